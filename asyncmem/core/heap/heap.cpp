// Taking and freeing: the caches, and the way from a request to a block and back.
#include "heap.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

namespace asyncmem {

namespace {
constexpr uint32_t most_strikes = 16;    // strikes of other sizes before a bin gives blocks back
constexpr uint32_t drained_at_once = 8;  // blocks a struck bin gives back in one operation
constexpr uint32_t shared_depth = 8;    // blocks of a shared bin looked at for one take
}  // namespace

// The way of a hit is one straight line: its few functions are inlined wherever they are called.
#define HIT_PATH [[gnu::always_inline]] inline

Heap::Heap(uint64_t granule, const Tuning& tuning) : shift_(static_cast<uint32_t>(std::countr_zero(granule))) {
    if (granule < 512 || granule > 65536 || !std::has_single_bit(granule))
        refuse_argument("granule must be a power of two from 512 to 65536");
    arenas_[0].used = arenas_[1].used = true;
    configure(tuning);
    add_stream();
}

void Heap::configure(const Tuning& tuning) {
    std::lock_guard lock(lock_);
    bool moved = tuning.small_limit != tuning_.small_limit;
    tuning_ = tuning;
    shared_.max_blocks = tuning.shared_cache_blocks;
    shared_.max_bytes = tuning.shared_cache_bytes;
    auto fit = [&](auto& cache) {
        // Cached blocks lie in the arena that their size asks for, so moving the border empties the caches.
        bool over = cache.blocks() > cache.max_blocks || cache.bytes() > cache.max_bytes || cache.outsize();
        if (!moved && !over) return;
        for (Bin& bin : cache.bins()) drain(cache, bin, UINT32_MAX);
    };
    for (auto& stream : streams_) {
        stream->cache.max_blocks = tuning.stream_cache_blocks;
        stream->cache.max_bytes = tuning.stream_cache_bytes;
        fit(stream->cache);
    }
    fit(shared_);
}

void Heap::start_journal() {
    journal_ = std::make_unique<Journal>();
    journal_->write("heap", [](auto&&...) {}, uint64_t{1} << shift_, tuning_);
}

// Bookkeeping of a block that leaves a cache.
HIT_PATH void Heap::release(Node& node) {
    node.shared = false;
    cached_ -= bytes(node);
}

// A bin that other sizes keep asking for gives its blocks back, a few at a time, and then its place.
HIT_PATH void Heap::strike(Cache& cache, Bin& bin, uint64_t granules) {
    if (bin.head && ++bin.strikes > most_strikes) drain(cache, bin, drained_at_once);
    cache.take_over(bin, granules);
}

HIT_PATH BlockId Heap::take_cached(uint64_t granules, const Ask& ask, Outcome& outcome) {
    bool large = natural_arena(granules << shift_);
    if (ask.arena >= 0 && static_cast<uint32_t>(ask.arena) != large) return 0;
    auto& local = streams_[ask.stream]->cache;
    if (granules >= paged_from_) {
        if (!ask.again) local.pass();
        return 0;
    }
    Bin* bin = local.find(granules, large);
    BlockId block = bin ? bin->head : 0;
    if (block) {
        if (!ask.again) bin->serve();
        local.remove(nodes_, *bin, block, granules << shift_);
        release(nodes_[block]);
        outcome.level = 1;
        outcome.touched = 1;
        return block;
    }
    if (!ask.again && bin) {
        bin->strikes = 0;
        local.ask(*bin, large);
    } else if (!ask.again) {
        strike(local, local.find_weakest(granules, large), granules);
    }
    return shared_.blocks() ? take_shared(granules, ask.stream, outcome) : 0;
}

BlockId Heap::take_shared(uint64_t granules, uint32_t stream, Outcome& outcome) {
    Bin* bin = shared_.find(granules, natural_arena(granules << shift_));
    if (!bin) return 0;
    uint32_t depth = 0;
    for (BlockId block = bin->head; block && depth < shared_depth; block = nodes_[block].slot, ++depth) {
        ++outcome.touched;
        if (!eligible(nodes_[block], stream, Bound::Done)) continue;
        shared_.remove(nodes_, *bin, block, granules << shift_);
        release(nodes_[block]);
        resolve(nodes_[block], stream);
        outcome.level = 2;
        return block;
    }
    return 0;
}

HIT_PATH bool Heap::refused(const Ask& ask, uint64_t nbytes, Outcome& outcome) {
    bool inside = ask.arena >= 2;
    if (ask.stream >= streams_.size() || !accounts_.known(ask.account) || ask.nbytes - 1 >= max_size ||
        accounts_[ask.account].inner != inside || (inside && !known_arena(ask.arena)))
        explain(ask);
    if (ask.fast && accounts_.barred(ask.account)) {
        outcome.passing = accounts_.may_pass(nbytes);
        if (!outcome.passing) {
            outcome.reason = GateClosed;
            ++total_.barred;
            return true;
        }
    }
    if (!accounts_.affordable(ask.account, nbytes)) {
        outcome.reason = OverLimit;
        ++total_.refusals;
    }
    return outcome.reason != Served;
}

void Heap::explain(const Ask& ask) const {
    need_stream(ask.stream);
    need_account(ask.account);
    if (ask.nbytes == 0 || ask.nbytes > max_size) refuse_argument("size must be from 1 to 2**47 bytes");
    if (ask.arena >= 2 && !known_arena(ask.arena)) refuse_argument("unknown arena");
    refuse_argument("the inside of a lease, and only that, is charged to an account below none");
}

// Everything about a grant but the account's side of it.
HIT_PATH void Heap::enliven(BlockId block, const Ask& ask, uint32_t level) {
    Node& node = nodes_[block];
    node.state = State::Live;
    node.stream = ask.stream;
    node.account = ask.account;
    node.slack = static_cast<uint16_t>(bytes(node) - ask.nbytes);
    node.link = level;
}

HIT_PATH void Heap::raise_marks(Outcome& outcome) {
    uint64_t live = accounts_[0].live;
    if (live > live_high_) {
        live_high_ = no_limit;
        outcome.flags |= LiveCrossed;
    }
}

HIT_PATH void Heap::grant(BlockId block, const Ask& ask, Outcome& outcome) {
    enliven(block, ask, outcome.level);
    outcome.address = nodes_[block].address;
    accounts_.grant(ask.account, bytes(nodes_[block]), ask.nbytes, outcome.level);
    if (outcome.passing) accounts_.pass(bytes(nodes_[block]));
    if (log_) [[unlikely]] log_take(block, ask);
    raise_marks(outcome);
}

// A block from the caches or from mapped memory, not yet granted.
HIT_PATH BlockId Heap::find_block(const Ask& ask, Outcome& outcome) {
    uint64_t granules = rounded(ask.nbytes) >> shift_;
    outcome.touched = 0;
    BlockId block = take_cached(granules, ask, outcome);
    return block ? block : find_hole(ask, outcome);
}

// Beyond the caches.
HIT_PATH BlockId Heap::find_hole(const Ask& ask, Outcome& outcome) {
    uint64_t granules = rounded(ask.nbytes) >> shift_;
    BlockId block = deferred_.count && !deferred_.out ? take_deferred(granules, ask, outcome) : 0;
    return block ? block : take_placed(granules, ask, outcome);
}

BlockId Heap::take(const Ask& ask, Outcome& outcome) {
    ASYNCMEM_ENTER(take, ask, filled(outcome));
    outcome = Outcome{};
    if (refused(ask, rounded(ask.nbytes), outcome)) return 0;
    BlockId block = find_block(ask, outcome);
    if (block) grant(block, ask, outcome);
    return block;
}

BlockId Heap::take_foreign(const Ask& ask, bool late, Entries& owed, Outcome& outcome) {
    ASYNCMEM_ENTER(take_foreign, ask, late, filled(owed), filled(outcome));
    outcome = Outcome{};
    if (refused(ask, rounded(ask.nbytes), outcome)) return 0;
    return grant_owing(take_reaching(rounded(ask.nbytes) >> shift_, ask, late, outcome), ask, owed, outcome);
}

// Grant a block that others may have used, if one was found.
BlockId Heap::grant_owing(BlockId block, const Ask& ask, Entries& owed, Outcome& outcome) {
    if (!block) {
        ++total_.misses;
        return 0;
    }
    owed = resolve(nodes_[block], ask.stream);
    outcome.level = 3;
    if (!owed.empty()) ++total_.foreign;
    grant(block, ask, outcome);
    if (log_ && !owed.empty() && nodes_[block].arena < 2) log_->foreign(block);
    return block;
}

BlockId Heap::take_at(const Ask& ask, uint64_t address, bool late, Entries& owed, Outcome& outcome) {
    ASYNCMEM_ENTER(take_at, ask, address, late, filled(owed), filled(outcome));
    outcome = Outcome{};
    if (refused(ask, rounded(ask.nbytes), outcome)) return 0;
    if (ask.arena < 2) refuse_argument("only the inside of a lease is taken by its addresses");
    const Segment& range = segments_[arenas_[ask.arena].segment];
    uint64_t offset = address - range.address, nbytes = rounded(ask.nbytes);
    if (address < range.address || offset & (rounded(1) - 1) || offset > range.nbytes || nbytes > range.nbytes - offset)
        refuse_argument("the address is no granule of the lease, or the bytes from there on are not all in it");
    Search search{nbytes >> shift_, ask.stream, late ? Bound::Any : Bound::Recorded, 0};
    BlockId block = place_at(range, address, search);
    outcome.touched = search.touched;
    if (!block) outcome.reason = NoMemory;
    return grant_owing(block, ask, owed, outcome);
}

bool Heap::take_many(const Ask& ask, std::span<const uint64_t> sizes, std::span<Granted> granted, Outcome& outcome) {
    ASYNCMEM_ENTER(take_many, ask, sizes, filled(granted), filled(outcome));
    size_t count = sizes.size();
    outcome = Outcome{};
    Ask one = ask;
    one.nbytes = 1;
    uint64_t total = 0, requested = 0, hits[3] = {};
    for (size_t i = 0; i < count; ++i) {
        if (sizes[i] - 1 >= max_size) one.nbytes = sizes[i];
        requested += sizes[i];
        total += rounded(sizes[i]);
    }
    // Asked about all of them at once, so that a batch over a limit disturbs nothing.
    if (refused(one, total, outcome)) return false;
    std::vector<uint32_t> left;  // what no cache has
    auto put = [&](size_t i, BlockId block) {
        enliven(block, one, outcome.level);
        ++hits[outcome.level - 1];
        granted[i] = {block, nodes_[block].address};
    };
    for (size_t i = 0; i < count; ++i) {
        one.nbytes = sizes[i];
        uint64_t granules = rounded(sizes[i]) >> shift_;
        BlockId block = take_cached(granules, one, outcome);
        if (block) {
            put(i, block);
        } else {
            granted[i] = {};
            left.push_back(static_cast<uint32_t>(i));
        }
    }
    // Largest first, equal sizes in a row: what is asked for together is cut side by side from the same hole.
    std::stable_sort(left.begin(), left.end(), [&](uint32_t a, uint32_t b) { return sizes[a] > sizes[b]; });
    for (uint32_t i : left) {
        one.nbytes = sizes[i];
        outcome.touched = 0;
        BlockId block = find_hole(one, outcome);
        if (!block) {
            for (size_t j = count; j--;)
                if (granted[j].block) retract(std::exchange(granted[j], {}).block, {});
            outcome.level = 0;
            return false;
        }
        put(i, block);
    }
    accounts_.grant(ask.account, total, requested, 1, hits[0]);
    accounts_.grant(ask.account, 0, 0, 2, hits[1]);
    accounts_.grant(ask.account, 0, 0, 3, hits[2]);
    if (outcome.passing) accounts_.pass(total);
    for (size_t i = 0; log_ && i < count; ++i) log_take(granted[i].block, ask);
    raise_marks(outcome);
    return true;
}

uint32_t Heap::put_back(BlockId block, const Entries& owed) {
    ASYNCMEM_ENTER(put_back, block, owed);
    need_live(block);
    for (const Entry& entry : owed) need_stream(entry.stream);
    Node& node = nodes_[block];
    accounts_.undo(node.account, bytes(node), bytes(node) - node.slack, node.link);
    if (!owed.empty()) --total_.foreign;
    if (log_) log_->undone(block);
    retract(block, owed);
    return released_flags();
}

// Give a granted block to the index with the entries it was taken with.
void Heap::retract(BlockId block, const Entries& owed) {
    Node& node = nodes_[block];
    Entries home = node.epoch ? Entries{{node.stream, node.epoch}} : Entries{};
    entry_pool_.store(node, joined(home, owed));
    settle(block);
}

// Put a freed block into the stream's cache, else into the shared one, if its size is asked for again and again.
HIT_PATH bool Heap::keep(BlockId block, bool only_home) {
    Node& node = nodes_[block];
    uint64_t nbytes = bytes(node);
    auto& local = streams_[node.stream]->cache;
    bool large = natural_arena(nbytes);
    Bin* bin = local.find(node.granules, large);
    if (!bin || !bin->hot(large) || node.arena != large) return false;
    if (only_home && (local.has_room(nbytes) || (local.is_outsize(nbytes) && vacate(local, node.granules)))) {
        local.push(nodes_, *bin, block, nbytes);
    } else if (!keep_shared(block)) {
        return false;
    }
    cached_ += nbytes;
    return true;
}

// Make way for an outsize block: one of another size goes, one of the same size stays.
bool Heap::vacate(BinTable<8>& cache, uint64_t granules) {
    if (!cache.outsize()) return true;
    uint64_t there = nodes_[cache.outsize()].granules;
    if (there == granules) return false;
    drain(cache, *cache.find(there, natural_arena(there << shift_)), 1);
    return true;
}

bool Heap::keep_shared(BlockId block) {
    Node& node = nodes_[block];
    Bin* own = shared_.find(node.granules, node.arena);
    Bin& bin = own ? *own : shared_.find_weakest(node.granules, node.arena);
    if (!own) strike(shared_, bin, node.granules);
    if (bin.granules != node.granules || !shared_.has_room(bytes(node))) return false;
    bin.strikes = 0;
    // Of the blocks that wait for other streams the oldest is the likeliest to be ready, so those are taken in turn.
    if (node.more) {
        shared_.append(nodes_, bin, block, bytes(node));
    } else {
        shared_.push(nodes_, bin, block, bytes(node));
    }
    node.shared = true;
    return true;
}

// Put off joining a deferred block that was taken, once more.
HIT_PATH bool Heap::defer_again(BlockId block) {
    Node& node = nodes_[block];
    if (block != deferred_.out || !deferred_.out_deferred || node.more || node.stream != deferred_.stream) return false;
    note_free(node);
    node.state = State::Pending;
    node.bare = 0;
    deferred_.out = 0;
    return true;
}

// Everything about a free but the account's side of it.
HIT_PATH void Heap::give_back(BlockId block, std::span<const Entry> extra) {
    Node& node = nodes_[block];
    node.epoch = streams_[node.stream]->epochs.open;
    if (!extra.empty()) [[unlikely]] owe(node, extra);
    if (!keep(block, node.more == 0) && !defer_again(block)) settle(block);
}

// Have a block that waits for its home wait for other uses too; mostly there is one.
[[gnu::noinline]] void Heap::owe(Node& node, std::span<const Entry> extra) {
    if (extra.size() == 1) {
        if (extra[0].stream != node.stream && !is_done(extra[0])) entry_pool_.add(node, extra[0]);
        return;
    }
    entry_pool_.store(node, joined({{node.stream, node.epoch}}, undone({extra.begin(), extra.end()})));
}

HIT_PATH uint32_t Heap::free_locked(BlockId block, std::span<const Entry> extra) {
    const Node& node = nodes_[block];
    bool inside = node.arena >= 2;
    uint32_t account = node.account;
    if (log_) [[unlikely]] log_free(block, extra);
    accounts_.free(account, bytes(node), bytes(node) - node.slack);
    give_back(block, extra);
    return inside ? flags_inside(account) : released_flags();
}

uint32_t Heap::free(BlockId block) {
    ASYNCMEM_ENTER(free, block);
    need_live(block);
    return free_locked(block, {});
}

uint32_t Heap::free(BlockId block, std::span<const Entry> extra) {
    ASYNCMEM_ENTER(free, block, extra);
    need_live(block);
    for (const Entry& entry : extra) need_stream(entry.stream);
    return free_locked(block, extra);
}

uint32_t Heap::free_everywhere(BlockId block) {
    ASYNCMEM_ENTER(free_everywhere, block);
    need_live(block);
    Entries everything;
    for (uint32_t s = 0; s < streams_.size(); ++s) everything.push_back({s, streams_[s]->epochs.open});
    return free_locked(block, everything);
}

uint32_t Heap::free_many(std::span<const BlockId> blocks) {
    ASYNCMEM_ENTER(free_many, blocks);
    size_t count = blocks.size();
    // All or nothing: mark every block first, so that one named twice or not live is found before any is freed.
    for (size_t i = 0; i < count; ++i) {
        if (nodes_.known(blocks[i]) && nodes_[blocks[i]].state == State::Live) {
            nodes_[blocks[i]].state = State::Pending;
            continue;
        }
        while (i--) nodes_[blocks[i]].state = State::Live;
        refuse_argument("not a live block (freed already, never taken, or named twice)");
    }
    // Blocks of one account in a row, as in a batch, are credited together.
    bool inside = true;
    uint32_t flags = 0;
    for (size_t i = 0, from = 0; i < count; from = i) {
        uint32_t account = nodes_[blocks[i]].account;
        uint64_t total = 0, slack = 0;
        for (; i < count && nodes_[blocks[i]].account == account; ++i) {
            const Node& node = nodes_[blocks[i]];
            total += bytes(node);
            slack += node.slack;
            inside = inside && node.arena >= 2;
            if (log_) [[unlikely]] log_free(blocks[i], {});
            give_back(blocks[i], {});
        }
        accounts_.free(account, total, total - slack, i - from);
        flags |= flags_inside(account);
    }
    return inside ? flags : released_flags();
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
    ASYNCMEM_ENTER(flush, stream);
    if (stream >= 0) need_stream(stream);
    uint64_t drained = 0;
    auto empty = [&](auto& cache) {
        // Often, and mostly of few blocks: so it ends with the last of them.
        for (auto bin = cache.bins().begin(); cache.blocks(); ++bin)
            if (bin->head) {
                if (natural_arena(bin->granules << shift_)) bin->doubt();
                drained += drain(cache, *bin, UINT32_MAX);
            }
    };
    for (size_t s = 0; s < streams_.size(); ++s)
        if (stream < 0 || s == static_cast<size_t>(stream)) empty(streams_[s]->cache);
    if (stream < 0) empty(shared_);
    return drained;
}

void Heap::need_live(BlockId block) const {
    if (!nodes_.known(block) || nodes_[block].state != State::Live)
        refuse_argument("not a live block (freed already, or never taken)");
}

Heap::Stream& Heap::need_stream(int64_t stream) const {
    if (stream < 0 || static_cast<size_t>(stream) >= streams_.size()) refuse_argument("unknown stream");
    return *streams_[stream];
}

}  // namespace asyncmem
