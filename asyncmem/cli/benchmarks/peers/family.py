"""Families of allocators that share a process: what each needs to be measured here, and how its members are made.

torch reads its configuration once, and every library keeps memory and contexts to itself, so one family never runs
beside another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final, TypeAlias

from asyncmem.cli.benchmarks.peers.peer import Peer

Makers: TypeAlias = tuple[Callable[[], Peer], ...]

OURS: Final = "asyncmem"
TOGETHER: Final = "asyncmem and torch"
TORCH: Final = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Peers that are measured in one process."""

    name: str
    make: Callable[[str], Makers]
    """Answers what makes each member for a device such as "cuda:0"; the libraries are imported only then."""
    module: str = ""
    """What has to be importable; "" where nothing has to."""
    install: str = ""
    """How to get it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the process is started with."""
    peer: bool = True
    """Whether it is measured only with `--peers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """A family that was not measured."""

    family: str
    reason: str
    install: str = ""


def absent(one: Family) -> Absent | None:
    """Answer what is missing for a family, by name, or None. Imports nothing of its."""
    if not one.module:
        return None
    try:
        found = find_spec(one.module) is not None
    except ModuleNotFoundError:  # a package above it is not there
        found = False
    return None if found else Absent(family=one.name, reason=f"{one.module} is not installed", install=one.install)


def family(name: str) -> Family:
    """Find a family by its name."""
    return next(one for one in FAMILIES if one.name == name)


def index_of(device: str) -> int:
    """Answer the number in "cuda:1"; 0 where there is none."""
    return int(device.partition(":")[2] or "0")


def _ours(device: str) -> Makers:
    from asyncmem.cli.benchmarks.peers.ours import Ours

    return (lambda: Ours(device),)


def _together(device: str) -> Makers:
    from asyncmem.cli.benchmarks.peers.together import Together

    return (lambda: Together(device),)


def _torch(configuration: str) -> Callable[[str], Makers]:
    def make(device: str) -> Makers:
        from asyncmem.cli.benchmarks.peers import torch_

        index = index_of(device)
        kinds = [torch_.TorchEmpty, torch_.TorchRaw, *([] if configuration else [torch_.TorchCachingAlloc])]
        return tuple(lambda kind=kind: kind(index, configuration) for kind in kinds)

    return make


def _cupy(device: str) -> Makers:
    from asyncmem.cli.benchmarks.peers import cupy_

    index = index_of(device)
    return (lambda: cupy_.CuPyPool(index), lambda: cupy_.CuPyAsyncPool(index))


def _rmm(device: str) -> Makers:
    from asyncmem.cli.benchmarks.peers import rmm_

    index = index_of(device)
    return (lambda: rmm_.RmmArena(index), lambda: rmm_.RmmPool(index), lambda: rmm_.RmmAsync(index))


def _driver(device: str) -> Makers:
    from asyncmem.cli.benchmarks.peers import driver

    return (lambda: driver.MemAllocAsync(index_of(device)),)


def _cuda_core(device: str) -> Makers:
    from asyncmem.cli.benchmarks.peers import driver

    return (lambda: driver.CudaCore(index_of(device)),)


def _configured(name: str, value: str) -> Family:
    return Family(
        name=f"torch {name}",
        make=_torch(name),
        module="torch",
        install="pip install torch",
        # The older name is read by versions that do not know the new one.
        environment={"PYTORCH_ALLOC_CONF": value, "PYTORCH_CUDA_ALLOC_CONF": value},
    )


FAMILIES: Final = (
    Family(name=OURS, make=_ours, peer=False),
    Family(name=TOGETHER, make=_together, module="torch", install="pip install torch", peer=False),
    Family(name=TORCH, make=_torch(""), module="torch", install="pip install torch"),
    _configured("expandable", "expandable_segments:True"),
    _configured("cudaMallocAsync", "backend:cudaMallocAsync"),
    Family(name="CuPy", make=_cupy, module="cupy", install="pip install cupy-cuda13x"),
    Family(name="RMM", make=_rmm, module="rmm", install="pip install rmm-cu13"),
    Family(name="cuda.core", make=_cuda_core, module="cuda.core", install="pip install cuda-core"),
    Family(name="driver", make=_driver, module="cuda.bindings", install="pip install cuda-python"),
)
"""All of them, in the order in which they are measured."""
