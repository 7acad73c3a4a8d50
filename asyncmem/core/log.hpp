// What a heap takes and frees, in its order, while somebody records it: one row each, the takes numbered from 0.
//
// The heap holds its lock while it writes here. Rows lie in pages that never move, so no row waits for a large copy.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "node.hpp"

namespace asyncmem {

struct LogRow {
    enum What : uint8_t { Taken, Freed, Undone };  // undone: the take has never been
    int64_t time_us;
    uint64_t nbytes;  // as it was asked for
    int32_t number;   // of the take
    uint16_t stream;
    What what;
};

class Log {
public:
    // Until it runs, all that is written is of time 0.
    void run() {
        began_ = Clock::now();
        running_ = true;
    }

    void taken(BlockId block, uint64_t nbytes, uint32_t stream) {
        if (next_ == std::numeric_limits<int32_t>::max() || stream > std::numeric_limits<uint16_t>::max()) cut_ = true;
        write([&] {
            if (block >= numbers_.size()) numbers_.resize(size_t{block} + 1, nobody);
            add({now(), nbytes, next_, static_cast<uint16_t>(stream), LogRow::Taken});
            numbers_[block] = next_++;
        });
    }

    // Ends of blocks whose take is not here are left out.
    void freed(BlockId block, uint64_t nbytes, uint32_t stream) { end(block, nbytes, stream, LogRow::Freed); }
    void undone(BlockId block) { end(block, 0, 0, LogRow::Undone); }

    size_t size() const { return size_; }
    const LogRow& operator[](size_t i) const { return pages_[i / page_rows][i % page_rows]; }
    // Whether it stopped before its end, because memory or numbers ran out.
    bool cut() const { return cut_; }

private:
    using Clock = std::chrono::steady_clock;
    static constexpr size_t page_rows = 65536;
    static constexpr int32_t nobody = -1;

    void end(BlockId block, uint64_t nbytes, uint32_t stream, LogRow::What what) {
        if (block >= numbers_.size() || numbers_[block] == nobody) return;
        write([&] {
            add({now(), nbytes, numbers_[block], static_cast<uint16_t>(stream), what});
            numbers_[block] = nobody;
        });
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
        if (size_ == pages_.size() * page_rows) pages_.emplace_back(new LogRow[page_rows]);
        pages_[size_ / page_rows][size_ % page_rows] = row;
        ++size_;
    }

    int64_t now() const {
        if (!running_) return 0;
        return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began_).count();
    }

    Clock::time_point began_;
    std::vector<std::unique_ptr<LogRow[]>> pages_;
    std::vector<int32_t> numbers_;  // by block
    size_t size_ = 0;
    int32_t next_ = 0;
    bool running_ = false, cut_ = false;
};

}  // namespace asyncmem
