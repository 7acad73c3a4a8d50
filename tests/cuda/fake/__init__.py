"""A stand-in for the CUDA driver and for HIP's runtime, built from the sources here, for where there is no GPU.

It answers as strictly as a driver does, really moves bytes, and follows the order of all work: what touches memory
without order is told by `FakeDriver.violations`. `build` makes the library; loaded under its own name before anybody
asks for the driver, it is the driver of this process. A process that is started with its folder on `LD_LIBRARY_PATH`
has it too, with `FAKE_CUDA_DEVICES` devices (1), as far as `CUDA_VISIBLE_DEVICES` shows them, in `FAKE_CUDA_VERSION`
(13000). HIP's runtime is the same code under another name, in `FAKE_HIP_VERSION` (60342134); faults and counts of its
calls go by CUDA's names for them.
"""

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

SONAMES = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so"}
"""What the drivers of CUDA and of ROCm are looked for by."""
NEWER = "newer"
"""The folder, within that of the libraries, with a runtime of HIP 7.15, where streams have numbers."""
MIB = 1 << 20

Range = tuple[int, int]
"""An address and a number of bytes."""


def build(folder: Path) -> None:
    """Compile the fake into `folder`, once for all of its names (takes some seconds)."""
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-c", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
    source, compiled = Path(__file__).with_name("fake.cpp"), folder / "fake.o"
    subprocess.run([compiler, *flags, "-o", compiled, source], check=True)
    for soname in SONAMES.values():
        _link(compiled, folder / soname, "-Wl,--version-script=" + str(_without(folder, "hipStreamGetId")))
    newer = folder / NEWER
    newer.mkdir()
    _link(compiled, newer / SONAMES["rocm"])
    compiled.unlink()


def _link(compiled: Path, library: Path, *options: str) -> None:
    compiler = os.environ.get("CXX", "g++")
    named = f"-Wl,-soname,{library.name}"
    subprocess.run([compiler, "-shared", named, *options, "-o", library, compiled, "-pthread"], check=True)


def _without(folder: Path, function: str) -> Path:
    """Write what keeps the linker from showing a function, as an older version has not got it."""
    script = folder / "older.map"
    script.write_text(f"{{ local: {function}; }};\n")
    return script


class FakeDriver:
    """Steers the fake. Streams are handles (0: the default one of device 0), times ns, sizes bytes."""

    def __init__(self, library: Path | str) -> None:
        """Load the library, which is the driver for every later loader of its name in this process."""
        self.path = Path(library)
        self._library = ctypes.CDLL(str(library))
        self._library.fake_calls.restype = ctypes.c_int64
        self._library.fake_used.restype = ctypes.c_uint64

    def reset(self) -> None:
        """Begin anew with one device of 1 GiB. Whatever was there is gone, and its handles are invalid."""
        self._do("reset")
        self.devices(1)

    def devices(self, count: int, nbytes: int = 1024 * MIB) -> None:
        """Forget faults, delays, holds, losses and violations, and show so many devices of so many bytes each.

        What is live stays, on its device.
        """
        self._do("set_devices", ctypes.c_int(count), ctypes.c_uint64(nbytes))

    def version(self, number: int) -> None:
        """Be a driver of that version (12040: 12.4), for those who look up functions from now on."""
        self._do("version", ctypes.c_int(number))

    def attribute(self, device: int, attribute: int, value: int) -> None:
        """Let a device say something else about itself."""
        self._do("attribute", ctypes.c_int(device), ctypes.c_int(attribute), ctypes.c_int(value))

    def unlink(self, device: int, peer: int) -> None:
        """Let a device have no way to another one's memory."""
        self.attribute(device, -1 - peer, 0)

    def fail(self, call: str, nth: int = 1, code: int = 2, times: int = 1) -> None:
        """Let the `nth` coming call of that name ("*": of any) return `code` without doing anything, and more after."""
        self._do("fail", call.encode(), ctypes.c_uint64(nth), ctypes.c_int(code), ctypes.c_uint64(times))

    def clear_faults(self) -> None:
        """Forget the faults that have not come yet."""
        self._do("clear_faults")

    def latency(self, call: str, ns: int, nth: int = 1, times: int = 2**64 - 1) -> None:
        """Let calls of a name ("*": any other) take so long on the caller's thread: all, or some from the `nth` on."""
        self._do("latency", call.encode(), ctypes.c_int64(ns), ctypes.c_uint64(nth), ctypes.c_uint64(times))

    def pace(self, ns: int) -> None:
        """Let all copies and fills take at least so long."""
        self._do("pace", ctypes.c_int64(ns))

    def hold(self, stream: int) -> None:
        """Leave what is queued on a stream unfinished."""
        self._do("hold", ctypes.c_uint64(stream), ctypes.c_int(1))

    def release(self, stream: int | None = None) -> None:
        """Let a held stream go on; None: every one."""
        if stream is None:
            self._do("release_all")
        else:
            self._do("hold", ctypes.c_uint64(stream), ctypes.c_int(0))

    def launch(self, stream: int, ns: int = 0, reads: Sequence[Range] = (), writes: Sequence[Range] = ()) -> None:
        """Run a kernel of that duration, which uses those ranges."""
        args = [item for ranges in (reads, writes) for item in (_pairs(ranges), ctypes.c_int(len(ranges)))]
        self._do("launch", ctypes.c_uint64(stream), ctypes.c_int64(ns), *args)

    def lose(self, device: int = 0, code: int = 700) -> None:
        """Let a device fail for good: every call returns `code`, and no work there ever ends."""
        self._do("lose", ctypes.c_int(device), ctypes.c_int(code))

    def others(self, nbytes: int, device: int = 0) -> None:
        """Let other processes have so much of a device's memory."""
        self._do("others", ctypes.c_int(device), ctypes.c_uint64(nbytes))

    def over_budget(self, nbytes: int, device: int = 0) -> int:
        """Tell those who registered that the process is over its budget, and return how many they are."""
        return int(self._library.fake_over_budget(ctypes.c_int(device), ctypes.c_uint64(nbytes)))

    def calls(self, name: str = "*") -> int:
        """Return how many calls of that name there have been since the beginning."""
        return int(self._library.fake_calls(name.encode()))

    def counts(self) -> dict[str, int]:
        """Return how many calls of each name there have been since the beginning."""
        return {name: int(count) for name, count in map(str.split, self._text("counts").splitlines())}

    def used(self, device: int = 0) -> int:
        """Return how many bytes of a device this process has."""
        return int(self._library.fake_used(ctypes.c_int(device)))

    def violations(self) -> list[str]:
        """Return what was wrong with the order of work and memory; empty when all was right."""
        return self._text("violations").splitlines()

    def forgive(self) -> None:
        """Forget the violations, where a test made them on purpose."""
        self._do("forgive")

    def live(self) -> dict[str, int]:
        """Return how many of each kind of thing have been made and not given back; nothing: an empty dict."""
        return {name: int(count) for name, count in map(str.split, self._text("live").splitlines())}

    def report_at_exit(self) -> None:
        """Have the process write to its standard error how many calls came after this one, and what is still live.

        It writes after the interpreter is gone, so an `atexit` function that was registered first calls this last.
        """
        self._do("report_at_exit")

    def _do(self, control: str, *args: object) -> None:
        code = getattr(self._library, f"fake_{control}")(*args)
        if code:
            raise RuntimeError(f"fake_{control} was refused with code {code}")

    def _text(self, control: str) -> str:
        function = getattr(self._library, f"fake_{control}")
        room = 4096
        while True:
            buffer = ctypes.create_string_buffer(room)
            needed = function(buffer, room)
            if needed <= room:
                return buffer.value.decode()
            room = needed


def _pairs(ranges: Sequence[Range]) -> "ctypes.Array[ctypes.c_uint64]":
    flat = [number for pair in ranges for number in pair]
    return (ctypes.c_uint64 * max(1, len(flat)))(*flat)
