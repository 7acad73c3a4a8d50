"""One pass over a loader that is read ahead: what `for` and `async for` ask for the next batch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Self, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.pipeline.batches import StagedBatch
    from asyncmem.pipeline.lookahead import Lookahead


_SOON = 60.0  # seconds, for threads that have nothing left to do


class _Pass:
    """What both kinds of pass have in common. The threads do not know it, so one that is dropped ends them."""

    def __init__(self, lookahead: Lookahead[StagedBatch], bring_out: Callable[[StagedBatch], Any]) -> None:
        self._lookahead = lookahead
        self._bring_out = bring_out
        lookahead.start()

    def close(self, timeout: float = 5.0) -> None:
        """End the pass, and wait for its threads on this thread (blocks for at most `timeout` seconds).

        Not on an event loop that the pass is on: there, await `aclose`.
        """
        self._lookahead.stop()
        self._lookahead.join(timeout)

    async def aclose(self, timeout: float = 5.0) -> None:
        """End the pass, and wait for its threads for at most `timeout` seconds, also where it is cancelled."""
        self._lookahead.stop()
        await self._lookahead.join_async(timeout)


@final
class Batches(_Pass):
    """One pass of a consumer that may block. Several threads may ask; each batch comes out once."""

    def __iter__(self) -> Self:
        """Answer itself."""
        return self

    def __next__(self) -> Any:  # noqa: ANN401 -- as nested as the loader's own
        """Answer the next batch; blocks until it is there, but not until its data is: `stream` waits for that.

        Raises:
            PoolTimeout: Its memory was not there in time. Likewise whatever the loader raised in its place.
        """
        ticket = self._lookahead.take()
        try:
            ticket.settled.block()
        except BaseException:  # a signal's handler may raise here
            self._lookahead.put_back(ticket)
            raise
        batch = self._lookahead.redeem(ticket)
        if batch is None:
            self._lookahead.join(_SOON)
            raise StopIteration
        return self._bring_out(batch)

    def __del__(self) -> None:
        if hasattr(self, "_lookahead") and not sys.is_finalizing():
            self.close()


@final
class AsyncBatches(_Pass):
    """One pass of a consumer that awaits. Several tasks may ask; each batch comes out once."""

    def __aiter__(self) -> Self:
        """Answer itself."""
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401 -- as nested as the loader's own
        """Answer the next batch; waits until it is there, but not until its data is: `stream` waits for that.

        Raises:
            PoolTimeout: Its memory was not there in time. Likewise whatever the loader raised in its place.

        Cancelled: the batch is still the next.
        """
        ticket = self._lookahead.take()
        try:
            await ticket.settled.wait()
        except BaseException:
            self._lookahead.put_back(ticket)
            raise
        batch = self._lookahead.redeem(ticket)
        if batch is None:
            await self._lookahead.join_async(_SOON)
            raise StopAsyncIteration
        return self._bring_out(batch)

    def __del__(self) -> None:
        if hasattr(self, "_lookahead"):
            self._lookahead.stop()
