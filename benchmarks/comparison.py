"""The comparison: asyncmem's own rows and more, the families of allocators that take part, and the bounds."""

from functools import partial
from typing import Final

from benchmarks import alone
from benchmarks.alone import DRIVER, POOL
from benchmarks.libraries import CudaCore, CuPyAsyncPool, CuPyPool, RmmArena, RmmAsync, RmmPool
from benchmarks.pytorch import AsyncmemAndTorch, TorchCachingAlloc, TorchEmpty, TorchRaw
from benchmarks.streams import streams
from benchmarks.suite import MOST, Bound, DeviceRow, Family, Suite
from benchmarks.take_back import take_back
from benchmarks.workloads import workload

TORCH: Final = "torch"
TOGETHER: Final = "asyncmem and torch"
INSTALL_TORCH: Final = "pip install torch"


def _torch(configuration: str = "", value: str = "") -> Family:
    """Return torch's allocators under one of the configurations that it reads at its start."""
    kinds = [TorchEmpty, TorchRaw, *([] if configuration else [TorchCachingAlloc])]
    return Family(
        name=f"{TORCH} {configuration}".strip(),
        peers=tuple(partial(kind, configuration=configuration) for kind in kinds),
        module=TORCH,
        install=INSTALL_TORCH,
        # The older name is read by versions that do not know the new one.
        environment={"PYTORCH_ALLOC_CONF": value, "PYTORCH_CUDA_ALLOC_CONF": value} if value else {},
    )


_OWN: Final = alone.SUITE.rows
_WORKLOADS: Final = {
    "same_size": 1.43,
    "large_tensors": 3.92,
    "transformer_step": 1.89,
    "pressure": 4.83,
    "variable_sizes": 0.83,
}
"""How many times as fast as torch others have published; asyncmem is to meet or beat that."""
_STREAMS: Final = (TOGETHER, TORCH, f"{TORCH} expandable", f"{TORCH} cudaMallocAsync")

SUITE: Final = Suite(
    module=__name__,
    rows={
        **{name: _OWN[name] for name in ("hit", "await_hit", "churn", "batch", "large", "cross_stream")},
        "streams": DeviceRow(measure=streams, families=_STREAMS),
        **{name: _OWN[name] for name in ("growth", "loop_stall")},
        "take_back": DeviceRow(measure=take_back, families=(TOGETHER,)),
        "replay": _OWN["replay"],
        **{name: DeviceRow(measure=workload(name), families=(POOL.name, TORCH)) for name in _WORKLOADS},
    },
    families=(
        POOL,
        Family(
            name=TOGETHER,
            peers=(AsyncmemAndTorch,),
            module=TORCH,
            install=INSTALL_TORCH,
            beside=False,
            general=False,
        ),
        _torch(),
        _torch("expandable", "expandable_segments:True"),
        _torch("cudaMallocAsync", "backend:cudaMallocAsync"),
        Family(name="CuPy", peers=(CuPyPool, CuPyAsyncPool), module="cupy", install="pip install cupy-cuda13x"),
        Family(name="RMM", peers=(RmmArena, RmmPool, RmmAsync), module="rmm", install="pip install rmm-cu13"),
        Family(name="cuda.core", peers=(CudaCore,), module="cuda.core", install="pip install cuda-core"),
        DRIVER,
    ),
    bounds=(
        *alone.SUITE.bounds,
        Bound(row="hit", peer="CuPy pool", bound=6),
        Bound(row="hit", peer="torch raw", bound=6),
        Bound(row="hit", peer="torch.empty", bound=20),
        Bound(row="churn", peer="CuPy pool", bound=5),
        Bound(row="churn", peer="torch raw", bound=5),
        Bound(row="batch", peer="torch.empty", bound=20),
        Bound(row="streams", case="reserved ÷ live", peer=POOL.name, bound=2, sense=MOST, held="min"),
        Bound(row="streams", case="time", peer=POOL.name, bound=1.05, sense=MOST, held="to_torch"),
        *(
            Bound(row="take_back", case=case, peer=POOL.name, bound=1.02, sense=MOST, held="to_floor")
            for case in ("256 MiB a time", "2 GiB a time")
        ),
        *(Bound(row="replay", peer=peer, bound=1) for peer in ("torch raw", "CuPy pool")),
        *(
            Bound(row=row, peer=peer, bound=bound)
            for row, bound in _WORKLOADS.items()
            for peer in ("torch.empty", "torch raw")
        ),
    ),
    packages=("torch", "cupy-cuda13x", "cupy-cuda12x", "rmm-cu13", "rmm-cu12", "cuda-core"),
)
