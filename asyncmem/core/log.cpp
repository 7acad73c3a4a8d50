// A heap's log. An open lease is one allocation, of its whole range; what is taken inside is no matter of the pool's.
#include "log.hpp"

#include <algorithm>
#include <atomic>

#include "heap.hpp"

namespace asyncmem {

uint16_t thread_number() noexcept {
    static std::atomic<uint32_t> known{0};
    thread_local const uint32_t mine = ++known;
    return mine <= std::numeric_limits<uint16_t>::max() ? static_cast<uint16_t>(mine) : 0;
}

void Log::close(uint32_t reader) {
    std::erase_if(readers_, [&](const Reader& one) { return one.id == reader; });
    forget();
}

Log::Part Log::read(uint32_t reader, uint64_t most, bool consume) {
    Part part;
    part.cut = cut_;
    for (Reader& one : readers_) {
        if (one.id != reader) continue;
        uint64_t start = start_of(one);
        uint64_t stop = start + std::min(most, end_ - start);
        part.rows.reserve(stop - start);
        for (uint64_t position = start; position < stop; ++position) part.rows.push_back(at(position));
        part.lost = one.lost + (start - one.at);
        if (consume) {
            one.lost = part.lost;
            one.at = stop;
        }
    }
    if (consume) forget();
    return part;
}

Log::Rows Log::held() const {
    Rows rows;
    for (const Page& page : held_)
        for (size_t i = 0; page && i < page_rows; ++i)
            if (page[i].number != LogRow::nobody) rows.push_back(page[i]);
    std::sort(rows.begin(), rows.end(), [](const LogRow& a, const LogRow& b) { return a.number < b.number; });
    for (LogRow& row : rows) row.what = LogRow::Held;
    return rows;
}

uint64_t Log::start_of(const Reader& reader) const {
    uint64_t unread = end_ - reader.at;
    return unread > reader.keep ? end_ - reader.keep : reader.at;
}

void Log::add_page() {
    if (!spare_) forget();
    pages_.push_back(spare_ ? std::move(spare_) : Page(new LogRow[page_rows]));
}

// Let go of pages that no reader will ask for any more.
void Log::forget() {
    uint64_t wanted = end_;
    for (const Reader& reader : readers_) wanted = std::min(wanted, start_of(reader));
    while (!pages_.empty() && first_ + page_rows <= wanted) {
        spare_ = std::move(pages_.front());
        pages_.pop_front();
        first_ += page_rows;
    }
}

uint32_t Heap::open_log(uint64_t keep, Log::Rows& held) {
    std::lock_guard lock(lock_);
    if (!log_) {
        auto log = std::make_unique<Log>();
        for (BlockId block = 1; block < nodes_.size(); ++block) {
            const Node& node = nodes_[block];
            if (in_use(node) && node.arena < 2)
                log->found(block, row_of(node));
        }
        log_.swap(log);
    }
    held = log_->held();
    return log_->open(keep);
}

Log::Part Heap::read_log(uint32_t reader, uint64_t most, bool consume) {
    std::lock_guard lock(lock_);
    return log_ ? log_->read(reader, most, consume) : Log::Part{};
}

void Heap::close_log(uint32_t reader) {
    std::unique_ptr<Log> over;  // ends without the lock
    std::lock_guard lock(lock_);
    if (!log_) return;
    log_->close(reader);
    if (log_->read_by_nobody()) over.swap(log_);
}

Log::Rows Heap::held() const {
    std::lock_guard lock(lock_);
    return log_ ? log_->held() : Log::Rows{};
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
        row.site = ask.cause.site;
        row.task = ask.cause.task;
        row.tag = ask.cause.tag;
        row.thread = ask.cause.thread;
        if (ask.cause.missed) row.level = LogRow::Missed;
    } else {
        row.thread = thread_number();
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
