// Spaces: ranges of addresses below whose blocks memory is mapped and unmapped.
//
// A block that is served has memory behind all of it. What lies free without memory is a block of its own or, where blocks are
// found by addresses alone, part of a free one.
//
// What is to change is first lifted: out of the free index, so that no request takes it while the driver works without
// the lock. Then each step that the driver has made is told here, and at last all of it is let go, free again with the
// memory that it has by then. So whatever fails half way, the heap says what is so.
#include <algorithm>

#include "heap.hpp"

namespace asyncmem {

uint32_t Heap::add_space(uint64_t address, uint64_t nbytes, uint32_t arena, uint64_t page) {
    ASYNCMEM_ENTER(add_space, address, nbytes, arena, page);
    if (arena > 1 || arenas_[arena].space) refuse_argument("there is one space in each of arenas 0 and 1");
    if (!std::has_single_bit(page) || page < (uint64_t{1} << shift_))
        refuse_argument("a page must be a power of two of granules");
    if (!nbytes || nbytes > max_size || address + nbytes < address || ((address | nbytes) & (page - 1)))
        refuse_argument("a space's address and size must be whole pages");
    if (nbytes / page > UINT32_MAX) refuse_argument("a space has at most 2**32 - 1 pages");
    uint32_t id = add_range({.address = address, .nbytes = nbytes, .arena = arena,
                             .space = std::make_unique<Space>(address, page), .page = page, .used = true}, 0, 0);
    BlockId block = segments_[id].space->end = segments_[id].first;
    index_remove(nodes_[block]);
    nodes_[block].state = State::Bare;
    arenas_[arena].space = id + 1;
    placed_from(page);
    return id;
}

void Heap::place_from(uint64_t nbytes) {
    std::lock_guard lock(lock_);
    placed_from(nbytes);
}

// What lies free is parted where its memory ends, or joined again.
void Heap::go_around(bool around) {
    Coalesced coalesced(*this);
    if (around == std::exchange(around_, around)) return;
    for (uint32_t at : {0, 1}) {
        if (!arenas_[at].space) continue;
        Space& space = space_of(arenas_[at].space - 1);
        std::vector<BlockId> holed;
        for (auto& index : arenas_[at].by_key)
            if (index)
                index->each([&](BlockId block) {
                    if (nodes_[block].bare) holed.push_back(block);
                });
        std::ranges::sort(holed, {}, [this](BlockId block) { return nodes_[block].address; });
        std::vector<Range> ranges;
        for (BlockId block : holed) {
            ranges.push_back({nodes_[block].address, bytes(nodes_[block])});
            lift(space, block, ranges.back().address, ranges.back().nbytes);
        }
        for (const Range& range : ranges) release(space, range.address, range.nbytes);
        for (auto [_, block] : std::exchange(space.bare_blocks, {})) {
            nodes_[block].bare = static_cast<uint32_t>(bytes(nodes_[block]) / space.page());
            put(space, block, false);
        }
    }
}

void Heap::placed_from(uint64_t nbytes) {
    paged_from_ = std::min(paged_from_, nbytes >> shift_);
    auto forget = [this](auto& cache) {
        for (Bin& bin : cache.bins()) {
            if (bin.granules < paged_from_) continue;
            drain(cache, bin, UINT32_MAX);
            bin = Bin{};
        }
    };
    for (auto& stream : streams_) forget(stream->cache);
    forget(shared_);
}

void Heap::remove_space(uint32_t segment) {
    ASYNCMEM_WRITTEN(remove_space, segment);
    Coalesced coalesced(*this);
    Space& space = space_of(segment);
    if (segments_[segment].mapped || !space.held.empty()) refuse_argument("the space has memory mapped");
    for (BlockId block = segments_[segment].first, next; block; block = next) {
        next = nodes_[block].after;
        if (nodes_[block].state == State::Free) index_remove(nodes_[block]);
        entry_pool_.store(nodes_[block], {});
        nodes_.release(block);
    }
    arenas_[segments_[segment].arena].space = 0;
    drop_segment(segment);
    paged_from_ = UINT64_MAX;
    for (const Segment& one : segments_)
        if (one.space) paged_from_ = std::min(paged_from_, one.page >> shift_);
}

Space& Heap::space_of(uint32_t segment) const {
    if (segment >= segments_.size() || !segments_[segment].space) refuse_argument("unknown space");
    return *segments_[segment].space;
}

[[gnu::noinline]] void Heap::note_uses(const Node& node) {
    uint64_t freed = handles_.next();
    auto note = [&](const Entry& use) {
        segments_[node.segment].space->each(node.address, bytes(node), handles_, [&](HandleId id) {
            if (!handles_.note(id, freed, use)) [[unlikely]] handles_.set_uses(id, joined(uses(id), {use}));
        });
    };
    if (node.more) [[unlikely]] {
        std::ranges::for_each(entry_pool_[node.more], note);
    } else {
        note({node.stream, node.epoch});
    }
}

// Find the free blocks that may have a handle in them; they are known until others are cut or joined, but by lift().
void Heap::find_holes() const {
    for (uint32_t at : {0, 1}) {
        if (!arenas_[at].space) continue;
        uint32_t segment = arenas_[at].space - 1;
        std::vector<BlockId>& holes = space_of(segment).holes;
        holes.clear();
        auto look = [&](BlockId block) {
            if (nodes_[block].segment == segment) holes.push_back(block);
        };
        for (auto& index : arenas_[at].by_key)
            if (index) index->each(look, paged_from_);
        std::ranges::sort(holes, {}, [this](BlockId block) { return nodes_[block].address; });
    }
}

// The free block in which a handle lies as a whole, or 0, of those that find_holes() has found.
BlockId Heap::idle(const Handle& handle) const {
    const std::vector<BlockId>& holes = space_of(handle.segment).holes;
    auto above = std::ranges::upper_bound(holes, handle.address, {}, [this](BlockId block) { return nodes_[block].address; });
    if (above == holes.begin()) return 0;
    const Node& node = nodes_[*--above];
    return handle.address + handle.nbytes <= node.address + bytes(node) ? *above : 0;
}

// The handles that lie as a whole in one of them.
std::vector<HandleId> Heap::idle_handles() const {
    std::vector<HandleId> found;
    for (uint32_t at : {0, 1}) {
        if (!arenas_[at].space) continue;
        const Space& space = space_of(arenas_[at].space - 1);
        for (BlockId block : space.holes) {
            uint64_t from = nodes_[block].address, to = from + bytes(nodes_[block]);
            auto inside = [&](HandleId id) {
                const Handle& handle = handles_[id];
                if (from <= handle.address && handle.address + handle.nbytes <= to) found.push_back(id);
            };
            space.each(from, to - from, handles_, inside);
        }
    }
    return found;
}

// Take a part of a free or bare block out of where it is kept, as blocks that are held: one for each stretch with memory, or
// without.
void Heap::lift(Space& space, BlockId block, uint64_t address, uint64_t nbytes) {
    bool bare = nodes_[block].state == State::Bare;
    auto keep = [&](BlockId part) {
        if (bare) space.bare_blocks[nodes_[part].address] = part;
        else index_add(part);
    };
    auto hole = std::ranges::find(space.holes, block);
    if (bare) space.bare_blocks.erase(nodes_[block].address);
    else index_remove(nodes_[block]);
    uint64_t front = address - nodes_[block].address;
    bool last = block == space.end;
    if (front) {
        BlockId rest = cut(block, front >> shift_);
        keep(block);
        block = rest;
    }
    BlockId tail = bytes(nodes_[block]) > nbytes ? cut(block, nbytes >> shift_) : 0;
    if (last) space.end = tail;
    else if (tail) keep(tail);
    if (hole != space.holes.end()) {  // what is left of it takes its place
        if (!front) hole = space.holes.erase(hole);
        if (tail) space.holes.insert(hole + (front != 0), tail);
    }
    space.stretches(address, nbytes, [&](uint64_t at, uint64_t size, bool filled) {
        BlockId rest = at + size < address + nbytes ? cut(block, size >> shift_) : 0;
        Node& node = nodes_[block];
        node.state = filled ? State::Lifted : State::Filling;
        node.bare = 0;
        if (filled) lifted_ += bytes(node);
        space.held[node.address] = block;
        block = rest;
    });
}

// The held block in this state that has all of a range.
BlockId Heap::held_around(const Space& space, uint64_t address, uint64_t nbytes, State state) const {
    auto found = space.held.upper_bound(address);
    if (found == space.held.begin()) refuse_argument("nothing is held there");
    BlockId block = (--found)->second;
    const Node& node = nodes_[block];
    uint64_t front = address - node.address;
    if (node.state != state || !nbytes || front >= bytes(node) || nbytes > bytes(node) - front ||
        ((address | nbytes) & (space.page() - 1)))
        refuse_argument("the range is not held, or not in this state");
    return block;
}

// The held block that is exactly this range, cut out of a larger one.
BlockId Heap::held_part(Space& space, uint64_t address, uint64_t nbytes, State state) {
    BlockId block = held_around(space, address, nbytes, state);
    uint64_t front = address - nodes_[block].address;
    if (front) space.held[address] = block = cut(block, front >> shift_);
    if (bytes(nodes_[block]) > nbytes) space.held[address + nbytes] = cut(block, nbytes >> shift_);
    return block;
}

void Heap::set_mapped(uint32_t segment, uint64_t address, uint64_t nbytes) {
    std::lock_guard lock(lock_);
    Space& space = space_of(segment);
    nodes_[held_part(space, address, nbytes, State::Filling)].state = State::Lifted;
    HandleId id = handles_.add(segment, address, nbytes);
    space.set_handle(handles_[id], id);
    segments_[segment].mapped += nbytes;
    lifted_ += nbytes;
    reserved_ += nbytes;
    note_reserved();
}

void Heap::set_bare(uint32_t segment, uint64_t address, uint64_t nbytes) {
    Coalesced coalesced(*this);
    Space& space = space_of(segment);
    HandleId id = space.handle(address);
    const Handle& handle = handles_[id];
    if (!id || handle.address != address || handle.nbytes != nbytes) refuse_argument("a handle is unmapped as a whole");
    if (!uses(id).empty()) refuse_argument("the handle is still in use");
    nodes_[held_part(space, address, nbytes, State::Lifted)].state = State::Filling;
    space.set_handle(handle, 0);
    handles_.remove(id);
    segments_[segment].mapped -= nbytes;
    lifted_ -= nbytes;
    reserved_ -= nbytes;
}

// A handle is mapped at another address as well, which has all that it owes. The old one is held until it is let go, for the
// device may still work there.
void Heap::set_moved(const Move& move, uint32_t segment) {
    Coalesced coalesced(*this);
    Space &from = space_of(move.segment), &to = space_of(segment);
    HandleId id = from.handle(move.address);
    if (!id || handles_[id].address != move.address || handles_[id].nbytes != move.nbytes)
        refuse_argument("a handle is moved as a whole");
    held_around(to, move.to, move.nbytes, State::Filling);  // refused before anything is changed
    BlockId left = held_part(from, move.address, move.nbytes, State::Lifted);
    Node& node = nodes_[held_part(to, move.to, move.nbytes, State::Filling)];
    nodes_[left].state = State::Filling;
    node.state = State::Lifted;
    if (Entries owed = uses(id); !owed.empty()) entry_pool_.store(node, joined(undone(entry_pool_.all(node)), owed));
    from.set_handle(handles_[id], 0);
    handles_.move(id, segment, move.to);
    to.set_handle(handles_[id], id);
    segments_[move.segment].mapped -= move.nbytes;
    segments_[segment].mapped += move.nbytes;
}

void Heap::let_go(uint32_t segment, uint64_t address, uint64_t nbytes) {
    Coalesced coalesced(*this);
    Space& space = space_of(segment);
    auto found = space.held.find(address);
    BlockId first = found == space.held.end() ? 0 : found->second;
    uint64_t end = address;
    for (BlockId block = first; block && end < address + nbytes; block = nodes_[block].after) {
        if (nodes_[block].state != State::Lifted && nodes_[block].state != State::Filling) break;
        end += bytes(nodes_[block]);
    }
    if (!nbytes || end != address + nbytes) refuse_argument("the range is not held");
    accounts_.close_up();  // what has come is for waiting requests
    release(space, address, nbytes);
    space.each(address, nbytes, handles_, [this](HandleId id) { handles_.note(id, handles_.next(), {}); });
}

// Have a range that is held free again, what belongs together as one block.
void Heap::release(Space& space, uint64_t address, uint64_t nbytes) {
    BlockId whole = 0;
    bool filled = false;
    for (BlockId block = space.held.at(address), next; block; block = next) {
        Node& node = nodes_[block];
        next = node.address + bytes(node) < address + nbytes ? node.after : 0;
        space.held.erase(node.address);
        bool has = node.state == State::Lifted;
        if (has) lifted_ -= bytes(node);
        node.bare = has ? 0 : static_cast<uint32_t>(bytes(node) / space.page());
        if (whole && !(around_ && has != filled) && belong(nodes_[whole], node)) {
            unite(whole, block);
            continue;
        }
        if (whole) put(space, whole, filled);
        whole = block;
        filled = has;
    }
    put(space, whole, filled);
}

// Have a block free that is in no list, and joined with the neighbours that it belongs to. Where takes go around holes, it has
// memory behind all of it, or none.
void Heap::put(Space& space, BlockId block, bool filled) {
    Node& node = nodes_[block];
    if (filled || !around_) {
        node.state = State::Pending;
        index_add(reunite(block));
        return;
    }
    node.state = State::Bare;
    node.bare = 0;
    entry_pool_.store(node, {});
    if (BlockId before = node.before; before && nodes_[before].state == State::Bare) {
        unite(before, block);
        block = before;
    }
    BlockId after = nodes_[block].after;
    if (after && nodes_[after].state == State::Bare) {
        space.bare_blocks.erase(nodes_[after].address);
        unite(block, after);
    }
    if (nodes_[block].after) {
        space.bare_blocks[nodes_[block].address] = block;
    } else {
        space.bare_blocks.erase(nodes_[block].address);
        space.end = block;
    }
}

// Whether neighbours are parts of one block: they wait for the same, and not merely for nothing any more. Free blocks that
// lie apart because of what they waited for once stay so, as if nothing had been lifted.
bool Heap::belong(const Node& a, const Node& b) const {
    return !key_of(a) || !key_of(b) || alike(a, b);
}

bool Heap::alike(const Node& a, const Node& b) const {
    if (a.more || b.more) return a.more && b.more && entry_pool_[a.more] == entry_pool_[b.more];
    return key_of(a) == key_of(b);
}

// Join a block that was held with the free neighbours that it belongs to, and return what became of it. Where takes go around
// holes, what came for a request joins nothing that this one may not have.
BlockId Heap::reunite(BlockId block) {
    auto joins = [this](const Node& a, const Node& b) { return around_ ? alike(a, b) : belong(a, b); };
    BlockId before = nodes_[block].before;
    if (before && nodes_[before].state == State::Free && joins(nodes_[before], nodes_[block])) {
        index_remove(nodes_[before]);
        unite(before, block);
        block = before;
    }
    BlockId after = nodes_[block].after;
    if (after && nodes_[after].state == State::Free && joins(nodes_[block], nodes_[after])) {
        index_remove(nodes_[after]);
        unite(block, after);
    }
    return block;
}

std::vector<Piece> Heap::handles() const {
    Coalesced coalesced(*this);
    std::vector<Piece> all;
    for (HandleId id = 1; id < handles_.all().size(); ++id)
        if (const Handle& handle = handles_[id]; handle.nbytes)
            all.push_back({handle.segment, handle.address, handle.nbytes, uses(id)});
    return all;
}

Piece Heap::idle_memory() const {
    Coalesced coalesced(*this);
    Piece all;
    find_holes();
    for (HandleId id : idle_handles()) {
        all.nbytes += handles_[id].nbytes;
        for (const Entry& use : uses(id)) include(all.uses, use);
    }
    return all;
}

std::vector<uint32_t> Heap::unfenced() const {
    std::lock_guard lock(lock_);
    Entries latest;
    handles_.each_use([&](const Entry& use) { include(latest, use); });
    std::vector<uint32_t> found;
    for (const Entry& use : latest)
        if (!streams_[use.stream]->epochs.covers(use.epoch)) found.push_back(use.stream);
    return found;
}

uint64_t Heap::spread() const {
    std::lock_guard lock(lock_);
    uint64_t total = 0;
    for (const Segment& segment : segments_) {
        if (!segment.used || segment.container) continue;
        BlockId end = segment.space ? segment.space->end : 0;
        total += segment.nbytes - (end ? bytes(nodes_[end]) : 0);
    }
    return total;
}

// Every block that is in use lies on memory, a free one tells of its holes, and pages, handles and bytes agree.
std::string Heap::check_space(uint32_t id) const {
    const Segment& segment = segments_[id];
    const Space& space = space_of(id);
    uint64_t mapped = 0, held = 0, empty_blocks = 0;
    for (BlockId block = segment.first; block; block = nodes_[block].after) {
        const Node& node = nodes_[block];
        uint64_t bare = bare_pages(node, bytes(node)) * space.page();
        bool empty = node.state == State::Bare || node.state == State::Filling;
        if (bare != (empty ? bytes(node) : node.state == State::Free ? bare_bytes(node) : 0))
            return "a block's memory is not what it says";
        mapped += bytes(node) - bare;
        if (block == space.end && node.after) return "unused addresses that are not the end";
        if (around_ && node.state == State::Free && node.bare) return "a free block with a hole";
        if (node.state == State::Bare && block != space.end) {
            auto found = space.bare_blocks.find(node.address);
            if (found == space.bare_blocks.end() || found->second != block) return "bare block that its space does not know";
            ++empty_blocks;
        }
        if (node.state != State::Lifted && node.state != State::Filling) continue;
        auto found = space.held.find(node.address);
        if (found == space.held.end() || found->second != block) return "held block that its space does not know";
        ++held;
    }
    if (mapped != segment.mapped) return "a space's mapped bytes differ from its blocks";
    if (held != space.held.size() || empty_blocks != space.bare_blocks.size()) return "a space knows blocks that are not there";
    uint64_t total = 0;
    for (const Handle& handle : handles_.all())
        if (handle.segment == id) total += handle.nbytes;
    return total == mapped ? "" : "a space's handles differ from what is mapped";
}

}  // namespace asyncmem
