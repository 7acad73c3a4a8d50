"""How an allocator is asked for memory and given it back, as Python source.

A loop that is compiled from it calls the allocator as its users do, and not through a function of ours in between.
"""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Plan: TypeAlias = list[tuple[int, int, int]]
"""Triples of slot, size and the size of what lies in the slot before; size 0 only gives that back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One allocator's calls."""

    names: Mapping[str, object]
    """What the source uses."""
    allocate: str
    """An expression; `{size}` stands for the bytes."""
    release: str = ""
    """A statement; `{block}` and `{size}` stand for what was allocated. "" where the last reference gives it back."""

    def once(self, size: str) -> str:
        """Write the statement that allocates and gives back at once."""
        made = self.allocate.format(size=size)
        return f"block = {made}\n{self.release.format(block='block', size=size)}" if self.release else made

    def drop(self, place: str, size: str) -> str:
        """Write the statement that gives back what lies in a place."""
        return self.release.format(block=place, size=size) if self.release else f"{place} = None"

    def follow(self) -> str:
        """Write the loop over `plan`, a `Plan`, in which every step gives the slot's old block back first."""
        body = f"{self.drop('live[slot]', 'old')}\nlive[slot] = {self.allocate.format(size='size')}"
        return "for slot, size, old in plan:\n" + textwrap.indent(body, "    ")

    def obey(self) -> str:
        """Write the loop over `plan` whose steps either allocate into an empty slot or, with size 0, empty one."""
        made = f"live[slot] = {self.allocate.format(size='size')}"
        gone = self.drop("live[slot]", "old")
        body = f"if size:\n{textwrap.indent(made, '    ')}\nelse:\n{textwrap.indent(gone, '    ')}"
        return "for slot, size, old in plan:\n" + textwrap.indent(body, "    ")

    def hundred(self) -> str:
        """Write the statement that allocates one block for each of `sizes`, looks at each, and gives all back."""
        made = f"blocks = [{self.allocate.format(size='size')} for size in sizes]"
        if self.release:
            gone = self.release.format(block="block", size="size")
            return f"{made}\nfor block, size in zip(blocks, sizes):\n    {gone}"
        return f"{made}\nfor block in blocks: pass\ndel block, blocks"

    def take(self) -> Callable[[int], object]:
        """Make a function that allocates so many bytes."""
        space = dict(self.names)
        exec(f"def take(size): return {self.allocate.format(size='size')}", space)  # noqa: S102 - its loops are too
        take: Callable[[int], object] = space["take"]  # type: ignore[assignment] # made by the line above
        return take

    def give(self) -> Callable[[list[object], list[int]], None]:
        """Make a function that gives a list of blocks of these sizes back, and empties it."""
        space = dict(self.names)
        gone = self.release.format(block="block", size="size") or "pass"
        source = f"def give(blocks, sizes):\n    for block, size in zip(blocks, sizes): {gone}\n    blocks.clear()"
        exec(source, space)  # noqa: S102 - its loops are made so too
        give: Callable[[list[object], list[int]], None] = space["give"]  # type: ignore[assignment] # as above
        return give


FLOOR = Way(names={"object": object}, allocate="object()")
"""What lies below any allocation that Python can make."""
