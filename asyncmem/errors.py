"""One tree of errors. Constructors take facts and build the message; the facts are attributes.

After any of these the pool is usable or closed, never in between, and nothing is half done.
"""

import reprlib
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from asyncmem.facts import OutOfMemoryFacts, OwnerInfo, Shortfall, owner_table
from asyncmem.figures import format_count, format_duration, format_size
from asyncmem.text import printable, printable_lines, quoted


class AsyncmemError(Exception):
    """Base of every error that asyncmem raises. Copies and pickles keep the facts."""

    __module__ = "asyncmem"

    def __str__(self) -> str:
        """Return the sentence, with escape sequences escaped: programs choose parts of it."""
        return printable_lines(super().__str__())

    def __reduce__(self) -> tuple[Callable[..., "AsyncmemError"], tuple[object, ...]]:
        """Rebuild from the finished sentence: constructors take facts, which `Exception` would not hand them again."""
        return _restore, (type(self), self.args, self.__dict__.copy())

    def __copy__(self) -> Self:
        """Copy the facts, and nothing of where it came up: frames keep alive what they hold.

        Without it, tblib, which distributed imports, would have copies keep the frames and what it was raised from.
        """
        return _restore(type(self), self.args, self.__dict__)


class InvalidRequest(AsyncmemError, ValueError):
    """An invalid argument or option. Raised at the call; nothing has happened."""

    __module__ = "asyncmem"

    def __init__(self, what: str, got: object, expected: str, *, hint: str = "") -> None:
        """Take an argument's name, the value that it `got`, what is `expected`, and a `hint` at the right way."""
        self.what = what
        self.got = _show(got)
        self.expected = expected
        self.hint = hint
        super().__init__(f"{what}: expected {expected}, got {self.got}" + (f" ({hint})" if hint else ""))


class Described(str):
    """Text that stands in `InvalidRequest.got` as it is, without quotes: "a buffer of pool 'a'"."""

    __slots__ = ()


class UnknownOption(InvalidRequest, TypeError):
    """A keyword that names no option; also a `TypeError`, as any unknown keyword is."""


class BadTrace(InvalidRequest):
    """A recording that cannot be read, or that contradicts itself. Nothing of it was used."""

    __module__ = "asyncmem"

    def __init__(self, got: str, expected: str, *, file: str = "", row: int | None = None, hint: str = "") -> None:
        """Take what was found and what ought to be, the file if it came from one, and the row counted from 0."""
        self.file = file
        self.row = row
        name = f" {quoted(file)}" if file else ""
        place = "" if row is None else f", row {row}"
        super().__init__(f"trace{name}{place}", Described(got), expected, hint=hint)


class OutOfMemoryError(AsyncmemError, RuntimeError, MemoryError):
    """There is no such memory, and waiting cannot help. Every buffer stays valid and the pool usable.

    It is a `RuntimeError` too, and on CUDA its text starts "CUDA OOM: CUDA out of memory.", because that is what code
    written for other allocators looks for.
    """

    __module__ = "asyncmem"

    def __init__(self, facts: OutOfMemoryFacts) -> None:
        """Take the record that `on_oom` was shown."""
        self.facts = facts
        self.asked = facts.asked
        self.device = facts.device
        self.limit = facts.limit
        self.reserved = facts.reserved
        self.live = facts.live
        self.free = facts.free
        self.largest_hole = facts.largest_hole
        self.pending_fence_bytes = facts.pending_fence_bytes
        self.waiting = facts.waiting
        self.waiting_bytes = facts.waiting_bytes
        self.holders = facts.holders
        self.sites = facts.sites
        self.cause = facts.cause
        self.advice = facts.advice
        start = "CUDA OOM: CUDA out of memory. On" if facts.device.partition(":")[0] == "cuda" else "out of memory on"
        super().__init__(f"{start} {printable(facts.device)}: {facts.describe()}")


class PoolTimeout(AsyncmemError, TimeoutError):
    """A request's deadline passed before it was granted. It has left the queue and holds nothing."""

    __module__ = "asyncmem"

    def __init__(
        self, *, pool: str, asked: int, timeout: float, ahead: int = 0, free: int = 0, level: str = ""
    ) -> None:
        """Take the request's bytes and seconds, the requests before it, and what had no room, with its free bytes."""
        self.pool = pool
        self.asked = asked
        self.timeout = timeout
        self.ahead = ahead
        self.free = free
        self.level = level or f"pool {quoted(pool)}"
        super().__init__(
            f"{self.level} had no {format_size(asked)} within {format_duration(timeout)}: "
            f"{format_count(ahead, 'request')} ahead, {format_size(free)} free"
        )


class RequestCancelled(AsyncmemError):
    """The request was cancelled by its own `cancel()`. Its memory, or its place in the queue, has been given back.

    Being cancelled from outside (a task's `cancel()`, a cancel scope) raises what that framework raises instead.
    """

    __module__ = "asyncmem"

    def __init__(self, *, pool: str, asked: int) -> None:
        """Take the pool's name and the bytes that were asked for."""
        self.pool = pool
        self.asked = asked
        super().__init__(f"the request for {format_size(asked)} from pool {quoted(pool)} was cancelled")


class PoolClosed(AsyncmemError):
    """The pool is closed, or cannot be used in this process. Buffers it handed out stay valid until they are freed."""

    __module__ = "asyncmem"

    def __init__(self, pool: str, reason: str = "") -> None:
        """Take the pool's name and why it is closed, if that was not the user's own `aclose()`."""
        self.pool = pool
        self.reason = reason
        super().__init__(
            f"pool {quoted(pool)} is closed" + (f": {printable(reason)}" if reason else " and cannot be opened again")
        )


class TooManyRequests(AsyncmemError):
    """The queue is as long as `max_waiting` allows. The request was not queued."""

    __module__ = "asyncmem"

    def __init__(self, *, pool: str, waiting: int, max_waiting: int, asked: int) -> None:
        """Take the length of the queue, its bound and the bytes that were asked for."""
        self.pool = pool
        self.waiting = waiting
        self.max_waiting = max_waiting
        self.asked = asked
        super().__init__(
            f"pool {quoted(pool)} has {format_count(waiting, 'waiting request')} and max_waiting is {max_waiting}; "
            f"the request for {format_size(asked)} was not queued"
        )


class DeadlockError(AsyncmemError):
    """Owners hold memory and wait for each other's, and all others together cannot free enough. Nothing was granted.

    The error goes to one of them; what it holds is freed as its `with` blocks are left, so the others go on.
    """

    __module__ = "asyncmem"

    def __init__(
        self, *, pool: str, owners: Sequence[OwnerInfo], hints: Sequence[str] = (), level: str = "", holders: str = ""
    ) -> None:
        """Take the stuck owners, how to avoid it, the level that has no room for the failing one, and its holders."""
        self.pool = pool
        self.owners = tuple(owners)
        self.hints = tuple(hints)
        self.level = level or f"pool {quoted(pool)}"
        count = format_count(len(self.owners), "owner")
        lines = [
            f"deadlock in {self.level}: {count} cannot all be served even if all others free everything",
            owner_table(self.owners),
        ]
        lines += [holders] if holders else []
        lines += [f"To avoid it: {'; '.join(self.hints)}"] if self.hints else []
        super().__init__("\n".join(lines))


class StageError(AsyncmemError):
    """A stage of a pipeline failed. The others were cancelled, and the memory of all items under way is free.

    What the stage raised is the `__cause__`; the frames of its traceback hold no values, because those hold memory.
    """

    def __init__(self, stage: str, item: int, reason: str) -> None:
        """Take the stage's name, the item's number in what was mapped, counted from 0, and what went wrong."""
        self.stage = stage
        self.item = item
        self.reason = reason
        super().__init__(f"stage {quoted(stage)} failed at item {item}: {printable(reason)}")


class StageLost(StageError):
    """No worker of a cluster could run a stage of a pipeline any more. The memory of all items under way is free."""

    def __init__(self, stage: str, item: int, reason: str) -> None:
        """Take the stage's name, the number of the first item that is not done, and what became of the workers."""
        super().__init__(stage, item, reason)
        self.args = (f"stage {quoted(stage)} was lost at item {item}: {printable(reason)}",)


class StepError(AsyncmemError):
    """A step of pipeline parallelism failed. The other stages were cancelled, and the memory of all of them is free.

    What the step raised is the `__cause__`; the frames of its traceback hold no values, because those hold memory.
    """

    def __init__(self, stage: str, micro_batch: int, *, forward: bool, reason: str) -> None:
        """Take the stage's name, the micro-batch's number counted from 0, the direction, and what went wrong."""
        self.stage = stage
        self.micro_batch = micro_batch
        self.forward = forward
        self.reason = reason
        direction = "forward" if forward else "backward"
        super().__init__(
            f"stage {quoted(stage)} failed in the {direction} of micro-batch {micro_batch}: {printable(reason)}"
        )


class DeviceError(AsyncmemError, RuntimeError):
    """A driver call failed. The pool has undone its part of it, and works unless the device itself is lost."""

    __module__ = "asyncmem"
    CAPTURE_UNSUPPORTED = 900
    """The code, CUDA's and HIP's, of a call that is refused while a graph is captured, and works afterwards."""

    def __init__(self, call: str, *, code: int, code_name: str, device: str = "", advice: str = "") -> None:
        """Take the driver's name of the call, its code and that code's name."""
        self.call = call
        self.code = code
        self.code_name = code_name
        self.device = device
        self.advice = advice
        where = f" on {printable(device)}" if device else ""
        super().__init__(f"{call} failed{where}: {code_name} ({code})" + (f". {advice}" if advice else ""))


class BackendUnavailable(AsyncmemError, RuntimeError):
    """The device asked for cannot be used on this machine."""

    __module__ = "asyncmem"

    def __init__(self, device: str, *, tried: Sequence[str] = (), install: str = "", package: str = "") -> None:
        """Take what was tried, each with its outcome, and what to install or to use instead.

        `package` is the Python package that a GPU which is there lacks, if nothing else is missing.
        """
        self.device = device
        self.tried = tuple(tried)
        self.install = install
        self.package = package
        tail = f" (tried {'; '.join(map(printable, self.tried))})" if self.tried else ""
        super().__init__(f"device {quoted(device)} is not available{tail}" + (f". {install}" if install else ""))


class NoDeviceHasRoom(AsyncmemError, RuntimeError, MemoryError):
    """No device here has room for what is needed. Nothing was reserved, and nothing is left open."""

    __module__ = "asyncmem"

    def __init__(self, need: int, shortfalls: Sequence[Shortfall]) -> None:
        """Take the bytes that are needed, and what each device lacks."""
        self.need = need
        self.shortfalls = tuple(shortfalls)
        each = "; ".join(one.describe() for one in self.shortfalls)
        super().__init__(f"no device has room for {format_size(need)}: {each}")


class BufferReleased(AsyncmemError, RuntimeError):
    """A buffer was used after it had been freed. Its memory may be in use again and was not touched."""

    __module__ = "asyncmem"

    def __init__(self, nbytes: int, *, tag: str | None = None, action: str = "") -> None:
        """Take the buffer's size and tag, and what was tried with it: "view()"."""
        self.nbytes = nbytes
        self.tag = tag
        self.action = action
        label = f" tagged {quoted(tag)}" if tag else ""
        needs = f"; {action} needs a live one" if action else ""
        super().__init__(f"this buffer of {format_size(nbytes)}{label} has been freed{needs}")


class StaleDescriptor(AsyncmemError, LookupError):
    """A descriptor of `asyncmem.share` opens no memory: its process has ended, or it was closed, used up or forged."""

    def __init__(self, reason: str) -> None:
        """Take why."""
        self.reason = reason
        super().__init__(f"the descriptor opens no memory: {printable(reason)}")


class ReaderLost(AsyncmemError):
    """A process ended before it let go of shared memory that it was to read, which is its exporter's alone again."""

    def __init__(self, pid: int, nbytes: int) -> None:
        """Take the process's number, 0 where it is not known, and the bytes."""
        self.pid = pid
        self.nbytes = nbytes
        super().__init__(f"process {pid or 'unknown'} ended before it let go of {format_size(nbytes)} of shared memory")


class RankLost(AsyncmemError):
    """Another process of a group has failed, ended or left while all did something together."""

    def __init__(self, rank: int, reason: str, details: object = None) -> None:
        """Take its number in the group, what became of it, and what it said of that itself."""
        self.rank = rank
        self.reason = reason
        self.details = details
        super().__init__(f"rank {rank} {printable(reason)}")


class AsyncmemWarning(RuntimeWarning):
    """Base of asyncmem's warnings: what went wrong where no error could be raised, as in a destructor."""

    __module__ = "asyncmem"


class LeakWarning(AsyncmemWarning):
    """A buffer that was forgotten, or a pool that was not closed.

    No `ResourceWarning`, which Python hides by default: it is given only with `track=True`, or if you close a pool
    whose buffers are still live.
    """

    __module__ = "asyncmem"


class StallWarning(AsyncmemWarning):
    """Requests have waited longer than `stall_after` and nothing was freed; the text has the table of owners."""

    __module__ = "asyncmem"


def _show(value: object) -> str:
    if isinstance(value, Described):
        return printable(value)
    # Python refuses to print integers of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return printable(reprlib.repr(value))


_Error = TypeVar("_Error", bound=AsyncmemError)


def _restore(kind: type[_Error], args: tuple[object, ...], facts: dict[str, object]) -> _Error:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error
