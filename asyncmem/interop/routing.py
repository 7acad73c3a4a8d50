"""Where other libraries' memory comes from: what all of them need of a share, and of a block that changes it.

What a thread has is not a task's, so such a block must end before its task lets another one run.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context

from asyncmem.errors import InvalidRequest
from asyncmem.pool.loops import running_loop
from asyncmem.pool.share import Share


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Raise what to install where the block imports a module that is missing."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{missing.name}, which asyncmem.interop needs here, is missing: pip install '{package}'", name=missing.name
        ) from missing


def device_of(share: Share) -> int:
    """Return the number of the CUDA device whose memory a pool, a budget or a lease is.

    Raises:
        InvalidRequest: It is none, or that of another kind of device.
    """
    if not isinstance(share, Share):
        raise InvalidRequest("share", share, "a pool, a budget or a lease")
    device = share._opened.device
    index: int | None = getattr(device, "index", None)
    if device.kind != "cuda" or index is None:
        raise InvalidRequest("share", share, "memory of a CUDA device")
    return index


def need_no_blocking(share: Share) -> None:
    """Raise `InvalidRequest` on an event loop's thread for what might grow or wait there, so for all but leases."""
    if running_loop() is not None and not share._has_range:
        raise InvalidRequest("share", share, "a lease on an event loop's thread, which must not block",
                             hint="async with pool.lease(...) as lease, and use that")  # fmt: skip


class _OpenBlock:
    """One block on this thread. It ends once: by its end, or by the event loop, which runs before it has ended."""

    def __init__(self, what: object, undo: Callable[[], object]) -> None:
        self.what, self.task = what, _task_here()
        self.thread = threading.get_ident()
        self._undo: Callable[[], object] | None = undo

    def end(self) -> bool:
        """Undo what the block has changed; return whether that was left to do."""
        undo, self._undo = self._undo, None
        if undo is None:
            return False
        _thread.blocks.remove(self)
        undo()
        return True


class _Thread(threading.local):
    def __init__(self) -> None:
        self.blocks: list[_OpenBlock] = []


_thread = _Thread()


@contextmanager
def until_suspended(what: object, enter: Callable[[], object], leave: Callable[[], object]) -> Iterator[None]:
    """Run a block between two calls that change something of this thread.

    What a thread has is not a task's: a block that awaits would lend it to all tasks that run meanwhile. So the loop
    ends a block that it finds open, before it begins its next round, and the end of the block raises.

    Args:
        what: What the block uses, for the error.
        enter: Changes it.
        leave: Undoes that, on this thread.

    Raises:
        InvalidRequest: At its end, that the block has awaited something; at its begin, that another task's has.
    """
    blocks = _thread.blocks
    if blocks and blocks[-1].task is not _task_here():
        raise _awaited(blocks[-1].what)
    enter()
    block = _OpenBlock(what, leave)
    blocks.append(block)
    forget = _when_the_loop_turns(block.end)
    try:
        yield
    except BaseException as error:
        if not _finish(block, forget):
            error.add_note(str(_awaited(what)))
        raise
    if not _finish(block, forget):
        raise _awaited(what)


def _finish(block: _OpenBlock, forget: Callable[[], object]) -> bool:
    forget()
    if block.thread != threading.get_ident():
        raise InvalidRequest("use", block.what, "a block that ends on the thread where it began")
    return block.end()


def _awaited(what: object) -> InvalidRequest:
    return InvalidRequest(
        "use", what, "a block without an await inside, because other tasks of the thread run meanwhile",
        hint="await before the block or after it",
    )  # fmt: skip


def _task_here() -> object:
    loop = asyncio._get_running_loop()
    if loop is not None:
        return asyncio.current_task(loop)
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return trio.lowlevel.current_task()
    return None


def _when_the_loop_turns(call: Callable[[], object]) -> Callable[[], object]:
    """Schedule a call in the next iteration of the loop that runs here, if one does; return what cancels it."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return loop.call_soon(call, context=Context()).cancel
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        trio.lowlevel.current_trio_token().run_sync_soon(call)
    return lambda: None
