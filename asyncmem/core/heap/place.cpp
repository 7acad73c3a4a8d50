// Placement: finding the free block that serves a request, cutting it, and joining what comes back.
#include "heap.hpp"

#include <algorithm>
#include <utility>

namespace asyncmem {

namespace {
constexpr uint32_t cascade = 16;  // joins that one free may cause
}  // namespace

// What a free block waits for.

[[gnu::noinline]] Entries Heap::undone(Entries entries) const {
    std::erase_if(entries, [this](const Entry& entry) { return is_done(entry); });
    return entries;
}

void Heap::purge(Node& node) {
    if (node.more) [[unlikely]] {
        entry_pool_.store(node, undone(entry_pool_.all(node)));
    } else if (node.epoch <= streams_[node.stream]->epochs.done) {
        node.epoch = 0;
    }
}

// Turn a block's entries into the taker's: keep in `epoch` what the taker itself still owes, return the rest.
[[gnu::noinline]] Entries Heap::resolve(Node& node, uint32_t stream) {
    uint64_t own = 0;
    Entries owed;
    entry_pool_.each(node, [&](const Entry& entry) {
        if (entry.stream == stream) {
            own = entry.epoch;
        } else if (!is_done(entry)) {
            owed.push_back(entry);
        }
    });
    entry_pool_.store(node, {});
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
    auto passes = [&](const Entry& entry) {
        if (entry.stream == stream || bound == Bound::Any) return true;
        const Epochs& epochs = streams_[entry.stream]->epochs;
        return bound == Bound::Done ? entry.epoch <= epochs.done : epochs.covers(entry.epoch);
    };
    if (!node.more) return node.epoch == 0 || passes({node.stream, node.epoch});
    return std::ranges::all_of(entry_pool_[node.more], passes);
}

// The free index of an arena.

FreeIndex* Heap::Arena::index(size_t key) const {
    return key < by_key.size() && by_key[key] && by_key[key]->count() ? by_key[key].get() : nullptr;
}

inline FreeIndex& Heap::index_of(const Node& node) {
    auto& by_key = arenas_[node.arena].by_key;
    uint32_t key = key_of(node);
    if (key >= by_key.size() || !by_key[key]) [[unlikely]] add_index(by_key, key);
    return *by_key[key];
}

[[gnu::noinline]] void Heap::add_index(std::vector<std::unique_ptr<FreeIndex>>& by_key, uint32_t key) {
    if (key >= by_key.size()) by_key.resize(key + 1);
    by_key[key] = std::make_unique<FreeIndex>();
}

void Heap::index_add(BlockId block) {
    Node& node = nodes_[block];
    index_of(node).add(nodes_, node, block);
    node.state = State::Free;
}

void Heap::index_remove(Node& node) {
    arenas_[node.arena].by_key[key_of(node)]->remove(nodes_, node);
    node.state = State::Pending;
}

// Move where a block of the index begins.
void Heap::move_hole(BlockId block, uint64_t address, uint64_t granules) {
    Node& node = nodes_[block];
    node.address = address;
    node.granules = granules;
    arenas_[node.arena].by_key[key_of(node)]->resize(nodes_, node, block);
}

// Searching.

// Whether a block serves a request better than another that fits as well: it is smaller, or as large and lower.
inline bool Heap::better(const Node& a, const Node& b) {
    return a.granules != b.granules ? a.granules < b.granules : a.address < b.address;
}

// The best of the newest `window` candidates: the smallest that fits, then the lowest address.
inline BlockId Heap::best_of(const CandidateList& list, bool fit, bool all, Search& search) const {
    const Candidate* best = nullptr;
    uint32_t least = static_cast<uint32_t>(search.granules) * !fit;
    const Candidate *end = list.data() + list.size(), *c = end;
    const Candidate* last = end - std::min<size_t>(list.size(), search.window);
    while (c != last) {
        --c;
        if (c->low < least) continue;
        if (best && (c->low > best->low || (c->low == best->low && c->address > best->address))) continue;
        if (!all && !eligible(nodes_[c->node], search.stream, search.bound)) continue;
        best = c;
        if (!tuning_.best_fit) break;
    }
    search.touched += static_cast<uint32_t>(end - c);
    return best ? best->node : 0;
}

// Search one index, for what is better than `known` if there is that; `all` of it may be taken.
inline BlockId Heap::find(const FreeIndex& index, bool all, Search& search, BlockId known) const {
    const SmallIndex* few = index.few();
    if (!few) return find_listed(index, all, search, known);
    search.touched += static_cast<uint32_t>(index.count());
    return all ? few->best(search.granules, nodes_) : find_eligible(*few, search);
}

[[gnu::noinline]] BlockId Heap::find_eligible(const SmallIndex& few, Search& search) const {
    BlockId best = 0;
    few.each([&](BlockId block) {
        const Node& node = nodes_[block];
        if (node.granules < search.granules || (best && better(nodes_[best], node))) return;
        if (eligible(node, search.stream, search.bound)) best = block;
    });
    return best;
}

// From the class of the size up to the last one that could be better, for at most two windows of candidates.
inline BlockId Heap::find_listed(const FreeIndex& index, bool all, Search& search, BlockId known) const {
    uint32_t least = class_of(search.granules), last = known ? class_of(nodes_[known].granules) : FreeIndex::none;
    uint32_t most = search.touched + 2 * search.window;
    uint32_t cls = index.next(least);
    while (cls != FreeIndex::none && cls <= last && search.touched < most) {
        if (BlockId block = best_of(index.at(cls), cls > least, all, search)) return block;
        cls = index.next(cls + 1);
    }
    return 0;
}

// The best of its own blocks and of clean ones, then those of other streams in their order, then those of several streams.
BlockId Heap::place(const Arena& arena, Search& search) const {
    FreeIndex* mine = arena.index(2 + size_t{search.stream});
    FreeIndex* unowed = arena.index(0);
    BlockId own = mine ? find(*mine, true, search, 0) : 0;
    BlockId clean = unowed ? find(*unowed, true, search, own) : 0;
    if (own && clean) return better(nodes_[own], nodes_[clean]) ? own : clean;
    return own ? own : clean ? clean : place_foreign(arena, search);
}

[[gnu::noinline]] BlockId Heap::place_foreign(const Arena& arena, Search& search) const {
    if (search.bound != Bound::Done && search.granules << shift_ >= tuning_.small_limit)
        return oldest_of(arena, search);
    auto look = [&](size_t key) -> BlockId {
        FreeIndex* index = arena.index(key);
        return index ? find(*index, false, search, 0) : 0;
    };
    for (size_t key = 2; key < arena.by_key.size(); ++key) {
        if (key == 2 + size_t{search.stream}) continue;
        if (BlockId block = look(key)) return block;
    }
    return look(1);
}

// Of the large blocks that must be waited for, the one for which the least is: whose fences lie furthest back. It costs
// more memory than the best fit, and much less of the time that streams work side by side.
BlockId Heap::oldest_of(const Arena& arena, Search& search) const {
    BlockId oldest = 0;
    uint64_t most = 0;
    auto look = [&](BlockId block) {
        ++search.touched;
        const Node& node = nodes_[block];
        if (node.granules < search.granules || !eligible(node, search.stream, search.bound)) return;
        uint64_t age = age_of(node, search.stream);
        if (oldest && (age < most || (age == most && better(nodes_[oldest], node)))) return;
        oldest = block;
        most = age;
    };
    auto look_at = [&](const FreeIndex& index) {
        if (const SmallIndex* few = index.few()) return few->each(look);
        uint32_t left = aged;
        for (uint32_t cls = index.next(class_of(search.granules)); cls != FreeIndex::none; cls = index.next(cls + 1))
            for (const Candidate& c : index.at(cls)) {
                if (!left--) return;
                look(c.node);
            }
    };
    for (size_t key = 1; key < arena.by_key.size(); ++key)
        if (FreeIndex* index = key == 2 + size_t{search.stream} ? nullptr : arena.index(key)) look_at(*index);
    return oldest;
}

// How many fences its streams have had, or had none for, since the newest that a taker must wait for.
uint64_t Heap::age_of(const Node& node, uint32_t taker) const {
    uint64_t age = UINT64_MAX;
    entry_pool_.each(node, [&](const Entry& entry) {
        if (entry.stream != taker) age = std::min(age, streams_[entry.stream]->epochs.open - entry.epoch);
    });
    return age;
}

inline BlockId Heap::place(const Ask& ask, Search& search) {
    uint32_t at = ask.arena >= 0 ? static_cast<uint32_t>(ask.arena) : natural_arena(search.granules << shift_);
    BlockId block = place(arenas_[at], search);
    if (!block && ask.anywhere && at < 2) block = place(arenas_[1 - at], search);
    if (!block) return 0;
    const Node& hole = nodes_[block];
    if (deferred_.count && nodes_[hole.before].state == State::Pending) [[unlikely]] coalesce();
    search.uncut = !search.cuts && search.granules >= whole_from_ && stays_whole(hole, search.granules);
    if (search.uncut) [[unlikely]] return 0;
    search.bare = hole.bare && bare_pages(hole, search.granules << shift_);
    if (search.bare) return 0;
    if (hole.granules == search.granules || hole.more) [[unlikely]] {
        index_remove(nodes_[block]);
        carve(block, search.granules);
    } else {
        block = take_front(block, search.granules);
    }
    if (search.bound == Bound::Done) adopt(nodes_[block], search.stream);
    return block;
}

// Whether a hole is the segment that stays whole, and much would be left of it.
[[gnu::noinline]] bool Heap::stays_whole(const Node& hole, uint64_t granules) const {
    bool last = hole.arena == 1 && hole.address + bytes(hole) == whole_end_;
    return last && !hole.before && !hole.after && hole.granules - granules >= whole_least_;
}

// What take() finds beyond the caches.
[[gnu::flatten]] BlockId Heap::take_placed(uint64_t granules, const Ask& ask, Outcome& outcome) {
    Search search{granules, ask.stream, Bound::Done, narrow};
    search.cuts = ask.cuts;
    if (deferred_.count) {
        if (deferred_.out || deferred_.lone()) coalesce();
        sync_index();
    }
    BlockId block = place(ask, search);
    outcome.touched += search.touched;
    total_.touched = std::max<uint64_t>(total_.touched, outcome.touched);
    if (block) {
        outcome.level = 3;
        newest_ = block;
        deferred_.out = block;
        deferred_.out_deferred = false;
    } else {
        outcome.reason = search.uncut ? Uncut : search.bare || has_spot(ask, granules) ? NoPages : NoMemory;
        ++total_.misses;
    }
    return block;
}

// What other streams have to be done with first, or are asked to wait for: by one search after the other.
BlockId Heap::take_reaching(uint64_t granules, const Ask& ask, bool late, Outcome& outcome) {
    coalesce();
    bool bare = false;
    for (Reach reach : reaches) {
        if (reach.bound == Bound::Any) {
            bare = has_spot(ask, granules);
            if (bare || !late) break;
        }
        Search search{granules, ask.stream, reach.bound, reach.window};
        BlockId block = place(ask, search);
        outcome.touched += search.touched;
        if (search.bare) outcome.reason = NoPages;
        if (block || search.bare) return block;
    }
    outcome.reason = bare ? NoPages : NoMemory;
    return 0;
}

// Cutting and joining.

// A new node for a part of a block that waits for one stream at most, with what every part has alike.
inline BlockId Heap::part_of(const Node& whole) {
    BlockId id = nodes_.acquire();
    Node& part = nodes_[id];
    // Field by field: a copy of the whole node would wait for the bytes that were just written to it.
    part.epoch = whole.epoch;
    part.stream = whole.stream;
    part.more = 0;
    part.segment = whole.segment;
    part.arena = whole.arena;
    part.shared = false;
    return id;
}

// Cut a block in two and return the upper part, of the same state and entries. Neither is in any list.
BlockId Heap::cut(BlockId block, uint64_t granules) {
    BlockId rest = part_of(nodes_[block]);
    Node& node = nodes_[block];
    Node& tail = nodes_[rest];
    tail.address = node.address + (granules << shift_);
    tail.granules = node.granules - granules;
    if (node.more) [[unlikely]] tail.more = entry_pool_.copy(node.more);
    tail.before = block;
    tail.after = node.after;
    tail.bare = node.bare;
    tail.state = node.state;
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
    index_add(rest);
    ++total_.splits;
}

// Whether free neighbours join at once: same streams still owed, or one of them owes nothing.
inline bool Heap::joins(const Node& a, const Node& b) const {
    if (a.more || b.more) [[unlikely]] return lists_join(a, b);
    auto owes = [this](const Node& n) { return n.epoch > streams_[n.stream]->epochs.done; };
    return a.stream == b.stream || !owes(a) || !owes(b);
}

[[gnu::noinline]] bool Heap::lists_join(const Node& a, const Node& b) const {
    Entries x = undone(entry_pool_.all(a)), y = undone(entry_pool_.all(b));
    return x.empty() || y.empty() || std::ranges::equal(x, y, {}, &Entry::stream, &Entry::stream);
}

// Join a block with the one after it; both are purged, and out of the index. The lower one stays.
void Heap::absorb(BlockId low, BlockId high) {
    unite(low, high);
    ++total_.merges;
}

[[gnu::noinline]] void Heap::unite_entries(Node& a, Node& b) {
    entry_pool_.store(a, joined(entry_pool_.all(a), entry_pool_.all(b)));
    entry_pool_.store(b, {});
}

// The joining itself, with all that either waits for.
void Heap::unite(BlockId low, BlockId high) {
    Node& a = nodes_[low];
    Node& b = nodes_[high];
    if (a.more || b.more || (a.epoch && b.epoch && a.stream != b.stream)) [[unlikely]] {
        unite_entries(a, b);
    } else {
        if (!a.epoch) a.stream = b.stream;
        a.epoch = std::max(a.epoch, b.epoch);
    }
    a.granules += b.granules;
    a.bare += b.bare;
    a.after = b.after;
    nodes_[a.after].before = low;  // or node 0, which stands for none
    nodes_.release(high);
}

// Join a purged block that is in no list with the free neighbours that it may join, and return what became of it.
BlockId Heap::join(BlockId block) {
    // A join may make the next neighbour joinable (its streams finished meanwhile). The cascade is cut off to bound the
    // work under the lock; what is left is for later frees, or for merge().
    for (uint32_t joins_left = cascade; joins_left; --joins_left) {
        Node& node = nodes_[block];
        Node& before = nodes_[node.before];
        if (before.state == State::Free && joins(before, node)) {
            BlockId low = node.before;
            index_remove(before);
            purge(before);
            absorb(low, block);
            block = low;
            continue;
        }
        Node& after = nodes_[node.after];
        if (after.state != State::Free || !joins(node, after)) break;
        index_remove(after);
        purge(after);
        absorb(block, node.after);
    }
    return block;
}

// Give a block that is in no list to the index.
[[gnu::flatten]] void Heap::settle(BlockId block) {
    bool alone = block == deferred_.out && !deferred_.out_deferred;  // all others rest
    if (!alone) coalesce();
    deferred_.out = 0;
    in_turn_ = block == newest_ ? in_turn_ + 1 : 0;
    Node& node = nodes_[block];
    purge(node);
    note_free(node);
    node.state = State::Pending;
    node.bare = 0;
    bool sinking = sinks(node);
    if (in_turn_ >= 2 && (sinking || stays_apart(node)) && defer(block, sinking)) return;
    if (sinking) {
        sink(block, node.granules + nodes_[node.after].granules);
    } else {
        coalesce();
        index_add(join(block));
    }
}

// Whether a freed block that waits for its home alone joins nothing.
inline bool Heap::stays_apart(const Node& node) const {
    return !node.more && nodes_[node.before].state != State::Free && nodes_[node.after].state != State::Free;
}

// Whether a freed block joins the hole behind it for sure, and nothing else.
inline bool Heap::sinks(const Node& node) const {
    const Node& hole = nodes_[node.after];
    if (hole.state != State::Free || hole.more || node.more || !hole.epoch || !node.epoch || hole.stream != node.stream)
        return false;
    return nodes_[node.before].state != State::Free && nodes_[hole.after].state != State::Free;
}

// Give a freed block to the hole behind it, which keeps its place in the index, and has so many granules then. The memory
// below both is noted already, as what the block lay on.
void Heap::sink(BlockId block, uint64_t granules) {
    BlockId hole = nodes_[block].after;
    uint64_t address = nodes_[block].address;
    join_hole(block);
    move_hole(hole, address, granules);
}

// Its node goes, and the hole takes its place among its neighbours.
void Heap::join_hole(BlockId block) {
    const Node& node = nodes_[block];
    Node& hole = nodes_[node.after];
    hole.epoch = std::max(hole.epoch, node.epoch);
    hole.before = node.before;
    link(node.before, node.after);
    nodes_.release(block);
    ++total_.merges;
}

// Make a block known to what lies before it: by an index, because a branch could not be foreseen.
inline void Heap::link(BlockId before, BlockId block) {
    BlockId* links[] = {&segments_[nodes_[block].segment].first, &nodes_[before].after};
    *links[before != 0] = block;
}

// Cut a block off the front of a hole that waits for no more than one stream; the rest keeps its place in the index.
inline BlockId Heap::take_front(BlockId block, uint64_t granules) {
    const Node& hole = nodes_[block];
    BlockId front = part_of(hole);
    Node& node = nodes_[front];
    node.address = hole.address;
    node.granules = granules;
    node.before = hole.before;
    node.after = block;
    node.bare = 0;
    node.state = State::Pending;
    nodes_[block].before = front;
    link(node.before, front);
    move_hole(block, hole.address + (granules << shift_), hole.granules - granules);
    ++total_.splits;
    return front;
}

}  // namespace asyncmem
