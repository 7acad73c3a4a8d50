"""Taking and freeing."""

from collections.abc import Iterable, Sequence
from typing import Final

from tests.reference.blocks import Block, Entries, joined
from tests.reference.caching import Caching
from tests.reference.ledger import Ledger
from tests.reference.place import Search

NARROW: Final = 32
"""Candidates of one class looked at by take()."""
WIDE: Final = 4096
"""And by take_foreign()."""
REACHES: Final = (("done", NARROW), ("done", WIDE), ("recorded", WIDE), ("any", WIDE))
"""The searches of one request, one after the other: (bound, candidates of one class looked at)."""
MAX_SIZE: Final = 1 << 47


class Takes(Caching):
    """The way from a request to a block and back."""

    def __init__(self, granule: int) -> None:
        super().__init__(granule)
        self.ledger = Ledger()
        self.held: dict[int, Block] = {}
        self.numbers: dict[Block, int] = {}
        self.last_number = 0
        self.level = self.reason = self.flags = self.examined = 0
        self.reserved_bytes = self.peak_reserved = self.peak_cached = self.touched_most = 0
        self.foreign = self.misses = self.refusals = self.leases_closed = 0
        self.live_low, self.live_high = 0, 2**63 - 1

    # -- taking ----------------------------------------------------------------------------------------------------

    def take(
        self, nbytes: int, stream: int, account: int = 0, arena: int = -1, anywhere: bool = False, again: bool = False
    ) -> int:
        """Return a block that the stream may use at once, or 0."""
        if self.refused([nbytes], stream, account, arena):
            return 0
        block = self.find_block(nbytes, stream, arena, anywhere=anywhere, again=again)
        return 0 if block is None else self.grant(block, nbytes, stream, account)

    def take_foreign(
        self, nbytes: int, stream: int, account: int = 0, arena: int = -1, anywhere: bool = False, late: bool = False
    ) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """Return (block, entries to discharge first) or None."""
        if self.refused([nbytes], stream, account, arena):
            return None
        lacks_pages = False
        for bound, window in REACHES:
            if bound == "any":
                lacks_pages = self.has_spot(self.rounded(nbytes), stream, arena)
                if lacks_pages or not late:
                    break
            search = Search(self.rounded(nbytes) // self.granule, stream, bound, window)
            block = self.place(search, arena, anywhere=anywhere)
            self.examined += search.touched
            if block is not None:
                owed = self.resolve(block, stream)
                self.level = 3
                self.foreign += bool(owed)
                return self.grant(block, nbytes, stream, account), tuple(sorted(owed.items()))
            lacks_pages = search.bare
            if lacks_pages:
                break
        self.reason = 4 if lacks_pages else 1
        self.misses += 1
        return None

    def take_at(
        self, address: int, nbytes: int, stream: int, account: int, arena: int, late: bool = False
    ) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """Return the same for just these bytes of a lease's inside."""
        if self.refused([nbytes], stream, account, arena):
            return None
        search = Search(self.rounded(nbytes) // self.granule, stream, "any" if late else "recorded", 0)
        block = self.place_at(search, arena, address)
        self.examined = search.touched
        if block is None:
            self.reason = 1
            self.misses += 1
            return None
        owed = self.resolve(block, stream)
        self.level = 3
        self.foreign += bool(owed)
        return self.grant(block, nbytes, stream, account), tuple(sorted(owed.items()))

    def take_many(
        self, sizes: Iterable[int], stream: int, account: int = 0, arena: int = -1, anywhere: bool = False
    ) -> list[int]:
        """Return one block a size in the order asked, or [] when not all fit."""
        wanted = list(sizes)
        if self.refused(wanted, stream, account, arena):
            return []
        found: dict[int, Block] = {}
        for i, nbytes in enumerate(wanted):
            block = self.look_in_caches(nbytes, stream, arena, again=False)
            if block is not None:
                found[i] = block
                self.enliven(block, nbytes, stream, account)
        for i in sorted(set(range(len(wanted))) - set(found), key=lambda i: (-wanted[i], i)):
            self.examined = 0
            block = self.find_hole(wanted[i], stream, arena, anywhere=anywhere)
            if block is None:
                for taken in sorted(found, reverse=True):
                    self.retract(found[taken], {})
                return []
            found[i] = block
            self.enliven(block, wanted[i], stream, account)
        for block in found.values():
            self.charge(block)
        self.raise_marks()
        return [self.number(found[i]) for i in range(len(wanted))]

    def refused(self, sizes: Sequence[int], stream: int, account: int, arena: int) -> bool:
        """Check the arguments and the limits; forget the outcome of the take before."""
        self.level = self.reason = self.flags = self.examined = 0
        self.need_stream(stream)
        if any(not 0 < nbytes <= MAX_SIZE for nbytes in sizes):
            raise ValueError("size must be from 1 to 2**47 bytes")
        if arena >= 2 and arena not in self.arenas:
            raise ValueError("unknown arena")
        if self.ledger[account].inner != (arena >= 2):
            raise ValueError("the inside of a lease, and only that, is charged to an account below none")
        if not self.ledger.affordable(account, sum(map(self.rounded, sizes))):
            self.reason = 2
            self.refusals += 1
        return self.reason != 0

    def find_block(self, nbytes: int, stream: int, arena: int, *, anywhere: bool, again: bool = False) -> Block | None:
        """Look in the caches, then in mapped memory."""
        block = self.look_in_caches(nbytes, stream, arena, again=again)
        return self.find_hole(nbytes, stream, arena, anywhere=anywhere) if block is None else block

    def look_in_caches(self, nbytes: int, stream: int, arena: int, *, again: bool) -> Block | None:
        """Look in the stream's cache and in the shared one."""
        rounded = self.rounded(nbytes)
        self.level = self.examined = 0
        if arena not in {-1, self.natural_arena(rounded)}:
            return None
        if not self.cacheable(rounded // self.granule):
            self.caches[stream].misses += not again
            return None
        block, self.level, self.examined = self.take_cached(rounded // self.granule, stream, again=again)
        return block

    def find_hole(self, nbytes: int, stream: int, arena: int, *, anywhere: bool) -> Block | None:
        """Look in mapped memory."""
        search = Search(self.rounded(nbytes) // self.granule, stream, "done", NARROW)
        block = self.place(search, arena, anywhere=anywhere)
        self.examined += search.touched
        self.touched_most = max(self.touched_most, self.examined)
        if block is None:
            self.reason = 4 if search.bare or self.has_spot(self.rounded(nbytes), stream, arena) else 1
            self.misses += 1
            self.level = 0
        else:
            self.resolve(block, stream)
            self.level = 3
        return block

    def grant(self, block: Block, nbytes: int, stream: int, account: int) -> int:
        """Make a block live and charge it."""
        self.enliven(block, nbytes, stream, account)
        self.charge(block)
        self.raise_marks()
        return self.number(block)

    def enliven(self, block: Block, nbytes: int, stream: int, account: int) -> None:
        """Make a block live."""
        block.state = "live"
        block.home, block.account, block.requested, block.level = stream, account, nbytes, self.level

    def charge(self, block: Block) -> None:
        """Charge and count a block."""
        self.ledger.charge(block.account, block.granules * self.granule, block.requested)
        self.ledger.count(block.account, block.level)

    def number(self, block: Block) -> int:
        """Give a live block its number."""
        self.last_number += 1
        self.held[self.last_number] = block
        self.numbers[block] = self.last_number
        return self.last_number

    def raise_marks(self) -> None:
        """Raise the flags of a take, each once."""
        live = self.ledger[0].live
        if live > self.live_high:
            self.live_high = 2**63 - 1
            self.flags |= 2

    # -- freeing ---------------------------------------------------------------------------------------------------

    def put_back(self, block: int, entries: Sequence[tuple[int, int]]) -> int:
        """Undo a take whose discharge failed; the block keeps `entries`."""
        taken = self.need_live(block)
        self.ledger.credit(taken.account, taken.granules * self.granule, taken.requested)
        self.ledger.count(taken.account, taken.level, -1)
        self.foreign -= bool(entries)
        self.forget(taken)
        self.retract(taken, self.gathered(entries))
        return self.released_flags()

    def retract(self, block: Block, owed: Entries) -> None:
        """Give a granted block to the index with the entries it was taken with."""
        block.entries = joined({block.home: block.owed} if block.owed else {}, owed)
        self.settle(block)

    def free(self, block: int, entries: Sequence[tuple[int, int]] = ()) -> int:
        """Give a block back, owing its home's open epoch and `entries`."""
        freed = self.need_live(block)
        extra = self.gathered(entries)
        inside = freed.arena >= 2
        self.forget(freed)
        self.give_back(freed, extra)
        return self.flags_inside(freed.account) if inside else self.released_flags()

    def free_everywhere(self, block: int) -> int:
        """Give a block back that owes every stream's open epoch."""
        return self.free(block, [(stream, known.open) for stream, known in enumerate(self.epochs)])

    def free_many(self, blocks: Iterable[int]) -> int:
        """Give blocks back, all or none."""
        named = list(blocks)
        freed = [self.need_live(block) for block in named]
        if len(set(named)) < len(named):
            raise ValueError("a block is named twice")
        inside = all(block.arena >= 2 for block in freed)
        accounts = {block.account for block in freed}
        for block in freed:
            self.forget(block)
            self.give_back(block, {})
        return max(map(self.flags_inside, accounts), default=0) if inside else self.released_flags()

    def give_back(self, block: Block, extra: Entries) -> None:
        """Credit a block and put it into a cache or the index."""
        self.ledger.credit(block.account, block.granules * self.granule, block.requested)
        for account in self.ledger.lineage(block.account):
            account.frees += 1
        block.entries = joined({block.home: self.epochs[block.home].open}, self.undone(extra))
        if not self.keep(block):
            self.settle(block)

    def note_reserved(self) -> None:
        """Raise the peaks of what is reserved."""
        self.peak_reserved = max(self.peak_reserved, self.reserved_bytes)
        self.peak_cached = max(self.peak_cached, self.reserved_bytes - self.ledger[0].live)

    def released_flags(self) -> int:
        """Return the flags of an operation that gave bytes back."""
        free = self.reserved_bytes - self.ledger[0].live
        self.peak_cached = max(self.peak_cached, free)
        flags = int(self.ledger.told(free))
        if self.ledger[0].live < self.live_low:
            self.live_low = 0
            flags |= 2
        return flags

    def flags_inside(self, account: int) -> int:
        """Return the same for bytes that went back to a lease: some may wait for memory of just that lease."""
        return int(self.ledger.barred(account))

    def has_spot(self, _size: int, _stream: int, _arena: int) -> bool:
        """Return whether a request that found no memory could have addresses that were used before."""
        return False

    # -- helpers ---------------------------------------------------------------------------------------------------

    def rounded(self, nbytes: int) -> int:
        """Return a size in whole granules."""
        return -(-nbytes // self.granule) * self.granule

    def gathered(self, entries: Sequence[tuple[int, int]]) -> Entries:
        """Return a list of entries as a mapping with the later epoch of each stream."""
        found: Entries = {}
        for stream, epoch in entries:
            self.need_stream(stream)
            found[stream] = max(found.get(stream, 0), epoch)
        return found

    def forget(self, block: Block) -> None:
        """Take a block's number back."""
        del self.held[self.numbers.pop(block)]

    def need_stream(self, stream: int) -> None:
        """Refuse an unknown stream."""
        if not 0 <= stream < len(self.epochs):
            raise ValueError("unknown stream")

    def need_live(self, block: int) -> Block:
        """Refuse anything but a live block."""
        if block not in self.held or self.held[block].state != "live":
            raise ValueError("not a live block (freed already, or never taken)")
        return self.held[block]
