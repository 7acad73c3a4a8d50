"""What comes out of a pipeline: an async iterator, which may be left at any time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, Self, TypeVar, cast

from asyncmem.figures import format_count
from asyncmem.pipeline.run import Ended

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from asyncmem.pipeline.run import Run

B = TypeVar("B")


class Results(Generic[B]):
    """The results of `Pipeline.map`, for ``async for``. Nothing runs before the first is asked for.

    Leaving the loop early ends the run: at once by `aclose` or at the end of an ``async with`` block over it, soon
    after the iterator is dropped, and with the pipeline's own block in any case.
    """

    def __init__(self, run: Run, start: Callable[[Run], None]) -> None:
        """Not made by users; see `Pipeline.map`."""
        self._run = run
        self._start: Callable[[Run], None] | None = start
        self._thread = threading.get_ident()

    def __repr__(self) -> str:
        state = "not begun" if self._start is not None else "over" if self._run.over.is_set() else "under way"
        return f"<asyncmem.Results: {state}, {format_count(self._run.handed, 'item')} handed out>"

    def __aiter__(self) -> Self:
        """Iterate over the results."""
        return self

    async def __anext__(self) -> B:
        """Wait for the next result.

        Raises:
            StageError: A stage or the source failed; all the rest has ended, and its memory is free. Raised once.
            StopAsyncIteration: Everything has been handed out.

        Cancelled: the result comes next time.
        """
        if self._start is not None:
            self._start(self._run)
            self._start = None
        try:
            return cast("B", await self._run.next())
        except Ended:
            error, self._run.error = self._run.error, None
        if error is not None:
            raise error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the run, and wait until nothing of it is left."""
        if self._start is None:
            self._run.stop()
            await self._run.over.wait()

    async def __aenter__(self) -> Self:
        """Answer the iterator itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the run."""
        await self.aclose()

    def __del__(self) -> None:
        # The workers know the run and not this, so that a loop that is left drops the last reference to it.
        # Collected on another thread, it leaves the end to the pipeline's block.
        if self._start is None and not self._run.over.is_set() and threading.get_ident() == self._thread:
            self._run.stop()
