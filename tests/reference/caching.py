"""The stream caches and the shared cache in front of placement."""

from typing import Final

from tests.reference.blocks import Block, Epochs
from tests.reference.cache import MOST_ASKED, Bin, Cache
from tests.reference.place import Placement

PATIENCE: Final = 16
"""Strikes of other sizes before a slot gives blocks back."""
DRAINED_AT_ONCE: Final = 8
"""Blocks that a struck slot gives back in one operation."""
NEARBY: Final = 512
"""Misses of a stream's cache that may lie between two requests of one large size which count as in a row."""
SHARED_DEPTH: Final = 8
"""Blocks of a shared slot looked at for one take."""


class Caching(Placement):
    """Which freed blocks are kept for their exact size, and for whom."""

    def __init__(self, granule: int) -> None:
        super().__init__(granule)
        self.caps = (256, 64 << 20)
        self.caches: list[Cache] = []
        self.shared = Cache(10)
        self.shared.max_blocks, self.shared.max_bytes = 1024, 256 << 20
        self.cached = 0

    def add_stream(self) -> int:
        """Add a stream and return its number."""
        cache = Cache(8)
        cache.max_blocks, cache.max_bytes = self.caps
        self.caches.append(cache)
        self.epochs.append(Epochs())
        return len(self.epochs) - 1

    def take_cached(self, granules: int, stream: int, *, again: bool) -> tuple[Block | None, int, int]:
        """Return a block of exactly this size, its level and the nodes examined; asked `again` it learns nothing."""
        local = self.caches[stream]
        large = granules * self.granule >= self.small_limit
        slot = local.bin(granules, large=large)
        if slot and slot.blocks:
            if not again:
                slot.serve()
            return self.uncache(local, slot, slot.blocks[-1], stream), 1, 1
        if not again and slot:
            slot.strikes = 0
            self.ask(local, slot, large=large)
        elif not again:
            self.strike(local, local.weakest(granules, large=large), granules)
        return self.take_shared(granules, stream)

    def ask(self, cache: Cache, slot: Bin, *, large: bool) -> None:
        """Count a request for a slot's size that has none; of a large one, in a row with those shortly before it."""
        cache.misses += 1
        if large and slot.asked < 3 + slot.more and cache.misses - slot.since > NEARBY:
            slot.asked = 0
        slot.asked, slot.since = min(slot.asked + 1, MOST_ASKED), cache.misses

    def take_shared(self, granules: int, stream: int) -> tuple[Block | None, int, int]:
        """Look for a block in the shared cache that the stream may use at once."""
        slot = self.shared.bin(granules, large=granules * self.granule >= self.small_limit)
        if not slot:
            return None, 0, 0
        touched = 0
        for block in reversed(slot.blocks[-SHARED_DEPTH:]):
            touched += 1
            if self.eligible(block, stream, "done"):
                return self.uncache(self.shared, slot, block, stream), 2, touched
        return None, 0, touched

    def uncache(self, cache: Cache, slot: Bin, block: Block, stream: int) -> Block:
        """Take a block out of a slot for a stream."""
        self.remove_cached(cache, slot, block)
        self.resolve(block, stream)
        return block

    def remove_cached(self, cache: Cache, slot: Bin, block: Block) -> None:
        """Take a block out of a slot."""
        slot.blocks.remove(block)
        if block is cache.outsize:
            cache.outsize = None
        else:
            cache.bytes -= block.granules * self.granule
        self.cached -= block.granules * self.granule
        block.shared = False

    def strike(self, cache: Cache, slot: Bin, granules: int) -> None:
        """Count a miss by another size; a slot with too many gives its blocks back, and then its place."""
        cache.misses += 1
        if slot.blocks:
            slot.strikes += 1
            if slot.strikes > PATIENCE:
                self.drain(cache, slot, DRAINED_AT_ONCE)
        if not slot.blocks:
            slot.begin(granules, 1, cache.misses)

    def drain(self, cache: Cache, slot: Bin, most: int | None = None) -> int:
        """Give up to `most` blocks of a slot to the index, in their order, and return their bytes."""
        drained = 0
        for block in slot.blocks[::-1][:most]:
            drained += block.granules * self.granule
            self.remove_cached(cache, slot, block)
            self.settle(block)
        return drained

    def keep(self, block: Block) -> bool:
        """Cache a freed block if its size is asked for again and again: a small one twice, a large one three times."""
        nbytes = block.granules * self.granule
        arena = self.natural_arena(nbytes)
        local = self.caches[block.home]
        slot = local.bin(block.granules, large=bool(arena))
        if not slot or slot.asked < 2 + arena + slot.more or block.arena != arena:
            return False
        if len(block.entries) == 1 and (
            local.has_room(nbytes) or (local.is_outsize(nbytes) and self.vacate(local, block.granules))
        ):
            cache = local
        else:
            cache, slot = self.shared, self.shared.bin(block.granules, large=bool(arena))
            if not slot:
                slot = cache.weakest(block.granules, large=bool(arena))
                self.strike(cache, slot, block.granules)
            if slot.granules != block.granules or not cache.has_room(nbytes):
                return False
            slot.strikes = 0
            block.shared = True
        block.state = "cached"
        # Of the blocks that wait for other streams the oldest is the likeliest to be ready.
        slot.blocks.insert(0 if block.shared and len(block.entries) > 1 else len(slot.blocks), block)
        if nbytes > cache.max_bytes:
            cache.outsize = block
        else:
            cache.bytes += nbytes
        self.cached += nbytes
        return True

    def cacheable(self, _granules: int) -> bool:
        """Return whether blocks of a size are cached at all."""
        return True

    def vacate(self, cache: Cache, granules: int) -> bool:
        """Make way for an outsize block: one of another size goes, one of the same size stays."""
        if cache.outsize is None:
            return True
        there = cache.outsize.granules
        if there == granules:
            return False
        slot = cache.bin(there, large=there * self.granule >= self.small_limit)
        assert slot
        self.drain(cache, slot, 1)
        return True

    def flush(self, stream: int = -1) -> int:
        """Empty one stream's cache, or (-1) every cache, into the free index."""
        caches = [*self.caches, self.shared] if stream == -1 else [self.caches[stream]]
        return sum(self.flush_bin(cache, slot) for cache in caches for slot in cache.bins if slot.blocks)

    def flush_bin(self, cache: Cache, slot: Bin) -> int:
        """Empty a slot; one of large blocks keeps its next ones the less readily the less these have served."""
        if self.natural_arena(slot.granules * self.granule):
            slot.doubt()
        return self.drain(cache, slot)

    def fit_caches(self, *, empty: bool) -> None:
        """Empty the caches that are over their caps, or all of them."""
        for cache in (*self.caches, self.shared):
            if cache is not self.shared:
                cache.max_blocks, cache.max_bytes = self.caps
            over = cache.blocks > cache.max_blocks or cache.bytes > cache.max_bytes or cache.outsize is not None
            if empty or over:
                for slot in cache.bins:
                    self.drain(cache, slot)
