"""The free index: lists of free blocks by size class, newest last; of a few blocks the order counts nothing."""

from typing import Final

from tests.reference.blocks import Block

FEW: Final = 32
"""Blocks that are all looked at; once there are more, it is half as many again."""


def class_of(granules: int) -> int:
    """Return the class of a size: exact below 64 granules, then 32 classes for each power of two."""
    step = max(granules.bit_length() - 6, 0)
    return 32 * step + (granules >> step)


class FreeIndex:
    """The free blocks of one arena that wait for the same kind of streams."""

    def __init__(self) -> None:
        self.lists: dict[int, list[Block]] = {}
        self.few = True

    def __len__(self) -> int:
        return sum(map(len, self.lists.values()))

    @property
    def blocks(self) -> list[Block]:
        """All of them."""
        return [block for candidates in self.lists.values() for block in candidates]

    def add(self, block: Block) -> None:
        """Put a block at the new end of its list."""
        if self.few and len(self) == FEW:
            self.order()
        candidates = self.lists.setdefault(class_of(block.granules), [])
        block.position = len(candidates)
        candidates.append(block)

    def remove(self, block: Block) -> None:
        """Take a block out; the newest of its list moves into the gap."""
        candidates = self.lists[class_of(block.granules)]
        last = candidates.pop()
        if last is not block:
            candidates[block.position] = last
            last.position = block.position
        if not candidates:
            del self.lists[class_of(block.granules)]
        if len(self) == FEW // 2:
            self.few = True

    def order(self) -> None:
        """From now on there is an order: the lowest block counts as the oldest."""
        self.few = False
        for candidates in self.lists.values():
            candidates.sort(key=lambda block: block.address)
            for position, block in enumerate(candidates):
                block.position = position

    def next(self, cls: int) -> int | None:
        """Return the first class at or above `cls` that holds a block."""
        return min((held for held in self.lists if held >= cls), default=None)
