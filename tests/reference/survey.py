"""What the twin says about itself, and check()."""

from collections.abc import Iterator

from asyncmem.core.report import AccountCounts, BlockInfo, HeapCorrupted, HeapCounts, SegmentCounts
from tests.reference.blocks import Block, Segment, listed
from tests.reference.index import class_of
from tests.reference.plans import Plans


class Survey(Plans):
    """The walks over the whole heap."""

    def walk(self, *, leases: bool) -> Iterator[tuple[int, Segment, list[Block]]]:
        """Go through the segments, or through the insides of leases."""
        for number, segment in sorted(self.segments_by_id.items()):
            if (segment.container is not None) == leases:
                yield number, segment, list(self.chain(segment.first))

    def bytes_of(self, blocks: list[Block], *states: str) -> int:
        """Return the bytes, with memory behind them, of the blocks in one of these states."""
        return sum(self.mapped(block) for block in blocks if block.state in states)

    def mapped_in(self, blocks: list[Block]) -> int:
        """Return the bytes of a segment that have memory behind them."""
        return sum(self.mapped(block) for block in blocks)

    def segments(self) -> list[SegmentCounts]:
        """Return every segment's counts."""
        return [
            SegmentCounts(
                number, segment.address, self.mapped_in(blocks), segment.arena,
                self.bytes_of(blocks, "live", "leased"), self.bytes_of(blocks, "free"), self.bytes_of(blocks, "cached"),
                sum(block.state in {"live", "leased"} for block in blocks),
                max((block.granules * self.granule for block in blocks if block.state == "free"), default=0),
            )
            for number, segment, blocks in self.walk(leases=False)
        ]  # fmt: skip

    def empty_segments(self) -> list[tuple[int, int, int, tuple[tuple[int, int], ...]]]:
        """Return (segment, address, nbytes, entries) of every segment that is one free block."""
        return [
            (number, segment.address, segment.nbytes, listed(self.undone(blocks[0].entries)))
            for number, segment, blocks in self.walk(leases=False)
            if len(blocks) == 1 and blocks[0].state == "free" and number not in self.spaces
        ]

    def blocks(self) -> list[BlockInfo]:
        """Return every block, segment by segment, then the insides of leases."""
        return [
            self._info(block)
            for leases in (False, True)
            for _, _, blocks in self.walk(leases=leases)
            for block in blocks
        ]

    def _info(self, block: Block) -> BlockInfo:
        nbytes = block.granules * self.granule
        if block.state in {"live", "leased"}:
            return BlockInfo(block.address, nbytes, block.state, block.arena, block.home, block.account, ())
        return BlockInfo(block.address, nbytes, block.state, block.arena, 0, 0, listed(block.entries))

    def account(self, account: int) -> AccountCounts:
        """Return an account's counts."""
        a = self.ledger[account]
        return AccountCounts(
            a.parent, a.limit, a.live, a.requested, a.peak, sum(a.hits), a.frees,
            sum(a.hits) - a.frees + a.adopted, *a.hits,
        )  # fmt: skip

    def counts(self) -> HeapCounts:
        """Return every gauge and counter."""
        totals, ordinary = self.ledger.totals(), [b for _, _, blocks in self.walk(leases=False) for b in blocks]
        everything = ordinary + [b for _, _, blocks in self.walk(leases=True) for b in blocks]
        return HeapCounts(
            reserved=self.reserved_bytes, live=self.ledger[0].live, free=self.bytes_of(ordinary, "free"),
            cached=self.cached, lifted=self.bytes_of(ordinary, "lifted"),
            empty=sum(nbytes for _, _, nbytes, _ in self.empty_segments()),
            peak_live=self.ledger[0].peak, peak_cached=self.peak_cached, peak_reserved=self.peak_reserved,
            allocations=sum(totals.hits), frees=totals.frees,
            stream_hits=totals.hits[0], shared_hits=totals.hits[1], placed=totals.hits[2], foreign=self.foreign,
            misses=self.misses, refusals=self.refusals, barred=0, splits=self.splits, merges=self.merges,
            live_blocks=sum(totals.hits) - totals.frees - self.leases_closed,
            free_blocks=sum(block.state == "free" for block in everything),
            cached_blocks=sum(cache.blocks for cache in (*self.caches, self.shared)),
            segments=sum(one.nbytes > 0 for one in self.segments()),
            streams=len(self.epochs), accounts=len(self.ledger.accounts),
            leases=len(self.arenas) - 2, touched=self.touched_most,
        )  # fmt: skip

    def reset_peaks(self) -> None:
        """Let every peak start again."""
        for account in self.ledger.accounts.values():
            account.peak = account.live
        self.peak_cached, self.peak_reserved = self.reserved_bytes - self.ledger[0].live, self.reserved_bytes

    def largest(self, arena: int = -1) -> int:
        """Return the largest free block of an arena, or (-1) outside leases."""
        if arena >= 0 and arena not in self.arenas:
            raise ValueError("unknown arena")
        arenas = (0, 1) if arena == -1 else (arena,)
        free = [b for number in arenas for index in self.arenas[number].by_key.values() for c in index.lists.values()
                for b in c]  # fmt: skip
        return max((block.granules * self.granule for block in free), default=0)

    def pending(self) -> int:
        """Return the bytes in the free index that some stream has still to be done with."""
        blocks = [b for _, _, blocks in self.walk(leases=False) for b in blocks]
        return self.bytes_of([block for block in blocks if self.undone(block.entries)], "free")

    def live(self) -> int:
        """Return the bytes granted."""
        return self.ledger[0].live

    def reserved(self) -> int:
        """Return the bytes in segments."""
        return self.reserved_bytes

    def last_level(self) -> int:
        """Return what served the latest take."""
        return self.level

    def last_reason(self) -> int:
        """Return why the latest take failed."""
        return self.reason

    def last_flags(self) -> int:
        """Return the flags of the latest take."""
        return self.flags

    def touched(self) -> int:
        """Return how many nodes the latest take examined."""
        return self.examined

    def check(self) -> None:
        """Raise HeapCorrupted when blocks do not fill their segments, lists do not hold them, or bytes are lost."""
        for leases in (False, True):
            for _, segment, blocks in self.walk(leases=leases):
                self._check_segment(segment, blocks)
        live = self.bytes_of([b for _, _, blocks in self.walk(leases=False) for b in blocks], "live", "leased")
        counts = self.counts()
        if live != counts.live or self.reserved_bytes != live + counts.free + counts.cached + counts.lifted:
            raise HeapCorrupted("reserved is not live + free + cached + lifted")

    def _check_segment(self, segment: Segment, blocks: list[Block]) -> None:
        address = segment.address
        for block in blocks:
            if block.address != address or not block.granules:
                raise HeapCorrupted(f"gap or overlap at address {address}")
            if block.state == "free":
                index = self.arenas[block.arena].by_key[self.key_of(block)]
                if index.lists[class_of(block.granules)][block.position] is not block:
                    raise HeapCorrupted(f"free block at {address} that its index does not hold")
            address += block.granules * self.granule
        if address != segment.address + segment.nbytes:
            raise HeapCorrupted(f"blocks do not fill their segment at {segment.address}")
