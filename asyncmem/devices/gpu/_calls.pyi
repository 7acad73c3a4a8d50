"""The driver's hot calls by function pointer: the primary context, fences, streams, mapped memory, notices of fences.

Every driver call is made without the interpreter's lock. No call is made in a forked child or at the interpreter's end.
"""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, final

from asyncmem.errors import DeviceError

@final
class Library:
    """A driver's library, found at run time."""

    legacy: int
    """The handle by which its legacy default stream is named."""

    def load_cuda(self) -> str:
        """Load CUDA's driver; return why it cannot be, or nothing."""

    def load_hip(self, library: bytes, /) -> str:
        """Load HIP's runtime from a file, the first time; return why it cannot be, or nothing."""

    def start(self) -> int:
        """Start it, once it is loaded (blocks), and return its code."""

    def version(self) -> int:
        """Return its version, such as 12040 of CUDA or 60342134 of HIP, or 0."""

    def device_count(self) -> int:
        """Return how many devices this process may see; where the driver fails, minus its code."""

    def error_name(self, code: int) -> str:
        """Return the driver's name of a code; nothing where it has none."""

    def forget_error(self) -> None:
        """Have it forget that a call on this thread failed, where it remembers that."""

def gone() -> bool:
    """Return whether no driver call may be made any more: the interpreter is ending, or this is a forked child."""

@final
class Context:
    """One use of a device's primary context, which is retained for as long as there are any."""

    handle: int
    """The context, as the driver knows it."""
    device: int
    """The device, as the driver knows it."""
    fence_calls: int
    """The address of the calls that compiled code makes by itself."""
    call_count: int
    """How many driver calls have been made through the context."""
    over_budget: int
    """How many notices there have been that the process has more memory than it should."""

    def __init__(self, library: Library, ordinal: int, failed: Callable[[str, int], Exception], /) -> None:
        """Retain the context (blocks). `failed` makes the error to raise from a call's name and its code."""

    def close(self) -> None:
        """End this use, once (blocks where it is the last); the object serves the others."""

    def use(self) -> None:
        """Begin another use, to be ended by `end_use`."""

    def end_use(self) -> None:
        """End one use; the last one releases the context (blocks)."""

    def entered(self) -> Scope:
        """Make the context current within a `with`, on this thread, undisturbed by graph captures."""

    def paging(self) -> Paging:
        """Begin to map memory in reserved ranges; nothing is mapped yet."""

    def record(self, stream: int, /) -> Fence:
        """Record a fence behind all that was submitted to a stream so far."""

    def record_all(self) -> Fence:
        """Record a fence behind all that was submitted to every stream so far."""

    def wait(self, stream: int, fence: Fence, /) -> None:
        """Order later work of a stream behind a fence, which may be another device's."""

    def capturing(self, stream: int, /) -> bool:
        """Return whether what is submitted to a stream is captured into a graph."""

    def create_stream(self) -> int:
        """Make a non-blocking stream."""

    def destroy_stream(self, stream: int, /) -> None:
        """Destroy a stream that `create_stream` made; what is queued there still runs."""

    def add_stream(self, stream: int, /) -> None:
        """Ask one more stream, of another library, whether it is captured, before `record_all`."""

    def remove_stream(self, stream: int, /) -> None:
        """Count it no more."""

    def begin_captures(self) -> None:
        """From here on any stream may be captured: `record_all` refuses. Ended by `end_captures`, each time once."""

    def end_captures(self) -> None:
        """End what `begin_captures` began."""

    def stream_id(self, stream: int, /) -> int:
        """Return the stream's number, which no other stream of this process ever has. Asking ends a capture on it."""

    def capture_of(self, stream: int, /) -> int:
        """Return the number of the capture that an explicit stream is in, 0 for none, -1 for one that has failed."""

    def stream_context(self, stream: int, /) -> int:
        """Return the context that a stream belongs to."""

    def listen(self) -> bool:
        """Begin to count notices of being over budget; False where the driver has none."""

    def stop_listening(self) -> None:
        """End what `listen` has begun, once."""

@final
class Scope:
    """What `Context.entered` returns."""

    def __init__(self, owner: Context, /) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class Paging:
    """Memory under reserved ranges. Who uses it makes the context current, and keeps others off it."""

    def __init__(self, owner: Context, /) -> None: ...
    def remap(
        self,
        moves: Iterable[tuple[tuple[int, int], int]],
        out: Iterable[tuple[int, int]],
        into: Iterable[tuple[int, int]],
        devices: Iterable[int],
        step: int,
        /,
    ) -> tuple[int, int, int, DeviceError | None]:
        """Make moves, unmap spans, map others for devices to use (blocks); return how many of each, and the error."""

    def allow(self, devices: Iterable[int], allowed: bool, step: int, /) -> None:
        """Let devices use all that is mapped or forbid it (blocks), `step` bytes a call where handles allow that."""

    def bare(self, address: int, nbytes: int, /) -> bool:
        """Return whether nothing is mapped in a range; what could not be undone before is tried again."""

    def forget(self) -> None:
        """Take all for given back, where no call may be made any more."""

@final
class Fence:
    """A point in a stream, by its event. Forgetting it gives the event back for the next."""

    def done(self) -> bool:
        """Return whether the device has reached it."""

    def block(self, timeout: int, /) -> bool:
        """Wait on this thread (blocks), at most so many microseconds, or for ever below 0; False if it was not reached.

        Signals are heard.
        """

@final
class Sink:
    """Where notices of fences arrive. Its descriptor is readable while there are some."""

    def fileno(self) -> int:
        """The descriptor to wait for; it is closed with the sink."""

    def take(self) -> list[tuple[int, int]]:
        """Take what has arrived: pairs of the token and 0, or the code with which the device was lost."""

    def wake(self) -> None:
        """Make the descriptor readable although nothing has arrived."""

@final
class Watcher:
    """Learns on a native thread that fences are reached, and tells sinks."""

    def __init__(self, owner: Context, /) -> None: ...
    def watch(self, fence: Fence, sink: Sink, token: int, /) -> None:
        """Notify `sink` once, by `token`, when the fence is reached or the device is lost."""

    def forget(self, sink: Sink, token: int, /) -> None:
        """Cancel the notice; one that is on its way comes all the same."""

    def stop(self) -> None:
        """Wait until all that is watched has been notified (blocks); then there is no thread any more."""
