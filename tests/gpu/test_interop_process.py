"""What a process keeps until it ends: a pool as torch's allocator. Each program is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

BEGIN = """
import threading, time

import torch

import asyncmem
import asyncmem.interop.torch as interop

MIB = 1 << 20
pool = asyncmem.AsyncMemoryPool("cuda:0", limit=1024 * MIB)
interop.install(pool, timeout=20)
"""


def run(program: str) -> str:
    """Run a program that has a pool for torch's allocator, and return what it wrote."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    command = [sys.executable, "-W", "ignore", "-c", BEGIN + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tensors_are_blocks_of_the_pool() -> None:
    """Of every thread, backward passes included; torch's statistics count them, and a second install is refused."""
    program = """
before = torch.cuda.memory_allocated()
x = torch.ones(16 * MIB, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() == before + 16 * MIB
assert pool._core.tag_bytes()["torch"] >= 16 * MIB
y = x + 1
assert int(y.sum()) == 32 * MIB
del y
assert torch.cuda.max_memory_allocated() >= 32 * MIB + before
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() < 32 * MIB + before
torch.cuda.reset_accumulated_memory_stats()
assert torch.cuda.memory_stats()["allocation.all.freed"] == 0
assert "Allocated memory" in torch.cuda.memory_summary()
layers = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).cuda()
best = torch.optim.Adam(layers.parameters())
for _ in range(5):
    best.zero_grad()
    layers(torch.randn(64, 512, device="cuda")).square().mean().backward()
    best.step()
with pool.lease(64 * MIB) as lease, interop.use(lease, tag="request"):
    z = torch.zeros(MIB, device="cuda")
    assert lease.address <= z.data_ptr() < lease.address + lease.nbytes
    assert pool._core.tag_bytes()["request"] == 4 * MIB
    del z
    assert lease.stats().allocated_bytes == 0
try:
    interop.install(pool)
except asyncmem.BackendUnavailable:
    pass
else:
    raise AssertionError
"""
    run(program)


def test_full_pool_waits_or_raises() -> None:
    """A thread waits until another gives memory back; past the time it gets torch's error, with our facts."""
    program = """
held = pool.allocate(960 * MIB, tag="others")
found = []
thread = threading.Thread(target=lambda: found.append(torch.zeros(128 * MIB, dtype=torch.uint8, device="cuda")))
torch.zeros(1, device="cuda")
thread.start()
while not pool.stats().waiting:
    time.sleep(0.001)
held.free()
thread.join()
assert not found[0].any()  # a sum would take eight times as much memory
try:
    torch.zeros(2048 * MIB, dtype=torch.uint8, device="cuda")
except RuntimeError as error:
    assert "CUDA out of memory" in str(error) and "'torch' 128 MiB" in str(error), error
else:
    raise AssertionError
assert int(torch.ones(100, device="cuda").sum()) == 100
"""
    run(program)


def test_streams_are_in_order() -> None:
    """Four threads on streams of their own, with `record_stream` on a fifth, find what they wrote."""
    program = """
side = torch.cuda.Stream()
wrong = []

def work(seed):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for step in range(100):
            value = (seed * 100 + step) % 251
            x = torch.full((8 * MIB,), value, dtype=torch.uint8, device="cuda")
            if step % 5 == 0:
                side.wait_stream(stream)
                with torch.cuda.stream(side):
                    torch.cuda._sleep(2_000_000)
                    y = (x != value).any()
                x.record_stream(side)
                del x
                stream.wait_stream(side)
                y.record_stream(stream)
            else:
                y = (x + 1 != (value + 1) % 256).any()
                del x
            if bool(y):
                wrong.append((seed, step))

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for one in threads:
    one.start()
for one in threads:
    one.join()
assert not wrong, wrong
torch.cuda.synchronize()
pool.check()
"""
    run(program)
