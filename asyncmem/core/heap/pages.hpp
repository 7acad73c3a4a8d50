// Pages: ranges of addresses, the handles behind them, and the free blocks that lie there.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "node.hpp"

namespace asyncmem {

using HandleId = uint32_t;  // 0 means "no handle"

// It owes the latest use of each stream by any block that lay on it since it was mapped; what is free around it may have been
// used later.
struct Handle : Owed {
    uint64_t address = 0, nbytes = 0;
    uint64_t freed = 0;  // when a block on it was freed last, or it was let go, by a count of both
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

    // Note what is freed now where its stream alone has used the handle; else return false.
    bool note_newest(HandleId id, const Entry& use) {
        Handle& handle = table_[id];
        handle.freed = count_;
        if (handle.more || handle.stream != use.stream) return false;
        handle.epoch = std::max(handle.epoch, use.epoch);
        return true;
    }

    // Note a free, and its use where all that is known are uses by the same stream; else return false.
    bool note(HandleId id, uint64_t freed, const Entry& use) {
        Handle& handle = table_[id];
        handle.freed = std::max(handle.freed, freed);
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

// Where a block lay that was freed, and a stream that it waits for; epoch 0: none.
struct RecentFree {
    uint64_t address = 0, nbytes = 0;
    uint64_t epoch = 0, freed = 0;
    uint32_t stream = 0, segment = 0;
};

// Ranges that were added, apart from each other.
class Cover {
public:
    // Add a range, and tell of each part that was not covered before: look(from, to), in the order of addresses.
    template <class Look>
    void add(uint64_t from, uint64_t to, Look look) {
        auto covers = [&](const Part& part) { return part.from <= from && to <= part.to; };
        if (last_ < parts_.size() && covers(parts_[last_])) return;
        auto at = std::ranges::lower_bound(parts_, from, {}, &Part::to);
        last_ = static_cast<size_t>(at - parts_.begin());
        if (at != parts_.end() && covers(*at)) return;
        Part whole{from, to};
        auto first = at;
        for (; at != parts_.end() && at->from <= to; ++at) {
            if (from < at->from) look(from, at->from);
            from = std::max(from, at->to);
            whole = {std::min(whole.from, at->from), std::max(whole.to, at->to)};
        }
        if (from < to) look(from, to);
        if (first == at) {
            parts_.insert(at, whole);
        } else {
            *first = whole;
            parts_.erase(first + 1, at);
        }
    }

private:
    struct Part {
        uint64_t from, to;
    };
    std::vector<Part> parts_;  // by address
    size_t last_ = 0;          // the latest that was looked at, which often covers the next, too
};

// What was freed on pages lately, before it is noted at the handles there. Most of it says nothing beside what was freed
// there later, so a program that frees the same pages again and again pays for next to none of those notes.
class RecentFrees {
public:
    bool full() const { return count_ == most; }
    void add(const RecentFree& note) { notes_[count_++] = note; }
    std::span<const RecentFree> all() const { return {notes_.data(), count_}; }

    // What was freed last since somebody looked at the handles, whether it is here or noted there at once.
    struct Newest {
        uint64_t address = 0, nbytes = 0, epoch = 0;
        uint32_t stream = 0;
    } newest{};

    // Take them all: look(note), with what is left of the pages of each without what later ones say as well.
    template <class Look>
    void take(uint64_t page, Look look) {
        newest = {};
        covers_.clear();
        for (; count_; --count_) {
            RecentFree note = notes_[count_ - 1];
            uint64_t from = note.address & ~(page - 1), to = (note.address + note.nbytes + page - 1) & ~(page - 1);
            auto leave = [&](uint64_t begin, uint64_t end) {
                note.address = begin;
                note.nbytes = end - begin;
                look(note);
            };
            StreamCover& cover = cover_of(note.stream);
            if (note.epoch && note.epoch <= cover.least) {
                cover.ranges.add(from, to, leave);
                cover.least = note.epoch;
            } else {  // it may say more than what covers it
                leave(from, to);
            }
        }
    }

private:
    struct StreamCover {
        uint32_t stream;
        uint64_t least = UINT64_MAX;  // the oldest use that covers any
        Cover ranges;
    };
    static constexpr uint32_t most = 256;

    StreamCover& cover_of(uint32_t stream) {
        for (StreamCover& one : covers_)
            if (one.stream == stream) return one;
        return covers_.emplace_back(StreamCover{.stream = stream, .ranges = {}});
    }

    std::array<RecentFree, most> notes_;
    uint32_t count_ = 0;
    std::vector<StreamCover> covers_;
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
        for (uint64_t a = handle.address; a < handle.address + handle.nbytes; a += page()) at(a) = id;
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
    HandleId& at(uint64_t address) {
        uint64_t p = (address - address_) >> shift_;
        if (p >= pages_.size()) pages_.resize(std::max<size_t>(p + 1, pages_.size() * 5 / 4));
        return pages_[p];
    }

    uint64_t address_;
    uint32_t shift_;
    std::vector<HandleId> pages_;
};

}  // namespace asyncmem
