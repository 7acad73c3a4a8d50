// What is reserved and in no use, as it lies between the blocks that are.
#include <algorithm>

#include "heap.hpp"

namespace asyncmem {

// Walks all blocks. A hole is a stretch of memory, free or cached, whatever it still waits for; it ends where a block is in
// use, and where there is no memory.
Waste Heap::waste() const {
    Settled settled(*this);
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
            strand(node, found.stranded);
            if (node.state == State::Cached || !node.bare) {
                hole += bytes(node);
                continue;
            }
            spaces_[segment.space - 1]->stretches(node.address, bytes(node), [&](uint64_t, uint64_t size, bool filled) {
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

// Count a free block for each stream whose unfinished work it waits for; one in a stream's cache is that stream's alone.
void Heap::strand(const Node& node, std::vector<uint64_t>& stranded) const {
    uint64_t nbytes = node.state == State::Cached ? bytes(node) : mapped(node);
    if (node.state == State::Cached && !node.shared) {
        stranded[node.stream] += nbytes;
        return;
    }
    for (const Entry& entry : undone(entry_pool_.all(node))) stranded[entry.stream] += nbytes;
}

}  // namespace asyncmem
