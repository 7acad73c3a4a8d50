// Taking and freeing: the caches, and the way from a request to a block and back.
#include "heap.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <stdexcept>

namespace asyncmem {

namespace {
constexpr uint32_t patience = 16;       // strikes of other sizes before a bin gives blocks back
constexpr uint32_t drained_at_once = 8;  // blocks a struck bin gives back in one operation
constexpr uint32_t shared_depth = 8;    // blocks of a shared bin looked at for one take
constexpr uint32_t narrow = 32;         // candidates of one class looked at by the fast takes
constexpr uint32_t wide = 4096;         // and by take_foreign, which runs only when the fast takes missed
}  // namespace

Heap::Heap(uint64_t granule, const Tuning& tuning) : shift_(static_cast<uint32_t>(std::countr_zero(granule))) {
    if (granule < 512 || granule > 65536 || !std::has_single_bit(granule))
        throw std::invalid_argument("granule must be a power of two from 512 to 65536");
    arenas_.resize(2);
    arenas_[0].used = arenas_[1].used = true;
    accounts_.resize(1);
    accounts_[0].used = true;
    configure(tuning);
    add_stream();
}

void Heap::configure(const Tuning& tuning) {
    std::lock_guard lock(mutex_);
    bool moved = tuning.small_limit != tuning_.small_limit;
    tuning_ = tuning;
    shared_.max_blocks = tuning.shared_cache_blocks;
    shared_.max_bytes = tuning.shared_cache_bytes;
    auto fit = [&](Cache& cache) {
        // Cached blocks lie in the arena that their size asks for, so moving the border empties the caches.
        if (!moved && cache.blocks() <= cache.max_blocks && cache.bytes() <= cache.max_bytes) return;
        for (Bin& bin : cache.bins()) drain(cache, bin, UINT32_MAX);
    };
    for (auto& stream : streams_) {
        stream->cache.max_blocks = tuning.stream_cache_blocks;
        stream->cache.max_bytes = tuning.stream_cache_bytes;
        fit(stream->cache);
    }
    fit(shared_);
}

Tuning Heap::tuning() const {
    std::lock_guard lock(mutex_);
    return tuning_;
}

BlockId Heap::take(const Ask& ask, Outcome& outcome) {
    std::lock_guard lock(mutex_);
    return take_locked(ask, outcome);
}

BlockId Heap::take_locked(const Ask& ask, Outcome& outcome) {
    outcome = Outcome{};
    uint64_t granules = (ask.nbytes + (uint64_t{1} << shift_) - 1) >> shift_;
    uint64_t nbytes = granules << shift_;
    if (refused(ask, nbytes, outcome)) return 0;
    BlockId block = 0;
    uint32_t natural = natural_arena(nbytes);
    if (ask.arena < 0 || static_cast<uint32_t>(ask.arena) == natural)
        block = take_cached(granules, ask.stream, outcome);
    if (!block) {
        Search search{granules, ask.stream, Bound::Done, narrow};
        block = place(ask, search);
        outcome.touched += search.touched;
        if (!block) {
            outcome.reason = NoMemory;
            ++total_.misses;
            return 0;
        }
        outcome.level = 3;
    }
    grant(block, ask, outcome);
    return block;
}

bool Heap::refused(const Ask& ask, uint64_t nbytes, Outcome& outcome) {
    need_stream(ask.stream);
    need_account(ask.account);
    if (ask.nbytes == 0 || ask.nbytes > max_size) throw std::invalid_argument("size must be from 1 to 2**47 bytes");
    if (ask.arena >= 0 && (static_cast<size_t>(ask.arena) >= arenas_.size() || !arenas_[ask.arena].used))
        throw std::invalid_argument("unknown arena");
    if (ask.door && accounts_[ask.account].barred) {
        outcome.reason = GateClosed;
        ++total_.barred;
    } else if (!affordable(ask.account, nbytes)) {
        outcome.reason = OverLimit;
        ++total_.refusals;
    }
    return outcome.reason != Served;
}

BlockId Heap::take_cached(uint64_t granules, uint32_t stream, Outcome& outcome) {
    Cache& local = streams_[stream]->cache;
    Bin& bin = local.bin(granules);
    if (bin.granules != granules) {
        strike(local, bin, granules);
    } else {
        bin.hot = true;
        bin.strikes = 0;
        if (BlockId block = bin.head) {
            local.remove(nodes_, bin, block, granules << shift_);
            release(nodes_[block]);
            outcome.level = 1;
            outcome.touched = 1;
            return block;
        }
    }
    Bin& common = shared_.bin(granules);
    if (common.granules != granules) return 0;
    uint32_t depth = 0;
    for (BlockId block = common.head; block && depth < shared_depth; block = nodes_[block].slot, ++depth) {
        ++outcome.touched;
        if (!eligible(nodes_[block], stream, Bound::Done)) continue;
        shared_.remove(nodes_, common, block, granules << shift_);
        release(nodes_[block]);
        resolve(nodes_[block], stream);
        outcome.level = 2;
        return block;
    }
    return 0;
}

// Bookkeeping of a block that leaves a cache.
void Heap::release(Node& node) {
    node.shared = false;
    cached_ -= bytes(node);
}

// A bin that other sizes keep asking for gives its blocks back, a few at a time, and then its place.
void Heap::strike(Cache& cache, Bin& bin, uint64_t granules) {
    if (bin.head && ++bin.strikes > patience) drain(cache, bin, drained_at_once);
    if (!bin.head) bin = Bin{.granules = granules};
}

void Heap::grant(BlockId block, const Ask& ask, Outcome& outcome) {
    Node& node = nodes_[block];
    node.state = State::Live;
    node.stream = ask.stream;
    node.account = ask.account;
    node.slack = static_cast<uint16_t>(bytes(node) - ask.nbytes);
    node.link = outcome.level;
    outcome.address = node.address;
    charge(ask.account, bytes(node), ask.nbytes);
    for (int32_t a = static_cast<int32_t>(ask.account); a >= 0; a = accounts_[a].parent) {
        ++accounts_[a].allocations;
        ++accounts_[a].hits[outcome.level - 1];
    }
    ++total_.allocations;
    ++total_.hits[outcome.level - 1];
    ++live_blocks_;
    total_.touched = std::max<uint64_t>(total_.touched, outcome.touched);
    if (node.arena >= 2) return;  // inside a lease: the heap's bytes were counted when the lease was opened
    live_ += bytes(node);
    total_.peak_live = std::max(total_.peak_live, live_);
    if (live_ > live_high_) {
        live_high_ = no_limit;
        outcome.flags |= LiveCrossed;
    }
    if (reserved_ - live_ < free_low_) {
        free_low_ = 0;
        outcome.flags |= FreeLow;
    }
}

BlockId Heap::take_foreign(const Ask& ask, bool late, Entries& owed, Outcome& outcome) {
    std::lock_guard lock(mutex_);
    outcome = Outcome{};
    uint64_t granules = (ask.nbytes + (uint64_t{1} << shift_) - 1) >> shift_;
    if (refused(ask, granules << shift_, outcome)) return 0;
    BlockId block = 0;
    for (Bound bound : {Bound::Done, Bound::Recorded, Bound::Any}) {
        if (bound == Bound::Any && !late) break;
        Search search{granules, ask.stream, bound, wide};
        block = place(ask, search);
        outcome.touched += search.touched;
        if (block) break;
    }
    if (!block) {
        outcome.reason = NoMemory;
        ++total_.misses;
        return 0;
    }
    owed = resolve(nodes_[block], ask.stream);
    outcome.level = 3;
    if (!owed.empty()) ++total_.foreign;
    grant(block, ask, outcome);
    return block;
}

bool Heap::take_many(const Ask& ask, const uint64_t* sizes, size_t count, Granted* granted, Outcome& outcome) {
    std::lock_guard lock(mutex_);
    // Largest first, equal sizes in a row: what is asked for together is cut side by side from the same hole.
    std::vector<uint32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    if (!std::is_sorted(sizes, sizes + count, std::greater<>()))
        std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return sizes[a] > sizes[b]; });
    Outcome all{};
    Ask one = ask;
    for (size_t i = 0; i < count; ++i) {
        one.nbytes = sizes[order[i]];
        BlockId block = take_locked(one, outcome);
        granted[order[i]] = {block, outcome.address};
        all.flags |= outcome.flags;
        all.touched = std::max(all.touched, outcome.touched);
        all.level = outcome.level;
        if (block) continue;
        while (i--) put_back_locked(granted[order[i]].block, {});
        outcome.flags = all.flags;
        return false;
    }
    outcome = all;
    return true;
}

uint32_t Heap::put_back(BlockId block, const Entries& owed) {
    std::lock_guard lock(mutex_);
    need_live(block);
    for (const Entry& entry : owed) need_stream(entry.stream);
    put_back_locked(block, owed);
    return released_flags();
}

void Heap::put_back_locked(BlockId block, const Entries& owed) {
    Node& node = nodes_[block];
    uint32_t level = node.link;
    credit(node.account, bytes(node), bytes(node) - node.slack);
    for (int32_t a = static_cast<int32_t>(node.account); a >= 0; a = accounts_[a].parent) {
        --accounts_[a].allocations;
        --accounts_[a].hits[level - 1];
    }
    --total_.allocations;
    --total_.hits[level - 1];
    --live_blocks_;
    if (!owed.empty()) --total_.foreign;
    if (node.arena < 2) live_ -= bytes(node);
    Entries home = node.epoch ? Entries{{node.stream, node.epoch}} : Entries{};
    Entries sorted = owed;
    normalise(sorted);
    store_entries(node, joined(home, sorted));
    settle(block);
}

uint32_t Heap::free(BlockId block) {
    std::lock_guard lock(mutex_);
    need_live(block);
    return free_locked(block, nullptr);
}

uint32_t Heap::free(BlockId block, const Entries& extra) {
    std::lock_guard lock(mutex_);
    need_live(block);
    for (const Entry& entry : extra) need_stream(entry.stream);
    return free_locked(block, &extra);
}

uint32_t Heap::free_everywhere(BlockId block) {
    std::lock_guard lock(mutex_);
    need_live(block);
    Entries everything;
    for (uint32_t s = 0; s < streams_.size(); ++s) everything.push_back({s, streams_[s]->epochs.open});
    return free_locked(block, &everything);
}

uint32_t Heap::free_many(const BlockId* blocks, size_t count) {
    std::lock_guard lock(mutex_);
    // All or nothing: mark every block first, so that one named twice or not live is found before any is freed.
    for (size_t i = 0; i < count; ++i) {
        if (nodes_.known(blocks[i]) && nodes_[blocks[i]].state == State::Live) {
            nodes_[blocks[i]].state = State::Pending;
            continue;
        }
        while (i--) nodes_[blocks[i]].state = State::Live;
        throw std::invalid_argument("not a live block (freed already, never taken, or named twice)");
    }
    uint32_t flags = 0;
    for (size_t i = 0; i < count; ++i) flags |= free_locked(blocks[i], nullptr);
    return flags;
}

uint32_t Heap::free_locked(BlockId block, const Entries* extra) {
    Node& node = nodes_[block];
    credit(node.account, bytes(node), bytes(node) - node.slack);
    for (int32_t a = static_cast<int32_t>(node.account); a >= 0; a = accounts_[a].parent) ++accounts_[a].frees;
    ++total_.frees;
    --live_blocks_;
    if (node.arena < 2) live_ -= bytes(node);
    node.epoch = streams_[node.stream]->epochs.open;
    if (extra && !extra->empty()) {
        Entries sorted = undone(*extra);
        normalise(sorted);
        store_entries(node, joined({{node.stream, node.epoch}}, sorted));
    }
    if (!keep(block, node.more == 0)) settle(block);
    return node.arena < 2 ? released_flags() : 0;
}

// Put a freed block into the stream's cache, else into the shared one, if its size is asked for again and again.
bool Heap::keep(BlockId block, bool only_home) {
    Node& node = nodes_[block];
    if (!cacheable(node)) return false;
    Cache& local = streams_[node.stream]->cache;
    Bin& bin = local.bin(node.granules);
    if (bin.granules != node.granules || !bin.hot) return false;
    if (only_home && local.has_room(bytes(node))) {
        local.push(nodes_, bin, block, bytes(node));
    } else {
        Bin& common = shared_.bin(node.granules);
        if (common.granules != node.granules) strike(shared_, common, node.granules);
        if (common.granules != node.granules || !shared_.has_room(bytes(node))) return false;
        common.strikes = 0;
        shared_.push(nodes_, common, block, bytes(node));
        node.shared = true;
    }
    cached_ += bytes(node);
    total_.peak_cached = std::max(total_.peak_cached, cached_);
    return true;
}

uint64_t Heap::drain(Cache& cache, Bin& bin, uint32_t most) {
    uint64_t drained = 0;
    for (; bin.head && most; --most) {
        BlockId block = bin.head;
        uint64_t nbytes = bytes(nodes_[block]);
        cache.remove(nodes_, bin, block, nbytes);
        release(nodes_[block]);
        drained += nbytes;
        settle(block);
    }
    return drained;
}

uint64_t Heap::flush(int64_t stream) {
    std::lock_guard lock(mutex_);
    if (stream >= 0) need_stream(stream);
    uint64_t drained = 0;
    for (size_t s = 0; s < streams_.size(); ++s) {
        if (stream >= 0 && s != static_cast<size_t>(stream)) continue;
        for (Bin& bin : streams_[s]->cache.bins()) drained += drain(streams_[s]->cache, bin, UINT32_MAX);
    }
    if (stream < 0)
        for (Bin& bin : shared_.bins()) drained += drain(shared_, bin, UINT32_MAX);
    return drained;
}

// Flags of an operation that gave bytes back.
uint32_t Heap::released_flags() {
    uint32_t flags = gates_closed_ ? uint32_t{Waiting} : 0;
    if (live_ < live_low_) {
        live_low_ = 0;
        flags |= LiveCrossed;
    }
    return flags;
}

void Heap::need_live(BlockId block) const {
    if (!nodes_.known(block) || nodes_[block].state != State::Live)
        throw std::invalid_argument("not a live block (freed already, or never taken)");
}

void Heap::need_stream(int64_t stream) const {
    if (stream < 0 || static_cast<size_t>(stream) >= streams_.size()) throw std::invalid_argument("unknown stream");
}

}  // namespace asyncmem
