"""PyTorch's expandable segments over a recording: what they would have mapped, by the rules of its allocator."""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Final

from asyncmem.replay import Op, Trace

_SMALL: Final = 1 << 20
_PAGE: Final = {True: 2 << 20, False: 20 << 20}
"""What is mapped at once, for small requests and for others."""


@dataclass(eq=False)
class _Block:
    start: int
    end: int
    mapped: bool
    before: "_Block | None" = None
    after: "_Block | None" = None

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class _Segment:
    """The one segment of a stream and kind: blocks side by side, and behind the last a stretch that has no memory."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.mapped = 0
        self._tail = _Block(0, 1 << 60, mapped=False)
        self._free: list[tuple[int, int]] = []  # bytes and address
        self._at: dict[int, _Block] = {}

    def take(self, nbytes: int) -> _Block:
        """Allocate."""
        block = self._fitting(nbytes) or self._grown(nbytes)
        if block.nbytes > nbytes:
            rest = _Block(block.start + nbytes, block.end, True, block, block.after)
            if rest.after:
                rest.after.before = rest
            block.end, block.after = rest.start, rest
            self._add(rest)
        return block

    def free(self, block: _Block) -> None:
        """Free, and join with free neighbours."""
        before, after = block.before, block.after
        if before and before.start in self._at:
            self._remove(before)
            block.start, block.before = before.start, before.before
            if block.before:
                block.before.after = block
        if after and after.start in self._at:
            self._remove(after)
            block.end, block.after = after.end, after.after
            if block.after:
                block.after.before = block
        self._add(block)

    def _fitting(self, nbytes: int) -> _Block | None:
        """Return the best fit; what lies before the stretch without memory counts as if it were as large as that."""
        place = bisect_left(self._free, (nbytes, 0))
        if place < len(self._free):
            found = self._at[self._free[place][1]]
            if found.after is self._tail and place + 1 < len(self._free):
                found = self._at[self._free[place + 1][1]]
            self._remove(found)
            return found
        return None

    def _grown(self, nbytes: int) -> _Block:
        last = self._tail.before
        have = last.nbytes if last and last.start in self._at else 0
        more = -(-(nbytes - have) // self.page) * self.page
        self.mapped += more
        block = _Block(self._tail.start, self._tail.start + more, True, self._tail.before, self._tail)
        if block.before:
            block.before.after = block
        self._tail.start, self._tail.before = block.end, block
        if have and last:
            self._remove(last)
            block.start, block.before = last.start, last.before
            if block.before:
                block.before.after = block
        return block

    def _add(self, block: _Block) -> None:
        insort(self._free, (block.nbytes, block.start))
        self._at[block.start] = block

    def _remove(self, block: _Block) -> None:
        del self._free[bisect_left(self._free, (block.nbytes, block.start))]
        del self._at[block.start]


def expandable(trace: Trace, lag: float) -> int:
    """Return the most bytes that expandable segments would have mapped.

    Args:
        trace: What the program did. Where it says when a free was seen done, the block is held until then.
        lag: Seconds after which a free on another stream than the allocation's is seen done, where it does not.
    """
    segments: dict[tuple[int, bool], _Segment] = {}
    held: dict[int, tuple[_Segment, _Block, int]] = {}
    later: deque[tuple[float, int]] = deque()
    told = bool((trace.op == Op.DONE).any())
    for op, stream, number, nbytes, time in zip(*(column.tolist() for column in trace.columns), strict=True):
        while later and later[0][0] <= time:
            segment, block, _ = held.pop(later.popleft()[1])
            segment.free(block)
        if op == Op.ALLOCATE and nbytes:
            size = max(512, -(-nbytes // 512) * 512)
            small = size <= _SMALL
            segment = segments.setdefault((stream, small), _Segment(_PAGE[small]))
            held[number] = segment, segment.take(size), stream
        elif op == (Op.DONE if told else Op.FREE) and number in held:
            segment, block, home = held[number]
            if home != stream and not told:
                later.append((time + lag * 1e6, number))
                continue
            del held[number]
            segment.free(block)
    return sum(segment.mapped for segment in segments.values())
