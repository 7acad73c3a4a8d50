// check(): walk every structure and answer the first invariant that does not hold, in words.
#include "heap.hpp"

#include <algorithm>

namespace asyncmem {

namespace {
std::string at(uint64_t address, const char* what) { return std::string(what) + " at address " + std::to_string(address); }
}  // namespace

std::string Heap::check() const {
    Noted noted(*this);
    for (uint32_t s = 0; s < segments_.size(); ++s) {
        if (!segments_[s].used) continue;
        if (std::string wrong = check_segment(s); !wrong.empty()) return wrong;
    }
    if (std::string wrong = check_sums(); !wrong.empty()) return wrong;
    if (std::string wrong = check_caches(); !wrong.empty()) return wrong;
    return check_indexes();
}

// The blocks of a segment follow each other without gap or overlap and fill it.
std::string Heap::check_segment(uint32_t id) const {
    const Segment& segment = segments_[id];
    uint64_t address = segment.address;
    BlockId before = 0;
    for (BlockId block = segment.first; block; before = block, block = nodes_[block].after) {
        const Node& node = nodes_[block];
        if (node.address != address) return at(address, "gap or overlap between blocks");
        if (node.before != before) return at(address, "neighbour links disagree");
        if (node.segment != id || node.arena != segment.arena) return at(address, "block in the wrong segment or arena");
        if (!node.granules) return at(address, "block without bytes");
        if (std::string wrong = check_block(block, segment); !wrong.empty()) return wrong;
        address += bytes(node);
    }
    if (address != segment.address + segment.nbytes) return at(segment.address, "blocks do not fill their segment");
    return segment.space ? check_space(id) : "";
}

std::string Heap::check_block(BlockId block, const Segment& segment) const {
    const Node& node = nodes_[block];
    switch (node.state) {
        case State::Live:
        case State::Leased:
            if (node.more) return at(node.address, "live block with entries of several streams");
            if (!ledger_[node.account].used) return at(node.address, "live block on an unknown account");
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
std::string Heap::check_sums() const {
    uint64_t live = 0, free = 0, cached = 0, reserved = 0, live_blocks = 0;
    std::vector<uint64_t> charged(ledger_.size()), requested(ledger_.size());
    for (const Segment& segment : segments_) {
        if (!segment.used) continue;
        if (!segment.container) reserved += segment.mapped;
        for (BlockId block = segment.first; block; block = nodes_[block].after) {
            const Node& node = nodes_[block];
            if (node.state == State::Free && !segment.container) free += mapped(node);
            if (node.state == State::Cached) cached += bytes(node);
            if (!in_use(node)) continue;
            ++live_blocks;
            if (!segment.container) live += bytes(node);
            for (int32_t a = static_cast<int32_t>(node.account); a >= 0; a = ledger_[a].parent) {
                charged[a] += bytes(node);
                requested[a] += bytes(node) - node.slack;
            }
        }
    }
    Account all = ledger_.totals();
    uint64_t expected = all.hits[0] + all.hits[1] + all.hits[2] - all.frees - leases_closed_;
    if (reserved != reserved_ || live != ledger_[0].live || cached != cached_ || live_blocks != expected)
        return "the heap's totals differ from the sum of its blocks";
    if (free != unused()) return "reserved is not live + free + cached + lifted";
    for (uint32_t a = 0; a < ledger_.size(); ++a)
        if (ledger_[a].used && (charged[a] != ledger_[a].live || requested[a] != ledger_[a].requested))
            return "account " + std::to_string(a) + " differs from the blocks charged to it";
    return "";
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

std::string Heap::check_indexes() const {
    uint64_t free_blocks = 0, mixed = 0;
    for (const Segment& segment : segments_) {
        if (!segment.used) continue;
        for (BlockId block = segment.first; block; block = nodes_[block].after) {
            free_blocks += nodes_[block].state == State::Free;
            mixed += nodes_[block].more != 0;
        }
    }
    for (const Arena& arena : arenas_)
        for (auto& index : arena.by_key) free_blocks -= index ? index->count() : 0;
    if (free_blocks) return "the free index does not hold exactly the free blocks";
    return mixed == entry_pool_.used() ? "" : "entry lists leaked or shared";
}

}  // namespace asyncmem
