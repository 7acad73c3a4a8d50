"""Placement: finding the free block that serves a request, cutting it, and joining what comes back."""

from dataclasses import dataclass, field
from typing import Final

from tests.reference.blocks import Block, Entries, Epochs, Segment, joined
from tests.reference.index import FreeIndex, class_of

CASCADE: Final = 16
"""Joins that one free may cause."""


AGED: Final = 256
"""Candidates of one index that are looked at for the oldest."""


@dataclass(slots=True)
class Arena:
    """A part of the heap whose blocks mix only with each other."""

    by_key: dict[int, FreeIndex] = field(default_factory=dict)
    segment: int = 0


@dataclass(slots=True)
class Search:
    """What a placement looks for."""

    granules: int
    stream: int
    bound: str
    """How far entries of other streams must have come: "done", "recorded" or "any"."""
    window: int
    """Candidates looked at in one class."""
    touched: int = 0
    bare: bool = False
    """A block was found, and memory is missing behind it."""


class Placement:
    """The free index and the rules of searching, cutting and joining."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.small_limit = 1 << 20
        self.best_fit = True
        self.around = False
        self.epochs: list[Epochs] = []
        self.arenas: dict[int, Arena] = {0: Arena(), 1: Arena()}
        self.segments_by_id: dict[int, Segment] = {}
        self.splits = 0
        self.merges = 0

    # -- what a block waits for ------------------------------------------------------------------------------------

    def undone(self, entries: Entries) -> Entries:
        """Return the entries that are not known to be done."""
        return {stream: epoch for stream, epoch in entries.items() if epoch > self.epochs[stream].done}

    def passes(self, stream: int, epoch: int, bound: str) -> bool:
        """Return whether another stream's entry has come far enough."""
        known = self.epochs[stream]
        reached = {"done": known.done, "recorded": max(known.done, known.recorded), "any": epoch}
        return epoch <= reached[bound]

    def eligible(self, block: Block, stream: int, bound: str) -> bool:
        """Return whether a stream may take the block at all."""
        return all(own == stream or self.passes(own, epoch, bound) for own, epoch in block.entries.items())

    def resolve(self, block: Block, stream: int) -> Entries:
        """Turn a block's entries into the taker's: note what it owes itself, return what it must discharge first."""
        owed = {s: epoch for s, epoch in self.undone(block.entries).items() if s != stream}
        block.owed = block.entries.get(stream, 0)
        block.entries = {}
        return owed

    # -- the free index --------------------------------------------------------------------------------------------

    @staticmethod
    def key_of(block: Block) -> int:
        """Return which index of an arena holds the block: 0 clean, 1 several streams, 2 + s only stream s."""
        if len(block.entries) > 1:
            return 1
        return 2 + next(iter(block.entries)) if block.entries else 0

    def index_add(self, block: Block) -> None:
        """Make a block findable."""
        self.arenas[block.arena].by_key.setdefault(self.key_of(block), FreeIndex()).add(block)
        block.state = "free"

    def index_remove(self, block: Block) -> None:
        """Take a block out of its index."""
        self.arenas[block.arena].by_key[self.key_of(block)].remove(block)
        block.state = "pending"

    # -- searching -------------------------------------------------------------------------------------------------

    def natural_arena(self, nbytes: int) -> int:
        """Return the arena of a rounded size."""
        return 0 if nbytes < self.small_limit else 1

    def best_of(self, candidates: list[Block], search: Search, *, ordered: bool) -> Block | None:
        """Return the smallest, then lowest, of the newest candidates that fit and may be taken."""
        best: Block | None = None
        for block in reversed(candidates[-search.window :]):
            search.touched += 1
            if block.granules < search.granules:
                continue
            if best is not None and (block.granules, block.address) > (best.granules, best.address):
                continue
            if ordered or self.eligible(block, search.stream, search.bound):
                best = block
                if not self.best_fit:
                    break
        return best

    def best_of_all(self, index: FreeIndex, search: Search) -> Block | None:
        """Return the smallest, then lowest, of few blocks that fit and may be taken."""
        search.touched += len(index)
        fit = [block for block in index.blocks if block.granules >= search.granules]
        able = [block for block in fit if self.eligible(block, search.stream, search.bound)]
        return min(able, key=lambda one: (one.granules, one.address), default=None)

    def find(self, index: FreeIndex, search: Search, *, ordered: bool, last: int | None = None) -> Block | None:
        """Search one index from the class of the size up to `last`; `ordered`: its blocks need nothing waited for."""
        if index.few:
            return self.best_of_all(index, search)
        most = search.touched + 2 * search.window
        cls = index.next(class_of(search.granules))
        while cls is not None and (last is None or cls <= last) and search.touched < most:
            best = self.best_of(index.lists[cls], search, ordered=ordered)
            if best is not None:
                return best
            cls = index.next(cls + 1)
        return None

    def search_arena(self, arena: int, search: Search) -> Block | None:
        """Take the best of own blocks and clean ones, else other streams' in their order, else those of several."""
        by_key = self.arenas[arena].by_key
        own = 2 + search.stream
        mine = self.find(by_key[own], search, ordered=True) if own in by_key else None
        last = None if mine is None else class_of(mine.granules)
        clean = self.find(by_key[0], search, ordered=True, last=last) if 0 in by_key else None
        usable = [one for one in (mine, clean) if one is not None]
        if usable:
            return min(usable, key=lambda one: (one.granules, one.address))
        if search.bound != "done" and search.granules * self.granule >= self.small_limit:
            return self.oldest_of([by_key[key] for key in by_key if key >= 1 and key != own], search)
        for key in [*sorted(key for key in by_key if key >= 2 and key != own), 1]:
            if key in by_key:
                found = self.find(by_key[key], search, ordered=False)
                if found is not None:
                    return found
        return None

    def oldest_of(self, indexes: list[FreeIndex], search: Search) -> Block | None:
        """Return the one whose newest use by another stream has had the most fences since, the smallest of those."""
        found: list[Block] = []
        for index in indexes:
            lists = [index.lists[cls] for cls in sorted(index.lists) if cls >= class_of(search.granules)]
            looked_at = index.blocks if index.few else [block for blocks in lists for block in blocks][:AGED]
            search.touched += len(looked_at)
            found += [block for block in looked_at if block.granules >= search.granules]
        able = [block for block in found if self.eligible(block, search.stream, search.bound)]
        return min(able, key=lambda one: (-self.age_of(one, search.stream), one.granules, one.address), default=None)

    def age_of(self, block: Block, taker: int) -> int:
        """Return how many fences its streams have had since the newest that a taker must wait for."""
        return min(self.epochs[stream].open - epoch for stream, epoch in block.entries.items() if stream != taker)

    def place(self, search: Search, arena: int, *, anywhere: bool) -> Block | None:
        """Take a block out of the index and cut it to size."""
        if arena < 0:
            arena = self.natural_arena(search.granules * self.granule)
        block = self.search_arena(arena, search)
        if block is None and anywhere and arena < 2:
            block = self.search_arena(1 - arena, search)
        if block is None or not self.serves(block, search):
            return None
        self.index_remove(block)
        self.carve(block, search.granules)
        return block

    def place_at(self, search: Search, arena: int, address: int) -> Block | None:
        """Cut just these bytes out of the free blocks of a lease that they lie in."""
        inside = self.segments_by_id[self.arenas[arena].segment] if arena >= 2 else None
        end = address + search.granules * self.granule
        if inside is None or not inside.address <= address or end > inside.address + inside.nbytes:
            raise ValueError("not all of it is in the lease")
        if address % self.granule:
            raise ValueError("an address is a multiple of the granule")
        blocks = []
        block: Block | None = inside.first
        while block is not None and block.address < end:
            search.touched += 1
            if block.address + block.granules * self.granule > address:
                blocks.append(block)
                if block.state != "free" or not self.eligible(block, search.stream, search.bound):
                    return None
            block = block.after
        first = blocks[0]
        self.index_remove(first)
        low = (address - first.address) // self.granule
        if low:
            first = self.cut_off(first, low)
        for block in blocks[1:]:
            self.index_remove(block)
            self.carve(block, min(block.granules, search.granules - first.granules))
            self.absorb(first, block)
        self.carve(first, search.granules)
        return first

    def cut_off(self, block: Block, granules: int) -> Block:
        """Cut a block; the lower part becomes a free block, and the rest is the answer."""
        self.carve(block, granules)
        rest = block.after
        assert rest is not None
        self.index_remove(rest)
        self.index_add(block)
        return rest

    def serves(self, _block: Block, _search: Search) -> bool:
        """Return whether a block that was found can be used."""
        return True

    # -- cutting and joining ---------------------------------------------------------------------------------------

    def carve(self, block: Block, granules: int) -> None:
        """Cut a block; the rest, with a copy of its entries, is free after it."""
        if block.granules == granules:
            return
        address = block.address + granules * self.granule
        rest = Block(address, block.granules - granules, block.segment, block.arena, dict(block.entries))
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        block.granules = granules
        self.index_add(rest)
        self.splits += 1

    def joins(self, a: Block, b: Block) -> bool:
        """Return whether free neighbours join at once: same streams still owed, or one of them owes nothing."""
        x, y = self.undone(a.entries), self.undone(b.entries)
        return not x or not y or x.keys() == y.keys()

    def absorb(self, low: Block, high: Block) -> None:
        """Join a block with the one after it; both are out of the index."""
        low.entries, high.entries = self.undone(low.entries), self.undone(high.entries)
        self.unite(low, high)
        self.merges += 1

    @staticmethod
    def unite(low: Block, high: Block) -> None:
        """Do the joining itself, with all that either waits for."""
        low.entries = joined(low.entries, high.entries)
        low.granules += high.granules
        low.after = high.after
        if low.after is not None:
            low.after.before = low

    def settle(self, block: Block) -> None:
        """Give a block to the index, joined with the free neighbours that it may join."""
        block.entries = self.undone(block.entries)
        block.state = "pending"
        self.index_add(self.join(block))

    def join(self, block: Block) -> Block:
        """Join a block that is in no list with the free neighbours that it may join, and return what became of it."""
        for _ in range(CASCADE):
            before, after = block.before, block.after
            if before is not None and before.state == "free" and self.joins(before, block):
                self.index_remove(before)
                self.absorb(before, block)
                block = before
            elif after is not None and after.state == "free" and self.joins(block, after):
                self.index_remove(after)
                self.absorb(block, after)
            else:
                break
        return block

    def merge(self, arena: int = -1) -> int:
        """Join all free neighbours, whatever they wait for, and forget entries that are done; or those in a lease."""
        if arena >= 2 and arena not in self.arenas:
            raise ValueError("unknown lease")
        before = self.merges
        for number, segment in sorted(self.segments_by_id.items()):
            if arena >= 2 and number != self.arenas[arena].segment:
                continue
            block: Block | None = segment.first
            while block is not None:
                if block.state == "free":
                    self.index_remove(block)
                    block.entries = self.undone(block.entries)
                    while block.after is not None and block.after.state == "free":
                        self.index_remove(block.after)
                        self.absorb(block, block.after)
                    self.index_add(block)
                block = block.after
        return self.merges - before
