"""Spaces: ranges of addresses below whose blocks memory is mapped and unmapped."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncmem.core.report import Move, Piece
from tests.reference.blocks import Block, Entries, Segment, joined, listed
from tests.reference.place import Search
from tests.reference.takes import MAX_SIZE, Takes


@dataclass(slots=True, eq=False)
class Handle:
    """Physical memory that is mapped and unmapped as a whole."""

    number: int
    segment: int
    address: int
    nbytes: int
    uses: Entries = field(default_factory=dict)
    freed: int = 0
    """When a block on it was noted last, or it was let go, by a count of both."""


@dataclass(slots=True, eq=False)
class Space:
    """What a segment has beside its blocks if its memory comes and goes."""

    page: int
    handles: dict[int, Handle] = field(default_factory=dict)
    """By the address of each page that has memory."""
    use: tuple[int, int] = (0, 0)
    """The latest use by one stream alone."""
    noted: set[int] = field(default_factory=set)
    """The pages at whose handles it is noted."""

    def put(self, address: int, nbytes: int, handle: Handle | None) -> None:
        """Have a handle behind a range, or none; nothing is noted there."""
        for page in self.pages(address, nbytes):
            self.noted.discard(page)
            if handle is None:
                del self.handles[page]
            else:
                self.handles[page] = handle

    def note(self, address: int, nbytes: int, use: tuple[int, int]) -> bool:
        """Note a use at all pages of a range, and return whether it was noted there before."""
        if use != self.use:
            self.use = use
            self.noted.clear()
        pages = set(self.pages(address, nbytes))
        before = pages <= self.noted
        self.noted |= pages
        return before

    def up(self, address: int) -> int:
        """Return the border of pages at or above an address."""
        return -(-address // self.page) * self.page

    def pages(self, address: int, nbytes: int) -> range:
        """Return the address of each page that has a byte in a range."""
        return range(address // self.page * self.page, address + nbytes, self.page)

    def lacks(self, address: int, nbytes: int) -> int:
        """Return the bytes of pages without memory of a range."""
        return sum(self.page for at in self.pages(address, nbytes) if at not in self.handles)

    def behind(self, address: int, nbytes: int) -> list[Handle]:
        """Return each handle that has a byte in a range, in the order of addresses."""
        return list(dict.fromkeys(self.handles[at] for at in self.pages(address, nbytes) if at in self.handles))


class Spaces(Takes):
    """Which pages have memory, what that memory waits for, and its way to and from the driver."""

    def __init__(self, granule: int) -> None:
        super().__init__(granule)
        self.free_segments: list[int] = []
        self.spaces: dict[int, Space] = {}
        self.all_handles: dict[int, Handle] = {}
        self.handle_numbers: list[int] = []
        self.freed = 0
        """How many blocks were noted, and handles let go."""
        self.stamped: dict[int, int] = {}
        """The latest epoch of each stream that was noted as a use of a handle."""

    # -- spaces ----------------------------------------------------------------------------------------------------

    def add_space(self, address: int, nbytes: int, arena: int, page: int) -> int:
        """Add a range of addresses without memory and return its segment."""
        if arena not in {0, 1} or any(self.segments_by_id[number].arena == arena for number in self.spaces):
            raise ValueError("there is one space in each of arenas 0 and 1")
        if page.bit_count() != 1 or page < self.granule or not 0 < nbytes <= MAX_SIZE or (address | nbytes) % page:
            raise ValueError("a space has whole pages, and a page whole granules")
        number = self.free_segments.pop() if self.free_segments else len(self.segments_by_id)
        block = Block(address, nbytes // self.granule, number, arena, state="bare")
        self.segments_by_id[number] = Segment(address, nbytes, arena, block)
        self.spaces[number] = Space(page)
        self.forget_pages()
        return number

    def forget_pages(self) -> None:
        """Empty the caches of sizes that are not cached any more."""
        for cache in (*self.caches, self.shared):
            for slot in cache.bins:
                if not self.cacheable(slot.granules):
                    self.drain(cache, slot)
                    slot.begin(0, 0, 0)

    def remove_space(self, segment: int) -> None:
        """Take a space out that has no memory mapped."""
        space = self.space_of(segment)
        blocks = list(self.chain(self.segments_by_id[segment].first))
        if space.handles or any(block.state in {"lifted", "filling"} for block in blocks):
            raise ValueError("the space has memory mapped")
        for block in blocks:
            if block.state == "free":
                self.index_remove(block)
        del self.spaces[segment], self.segments_by_id[segment]
        self.free_segments.append(segment)

    def space_of(self, segment: int) -> Space:
        """Refuse anything but a space."""
        if segment not in self.spaces:
            raise ValueError("unknown space")
        return self.spaces[segment]

    @staticmethod
    def chain(first: Block) -> Iterator[Block]:
        """Go through a segment's blocks in address order."""
        block: Block | None = first
        while block is not None:
            yield block
            block = block.after

    # -- what the rest of the heap has to do with it -----------------------------------------------------------------

    def mapped(self, block: Block) -> int:
        """Return how many of a block's bytes have memory behind them."""
        nbytes = block.granules * self.granule
        if block.segment not in self.spaces:
            return nbytes
        space = self.spaces[block.segment]
        bare = [at for at in space.pages(block.address, nbytes) if at not in space.handles]
        return nbytes - len(bare) * space.page

    def cacheable(self, granules: int) -> bool:
        """Return whether blocks of a size are cached: from a page on, they would keep its memory from being moved."""
        return all(granules * self.granule < space.page for space in self.spaces.values())

    def serves(self, block: Block, search: Search) -> bool:
        """Return whether there is memory behind all of what is asked for."""
        if block.segment not in self.spaces:
            return True
        space = self.spaces[block.segment]
        search.bare = any(at not in space.handles for at in space.pages(block.address, search.granules * self.granule))
        return not search.bare

    def settle(self, block: Block) -> None:
        """Note what a freed block still waits for at each handle that it lay on."""
        if block.segment in self.spaces:
            self.note(block, self.undone(block.entries))
        super().settle(block)

    def note(self, block: Block, entries: Entries) -> None:
        """Note uses at each handle that a block lay on, unless they are noted there already."""
        nbytes = block.granules * self.granule
        if len(entries) == 1 and self.spaces[block.segment].note(block.address, nbytes, *entries.items()):
            return
        for stream, epoch in entries.items():
            self.stamped[stream] = max(self.stamped.get(stream, 0), epoch)
        self.freed += 1
        for handle in self.behind(block):
            self.stamp(handle, entries)
            self.make_newest(handle)

    def stamp(self, handle: Handle, entries: Entries) -> None:
        """Note the uses of a block that lay on a handle."""
        handle.uses = joined(handle.uses, entries)

    def make_newest(self, handle: Handle) -> None:
        """Have other handles be taken before it."""
        handle.freed = self.freed

    def behind(self, block: Block) -> list[Handle]:
        """Return each handle on which a block of a space lies."""
        return self.spaces[block.segment].behind(block.address, block.granules * self.granule)

    def idle(self, handle: Handle) -> Block | None:
        """Return the one free block in which a handle lies as a whole."""
        for block in self.chain(self.segments_by_id[handle.segment].first):
            end = block.address + block.granules * self.granule
            if block.state == "free" and block.address <= handle.address and handle.address + handle.nbytes <= end:
                return block
        return None

    # -- lifting ---------------------------------------------------------------------------------------------------

    def cut(self, block: Block, granules: int) -> Block:
        """Cut a block that is in no list and return the upper part, which waits for the same."""
        address = block.address + granules * self.granule
        rest = Block(address, block.granules - granules, block.segment, block.arena, dict(block.entries), block.state)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.granules = rest, granules
        return rest

    def split_at(self, block: Block, address: int) -> Block:
        """Cut a block in front of an address, if that lies within, and return the part that starts there."""
        return block if address == block.address else self.cut(block, (address - block.address) // self.granule)

    def lift(self, block: Block, address: int, nbytes: int) -> None:
        """Hold a part of a free or bare block: one block for each stretch with memory, or without."""
        free = block.state == "free"
        if free:
            self.index_remove(block)
        space, end = self.spaces[block.segment], address + nbytes
        part = self.split_at(block, address)
        if part is not block and free:
            self.index_add(block)
        if part.address + part.granules * self.granule > end:
            rest = self.split_at(part, end)
            self.index_add(rest) if free else None
        pages = space.pages(address, nbytes)
        for page, next_page in zip(pages, [*pages[1:], None], strict=True):
            part.state = "lifted" if page in space.handles else "filling"
            if next_page is not None and (page in space.handles) != (next_page in space.handles):
                part = self.split_at(part, next_page)

    def held_around(self, segment: int, address: int, nbytes: int, state: str) -> Block:
        """Return the held block in a state that has all of a range."""
        page = self.space_of(segment).page
        for block in self.chain(self.segments_by_id[segment].first):
            end = block.address + block.granules * self.granule
            if block.state == state and block.address <= address < address + nbytes <= end:
                if address % page or nbytes % page:
                    break
                return block
        raise ValueError("the range is not held, or not in this state")

    def held_part(self, segment: int, address: int, nbytes: int, state: str) -> Block:
        """Return the held block that is exactly a range, cut out of a larger one."""
        part = self.split_at(self.held_around(segment, address, nbytes, state), address)
        self.split_at(part, address + nbytes) if nbytes < part.granules * self.granule else None
        return part

    def set_mapped(self, segment: int, address: int, nbytes: int) -> None:
        """Note that a handle has been mapped in a lifted range."""
        self.held_part(segment, address, nbytes, "filling").state = "lifted"
        number = self.handle_numbers.pop() if self.handle_numbers else len(self.all_handles)
        handle = self.all_handles[number] = Handle(number, segment, address, nbytes)
        self.spaces[segment].put(address, nbytes, handle)
        self.reserved_bytes += nbytes
        self.note_reserved()

    def set_bare(self, segment: int, address: int, nbytes: int) -> None:
        """Note that a lifted handle has been unmapped; all uses of it were done."""
        space = self.space_of(segment)
        handle = space.handles.get(address)
        if handle is None or (handle.address, handle.nbytes) != (address, nbytes):
            raise ValueError("a handle is unmapped as a whole")
        if self.undone(handle.uses):
            raise ValueError("the handle is still in use")
        self.held_part(segment, address, nbytes, "lifted").state = "filling"
        space.put(address, nbytes, None)
        del self.all_handles[handle.number]
        self.handle_numbers.append(handle.number)
        self.reserved_bytes -= nbytes

    def set_moved(self, move: Move, segment: int) -> None:
        """Note that a lifted handle is mapped at another address as well; the old one is held until it is let go."""
        space, target = self.space_of(move.segment), self.space_of(segment)
        handle = space.handles.get(move.address)
        if handle is None or (handle.address, handle.nbytes) != (move.address, move.nbytes):
            raise ValueError("a handle is moved as a whole")
        self.held_around(segment, move.to, move.nbytes, "filling")
        self.held_part(move.segment, move.address, move.nbytes, "lifted").state = "filling"
        block = self.held_part(segment, move.to, move.nbytes, "filling")
        block.state = "lifted"
        self.bring_uses(block, handle)
        space.put(move.address, move.nbytes, None)
        handle.segment, handle.address = segment, move.to
        target.put(move.to, move.nbytes, handle)

    def bring_uses(self, block: Block, handle: Handle) -> None:
        """Let a block wait for what the memory that came to it waits for."""
        if uses := self.undone(handle.uses):
            block.entries = joined(self.undone(block.entries), uses)

    def let_go(self, segment: int, address: int, nbytes: int) -> None:
        """End the lifting of a range: it is free, with the memory that it has now."""
        space, end = self.space_of(segment), address + nbytes
        inside = [b for b in self.chain(self.segments_by_id[segment].first) if address <= b.address < end]
        held = [b for b in inside if b.state in {"lifted", "filling"}]
        whole = held and held[0].address == address and held[-1].address + held[-1].granules * self.granule == end
        if not whole or held != inside:
            raise ValueError("the range is not held")
        self.ledger.wanted = 0  # what has come is for whoever waits
        self.release(held)
        for handle in space.behind(address, nbytes):
            self.freed += 1
            self.make_newest(handle)

    def go_around(self, around: bool) -> None:
        """Part what lies free where its memory ends, or join it again."""
        if around == self.around:
            return
        self.around = around
        for segment in sorted(self.spaces, key=lambda number: self.segments_by_id[number].arena):
            blocks = list(self.chain(self.segments_by_id[segment].first))
            if around:
                self.part(segment, [block for block in blocks if block.state == "free"])
                continue
            for block in blocks:
                if block.state == "bare" and block.after is not None:
                    self.put(block, filled=False)

    def part(self, segment: int, free: list[Block]) -> None:
        """Cut free blocks where their memory begins and ends."""
        sizes = {block.address: block.granules * self.granule for block in free}
        holed = [block for block in free if self.mapped(block) < sizes[block.address]]
        ranges = [(block.address, block.address + sizes[block.address]) for block in holed]
        for block in holed:
            self.lift(block, block.address, sizes[block.address])
        for start, end in ranges:
            self.release([b for b in self.chain(self.segments_by_id[segment].first) if start <= b.address < end])

    def release(self, held: list[Block]) -> None:
        """Have blocks that were held side by side free again, what belongs together as one."""
        whole, filled = held[0], held[0].state == "lifted"
        for block in held[1:]:
            apart = self.around and filled != (block.state == "lifted")
            if not apart and self.belong(whole, block):
                self.unite(whole, block)
                continue
            self.put(whole, filled=filled)
            whole, filled = block, block.state == "lifted"
        self.put(whole, filled=filled)

    def put(self, block: Block, *, filled: bool) -> None:
        """Have a block free, joined with the neighbours that it belongs to, or bare where takes go around holes."""
        if filled or not self.around:
            self.index_add(self.reunite(block))
            return
        block.state, block.entries = "bare", {}
        before, after = block.before, block.after
        if before is not None and before.state == "bare":
            self.unite(before, block)
            block = before
        if after is not None and after.state == "bare":
            self.unite(block, after)

    def reunite(self, block: Block) -> Block:
        """Join a block that was held with the free neighbours that it belongs to, all as it was."""
        joins = self.alike if self.around else self.belong
        before = block.before
        if before is not None and before.state == "free" and joins(before, block):
            self.index_remove(before)
            self.unite(before, block)
            block = before
        after = block.after
        if after is not None and after.state == "free" and joins(block, after):
            self.index_remove(after)
            self.unite(block, after)
        return block

    @classmethod
    def belong(cls, a: Block, b: Block) -> bool:
        """Return whether neighbours are parts of one block: they wait for the same, not just for nothing any more."""
        return not a.entries or not b.entries or cls.alike(a, b)

    @staticmethod
    def alike(a: Block, b: Block) -> bool:
        """Return whether they wait for the same."""
        return a.entries == b.entries or (len(a.entries) == 1 and a.entries.keys() == b.entries.keys())

    def idle_memory(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Return the bytes of idle handles, and their uses that are not done."""
        found = [handle for handle in self.all_handles.values() if self.idle(handle) is not None]
        uses: Entries = {}
        for handle in found:
            uses = joined(uses, self.undone(handle.uses))
        return sum(handle.nbytes for handle in found), listed(uses)

    def unfenced(self) -> list[int]:
        """Return the streams whose uses of handles no recorded fence covers yet."""
        known = self.epochs
        return [s for s in range(len(known)) if self.stamped.get(s, 0) > max(known[s].done, known[s].recorded)]

    def spread(self) -> int:
        """Return the bytes of addresses up to those at the end that have no memory."""
        used = [
            block
            for segment in self.segments_by_id.values()
            if segment.container is None
            for block in self.chain(segment.first)
        ]
        return sum(block.granules * self.granule for block in used if block.state != "bare" or block.after)

    def handles(self) -> list[Piece]:
        """Return every handle that is mapped."""
        return [
            Piece(handle.segment, handle.address, handle.nbytes, listed(self.undone(handle.uses)))
            for _, handle in sorted(self.all_handles.items())
        ]
