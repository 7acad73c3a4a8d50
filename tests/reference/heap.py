"""The whole twin: streams, segments, leases, accounts, and what it says about itself."""

from asyncmem.core.report import BlockInfo
from tests.reference.blocks import Block, Segment, listed
from tests.reference.place import Arena
from tests.reference.survey import Survey


class ReferenceHeap(Survey):
    """The compiled `Heap`'s twin: same methods, same answers, but block numbers of its own."""

    def __init__(self, *, granule: int = 512, **options: object) -> None:
        super().__init__(granule)
        self.free_arenas: list[int] = []
        self.configure(**options)
        self.add_stream()

    def configure(self, **options: object) -> None:
        """Change small_limit, strategy or the cache caps."""
        border = self.small_limit
        for name, value in options.items():
            self._set(name, value)
        self.fit_caches(empty=border != self.small_limit)

    def _set(self, name: str, value: object) -> None:
        if name == "strategy":
            if value not in {"best_fit", "good_fit"}:
                raise ValueError("strategy must be 'best_fit' or 'good_fit'")
            self.best_fit = value == "best_fit"
            return
        assert isinstance(value, int)
        if name == "small_limit":
            self.small_limit = value
        elif name == "stream_cache_blocks":
            self.caps = (value, self.caps[1])
        elif name == "stream_cache_bytes":
            self.caps = (self.caps[0], value)
        elif name == "shared_cache_blocks":
            self.shared.max_blocks = value
        elif name == "shared_cache_bytes":
            self.shared.max_bytes = value
        else:
            raise TypeError(f"unknown heap option {name!r}")

    # -- streams ---------------------------------------------------------------------------------------------------

    def open_epoch(self, stream: int) -> int:
        """Return the epoch that frees join now."""
        self.need_stream(stream)
        return self.epochs[stream].open

    def close_epoch(self, stream: int) -> int:
        """Close the open epoch and return its number."""
        self.need_stream(stream)
        self.epochs[stream].open += 1
        return self.epochs[stream].open - 1

    def publish(self, stream: int, epoch: int) -> None:
        """Note that a recorded fence covers the epoch."""
        self.need_stream(stream)
        self._need_closed(stream, epoch)
        self.epochs[stream].recorded = max(self.epochs[stream].recorded, epoch)

    def mark_done(self, stream: int, epoch: int) -> None:
        """Note that the epoch and all before it are done."""
        self.publish(stream, epoch)
        self.epochs[stream].done = max(self.epochs[stream].done, epoch)

    def _need_closed(self, stream: int, epoch: int) -> None:
        if epoch >= self.epochs[stream].open:
            raise ValueError("the epoch is still open: close it before its fence")

    def entry_state(self, stream: int, epoch: int) -> int:
        """Return 0 unrecorded, 1 recorded, 2 done."""
        self.need_stream(stream)
        known = self.epochs[stream]
        return 2 if epoch <= known.done else int(epoch <= known.recorded)

    # -- segments --------------------------------------------------------------------------------------------------

    def add_segment(self, address: int, nbytes: int, arena: int, stream: int) -> int:
        """Add a range, owing `stream` its open epoch."""
        self.need_stream(stream)
        if arena not in {0, 1} or nbytes <= 0 or nbytes % self.granule or address % self.granule:
            raise ValueError("a segment lies in arena 0 or 1 and has whole granules")
        number = self._add_range(address, nbytes, arena, stream, None)
        self.ledger.wanted = 0  # what has come is for whoever waits
        self.reserved_bytes += nbytes
        self.note_reserved()
        return number

    def _add_range(self, address: int, nbytes: int, arena: int, stream: int, container: Block | None) -> int:
        number = self.free_segments.pop() if self.free_segments else len(self.segments_by_id)
        block = Block(address, nbytes // self.granule, number, arena, {stream: self.epochs[stream].open})
        self.segments_by_id[number] = Segment(address, nbytes, arena, block, container)
        self.index_add(block)
        return number

    def remove_segment(self, segment: int) -> tuple[tuple[int, int], ...]:
        """Take a wholly free segment out and return what must be waited for."""
        if segment not in self.segments_by_id or self.segments_by_id[segment].container or segment in self.spaces:
            raise ValueError("unknown segment")
        block = self.segments_by_id[segment].first
        if block.state != "free" or block.after is not None:
            raise ValueError("the segment is not wholly free")
        self.index_remove(block)
        self.reserved_bytes -= self.segments_by_id.pop(segment).nbytes
        self.free_segments.append(segment)
        return listed(self.undone(block.entries))

    # -- leases ----------------------------------------------------------------------------------------------------

    def open_lease(self, block: int) -> int:
        """Turn a live block into an arena of its own."""
        leased = self.need_live(block)
        arena = self.free_arenas.pop() if self.free_arenas else len(self.arenas)
        self.arenas[arena] = Arena()
        nbytes = leased.granules * self.granule
        self.arenas[arena].segment = self._add_range(leased.address, nbytes, arena, leased.home, leased)
        leased.state, leased.lease = "leased", arena
        return arena

    def close_lease(self, arena: int) -> int:
        """Give a lease's free parts back; its live blocks become the leased block's account's."""
        if arena < 2 or arena not in self.arenas:
            raise ValueError("unknown lease")
        segment = self.arenas[arena].segment
        inside = self.segments_by_id[segment]
        leased = inside.container
        assert leased is not None
        blocks = list(self.chain(inside.first))
        freed = [block for block in blocks if block.state == "free"]
        for block in freed:
            self.index_remove(block)
        self.ledger.credit(leased.account, leased.granules * self.granule, leased.requested)
        self.ledger.adopt(leased.account, -1)
        self.leases_closed += 1
        self.forget(leased)
        self._adopt(blocks, leased)
        del self.segments_by_id[segment], self.arenas[arena]
        self.free_segments.append(segment)
        self.free_arenas.append(arena)
        for block in freed:
            self.settle(block)
        return self.released_flags() if leased.arena < 2 else self.flags_inside(leased.account)

    def _adopt(self, blocks: list[Block], leased: Block) -> None:
        for block in blocks:
            block.segment, block.arena = leased.segment, leased.arena
            if block.state != "pending":
                self.ledger.credit(block.account, block.granules * self.granule, block.requested)
                self.ledger.charge(leased.account, block.granules * self.granule, block.requested)
                self.ledger.adopt(block.account, -1)
                self.ledger.adopt(leased.account, 1)
                block.account = leased.account
        blocks[0].before, blocks[-1].after = leased.before, leased.after
        if leased.after is not None:
            leased.after.before = blocks[-1]
        if leased.before is not None:
            leased.before.after = blocks[0]
        else:
            self.segments_by_id[leased.segment].first = blocks[0]

    # -- accounts --------------------------------------------------------------------------------------------------

    def add_account(self, parent: int = 0, limit: int | None = None) -> int:
        """Add an account below `parent`, or (-1) below none."""
        if parent != -1:
            _ = self.ledger[parent]
        return self.ledger.add(parent, limit)

    def remove_account(self, account: int) -> None:
        """Remove an account that nothing hangs on."""
        self.ledger.remove(account)

    def set_limit(self, account: int, limit: int | None) -> None:
        """Change an account's limit."""
        self.ledger[account].limit = limit

    def set_gate(self, account: int, closed: bool) -> None:
        """Close or open an account's gate."""
        self.ledger[account].gated = closed
        self.ledger.wanted = self.ledger.wanted if account else 0

    def leave_ajar(self, allowance: int, wanted: int) -> None:
        """Tell of frees only from `wanted` free bytes on. This heap has no doors that could pass."""
        del allowance
        if self.ledger[0].gated:
            self.ledger.wanted = wanted

    def close_up(self) -> int:
        """End that; nothing has passed."""
        self.ledger.wanted = 0
        return 0

    def set_marks(self, live_low: int = 0, live_high: int = 2**63 - 1) -> None:
        """Arm the watermarks."""
        self.live_low, self.live_high = live_low, live_high

    # -- live blocks -----------------------------------------------------------------------------------------------

    def set_home(self, block: int, stream: int) -> None:
        """Make another stream the home."""
        live = self.need_live(block)
        self.need_stream(stream)
        live.home, live.owed = stream, 0

    def info(self, block: int) -> BlockInfo:
        """Return what there is to know of a live or leased block."""
        if block not in self.held:
            raise ValueError("not a live block (freed already, or never taken)")
        return self._info(self.held[block])
