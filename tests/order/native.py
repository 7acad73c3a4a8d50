"""The simulated device with a table of C functions for its fences, as a device with a driver has one.

The functions are Python underneath and end in the same streams, clock and order checker; the core cannot tell. Besides,
they hold the core to the table's terms: a fence is used only until its release, which comes exactly once.
"""

import ctypes
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from asyncmem.devices import Fence, Simulated, SimulatedStream
from asyncmem.errors import DeviceError

_P, _U = ctypes.c_void_p, ctypes.c_uint64
_TYPES: dict[str, Any] = {
    "record": ctypes.CFUNCTYPE(ctypes.c_int, _P, _U, ctypes.POINTER(_P)),
    "order": ctypes.CFUNCTYPE(ctypes.c_int, _P, _U, _U, ctypes.POINTER(_P), ctypes.POINTER(ctypes.c_int)),
    "record_all": ctypes.CFUNCTYPE(ctypes.c_int, _P, ctypes.POINTER(_P)),
    "query": ctypes.CFUNCTYPE(ctypes.c_int, _P, _P),
    "wait": ctypes.CFUNCTYPE(ctypes.c_int, _P, _U, _P),
    "block": ctypes.CFUNCTYPE(ctypes.c_int, _P, _P),
    "capturing": ctypes.CFUNCTYPE(ctypes.c_int, _P, _U),
    "release": ctypes.CFUNCTYPE(None, _P, _P),
}


class FenceCalls(ctypes.Structure):
    """AsyncmemFenceCalls, field by field."""

    _fields_ = [("context", _P), *_TYPES.items()]


_tables: list[FenceCalls] = []
"""Tables stay for ever: the garbage collector may take a device apart before those who still call it."""

_used: set["NativeSimulated"] = set()
"""Devices with fences that are not released yet."""

NOT_YET = -1
CAPTURED = -0x7FFFFFFE
REFUSED = 700
"""The code of a call that was told to fail."""


PAGE = 4096
"""A small one, so that there are many in small memory."""


class NativeSimulated(Simulated):
    """A simulated device whose streams' fences are made, asked and waited for through `fence_calls`."""

    def __init__(self, capacity: int | None = None, *, autojump: bool = True, page: int = PAGE) -> None:
        self.fences: dict[int, Fence] = {}
        self.problems: list[str] = []
        self.captured: set[int] = set()
        self.fail_captures = False
        self.called: dict[str, int] = dict.fromkeys(_TYPES, 0)
        self._numbers = itertools.count(16)
        super().__init__(capacity, autojump=autojump, page=page)
        self.default_stream.native = True
        made = {name: kind(self._guarded(name)) for name, kind in _TYPES.items()}
        _tables.append(FenceCalls(None, **made))
        self.fence_calls = ctypes.addressof(_tables[-1])

    def create_stream(self, name: str | None = None) -> SimulatedStream:
        """Make a stream that the table serves."""
        stream = super().create_stream(name)
        stream.native = True
        return stream

    def fence_error(self, call: str, code: int) -> DeviceError:
        """Make the error of a call."""
        return DeviceError(call, code=code, code_name="REFUSED", device=self.name)

    def _guarded(self, name: str) -> Callable[..., int | None]:
        me = weakref.ref(self)

        def guarded(_context: object, *arguments: Any) -> int | None:
            device = me()
            assert device is not None, f"{name} of a device that is gone"
            device.called[name] += name != "record"  # which counts where it is made
            call: Callable[..., int | None] = getattr(device, f"call_{name}")
            try:
                return call(*arguments)
            except DeviceError:
                return -REFUSED if name == "capturing" else REFUSED
            except Exception as error:  # noqa: BLE001  # an error cannot leave a C function
                device.problems.append(f"{name}{arguments}: {error!r}")
                return REFUSED

        return guarded

    def _hand_out(self, fence: Fence, made: Any) -> int:
        number = next(self._numbers)
        self.fences[number] = fence
        _used.add(self)
        made[0] = number
        return 0

    def _refusal(self, stream: int) -> int:
        captured = self.call_capturing(stream)
        return CAPTURED if captured > 0 else captured

    def record(self, stream: int) -> Fence:
        """Make a fence, as `call_record` and `call_order` do."""
        self.called["record"] += 1
        return self.stream_of(stream).record()

    def call_record(self, stream: int, made: Any) -> int:
        return self._refusal(stream) or self._hand_out(self.record(stream), made)

    def call_order(self, earlier: int, later: int, made: Any, refused: Any) -> int:
        code = self._refusal(earlier) or self._refusal(later) or self._hand_out(self.record(earlier), made)
        if code == 0:
            self.called["wait"] += 1
            try:
                refused[0] = self.call_wait(later, made[0])
            except DeviceError:
                refused[0] = REFUSED
        return code

    def call_record_all(self, made: Any) -> int:
        return self._hand_out(self.record_all(), made)

    def call_query(self, fence: int) -> int:
        return 0 if self.fences[fence].done() else NOT_YET

    def call_wait(self, stream: int, fence: int) -> int:
        self.stream_of(stream).wait(self.fences[fence])
        return 0

    def call_block(self, fence: int) -> int:
        self.fences[fence].block()
        return 0

    def call_capturing(self, stream: int) -> int:
        return -REFUSED if self.fail_captures else int(stream in self.captured)

    def call_release(self, fence: int) -> None:
        del self.fences[fence]
        if not self.fences:
            _used.discard(self)


class WaitsForNothing(NativeSimulated):
    """A stream goes on without waiting."""

    def call_wait(self, stream: int, fence: int) -> int:  # noqa: ARG002  # that is the mistake
        return 0


class SaysDoneUnasked(NativeSimulated):
    """Every fence is done."""

    def call_query(self, fence: int) -> int:  # noqa: ARG002  # that is the mistake
        return 0


class RecordsOncePerStream(NativeSimulated):
    """A stream's first fence is handed out again and again."""

    def __init__(self, capacity: int | None = None, *, autojump: bool = True) -> None:
        self.firsts: dict[int, Fence] = {}
        super().__init__(capacity, autojump=autojump)

    def record(self, stream: int) -> Fence:
        fence = super().record(stream)
        return self.firsts.setdefault(stream, fence)


class RecordsOneStreamForAll(NativeSimulated):
    """A fence behind all streams is one behind the default stream."""

    def call_record_all(self, made: Any) -> int:
        return self._hand_out(self.default_stream.record(), made)


class DoesNotBlock(NativeSimulated):
    """The host goes on before the fence is reached."""

    def call_block(self, fence: int) -> int:  # noqa: ARG002  # that is the mistake
        return 0


DEVICES: dict[str, type[Simulated]] = {"methods": Simulated, "table": NativeSimulated}
"""Whose fences are made by methods of the streams, or by the device's table of C functions."""

BROKEN_TABLES: dict[str, type[NativeSimulated]] = {
    "stream does not wait": WaitsForNothing,
    "fence done without asking": SaysDoneUnasked,
    "fence recorded once": RecordsOncePerStream,
    "one stream recorded for all": RecordsOneStreamForAll,
    "host does not wait": DoesNotBlock,
}
