// What the heap says about itself: gauges, counters, the walk over all blocks, what is in no use, and every invariant.

#include <algorithm>
#include <atomic>

#include "heap.hpp"

namespace asyncmem {

// The largest free block outside the caches: of one arena, or (-1) of arenas 0 and 1.
uint64_t Heap::largest(int32_t arena) const {
    Coalesced coalesced(*this);
    if (arena >= 0 && !known_arena(arena)) refuse_argument("unknown arena");
    uint64_t most = 0;
    for (size_t a = 0; a < arenas_.size(); ++a) {
        if (arena >= 0 ? a != static_cast<size_t>(arena) : a > 1) continue;
        for (auto& index : arenas_[a].by_key) {
            if (index) index->each_large([&](BlockId block) { most = std::max(most, bytes(nodes_[block])); });
        }
    }
    return most;
}

// Free bytes outside leases that some stream has still to be done with. Walks the blocks that owe anything.
uint64_t Heap::pending_bytes() const {
    Coalesced coalesced(*this);
    uint64_t pending = 0;
    for (uint32_t a : {0, 1}) {
        auto& by_key = arenas_[a].by_key;
        for (size_t key = 1; key < by_key.size(); ++key) {
            if (!by_key[key]) continue;
            by_key[key]->each([&](BlockId block) {
                if (!undone(entry_pool_.all(nodes_[block])).empty()) pending += mapped(nodes_[block]);
            });
        }
    }
    return pending;
}

Counts Heap::counts() const {
    Coalesced coalesced(*this);
    Counts c = total_;
    c.reserved = reserved_;
    c.live = accounts_[0].live;
    c.peak_live = accounts_.peak();
    c.free = unused();
    c.cached = cached_;
    c.lifted = lifted_;
    c.cached_blocks = shared_.blocks();
    for (auto& stream : streams_) c.cached_blocks += stream->cache.blocks();
    Account all = accounts_.totals();
    c.stream_hits = all.hits[0];
    c.shared_hits = all.hits[1];
    c.placed = all.hits[2];
    c.allocations = c.stream_hits + c.shared_hits + c.placed;
    c.frees = all.frees;
    c.live_blocks = c.allocations - c.frees - leases_closed_;
    for (const Arena& arena : arenas_) {
        for (auto& index : arena.by_key) c.free_blocks += index ? index->count() : 0;
    }
    for (const Segment& segment : segments_) {
        if (!segment.used || segment.container) continue;
        c.segments += segment.mapped > 0;
        if (is_empty(segment)) c.empty += segment.nbytes;
    }
    c.streams = streams_.size();
    for (uint32_t a = 0; a < accounts_.size(); ++a) c.accounts += accounts_[a].used;
    c.leases = arenas_.used() - 2;
    return c;
}

std::vector<SegmentInfo> Heap::segments() const {
    Coalesced coalesced(*this);
    std::vector<SegmentInfo> all;
    for (uint32_t s = 0; s < segments_.size(); ++s)
        if (segments_[s].used && !segments_[s].container) all.push_back(survey(s));
    return all;
}

SegmentInfo Heap::survey(uint32_t id) const {
    const Segment& segment = segments_[id];
    SegmentInfo info{};
    info.id = id;
    info.arena = segment.arena;
    info.address = segment.address;
    info.nbytes = segment.mapped;
    for (BlockId block = segment.first; block; block = nodes_[block].after) {
        const Node& node = nodes_[block];
        if (node.state == State::Free) {
            info.free += mapped(node);
            info.largest = std::max(info.largest, bytes(node));
        } else if (node.state == State::Cached) {
            info.cached += bytes(node);
        } else if (in_use(node)) {
            info.live += bytes(node);
            ++info.live_blocks;
        }
    }
    return info;
}

std::vector<Piece> Heap::empty_segments() const {
    Coalesced coalesced(*this);
    std::vector<Piece> empty;
    for (uint32_t s = 0; s < segments_.size(); ++s) {
        const Segment& segment = segments_[s];
        if (!is_empty(segment)) continue;
        Entries uses = undone(entry_pool_.all(nodes_[segment.first]));
        empty.push_back({s, segment.address, segment.nbytes, std::move(uses), segment.arena});
    }
    return empty;
}

BlockInfo Heap::describe(const Node& node) const {
    if (in_use(node)) return {node.address, bytes(node), node.state, node.arena, node.stream, node.account, {}};
    return {node.address, bytes(node), node.state, node.arena, 0, 0, entry_pool_.all(node)};
}

// Every block, segment by segment in address order; the inside of a lease after the segments.
std::vector<BlockInfo> Heap::blocks() const {
    Coalesced coalesced(*this);
    std::vector<BlockInfo> all;
    for (bool leases : {false, true}) {
        for (const Segment& segment : segments_) {
            if (!segment.used || (segment.container != 0) != leases) continue;
            for (BlockId block = segment.first; block; block = nodes_[block].after) {
                all.push_back(describe(nodes_[block]));
            }
        }
    }
    return all;
}

// Walks all blocks. A hole is a stretch of memory, free or cached, whatever it still waits for; it ends where a block is in
// use, and where there is no memory.
Waste Heap::waste() const {
    Coalesced coalesced(*this);
    Waste found;
    found.stranded.resize(streams_.size());
    uint64_t hole = 0;
    auto close = [&] {
        found.largest = std::max(found.largest, hole);
        found.squares += static_cast<double>(hole) * static_cast<double>(hole);
        found.bytes += hole;
        hole = 0;
    };
    for (const Segment& segment : segments_) {
        if (!segment.used || segment.container) continue;
        for (BlockId block = segment.first; block; block = nodes_[block].after) {
            const Node& node = nodes_[block];
            if (node.state != State::Free && node.state != State::Cached) {
                close();
                continue;
            }
            // Stranded for each stream whose unfinished work it waits for; what is in a stream's cache is that one's.
            if (node.state == State::Cached && !node.shared) {
                found.stranded[node.stream] += bytes(node);
            } else {
                uint64_t nbytes = node.state == State::Cached ? bytes(node) : mapped(node);
                for (const Entry& entry : undone(entry_pool_.all(node))) found.stranded[entry.stream] += nbytes;
            }
            if (node.state == State::Cached || !node.bare) {
                hole += bytes(node);
                continue;
            }
            segment.space->stretches(node.address, bytes(node), [&](uint64_t, uint64_t size, bool filled) {
                if (filled) {
                    hole += size;
                } else {
                    close();
                }
            });
        }
        close();
    }
    return found;
}

namespace {
std::string at(uint64_t address, const char* what) { return std::string(what) + " at address " + std::to_string(address); }
}  // namespace

std::string Heap::check() const {
    Coalesced coalesced(*this);
    Sums sums{.charged = std::vector<uint64_t>(accounts_.size()), .requested = std::vector<uint64_t>(accounts_.size())};
    for (uint32_t s = 0; s < segments_.size(); ++s) {
        if (!segments_[s].used) continue;
        if (std::string wrong = check_segment(s, sums); !wrong.empty()) return wrong;
    }
    if (std::string wrong = check_sums(sums); !wrong.empty()) return wrong;
    return check_caches();
}

// The blocks of a segment follow each other without gap or overlap and fill it.
std::string Heap::check_segment(uint32_t id, Sums& sums) const {
    const Segment& segment = segments_[id];
    uint64_t address = segment.address;
    BlockId before = 0;
    if (!segment.container) sums.reserved += segment.mapped;
    for (BlockId block = segment.first; block; before = block, block = nodes_[block].after) {
        const Node& node = nodes_[block];
        if (node.address != address) return at(address, "gap or overlap between blocks");
        if (node.before != before) return at(address, "neighbour links disagree");
        if (node.segment != id || node.arena != segment.arena) return at(address, "block in the wrong segment or arena");
        if (!node.granules) return at(address, "block without bytes");
        if (std::string wrong = check_block(block, segment); !wrong.empty()) return wrong;
        sum_up(node, segment, sums);
        address += bytes(node);
    }
    if (address != segment.address + segment.nbytes) return at(segment.address, "blocks do not fill their segment");
    return segment.space ? check_space(id) : "";
}

void Heap::sum_up(const Node& node, const Segment& segment, Sums& sums) const {
    sums.mixed += node.more != 0;
    if (node.state == State::Cached) sums.cached += bytes(node);
    if (node.state == State::Free) {
        ++sums.free_blocks;
        if (!segment.container) sums.free += mapped(node);
    }
    if (!in_use(node)) return;
    ++sums.live_blocks;
    if (!segment.container) sums.live += bytes(node);
    for (int32_t a = static_cast<int32_t>(node.account); a >= 0; a = accounts_[a].parent) {
        sums.charged[a] += bytes(node);
        sums.requested[a] += bytes(node) - node.slack;
    }
}

std::string Heap::check_block(BlockId block, const Segment& segment) const {
    const Node& node = nodes_[block];
    switch (node.state) {
        case State::Live:
        case State::Leased:
            if (node.more) return at(node.address, "live block with entries of several streams");
            if (!accounts_[node.account].used) return at(node.address, "live block on an unknown account");
            if (node.state == State::Leased && segments_[arenas_[node.slot].segment].container != block)
                return at(node.address, "leased block and its arena disagree");
            return "";
        case State::Free: {
            uint32_t key = key_of(node);
            const auto& by_key = arenas_[node.arena].by_key;
            if (key >= by_key.size() || !by_key[key]) return at(node.address, "free block without an index");
            if (node.more && entry_pool_[node.more].size() < 2) return at(node.address, "mixed block with one entry");
            if (!by_key[key]->holds(node, block)) return at(node.address, "free block that its index does not hold");
            for (const Entry& entry : entry_pool_.all(node))
                if (entry.epoch > streams_[entry.stream]->epochs.open) return at(node.address, "entry of a future epoch");
            return "";
        }
        case State::Cached:
            if (segment.arena > 1 || !cacheable(node)) return at(node.address, "cached block in the wrong arena");
            if (!node.shared && (node.more || !node.epoch)) return at(node.address, "stream cache holds another stream's block");
            return "";
        case State::Bare:
        case State::Lifted:
        case State::Filling:
            return segment.space ? "" : at(node.address, "block of a space outside of any");
        default:
            return at(node.address, "block in no state that lasts");
    }
}

// Bytes are conserved: reserved = live + free + cached, and every account equals the blocks charged to it.
std::string Heap::check_sums(const Sums& sums) const {
    Account all = accounts_.totals();
    uint64_t expected = all.grants() - all.frees - leases_closed_, indexed = 0;
    if (sums.reserved != reserved_ || sums.live != accounts_[0].live || sums.cached != cached_ ||
        sums.live_blocks != expected)
        return "the heap's totals differ from the sum of its blocks";
    if (sums.free != unused()) return "reserved is not live + free + cached + lifted";
    for (uint32_t a = 0; a < accounts_.size(); ++a)
        if (accounts_[a].used && (sums.charged[a] != accounts_[a].live || sums.requested[a] != accounts_[a].requested))
            return "account " + std::to_string(a) + " differs from the blocks charged to it";
    for (const Arena& arena : arenas_)
        for (auto& index : arena.by_key) indexed += index ? index->count() : 0;
    if (indexed != sums.free_blocks) return "the free index does not hold exactly the free blocks";
    return sums.mixed == entry_pool_.used() ? "" : "entry lists leaked or shared";
}

std::string Heap::check_caches() const {
    auto walk = [this](const auto& cache, bool shared, uint32_t stream) -> std::string {
        uint64_t blocks = 0, total = 0;
        for (const Bin& bin : cache.bins()) {
            uint32_t count = 0;
            BlockId before = 0;
            for (BlockId block = bin.head; block; before = block, block = nodes_[block].slot, ++count) {
                const Node& node = nodes_[block];
                if (node.state != State::Cached || node.shared != shared || node.granules != bin.granules ||
                    node.link != before || (!shared && node.stream != stream))
                    return at(node.address, "bin holds a block that is not its own");
                if (block != cache.outsize()) total += bytes(node);
            }
            if (count != bin.count || before != bin.tail) return "bin count differs from its blocks";
            blocks += count;
        }
        if (blocks != cache.blocks() || total != cache.bytes()) return "cache totals differ from their bins";
        if (blocks > cache.max_blocks || total > cache.max_bytes) return "cache is over its cap";
        return "";
    };
    for (uint32_t s = 0; s < streams_.size(); ++s)
        if (std::string wrong = walk(streams_[s]->cache, false, s); !wrong.empty()) return wrong;
    return walk(shared_, true, 0);
}

// The log. An open lease is one allocation, of its whole range; what is taken inside is no matter of the pool's.

uint16_t thread_number() noexcept {
    static std::atomic<uint32_t> known{0};
    thread_local const uint32_t mine = ++known;
    return mine <= std::numeric_limits<uint16_t>::max() ? static_cast<uint16_t>(mine) : 0;
}

uint32_t Heap::open_log(uint64_t keep, Log::Rows& held) {
    std::lock_guard lock(lock_);
    if (!log_) {
        auto log = std::make_unique<Log>();
        int64_t now = Log::now();
        for (BlockId block = 1; block < nodes_.size(); ++block) {
            const Node& node = nodes_[block];
            if (!in_use(node) || node.arena >= 2) continue;
            LogRow row = row_of(node);
            row.what = LogRow::Held;
            row.time_ns = now;
            log->taken(block, row);
        }
        log_.swap(log);
    }
    held = log_->held();
    return log_->open(keep);
}

void Heap::close_log(uint32_t reader) {
    std::unique_ptr<Log> over;  // ends without the lock
    std::lock_guard lock(lock_);
    if (!log_) return;
    log_->close(reader);
    if (log_->read_by_nobody()) over.swap(log_);
}

void Heap::note(LogRow row) {
    std::lock_guard lock(lock_);
    if (!log_) return;
    row.time_ns = Log::now();
    log_->note(row);
}

LogRow Heap::row_of(const Node& node) const {
    LogRow row;
    row.nbytes = bytes(node) - node.slack;
    row.address = node.address;
    row.stream = static_cast<uint16_t>(node.stream);
    row.level = static_cast<uint8_t>(node.link);
    return row;
}

void Heap::log_take(BlockId block, const Ask& ask) {
    const Node& node = nodes_[block];
    if (node.arena >= 2) return;
    LogRow row = row_of(node);
    row.time_ns = Log::now();
    if (ask.caused) {
        row.span_ns = ask.cause.span_ns;
        row.caller = ask.cause.caller;
        if (ask.cause.missed) row.level = LogRow::Missed;
    } else {
        row.caller.thread = thread_number();
    }
    log_->taken(block, row);
}

// Of several streams that used it, one besides home is named: a replay orders the free behind home anyway.
void Heap::log_free(BlockId block, std::span<const Entry> extra) {
    const Node& node = nodes_[block];
    uint32_t stream = node.stream;
    for (size_t i = 0; i < extra.size() && stream == node.stream; ++i) stream = extra[i].stream;
    log_->freed(block, stream);
}

// The range goes, and what is still held inside is the pool's own from here on.
void Heap::log_lease_end(const Segment& range) {
    const Node& container = nodes_[range.container];
    log_->freed(range.container, container.stream);
    for (BlockId block = range.first; block; block = nodes_[block].after) {
        const Node& node = nodes_[block];
        if (!in_use(node)) continue;
        LogRow row = row_of(node);
        row.time_ns = Log::now();
        log_->taken(block, row);
    }
}

}  // namespace asyncmem
