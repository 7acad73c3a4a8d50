"""The free index: lists of free blocks by size class, newest last."""

from asyncmem.core.reference.blocks import Block


def class_of(granules: int) -> int:
    """Answer the class of a size: exact below 64 granules, then 32 classes for each power of two."""
    step = max(granules.bit_length() - 6, 0)
    return 32 * step + (granules >> step)


class FreeIndex:
    """The free blocks of one arena that wait for the same kind of streams."""

    def __init__(self) -> None:
        self.lists: dict[int, list[Block]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.lists.values()))

    def add(self, block: Block) -> None:
        """Put a block at the new end of its list."""
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

    def next(self, cls: int) -> int | None:
        """Answer the first class at or above `cls` that holds a block."""
        return min((held for held in self.lists if held >= cls), default=None)
