// Pages: ranges of addresses, the handles behind them, and the free blocks that lie there.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "node.hpp"

namespace asyncmem {

using HandleId = uint32_t;  // 0 means "no handle"

// It owes the latest use of each stream by any block that lay on it since it was mapped; what is free around it may have been
// used later.
struct Handle : Owed {
    uint64_t address = 0, nbytes = 0;
    uint64_t freed = 0;  // when a free on it was noted last, or it was let go, by a count of both
    uint32_t segment = 0;
};

// All handles.
class Handles {
public:
    const Handle& operator[](HandleId id) const { return table_[id]; }
    const Slots<Handle>& all() const { return table_; }

    HandleId add(uint32_t segment, uint64_t address, uint64_t nbytes) {
        HandleId id = table_.acquire();
        Handle& handle = table_[id] = Handle{};
        handle.address = address;
        handle.nbytes = nbytes;
        handle.segment = segment;
        return id;
    }

    // It is behind other addresses now, with all that it owes.
    void move(HandleId id, uint32_t segment, uint64_t address) {
        table_[id].segment = segment;
        table_[id].address = address;
    }

    void remove(HandleId id) {
        set_uses(id, {});
        table_[id].nbytes = 0;
        table_.release(id);
    }

    Entries uses(HandleId id) const { return lists_.all(table_[id]); }
    void set_uses(HandleId id, Entries uses) { lists_.store(table_[id], std::move(uses)); }

    // All that any handle waits for, or waited for once: look(entry).
    template <class Look>
    void each_use(Look look) const {
        for (const Handle& handle : table_) lists_.each(handle, look);
    }

    // What comes now has this number.
    uint64_t next() { return ++count_; }

    // Note a free, and its use where all that is known are uses by the same stream; else return false.
    bool note(HandleId id, uint64_t freed, const Entry& use) {
        Handle& handle = table_[id];
        handle.freed = freed;
        if (!use.epoch) return true;
        if (handle.more || (handle.epoch && handle.stream != use.stream)) return false;
        handle.stream = use.stream;
        handle.epoch = std::max(handle.epoch, use.epoch);
        return true;
    }

private:
    Slots<Handle> table_{1};  // index 0 is no handle
    EntryPool lists_;
    uint64_t count_ = 0;
};

// A range of addresses, the handles behind its pages, and its blocks that are out of the ordinary.
class Space {
public:
    Space(uint64_t address, uint64_t page) : address_(address), shift_(static_cast<uint32_t>(std::countr_zero(page))) {}

    uint64_t page() const { return uint64_t{1} << shift_; }
    uint64_t up(uint64_t address) const { return (address + page() - 1) & ~(page() - 1); }

    // The handle behind an address, or 0.
    HandleId handle(uint64_t address) const {
        uint64_t p = (address - address_) >> shift_;
        return p < pages_.size() ? pages_[p] : 0;
    }
    void set_handle(const Handle& handle, HandleId id) {
        uint64_t p = (handle.address - address_) >> shift_, end = p + (handle.nbytes >> shift_);
        if (end > pages_.size()) {
            pages_.resize(std::max<size_t>(end, pages_.size() * 5 / 4));
            noted_.resize(pages_.size() / 64 + 1);
        }
        for (; p < end; ++p) {
            pages_[p] = id;
            noted_[p / 64] &= ~(uint64_t{1} << p % 64);
        }
        last_from_ = UINT64_MAX;
    }

    // Note a use at all pages of a range, and tell whether it was noted there before: a program that frees the same pages again
    // and again asks about no handle. Only the latest use is known, so whoever uses another stream in between asks each time.
    bool note(uint64_t address, uint64_t nbytes, uint32_t stream, uint64_t epoch) {
        if (noted_stream_ != stream || noted_epoch_ != epoch) [[unlikely]] note_anew(stream, epoch);
        uint64_t from = (address - address_) >> shift_, to = (address + nbytes - 1 - address_) >> shift_;
        if ((last_from_ <= from) & (to <= last_to_)) return true;
        last_from_ = from;
        last_to_ = to;
        uint64_t first = UINT64_MAX << from % 64, last = UINT64_MAX >> (63 - to % 64);
        if (from / 64 == to / 64) return note_word(from / 64, first & last);
        bool all = note_word(from / 64, first);
        for (uint64_t word = from / 64 + 1; word < to / 64; ++word) all &= note_word(word, UINT64_MAX);
        return note_word(to / 64, last) && all;
    }

    // How many pages of a range have no handle behind them.
    uint32_t bare(uint64_t address, uint64_t nbytes) const {
        uint64_t from = (address - address_) >> shift_, to = ((address + nbytes - 1 - address_) >> shift_) + 1;
        const HandleId* pages = pages_.data();
        if (to - from == 1) return from >= pages_.size() || !pages[from];
        uint64_t known = std::clamp<uint64_t>(pages_.size(), from, to);
        return static_cast<uint32_t>((known > from ? std::count(pages + from, pages + known, 0u) : 0) + (to - known));
    }

    // Each handle that has a byte in a range, in the order of addresses.
    template <class Look>
    void each(uint64_t address, uint64_t nbytes, const Handles& handles, Look look) const {
        for (uint64_t end = address + nbytes; address < end;) {
            HandleId id = handle(address);
            if (id) look(id);
            address = id ? handles[id].address + handles[id].nbytes : up(address + 1);
        }
    }

    // The stretches of a range with memory behind them and without it, in turn: look(address, nbytes, filled).
    template <class Look>
    void stretches(uint64_t address, uint64_t nbytes, Look look) const {
        for (uint64_t at = address, end = address + nbytes; at < end;) {
            uint64_t from = at, p = (at - address_) >> shift_, known = std::max<uint64_t>(p, pages_.size());
            uint64_t last = std::min(known, ((end - 1 - address_) >> shift_) + 1);
            bool filled = handle(at) != 0;
            while (p < last && (pages_[p] != 0) == filled) ++p;
            at = p < last || filled ? std::min(end, address_ + (p << shift_)) : end;
            look(from, at - from, filled);
        }
    }

    BlockId end = 0;                   // the last addresses, without memory; 0 when there are none
    std::map<uint64_t, BlockId> bare_blocks;  // the others that have no memory and are no part of a free block, by address
    std::map<uint64_t, BlockId> held;  // blocks that are lifted or filling, by address
    std::vector<BlockId> holes;        // blocks of a page or more in the free index, by address, while they are looked for

private:
    bool note_word(uint64_t word, uint64_t pages) {
        if ((noted_[word] & pages) == pages) return true;
        noted_[word] |= pages;
        noted_from_ = std::min(noted_from_, word);
        noted_to_ = std::max(noted_to_, word + 1);
        return false;
    }

    [[gnu::noinline]] void note_anew(uint32_t stream, uint64_t epoch) {
        noted_stream_ = stream;
        noted_epoch_ = epoch;
        if (noted_from_ < noted_to_) std::fill(noted_.data() + noted_from_, noted_.data() + noted_to_, 0);
        noted_from_ = last_from_ = UINT64_MAX;
        noted_to_ = last_to_ = 0;
    }

    uint64_t address_;
    uint32_t shift_;
    uint32_t noted_stream_ = 0;
    uint64_t noted_epoch_ = 0;
    uint64_t noted_from_ = UINT64_MAX, noted_to_ = 0;  // the words that have bits
    uint64_t last_from_ = UINT64_MAX, last_to_ = 0;    // pages that were noted together, the last that were asked for
    std::vector<HandleId> pages_;
    std::vector<uint64_t> noted_;  // a bit for each page at whose handle a use in that epoch of that stream is noted
};

}  // namespace asyncmem
