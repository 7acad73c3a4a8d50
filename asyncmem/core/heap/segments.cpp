// Streams and epochs; segments, and leases: a lease is a live block that holds a segment and an arena of its own;
// accounts, gates and marks.

#include <algorithm>

#include "heap.hpp"

namespace asyncmem {

uint32_t Heap::add_stream() {
    ASYNCMEM_ENTER(add_stream);
    streams_.push_back(std::make_unique<Stream>());
    streams_.back()->cache.max_blocks = tuning_.stream_cache_blocks;
    streams_.back()->cache.max_bytes = tuning_.stream_cache_bytes;
    return static_cast<uint32_t>(streams_.size() - 1);
}

uint64_t Heap::close_epoch(uint32_t stream) {
    ASYNCMEM_ENTER(close_epoch, stream);
    return need_stream(stream).epochs.open++;
}

void Heap::publish(uint32_t stream, uint64_t epoch) {
    ASYNCMEM_ENTER(publish, stream, epoch);
    Epochs& epochs = need_stream(stream).epochs;
    // A fence recorded before the epoch was closed would not cover frees that joined it later.
    if (epoch >= epochs.open) refuse_argument("the epoch is still open: close it before its fence");
    epochs.recorded = std::max(epochs.recorded, epoch);
}

void Heap::mark_done(uint32_t stream, uint64_t epoch) {
    ASYNCMEM_ENTER(mark_done, stream, epoch);
    Epochs& epochs = need_stream(stream).epochs;
    if (epoch >= epochs.open) refuse_argument("the epoch is still open: it cannot be done");
    epochs.recorded = std::max(epochs.recorded, epoch);
    epochs.done = std::max(epochs.done, epoch);
}

bool Heap::lags() const {
    std::lock_guard lock(lock_);
    return std::any_of(streams_.begin(), streams_.end(), [](auto& one) { return one->epochs.recorded > one->epochs.done; });
}

uint32_t Heap::add_segment(uint64_t address, uint64_t nbytes, uint32_t arena, uint32_t stream, uint64_t epoch) {
    Coalesced coalesced(*this);
    need_stream(stream);
    uint64_t mask = (uint64_t{1} << shift_) - 1;
    if (arena > 1) refuse_argument("segments are born in arena 0 or 1");
    if (!nbytes || nbytes > max_size || (nbytes & mask) || (address & mask) || address + nbytes < address)
        refuse_argument("a segment's address and size must be whole granules");
    uint32_t id = add_range({.address = address, .nbytes = nbytes, .mapped = nbytes, .arena = arena, .used = true},
                            std::min(epoch, streams_[stream]->epochs.open), stream);
    accounts_.close_up();  // what has come is for waiting requests
    reserved_ += nbytes;
    note_reserved();
    return id;
}

// One free block over a whole new range, owing `stream` its `epoch`.
uint32_t Heap::add_range(Segment range, uint64_t epoch, uint32_t stream) {
    uint32_t id = segments_.acquire();
    Segment& segment = segments_[id] = std::move(range);
    BlockId block = segment.first = nodes_.acquire();
    Node& node = nodes_[block] = Node{};
    node.address = segment.address;
    node.granules = segment.nbytes >> shift_;
    node.epoch = epoch;
    node.stream = stream;
    node.segment = id;
    node.arena = segment.arena;
    index_add(block);
    return id;
}

void Heap::keep_whole(uint64_t end, uint64_t nbytes, uint64_t least) {
    std::lock_guard lock(lock_);
    whole_end_ = end;
    whole_from_ = nbytes >> shift_;
    whole_least_ = least >> shift_;
}

Entries Heap::remove_segment(uint32_t segment) {
    Coalesced coalesced(*this);
    if (segment >= segments_.size() || !segments_[segment].used || segments_[segment].container || segments_[segment].space)
        refuse_argument("unknown segment");
    if (!is_empty(segments_[segment])) refuse_argument("the segment is not wholly free");
    BlockId block = segments_[segment].first;
    Entries owed = undone(entry_pool_.all(nodes_[block]));
    index_remove(nodes_[block]);
    entry_pool_.store(nodes_[block], {});
    nodes_.release(block);
    reserved_ -= segments_[segment].nbytes;
    drop_segment(segment);
    return owed;
}

void Heap::drop_segment(uint32_t segment) {
    segments_[segment] = Segment{};
    segments_.release(segment);
}

uint32_t Heap::open_lease(BlockId block) {
    ASYNCMEM_WRITTEN(open_lease, block);
    Coalesced coalesced(*this);
    need_live(block);
    uint32_t arena = arenas_.acquire();
    Node& node = nodes_[block];
    // The range owes what its holder's stream does from here on: another stream inside the lease must wait for it.
    uint64_t epoch = streams_[node.stream]->epochs.open;
    uint32_t range = add_range(
        {.address = node.address, .nbytes = bytes(node), .container = block, .arena = arena, .used = true}, epoch,
        node.stream);
    arenas_[arena].used = true;
    arenas_[arena].segment = range;
    node.state = State::Leased;
    node.slot = arena;
    return arena;
}

uint32_t Heap::close_lease(uint32_t arena) {
    ASYNCMEM_WRITTEN(close_lease, arena);
    Coalesced coalesced(*this);
    if (arena < 2 || !known_arena(arena)) refuse_argument("unknown lease");
    uint32_t range_id = arenas_[arena].segment;
    Segment range = std::move(segments_[range_id]);
    Node container = nodes_[range.container];
    std::vector<BlockId> freed;
    for (BlockId block = range.first; block; block = nodes_[block].after) {
        if (nodes_[block].state != State::Free) continue;
        index_remove(nodes_[block]);
        freed.push_back(block);
    }
    accounts_.leave(container.account, bytes(container), bytes(container) - container.slack);
    if (log_ && container.arena < 2) log_lease_end(range);
    ++leases_closed_;
    adopt_range(range, container);
    nodes_.release(range.container);
    drop_segment(range_id);
    arenas_[arena] = Arena{};
    arenas_.release(arena);
    for (BlockId block : freed) settle(block);
    return container.arena < 2 ? released_flags() : flags_inside(container.account);
}

// Put the blocks of a lease's range in the place of the leased block, on its account.
void Heap::adopt_range(const Segment& range, const Node& container) {
    BlockId last = 0;
    for (BlockId block = range.first; block; block = nodes_[block].after) {
        Node& node = nodes_[block];
        node.segment = container.segment;
        node.arena = container.arena;
        last = block;
        if (node.state == State::Pending) continue;
        accounts_.leave(node.account, bytes(node), bytes(node) - node.slack);
        accounts_.adopt(container.account, bytes(node), bytes(node) - node.slack);
        node.account = container.account;
    }
    nodes_[range.first].before = container.before;
    nodes_[last].after = container.after;
    if (container.after) nodes_[container.after].before = last;
    if (container.before) {
        nodes_[container.before].after = range.first;
    } else {
        segments_[container.segment].first = range.first;
    }
}

void Heap::set_home(BlockId block, uint32_t stream) {
    ASYNCMEM_ENTER(set_home, block, stream);
    need_live(block);
    need_stream(stream);
    nodes_[block].stream = stream;
    nodes_[block].epoch = 0;
}

BlockInfo Heap::info(BlockId block) const {
    std::lock_guard lock(lock_);
    if (!nodes_.known(block) || !in_use(nodes_[block]))
        refuse_argument("not a live block (freed already, or never taken)");
    return describe(nodes_[block]);
}

uint32_t Heap::add_account(int64_t parent, uint64_t limit) {
    ASYNCMEM_ENTER(add_account, parent, limit);
    if (parent != -1) need_account(parent);
    return accounts_.add(static_cast<int32_t>(parent), limit);
}

bool Heap::remove_account(uint32_t account) {
    ASYNCMEM_ENTER(remove_account, account);
    need_account(account);
    if (account == 0) refuse_argument("account 0 is the pool's own");
    if (accounts_[account].live || accounts_[account].children) return false;
    accounts_.remove(account);
    return true;
}

void Heap::set_limit(uint32_t account, uint64_t limit) {
    std::lock_guard lock(lock_);
    need_account(account);
    accounts_[account].limit = limit;
}

void Heap::promise(uint32_t account, int64_t nbytes) {
    std::lock_guard lock(lock_);
    need_account(account);
    accounts_.promise(account, nbytes);
}

uint64_t Heap::set_gate(uint32_t account, bool closed) {
    std::lock_guard lock(lock_);
    need_account(account);
    accounts_.set_gate(account, closed);
    return accounts_.returns();
}

void Heap::reset_peaks() {
    ASYNCMEM_ENTER(reset_peaks);
    accounts_.reset_peaks();
    total_.peak_cached = reserved_ - accounts_[0].live;
    total_.peak_reserved = reserved_;
}

const Account& Heap::need_account(int64_t account) const {
    if (!accounts_.known(account)) refuse_argument("unknown account");
    return accounts_[static_cast<uint32_t>(account)];
}

}  // namespace asyncmem
