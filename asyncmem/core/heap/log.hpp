// What a heap takes and frees, in its order, while that is read, and what its pool notes between.
//
// The heap holds its lock while it writes here. Rows never move, so none waits for a large copy.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

#include "journal.hpp"
#include "node.hpp"

namespace asyncmem {

// Who asked and from where: numbers of what the caller keeps by name, 0 for what is not known.
struct Caller {
    uint32_t site, task;
    uint16_t tag, thread;
};

struct Cause {
    Cause() {}  // as it lies: nothing of it is touched while nothing is recorded
    int64_t span_ns;  // from asking to granting
    Caller caller;
    bool missed;  // it had to wait
};

struct LogRow {
    // Undone: the take has never been. Held: taken before its reader came. The rest is noted by the pool.
    enum What : uint8_t { Taken, Freed, Undone, Held, Grown, Trimmed, Waited, Pressed, Refused, Closed };
    enum Level : uint8_t { Missed, OwnCache, SharedCache, Placed, Foreign };
    static constexpr uint64_t none = std::numeric_limits<uint64_t>::max();

    int64_t time_ns = 0;  // of the machine's steady clock
    uint64_t nbytes = 0;  // as it was asked for
    uint64_t address = 0;  // of a wait its priority: 0, -1, 1, -2, ... are 0, 1, 2, 3, ...
    int64_t span_ns = 0;  // of a take: from asking to granting; of its end: how long it was held
    uint64_t number = none;  // of the take
    Caller caller{};
    uint16_t stream = 0;
    What what = Taken;
    uint8_t level = 0;
};
static_assert(sizeof(LogRow) == 56, "read as it lies by who asks for rows");

// A number of the thread that runs, from 1 on, for the life of the process; 0 when there were too many.
uint16_t thread_number() noexcept;

class Log : Written {
public:
    using Rows = std::vector<LogRow>;
    struct Part {
        Rows rows;
        uint64_t lost = 0;  // rows that went before this reader came to read them, so far
        bool cut = false;   // it stopped before its end, because memory ran out
    };

    // A reader sees all that is written from now on, but of what it leaves unread no more than the newest `keep` rows.
    uint32_t open(uint64_t keep) {
        readers_.push_back({next_reader_, end(), keep});
        return next_reader_++;
    }
    void close(uint32_t reader) {
        std::erase_if(readers_, [&](const Reader& one) { return one.id == reader; });
        forget();
    }
    bool read_by_nobody() const { return readers_.empty(); }
    // The next rows, `most` at most, which stay for another time unless they are consumed.
    Part read(uint32_t reader, uint64_t most, bool consume) {
        Part part;
        part.cut = cut_;
        for (Reader& one : readers_) {
            if (one.id != reader) continue;
            uint64_t start = start_of(one), stop = start + std::min(most, end() - start);
            auto from = rows_.begin() + static_cast<int64_t>(start - first_);
            part.rows.assign(from, from + static_cast<int64_t>(stop - start));
            part.lost = one.lost + (start - one.at);
            if (consume) {
                one.lost = part.lost;
                one.at = stop;
            }
        }
        if (consume) forget();
        return part;
    }
    // What is taken and not freed.
    Rows held() const {
        Rows rows;
        for (const LogRow& row : held_)
            if (row.number != LogRow::none) rows.push_back(row);
        std::ranges::sort(rows, {}, &LogRow::number);
        for (LogRow& row : rows) row.what = LogRow::Held;
        return rows;
    }

    // A block is taken, or (`Held`) was before there was a log.
    void taken(BlockId block, LogRow row) {
        safely([&] {
            row.number = next_;
            if (block >= held_.size()) held_.resize(block + 1);
            held_[block] = row;
            if (row.what == LogRow::Taken) add(row);
            ++next_;
        });
    }
    // The take just written has another stream's memory.
    void foreign(BlockId block) {
        if (cut_ || !knows(block) || held_[block].level == LogRow::Missed) return;
        held_[block].level = rows_.back().level = LogRow::Foreign;
    }
    void freed(BlockId block, uint32_t stream) { end(block, stream, LogRow::Freed); }
    void undone(BlockId block) { end(block, 0, LogRow::Undone); }
    void note(const LogRow& row) {
        safely([&] { add(row); });
    }

    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
    }

private:
    using Clock = std::chrono::steady_clock;
    static constexpr uint64_t forget_each = 4096;  // rows between two looks at what no reader will ask for
    struct Reader {
        uint32_t id;
        uint64_t at, keep, lost = 0;
    };

    uint64_t end() const { return first_ + rows_.size(); }
    void end(BlockId block, uint32_t stream, LogRow::What what) {
        if (!knows(block)) return;
        LogRow& taken = held_[block];
        LogRow row = taken;
        taken.number = LogRow::none;
        row.what = what;
        row.time_ns = now();
        row.span_ns = row.time_ns - taken.time_ns;
        row.stream = static_cast<uint16_t>(stream);
        row.caller.thread = thread_number();
        note(row);
    }

    void add(const LogRow& row) {
        if (end() % forget_each == 0) forget();
        rows_.push_back(row);
    }
    // Let go of rows that no reader will ask for any more.
    void forget() {
        uint64_t wanted = end();
        for (const Reader& reader : readers_) wanted = std::min(wanted, start_of(reader));
        rows_.erase(rows_.begin(), rows_.begin() + static_cast<int64_t>(wanted - first_));
        first_ = wanted;
    }
    uint64_t start_of(const Reader& reader) const {
        return std::max(reader.at, end() - std::min(end(), reader.keep));
    }
    bool knows(BlockId block) const { return block < held_.size() && held_[block].number != LogRow::none; }

    std::deque<LogRow> rows_;
    std::deque<LogRow> held_;  // by block
    std::vector<Reader> readers_;
    uint64_t first_ = 0;       // position of the first row that is kept
    uint64_t next_ = 0;        // number of the next take
    uint32_t next_reader_ = 1;
};

}  // namespace asyncmem
