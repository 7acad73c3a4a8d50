// A heap's log. An open lease is one allocation, of its whole range; what is taken inside is no matter of the pool's.
#include "log.hpp"

#include "heap.hpp"

namespace asyncmem {

bool Heap::begin_log() {
    std::lock_guard lock(lock_);
    if (log_) return false;
    auto log = std::make_unique<Log>();
    log_.swap(log);
    for (BlockId block = 1; block < nodes_.size(); ++block)
        if (nodes_[block].state == State::Live || nodes_[block].state == State::Leased) log_take(block);
    log_->run();
    return true;
}

Logged Heap::read_log() const {
    std::lock_guard lock(lock_);
    return logged();
}

Logged Heap::end_log() {
    std::lock_guard lock(lock_);
    Logged found = logged();
    log_.reset();
    return found;
}

Logged Heap::logged() const {
    Logged found;
    if (!log_) return found;
    found.cut = log_->cut();
    found.rows.reserve(log_->size());
    for (size_t i = 0; i < log_->size(); ++i) found.rows.push_back((*log_)[i]);
    return found;
}

void Heap::log_take(BlockId block) {
    const Node& node = nodes_[block];
    if (node.arena < 2) log_->taken(block, bytes(node) - node.slack, node.stream);
}

// Of several streams that used it, one besides home is named: a replay orders the free behind home anyway.
void Heap::log_free(BlockId block, const Entries* extra) {
    const Node& node = nodes_[block];
    uint32_t stream = node.stream;
    for (size_t i = 0; extra && i < extra->size() && stream == node.stream; ++i) stream = (*extra)[i].stream;
    log_->freed(block, bytes(node) - node.slack, stream);
}

// The range goes, and what is still held inside is the pool's own from here on.
void Heap::log_lease_end(const Segment& range) {
    const Node& container = nodes_[range.container];
    log_->freed(range.container, bytes(container) - container.slack, container.stream);
    for (BlockId block = range.first; block; block = nodes_[block].after) {
        const Node& node = nodes_[block];
        if (node.state == State::Live || node.state == State::Leased)
            log_->taken(block, bytes(node) - node.slack, node.stream);
    }
}

}  // namespace asyncmem
