// What a heap takes and frees, in its order, while somebody reads it, and what its pool notes between.
//
// The heap holds its lock while it writes here. Rows lie in pages that never move, so no row waits for a large copy.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "node.hpp"

namespace asyncmem {

// Who asked and from where: numbers of what the caller keeps by name, 0 for what is not known.
struct Cause {
    Cause() {}  // as it lies: nothing of it is touched while nobody records
    int64_t span_ns;  // from asking to granting
    uint32_t site, task;
    uint16_t tag, thread;
    bool missed;  // it had to wait
};

struct LogRow {
    // Undone: the take has never been. Held: taken before its reader came. The rest is noted by the pool.
    enum What : uint8_t { Taken, Freed, Undone, Held, Grown, Trimmed, Waited, Pressed, Refused };
    enum Level : uint8_t { Missed, OwnCache, SharedCache, Placed, Foreign };
    static constexpr uint64_t nobody = std::numeric_limits<uint64_t>::max();

    int64_t time_ns = 0;  // of the machine's steady clock
    uint64_t nbytes = 0;  // as it was asked for
    uint64_t address = 0;
    int64_t span_ns = 0;  // of a take: from asking to granting; of its end: how long it was held
    uint64_t number = nobody;  // of the take
    uint32_t site = 0, task = 0;
    uint16_t tag = 0, thread = 0, stream = 0;
    What what = Taken;
    uint8_t level = 0;
};
static_assert(sizeof(LogRow) == 56, "read as it lies by who asks for rows");

// A number of the thread that runs, from 1 on, for the life of the process; 0 when there were too many.
uint16_t thread_number() noexcept;

class Log {
public:
    using Rows = std::vector<LogRow>;
    struct Part {
        Rows rows;
        uint64_t lost = 0;  // rows that went before this reader came to read them, so far
        bool cut = false;   // it stopped before its end, because memory ran out
    };

    Log() : began_(now()) {}

    // A reader sees all that is written from now on, but of what it leaves unread no more than the newest `keep` rows.
    uint32_t open(uint64_t keep) {
        readers_.push_back({next_reader_, end_, keep});
        return next_reader_++;
    }
    void close(uint32_t reader);
    bool read_by_nobody() const { return readers_.empty(); }
    // The next rows, `most` at most, which stay for another time unless they are consumed.
    Part read(uint32_t reader, uint64_t most, bool consume);
    // What is taken and not freed.
    Rows held() const;

    // What was live before there was a log is taken when that began.
    void taken(BlockId block, LogRow row) {
        write([&] {
            row.what = LogRow::Taken;
            row.number = next_;
            held_at(block) = row;
            add(row);
            ++next_;
        });
    }
    void found(BlockId block, LogRow row) {
        write([&] {
            row.what = LogRow::Held;
            row.number = next_;
            row.time_ns = began_;
            held_at(block) = row;
            ++next_;
        });
    }
    // The take just written has another stream's memory.
    void foreign(BlockId block) {
        if (cut_ || !knows(block) || held_at(block).level == LogRow::Missed) return;
        held_at(block).level = at(end_ - 1).level = LogRow::Foreign;
    }
    void freed(BlockId block, uint32_t stream) { end(block, stream, LogRow::Freed); }
    void undone(BlockId block) { end(block, 0, LogRow::Undone); }
    void note(const LogRow& row) {
        write([&] { add(row); });
    }

    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
    }

private:
    using Clock = std::chrono::steady_clock;
    using Page = std::unique_ptr<LogRow[]>;
    static constexpr size_t page_rows = 4096;
    struct Reader {
        uint32_t id;
        uint64_t at, keep, lost = 0;
    };

    void end(BlockId block, uint32_t stream, LogRow::What what) {
        if (!knows(block)) return;
        LogRow& taken = held_at(block);
        LogRow row = taken;
        taken.number = LogRow::nobody;
        row.what = what;
        row.time_ns = now();
        row.span_ns = row.time_ns - taken.time_ns;
        row.stream = static_cast<uint16_t>(stream);
        row.thread = thread_number();
        write([&] { add(row); });
    }

    // A free cannot fail, whatever becomes of its row.
    void write(auto&& row) noexcept {
        if (cut_) return;
        try {
            row();
        } catch (const std::bad_alloc&) {
            cut_ = true;
        }
    }

    void add(const LogRow& row) {
        if (end_ == first_ + pages_.size() * page_rows) add_page();
        at(end_) = row;
        ++end_;
    }
    void add_page();
    void forget();
    uint64_t start_of(const Reader& reader) const;
    LogRow& at(uint64_t position) {
        return pages_[(position - first_) / page_rows][(position - first_) % page_rows];
    }

    bool knows(BlockId block) const {
        size_t page = block / page_rows;
        return page < held_.size() && held_[page] && held_[page][block % page_rows].number != LogRow::nobody;
    }
    LogRow& held_at(BlockId block) {
        size_t page = block / page_rows;
        if (page >= held_.size()) held_.resize(page + 1);
        if (!held_[page]) held_[page].reset(new LogRow[page_rows]);
        return held_[page][block % page_rows];
    }

    const int64_t began_;
    std::deque<Page> pages_;
    Page spare_;
    std::vector<Page> held_;  // by block
    std::vector<Reader> readers_;
    uint64_t first_ = 0, end_ = 0;  // positions: of the first row that is kept, and of the next
    uint64_t next_ = 0;             // number of the next take
    uint32_t next_reader_ = 1;
    bool cut_ = false;
};

}  // namespace asyncmem
