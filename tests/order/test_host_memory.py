"""The same rules over real memory and real threads: what work wrote, later work of that buffer reads."""

import random

import numpy as np
import numpy.typing as npt
import pytest

from asyncmem.core import Retire
from asyncmem.devices import Host, HostStream, Work
from asyncmem.devices.host_memory import bytes_at

from .heaps import HEAPS
from .program import FullHeap

SIZE = 256 << 10


def write(memory: npt.NDArray[np.uint8], value: int) -> None:
    memory.fill(value)


def is_intact(memory: npt.NDArray[np.uint8], value: int) -> bool:
    return bool((memory == value).all())


@pytest.mark.parametrize("kind", HEAPS)
def test_memory_that_moves_between_streams_is_never_overwritten_early(kind: str) -> None:
    """Three streams share two blocks' worth of memory; each reads back what it wrote, while all of them are busy."""
    device = Host()
    heap: FullHeap = HEAPS[kind]()
    retire = Retire(heap, device)
    streams = [retire.register(device.create_stream()) for _ in range(3)]
    segment = device.allocate_segment(2 * SIZE)
    heap.add_segment(segment.address, segment.nbytes, 0, 0)
    choice = random.Random(1)
    checks: list[Work[bool]] = []
    for value in range(400):
        index = choice.choice(streams)
        block = take(heap, retire, index)
        memory = bytes_at(heap.info(block).address, SIZE)
        stream = device.stream_of(retire.streams[index])
        stream.run(write, memory, value % 251)
        checks.append(read_back(heap, retire, device, stream, choice.choice(streams), block, memory, value % 251))
        if value % 8 == 0:
            retire.poll()
    assert all(check.result(30) for check in checks)
    device.close()
    device.free_segment(segment)


def read_back(  # a buffer's whole life after its first write
    heap: FullHeap,
    retire: Retire,
    device: Host,
    home: HostStream,
    other: int,
    block: int,
    memory: npt.NDArray[np.uint8],
    value: int,
) -> Work[bool]:
    index = retire.register(home)
    retire.use_on(index, other)
    reader = device.stream_of(retire.streams[other])
    check = reader.run(is_intact, memory, value)
    heap.free(block, retire.entries_for([other] if other != index else []))
    return check


def take(heap: FullHeap, retire: Retire, index: int) -> int:
    block = heap.take(SIZE, index)
    if block:
        return block
    heap.flush()  # what other streams keep in their caches
    found = heap.take_foreign(SIZE, index, late=True)
    assert found is not None, "one of two blocks is always free"
    retire.discharge(index, found[1])
    return found[0]
