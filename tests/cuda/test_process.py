"""The driver and the process: what is loaded when, what happens at the end, in a fork, and on older drivers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .fake import FakeDriver

pytestmark = [
    pytest.mark.fake_only,
    pytest.mark.skipif(sys.platform != "linux", reason="the fake is a shared library of Linux"),
]

# Every program begins with the fake in the driver's place, unless it is to find none.
BEGIN = """
import gc, os, sys, threading
sys.path.insert(0, {folder!r})
import fake as package
fake = package.FakeDriver({library!r})
"""


def run(fake: FakeDriver, program: str, **environ: str) -> str:
    """Run a program in a new interpreter and return what it wrote; to its standard error it may write nothing."""
    begin = BEGIN.format(folder=str(Path(__file__).parent), library=str(fake.path))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", begin + program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | environ,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_importing_touches_no_driver(fake: FakeDriver) -> None:
    """Neither the package nor its devices do, until a card is asked for."""
    program = """
import asyncmem, asyncmem.devices
print(fake.calls("*"), "cuda.bindings" in sys.modules)
"""
    assert run(fake, program) == "0 False\n"


def test_a_machine_without_a_driver_says_what_to_install(tmp_path: Path) -> None:
    """The library is named as the loader names it, and "auto" takes the host without a word."""
    program = """
import sys
from asyncmem.devices import Cuda, device
from asyncmem.errors import BackendUnavailable
assert device("auto").name == "host"
try:
    Cuda()
except BackendUnavailable as error:
    print(error)
print("cuda.bindings" in sys.modules)
"""
    # A library of that name that is none is found first, whatever the machine has.
    tmp_path.joinpath("libcuda.so.1").write_bytes(b"")
    environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ)
    said, loaded = done.stdout.splitlines()
    assert "libcuda.so.1" in said
    assert "Install an NVIDIA driver for CUDA 12.4 or later" in said
    assert (loaded, done.stderr) == ("False", "")


def test_no_call_is_made_at_the_end(fake: FakeDriver) -> None:
    """Whatever is still there when the interpreter ends stays there: the driver may have gone before."""
    program = """
import asyncio, time
from asyncmem.devices import Cuda
gpu = Cuda()
segments = [gpu.allocate_segment(1, kind) for kind in gpu.segment_kinds]
pinned = gpu.pinned()
kept = pinned.allocate_segment(1)
stream = gpu.create_stream()
fake.hold(stream.handle)
fake.launch(stream.handle)
fence = stream.record()
fence.notify(lambda: None)
everything = gpu.record_all()
async def wait():
    await asyncio.wait_for(stream.record(), 0.01)
try:
    asyncio.run(wait())
except asyncio.TimeoutError:
    pass
class Last:
    # The interpreter is ending when this is called; the call that the native thread was in meanwhile ends by itself.
    def __del__(self, gpu=gpu, segment=segments[0], fence=fence, sleep=time.sleep, report=fake.report_at_exit):
        sleep(0.5)
        report()
        gpu.free_segment(segment)
sys.modules["kept for the very end"] = Last()
"""
    begin = BEGIN.format(folder=str(Path(__file__).parent), library=str(fake.path))
    command = [sys.executable, "-c", begin + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr.split("\n")[0] == "driver calls at exit: 0", done.stderr


def test_a_forked_child_keeps_off_the_driver(fake: FakeDriver) -> None:
    """What it frees or forgets is not freed, what it asks for is refused with what to do, and the parent goes on."""
    program = """
from asyncmem.devices import Cuda
from asyncmem.errors import DeviceError
gpu = Cuda()
segment = gpu.allocate_segment(1)
stream = gpu.create_stream()
fence = stream.record()
calls = fake.calls("*")
child = os.fork()
if child == 0:
    calls = fake.calls("*")
    gpu.free_segment(segment)
    for refused in (lambda: gpu.allocate_segment(1), stream.record, gpu.record_all, gpu.create_stream, gpu.memory):
        try:
            refused()
        except DeviceError as error:
            assert "spawn" in str(error), error
        else:
            os._exit(2)
    try:
        Cuda()
    except DeviceError as error:
        assert "spawn" in str(error), error
    del stream, fence
    gc.collect()
    gpu.close()
    os._exit(3 if fake.calls("*") != calls else 0)
_, status = os.waitpid(child, 0)
assert fence.done() and gpu.allocate_segment(1)
print(os.waitstatus_to_exitcode(status))
"""
    assert run(fake, program) == "0\n"


def test_a_driver_without_a_fence_of_everything_has_one_made_of_many(fake: FakeDriver) -> None:
    """Before 12.5 it is put together of the streams that are known: default ones, ours, others', forgotten ones."""
    program = """
fake.version(12_040)
from asyncmem.devices import Cuda
gpu = Cuda()
foreign = gpu.context.create_stream()
gpu.context.remove_stream(foreign)
class Theirs:
    cuda_stream = foreign
theirs = Theirs()
for make in (lambda: gpu.default_stream, lambda: gpu.stream_of(2), gpu.create_stream, lambda: gpu.stream_of(theirs)):
    stream = make()
    fake.hold(stream.handle)
    fake.launch(stream.handle)
    kept = stream if stream.handle == foreign else None
    del stream
    gc.collect()
    fence = gpu.record_all()
    print(fence.done(), end=" ")
    fake.release()
    print(fence.block(10))
assert fake.calls("cuCtxRecordEvent") == 0
del fence, kept
gpu.context.destroy_stream(foreign)
gpu.close()
gc.collect()
print(fake.live(), fake.violations())
"""
    assert run(fake, program) == "False True\n" * 4 + "{} []\n"


def test_the_environment_chooses_the_cards(fake: FakeDriver) -> None:
    """What it shows is numbered from 0, and memory is the one card's."""
    program = """
from asyncmem import AsyncMemoryPool, BackendUnavailable
from asyncmem.devices import Cuda, devices
print([one.name for one in devices() if one.kind == "cuda"])
with AsyncMemoryPool("cuda:0", limit="8 MiB", segment_size="8 MiB") as pool:
    pool.allocate("8 MiB").free()
    print(fake.used(0), fake.used(1))
try:
    Cuda(1)
except BackendUnavailable as error:
    print("only cuda:0" in str(error))
"""
    shown = run(fake, program, FAKE_CUDA_DEVICES="2", CUDA_VISIBLE_DEVICES="1")
    assert shown == f"['cuda:0']\n{8 << 20} 0\nTrue\n"


def test_interrupting_a_wait_is_heard(fake: FakeDriver) -> None:
    """Ctrl-C ends a thread's wait for the device."""
    program = """
import signal
from asyncmem.devices import Cuda
gpu = Cuda()
fake.hold(1)
fake.launch(1)
fence = gpu.default_stream.record()
try:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    fence.block()
except KeyboardInterrupt:
    print("interrupted")
fake.release()
"""
    assert run(fake, program) == "interrupted\n"


@pytest.mark.parametrize("version", ["12040", "13000"])
def test_consumers_of_any_stream_are_waited_for_on_every_driver(fake: FakeDriver, version: str) -> None:
    """One that was never shown, or known by its number alone, is behind a fence of everything, whoever ends first."""
    program = """
from cuda.bindings import driver
from asyncmem import AsyncMemoryPool
from asyncmem.arrays._dlpack import receive
from asyncmem.devices import Cuda
NBYTES = 4 << 20
gpu = Cuda()
with gpu.context.entered():
    foreign = int(driver.cuStreamCreate(1)[1])
with AsyncMemoryPool(gpu, limit=NBYTES, segment_size=NBYTES, min_free=0) as pool:
    streams = gpu.create_stream(), gpu.create_stream()
    for how in ("read", "exported", "freed first"):
        lent = [pool.allocate(NBYTES, stream=streams[0])]
        place = (lent[0].address, NBYTES)
        if how == "read":
            assert lent[0].__cuda_array_interface__
        else:
            lent.append(receive(lent[0].view("float32").__dlpack__(stream=foreign, max_version=(1, 0))))
        fake.hold(foreign)
        fake.launch(foreign, writes=[place])
        lent.pop() if how == "exported" else None
        lent.clear()
        timer = threading.Timer(0.05, fake.release)
        timer.start()
        with pool.allocate(NBYTES, stream=streams[1], timeout=10) as taken:
            assert taken.address == place[0]
            fake.launch(streams[1].handle, writes=[place])
        timer.join()
        print(how, fake.violations())
"""
    assert run(fake, program, FAKE_CUDA_VERSION=version) == "read []\nexported []\nfreed first []\n"


@pytest.mark.usefixtures("driver")  # without a compiler there is none to run over
def test_order_holds_on_the_oldest_driver_too() -> None:
    """What goes to other libraries and comes back, and captures of theirs, where no fence is behind all streams."""
    files = [Path(__file__).with_name(name) for name in ("test_exchange.py", "test_captures.py")]
    # There what a graph gave back waits for the device, and no capture can.
    choice = [*map(str, files), "-k", "not two_captures"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", *choice],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environ | {"FAKE_CUDA_VERSION": "12040"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_a_driver_without_a_fence_of_everything_keeps_nobody_waiting_for_one(fake: FakeDriver) -> None:
    """It is asked for in passing, tells when all work is done, and fails with a lost device."""
    program = """
from asyncmem import DeviceError
from asyncmem.devices import Cuda
gpu, stream = Cuda(), None
stream = gpu.create_stream()
fake.hold(stream.handle)
fake.launch(stream.handle)
first = gpu.record_all()
told = threading.Event()
first.notify(told.set)
assert not first.done() and not first.block(0.01) and not told.is_set()
gpu.begin_captures()
fake.release()
try:
    gpu.record_all()
except DeviceError as error:
    print(error.code)
gpu.end_captures()
print(first.block(10), told.wait(10), first.done())
fake.hold(stream.handle)
fake.launch(stream.handle)
second = gpu.record_all()
fake.lose()
try:
    second.block(10)
except DeviceError as error:
    print(error.code)
"""
    assert run(fake, program, FAKE_CUDA_VERSION="12040") == "900\nTrue True True\n700\n"
