"""Bins and the tables of them."""

from dataclasses import dataclass, field

from tests.reference.blocks import Block

MOST_ASKED = 192
PATIENT = 64
WAYS = 4


@dataclass(slots=True)
class Bin:
    """Blocks of exactly one size, the next one to be looked at last."""

    granules: int = 0
    blocks: list[Block] = field(default_factory=list)
    strikes: int = 0
    """Misses by other sizes since the bin was last asked for its own."""
    flushes: int = 0
    """How many took blocks of it since one served."""
    more: int = 0
    """Times that the size is to be asked for beyond the usual before anything is kept."""
    asked: int = 0
    """How often in a row its size was asked for and not there."""
    since: int = 0
    """The cache's misses, up to the latest of its own."""

    def begin(self, granules: int, asked: int, since: int) -> None:
        """Serve another size from now on."""
        self.granules, self.strikes, self.flushes, self.more = granules, 0, 0, 0
        self.asked, self.since = asked, since

    def serve(self) -> None:
        """Note that a block served."""
        self.strikes, self.flushes, self.more = 0, 0, 0

    def doubt(self) -> None:
        """Note a flush of large blocks; from the 64th in a row on twice as many requests are needed each time."""
        self.flushes += 1
        if self.flushes >= PATIENT:
            self.asked, self.more = 0, min(2 * self.more + 3, MOST_ASKED - 3)


class Cache:
    """A table of bins with caps over all of them; a small size has its place in one of four."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.bins = [Bin() for _ in range(1 << bits)]
        self.turns = [0] * ((1 << bits) // WAYS)
        """Of each row of bins, how many were taken over or passed."""
        self.max_blocks = 0
        self.max_bytes = 0
        self.bytes = 0
        """Without the outsize block."""
        self.outsize: Block | None = None
        """The one block larger than all that `max_bytes` allows."""
        self.misses = 0

    @property
    def blocks(self) -> int:
        """Blocks in all bins."""
        return sum(len(slot.blocks) for slot in self.bins)

    def bin(self, granules: int, *, large: bool) -> Bin | None:
        """Return the bin of a size, if it has one."""
        some = [self.bins[self.hash(granules)]] if large else self.row(granules)
        return next((one for one in some if one.granules == granules), None)

    def weakest(self, granules: int, *, large: bool) -> Bin:
        """Return the bin that a size is to take over: of several the empty ones in turn, else by strikes."""
        if large:
            return self.bins[self.hash(granules)]
        some, number = self.row(granules), self.hash(granules) // WAYS
        for _ in some:
            one = some[self.turns[number] % WAYS]
            self.turns[number] += 1
            if not one.blocks:
                return one
        return max(some, key=lambda one: one.strikes)

    def row(self, granules: int) -> list[Bin]:
        """Return the few bins that a small size has its place in."""
        first = self.hash(granules) // WAYS * WAYS
        return self.bins[first : first + WAYS]

    def hash(self, granules: int) -> int:
        """Return a size's place in the table."""
        return (granules * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 64 - self.bits

    def has_room(self, nbytes: int) -> bool:
        """Return whether the caps allow one block more."""
        return self.blocks < self.max_blocks and self.bytes + nbytes <= self.max_bytes

    def is_outsize(self, nbytes: int) -> bool:
        """Return whether a block of this size may only be the one beside the cap."""
        return nbytes > self.max_bytes > 0 and self.blocks < self.max_blocks
