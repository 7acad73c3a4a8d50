// Placement: finding the free block that serves a request, cutting it, and joining what comes back.
#include "heap.hpp"

#include <algorithm>
#include <utility>

namespace asyncmem {

namespace {
constexpr uint32_t cascade = 16;  // joins that one free may cause
}

// What a free block waits for.

uint32_t Heap::key_of(const Node& node) { return node.more ? 1 : node.epoch ? 2 + node.stream : 0; }

Entries Heap::raw_entries(const Node& node) const {
    if (node.more) return entry_pool_[node.more];
    return node.epoch ? Entries{{node.stream, node.epoch}} : Entries{};
}

Entries Heap::undone(Entries entries) const {
    std::erase_if(entries, [this](const Entry& entry) { return is_done(entry); });
    return entries;
}

void Heap::store_entries(Node& node, Entries entries) {
    if (node.more) entry_pool_.release(node.more);
    node.more = 0;
    node.epoch = 0;
    if (entries.size() == 1) {
        node.stream = entries[0].stream;
        node.epoch = entries[0].epoch;
    } else if (!entries.empty()) {
        node.more = entry_pool_.add(std::move(entries));
    }
}

void Heap::purge(Node& node) {
    if (node.more) [[unlikely]] {
        store_entries(node, undone(raw_entries(node)));
    } else if (node.epoch <= streams_[node.stream]->epochs.done) {
        node.epoch = 0;
    }
}

// Turn a block's entries into the taker's: keep in `epoch` what the taker itself still owes, answer the rest.
Entries Heap::resolve(Node& node, uint32_t stream) {
    uint64_t own = 0;
    Entries owed;
    auto look = [&](const Entry& entry) {
        if (entry.stream == stream) {
            own = entry.epoch;
        } else if (entry.epoch > streams_[entry.stream]->epochs.done) {
            owed.push_back(entry);
        }
    };
    if (node.more) {
        for (const Entry& entry : entry_pool_[node.more]) look(entry);
        store_entries(node, {});
    } else if (node.epoch) {
        look({node.stream, node.epoch});
    }
    node.stream = stream;
    node.epoch = own;
    return owed;
}

// The same where nothing is owed to others.
inline void Heap::adopt(Node& node, uint32_t stream) {
    if (node.more) [[unlikely]] {
        resolve(node, stream);
        return;
    }
    if (node.stream != stream) node.epoch = 0;
    node.stream = stream;
}

bool Heap::eligible(const Node& node, uint32_t stream, Bound bound) const {
    auto passes = [&](uint32_t s, uint64_t epoch) {
        if (s == stream || bound == Bound::Any) return true;
        const Epochs& epochs = streams_[s]->epochs;
        return epoch <= (bound == Bound::Done ? epochs.done : std::max(epochs.done, epochs.recorded));
    };
    if (!node.more) return node.epoch == 0 || passes(node.stream, node.epoch);
    for (const Entry& entry : entry_pool_[node.more])
        if (!passes(entry.stream, entry.epoch)) return false;
    return true;
}

// The free index of an arena.

inline FreeIndex& Heap::index_of(const Node& node) {
    auto& by_key = arenas_[node.arena].by_key;
    uint32_t key = key_of(node);
    if (key >= by_key.size() || !by_key[key]) [[unlikely]] add_index(by_key, key);
    return *by_key[key];
}

void Heap::add_index(std::vector<std::unique_ptr<FreeIndex>>& by_key, uint32_t key) {
    if (key >= by_key.size()) by_key.resize(key + 1);
    by_key[key] = std::make_unique<FreeIndex>();
}

inline void Heap::index_insert(BlockId block) {
    Node& node = nodes_[block];
    index_of(node).add(nodes_, block);
    node.state = State::Free;
    if (node.granules >= paged_from_) [[unlikely]] file_hole(block, true);
}

void Heap::index_add(BlockId block) {
    index_insert(block);
    arenas_[nodes_[block].arena].free += mapped(nodes_[block]);
}

void Heap::index_remove(BlockId block) {
    Node& node = nodes_[block];
    if (node.granules >= paged_from_) [[unlikely]] file_hole(block, false);
    index_of(node).remove(nodes_, block);
    node.state = State::Pending;
    arenas_[node.arena].free -= mapped(node);
}

// Searching.

// Whether a block serves a request better than another that fits as well: it is smaller, or as large and lower.
inline bool Heap::better(const Node& a, const Node& b) {
    return a.granules != b.granules ? a.granules < b.granules : a.address < b.address;
}

// The best of the newest `window` candidates: the smallest that fits, then the lowest address.
BlockId Heap::best_of(const CandidateList& list, uint32_t cls, bool all, Search& search) const {
    const Candidate* best = nullptr;
    bool fits = cls > class_of(search.granules);
    uint32_t low = static_cast<uint32_t>(search.granules);
    size_t end = list.size() > search.window ? list.size() - search.window : 0;
    for (size_t i = list.size(); i-- > end;) {
        const Candidate& c = list[i];
        ++search.touched;
        if (!fits && c.low < low) continue;
        if (best && (c.low > best->low || (c.low == best->low && c.address > best->address))) continue;
        if (!all && !eligible(nodes_[c.node], search.stream, search.bound)) continue;
        best = &c;
        if (!tuning_.best_fit) break;
    }
    return best ? best->node : 0;
}

// Search one index from the class of the size up to the last one, for at most two windows of candidates.
BlockId Heap::find(FreeIndex& index, bool all, Search& search, uint32_t last) const {
    uint32_t most = search.touched + 2 * search.window;
    uint32_t cls = index.next(class_of(search.granules));
    while (cls != FreeIndex::none && cls <= last && search.touched < most) {
        if (BlockId block = best_of(index.at(cls), cls, all, search)) return block;
        cls = index.next(cls + 1);
    }
    return 0;
}

// The best of its own blocks and of clean ones, then those of other streams in their order, then those of several streams.
BlockId Heap::place(uint32_t arena, Search& search) {
    auto& by_key = arenas_[arena].by_key;
    auto look = [&](size_t key, bool all, uint32_t last = FreeIndex::none) -> BlockId {
        if (key >= by_key.size() || !by_key[key] || !by_key[key]->count()) return 0;
        return find(*by_key[key], all, search, last);
    };
    BlockId own = look(2 + search.stream, true);
    BlockId clean = look(0, true, own ? class_of(nodes_[own].granules) : FreeIndex::none);
    if (own && clean) return better(nodes_[own], nodes_[clean]) ? own : clean;
    if (own || clean) return own ? own : clean;
    for (size_t key = 2; key < by_key.size(); ++key) {
        if (key == 2 + size_t{search.stream}) continue;
        if (BlockId block = look(key, false)) return block;
    }
    return look(1, false);
}

BlockId Heap::place(const Ask& ask, Search& search) {
    uint32_t arena = ask.arena >= 0 ? static_cast<uint32_t>(ask.arena) : natural_arena(search.granules << shift_);
    if (arenas_[arena].edge.rest) {
        if (BlockId block = take_edge(arenas_[arena], search)) return block;
    }
    BlockId block = place(arena, search);
    if (!block && ask.anywhere && arena < 2) {
        close_edge(arenas_[1 - arena]);
        block = place(1 - arena, search);
    }
    if (!block) return 0;
    search.bare = nodes_[block].bare && bare_pages(nodes_[block], search.granules << shift_);
    if (search.bare) return 0;
    index_remove(block);
    carve(block, search.granules);
    if (search.bound == Bound::Done) adopt(nodes_[block], search.stream);
    return block;
}

// Cut just these bytes out of the free blocks of a lease that they lie in; 0 where not all of them are free and eligible.
BlockId Heap::place_at(const Segment& range, uint64_t address, Search& search) {
    uint64_t end = address + (search.granules << shift_);
    BlockId first = range.first;
    for (; nodes_[first].address + bytes(nodes_[first]) <= address; first = nodes_[first].after) ++search.touched;
    for (BlockId block = first; block && nodes_[block].address < end; block = nodes_[block].after) {
        ++search.touched;
        if (nodes_[block].state != State::Free || !eligible(nodes_[block], search.stream, search.bound)) return 0;
    }
    index_remove(first);
    if (uint64_t before = address - nodes_[first].address) {
        BlockId rest = cut(first, before >> shift_);
        index_add(first);
        first = rest;
        ++total_.splits;
    }
    while (nodes_[first].granules < search.granules) {
        BlockId next = nodes_[first].after;
        index_remove(next);
        carve(next, std::min(nodes_[next].granules, search.granules - nodes_[first].granules));
        absorb(first, next);
    }
    carve(first, search.granules);
    return first;
}

// Cutting and joining.

// Cut a block in two and answer the upper part, of the same state and entries. Neither is in any list.
BlockId Heap::cut(BlockId block, uint64_t granules) {
    BlockId rest = nodes_.acquire();
    Node& node = nodes_[block];
    Node& tail = nodes_[rest];
    tail = node;
    if (node.more) tail.more = entry_pool_.add(Entries(entry_pool_[node.more]));
    tail.address = node.address + (granules << shift_);
    tail.granules = node.granules - granules;
    tail.before = block;
    if (tail.after) nodes_[tail.after].before = rest;
    node.after = rest;
    node.granules = granules;
    if (node.bare && node.state == State::Pending) [[unlikely]] {
        bool lower = node.granules < tail.granules;
        uint32_t counted = bare_pages(lower ? node : tail, bytes(lower ? node : tail));
        (lower ? node : tail).bare = counted;
        (lower ? tail : node).bare -= counted;
    }
    return rest;
}

// Cut the block down to `granules`; the rest, with a copy of its entries, becomes a free block after it.
void Heap::carve(BlockId block, uint64_t granules) {
    if (nodes_[block].granules == granules) return;
    uint32_t bare = std::exchange(nodes_[block].bare, 0);  // what is served has memory behind all of it
    BlockId rest = cut(block, granules);
    nodes_[rest].bare = bare;
    lay(rest);
    ++total_.splits;
}

// Whether free neighbours join at once: same streams still owed, or one of them owes nothing.
inline bool Heap::joins(const Node& a, const Node& b) const {
    if (a.more || b.more) [[unlikely]] return lists_join(a, b);
    auto owes = [this](const Node& n) { return n.epoch > streams_[n.stream]->epochs.done; };
    return a.stream == b.stream || !owes(a) || !owes(b);
}

bool Heap::lists_join(const Node& a, const Node& b) const {
    Entries x = undone(raw_entries(a)), y = undone(raw_entries(b));
    return x.empty() || y.empty() || same_streams(x, y);
}

// Join a block with the one after it; both are out of the index. The lower one stays.
void Heap::absorb(BlockId low, BlockId high) {
    purge(nodes_[low]);
    purge(nodes_[high]);
    if (uint32_t space = segments_[nodes_[low].segment].space) {
        // Memory that lies below both may be idle from now on.
        uint64_t border = nodes_[high].address;
        HandleId id = spaces_[space - 1]->handle(border);
        if (id && handles_[id].address < border && !handles_[id].queued) {
            catch_up();  // it comes behind those that were freed before
            handles_.queue(id);
        }
    }
    unite(low, high);
    ++total_.merges;
}

// The joining itself, with all that either waits for.
void Heap::unite(BlockId low, BlockId high) {
    Node& a = nodes_[low];
    Node& b = nodes_[high];
    if (!a.more && !b.more && (!a.epoch || !b.epoch || a.stream == b.stream)) {
        if (!a.epoch) a.stream = b.stream;
        a.epoch = std::max(a.epoch, b.epoch);
    } else {
        store_entries(a, joined(raw_entries(a), raw_entries(b)));
        store_entries(b, {});
    }
    a.granules += b.granules;
    a.bare += b.bare;
    a.after = b.after;
    if (a.after) nodes_[a.after].before = low;
    nodes_.release(high);
}

// Join a block that is in no list with the free neighbours that it may join, and answer what became of it.
BlockId Heap::join(BlockId block) {
    // A join may make the next neighbour joinable (its streams finished meanwhile). The cascade is cut off to bound the
    // work under the lock; what is left is for later frees, or for merge().
    for (uint32_t joins_left = cascade; joins_left; --joins_left) {
        BlockId before = nodes_[block].before;
        BlockId after = nodes_[block].after;
        if (before && nodes_[before].state == State::Free && joins(nodes_[before], nodes_[block])) {
            index_remove(before);
            absorb(before, block);
            block = before;
        } else if (after && nodes_[after].state == State::Free && joins(nodes_[block], nodes_[after])) {
            index_remove(after);
            absorb(block, after);
        } else {
            break;
        }
    }
    return block;
}

// Give a block that is in no list to the index.
void Heap::settle(BlockId block) {
    Node& node = nodes_[block];
    purge(node);
    if (segments_[node.segment].space && (node.more || !notes_.is_newest(note_of(node)))) stamp(node);
    node.state = State::Pending;
    node.bare = 0;
    Arena& arena = arenas_[node.arena];
    if (arena.edge.rest) {
        if (park(arena, block)) return;
        close_edge(arena);
    }
    lay(join(block));
}

// The edge. To take from a hole and to give back right before what is left of it would move the hole in and out of the
// index twice, cut it and join it, all to the same end. So the block that an arena's index should get next (`rest`) waits
// outside, and of a block freed right before it (`parked`) the joining is put off: where the two together are what serves
// the next take, only the border between them moves. What is served, and every count, is what it would be without:
// whatever else happens to the arena, or looks at it, closes the edge first.

// Give a block to the index, as the arena's edge, which is closed.
inline void Heap::lay(BlockId block) {
    Node& node = nodes_[block];
    Arena& arena = arenas_[node.arena];
    node.state = State::Pending;
    arena.free += mapped(node);
    arena.edge.rest = block;
    ++edges_open_;
}

// Whether the edge, were it in the index of the stream's own blocks, would be what placement finds there.
bool Heap::edge_serves(const Arena& arena, uint64_t address, uint64_t granules, Search& search) const {
    search.touched = 1;
    if (granules < search.granules) return false;
    uint32_t cls = class_of(granules);
    auto yields = [&](size_t key) {  // whether nothing in that index serves better
        if (key >= arena.by_key.size() || !arena.by_key[key]) return true;
        const FreeIndex& index = *arena.by_key[key];
        uint32_t first = index.next(class_of(search.granules));
        if (first != cls) return first > cls;
        if (!tuning_.best_fit) return key != 0;
        const CandidateList& list = index.at(cls);
        if (list.size() >= search.window) return false;
        BlockId rival = best_of(list, cls, true, search);
        if (!rival) return true;
        const Node& node = nodes_[rival];
        return node.granules != granules ? node.granules > granules : node.address > address;
    };
    return yields(2 + size_t{search.stream}) && yields(0);
}

// Serve a take from the arena's edge, if placement would, else close it and answer 0.
BlockId Heap::take_edge(Arena& arena, Search& search) {
    BlockId block = arena.edge.rest;
    Node& rest = nodes_[block];
    if (rest.bare) {
        close_edge(arena);
        return 0;
    }
    if (BlockId parked = arena.edge.parked) {
        Node& front = nodes_[parked];
        uint64_t all = front.granules + rest.granules;
        if (front.stream == search.stream && all > search.granules && edge_serves(arena, front.address, all, search)) {
            arena.edge.parked = 0;
            front.granules = search.granules;
            rest.address = front.address + (search.granules << shift_);
            rest.granules = all - search.granules;
            rest.stream = front.stream;
            rest.epoch = front.epoch;
            arena.free -= bytes(front);
            ++total_.merges, ++total_.splits;
            return parked;
        }
    } else if (rest.epoch && !rest.more && rest.stream == search.stream &&
               edge_serves(arena, rest.address, rest.granules, search)) {
        arena.edge.rest = 0;
        --edges_open_;
        arena.free -= bytes(rest);
        carve(block, search.granules);
        return block;
    }
    search.touched = 0;
    close_edge(arena);
    return 0;
}

// Put off the joining of a freed block with the edge behind it, if it would join that for sure and nothing else.
bool Heap::park(Arena& arena, BlockId block) {
    Node& node = nodes_[block];
    if (arena.edge.parked && node.after == arena.edge.parked) {
        absorb(arena.edge.parked, arena.edge.rest);
        arena.edge = {.rest = arena.edge.parked};
    }
    const Node& rest = nodes_[arena.edge.rest];
    if (node.after != arena.edge.rest || arena.edge.parked) return false;
    if (rest.bare || node.more || rest.more || !node.epoch || !joins(node, rest)) return false;
    if (rest.stream == node.stream && rest.epoch > node.epoch) return false;
    if (node.before && nodes_[node.before].state == State::Free) return false;
    if (rest.after && nodes_[rest.after].state == State::Free) return false;
    arena.edge.parked = block;
    arena.free += bytes(node);
    return true;
}

void Heap::close_edge(Arena& arena) {
    if (!arena.edge.rest) return;
    Edge edge = std::exchange(arena.edge, {});
    --edges_open_;
    index_insert(edge.rest);
    if (!edge.parked) return;
    arena.free -= bytes(nodes_[edge.parked]);
    index_add(join(edge.parked));
}

void Heap::close_edges() {
    for (Arena& arena : arenas_) close_edge(arena);
}

uint64_t Heap::merge() {
    Settled settled(*this);
    uint64_t before = total_.merges;
    for (const Segment& segment : segments_) {
        if (!segment.used) continue;
        for (BlockId block = segment.first; block; block = nodes_[block].after) {
            if (nodes_[block].state != State::Free) continue;
            index_remove(block);
            purge(nodes_[block]);
            while (BlockId next = nodes_[block].after) {
                if (nodes_[next].state != State::Free) break;
                index_remove(next);
                absorb(block, next);
            }
            index_add(block);
        }
    }
    return total_.merges - before;
}

}  // namespace asyncmem
