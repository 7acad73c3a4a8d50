// Pages: ranges of addresses, the handles behind them, and the free blocks that lie there.
#pragma once

#include <algorithm>
#include <array>
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
    uint32_t segment = 0;
    HandleId older = 0, newer = 0;
    bool queued = false;
};

// All handles, and of those that may be idle a queue in the order in which blocks on them were freed. Who finds one there
// that is in use takes it out: the free that ends the use puts it back.
class Handles {
public:
    const Handle& operator[](HandleId id) const { return table_[id]; }
    const Slots<Handle>& all() const { return table_; }
    HandleId oldest() const { return table_[0].newer; }

    HandleId add(uint32_t segment, uint64_t address, uint64_t nbytes) {
        HandleId id = table_.acquire();
        Handle& handle = table_[id] = Handle{};
        handle.address = address;
        handle.nbytes = nbytes;
        handle.segment = segment;
        return id;
    }

    void remove(HandleId id) {
        drop(id);
        set_uses(id, {});
        table_[id].nbytes = 0;
        table_.release(id);
    }

    Entries uses(HandleId id) const { return lists_.all(table_[id]); }
    void set_uses(HandleId id, Entries uses) { lists_.store(table_[id], std::move(uses)); }

    // Note a use, where all that is known are uses by the same stream; else return false.
    bool use(HandleId id, const Entry& entry) {
        Handle& handle = table_[id];
        if (handle.more || (handle.epoch && handle.stream != entry.stream)) return false;
        handle.stream = entry.stream;
        handle.epoch = std::max(handle.epoch, entry.epoch);
        return true;
    }

    // Make it the newest of the queue, if it is not there.
    void queue(HandleId id) {
        if (!table_[id].queued) link(id, id);
    }

    void drop(HandleId id) {
        if (table_[id].queued) unlink(id, id);
    }

    // Makes handles the newest of the queue, one after the other. What was freed together once lies there in a row, and a
    // row is moved as a whole, or stays where it is.
    class Touch {
    public:
        explicit Touch(Handles& handles) : handles_(handles) {}
        ~Touch() { move(); }

        void operator()(HandleId id) {
            if (last_ && handles_.table_[last_].queued && handles_.table_[last_].newer == id) {
                last_ = id;
                return;
            }
            move();
            first_ = last_ = id;
        }

    private:
        void move() {
            if (!last_ || handles_.table_[0].older == last_) return;
            if (handles_.table_[first_].queued) handles_.unlink(first_, last_);
            handles_.link(first_, last_);
        }

        Handles& handles_;
        HandleId first_ = 0, last_ = 0;
    };

private:
    void link(HandleId first, HandleId last) {
        HandleId end = table_[0].older;
        table_[first].older = end;
        table_[end].newer = first;
        table_[last].newer = 0;
        table_[0].older = last;
        table_[first].queued = true;
    }

    void unlink(HandleId first, HandleId last) {
        table_[table_[first].older].newer = table_[last].newer;
        table_[table_[last].newer].older = table_[first].older;
        table_[first].queued = false;
    }

    Slots<Handle> table_{1};  // index 0 is the queue's both ends
    EntryPool lists_;
};

// The free blocks of a space that have a whole page in them, found by any page of theirs.
//
// Each is filed under its first whole page. Bitmaps of two levels find the next one filed at or below a page.
class BlocksByPage {
public:
    void add(uint64_t page, BlockId block) {
        if (page >= first_.size()) grow(page);
        first_[page] = block;
        filed_[page >> 6] |= bit(page);
        some_[page >> 12] |= bit(page >> 6);
    }

    void remove(uint64_t page) {
        if (!(filed_[page >> 6] &= ~bit(page))) some_[page >> 12] &= ~bit(page >> 6);
    }

    // The block filed at `page` or next below it, or 0.
    BlockId below(uint64_t page) const {
        if (page >= first_.size()) page = first_.size() - 1;
        if (page == UINT64_MAX) return 0;
        if (uint64_t found = upto(filed_[page >> 6], page)) return first_[(page & ~uint64_t{63}) + top(found)];
        uint64_t word = page >> 6, row = word >> 6;
        uint64_t found = some_[row] & (bit(word) - 1);
        while (!found && row) found = some_[--row];
        if (!found) return 0;
        word = (row << 6) + top(found);
        return first_[(word << 6) + top(filed_[word])];
    }

private:
    static uint64_t bit(uint64_t at) { return uint64_t{1} << (at & 63); }
    static uint64_t upto(uint64_t word, uint64_t at) { return word & (bit(at) | (bit(at) - 1)); }
    static uint64_t top(uint64_t word) { return 63 - static_cast<uint64_t>(std::countl_zero(word)); }

    void grow(uint64_t page) {
        first_.resize((page + 1) * 5 / 4);
        filed_.resize((first_.size() >> 6) + 1);
        some_.resize((filed_.size() >> 6) + 1);
    }

    std::vector<BlockId> first_;
    std::vector<uint64_t> filed_, some_;
};

// What was freed on pages lately, before it is noted at the handles there.
// Pages that a block of one stream lay on when it was freed.
struct RecentFree {
    uint64_t address = 0, nbytes = 0;  // whole pages
    uint32_t segment = 0;
    Entry use{};  // epoch 0: none
};

// The latest frees, oldest first, each range of pages once: a program that frees the same again and again pays for one
// look at the table instead of one at each handle. Noting them in this order comes to what noting each at once would.
class RecentFrees {
public:
    bool empty() const { return count_ == 0; }
    bool full() const { return count_ == most; }

    // Whether the latest note says all of it.
    bool is_newest(const RecentFree& note) const {
        const RecentFree& known = slots_[slots_[0].older].note;
        return known.address == note.address && known.nbytes == note.nbytes && known.use == note.use;
    }

    // Whether a note about these pages could be renewed, and is the newest now.
    bool renew(const RecentFree& note) {
        for (uint8_t at = bucket(note); at; at = slots_[at].next) {
            RecentFree& known = slots_[at].note;
            if (known.address != note.address || known.nbytes != note.nbytes) continue;
            if (known.use.epoch && note.use.epoch && known.use.stream != note.use.stream) return false;
            if (note.use.epoch) known.use = {note.use.stream, std::max(known.use.epoch, note.use.epoch)};
            if (at == slots_[0].older) return true;
            unlink(at);
            link(at);
            return true;
        }
        return false;
    }

    // Keep a note that could not be renewed; there must be room.
    void add(const RecentFree& note) {
        uint8_t at = unused_ ? unused_ : static_cast<uint8_t>(count_ + 1);
        if (unused_) unused_ = slots_[at].next;
        slots_[at].note = note;
        slots_[at].next = bucket(note);
        bucket(note) = at;
        link(at);
        ++count_;
    }

    RecentFree take_oldest() {
        uint8_t at = slots_[0].newer;
        RecentFree note = slots_[at].note;
        uint8_t* place = &bucket(note);
        while (*place != at) place = &slots_[*place].next;
        *place = slots_[at].next;
        unlink(at);
        slots_[at].next = unused_;
        unused_ = at;
        --count_;
        return note;
    }

private:
    static constexpr uint32_t most = 32;
    struct Slot {
        RecentFree note;
        uint8_t next = 0;  // in its bucket, or of those that are unused
        uint8_t older = 0, newer = 0;
    };

    uint8_t& bucket(const RecentFree& note) {
        uint64_t mixed = (note.address ^ note.nbytes << 20) * 0x9E3779B97F4A7C15u;
        return buckets_[mixed >> 58];
    }

    void link(uint8_t at) {
        uint8_t newest = slots_[0].older;
        slots_[at].older = newest;
        slots_[at].newer = 0;
        slots_[newest].newer = at;
        slots_[0].older = at;
    }

    void unlink(uint8_t at) {
        slots_[slots_[at].older].newer = slots_[at].newer;
        slots_[slots_[at].newer].older = slots_[at].older;
    }

    std::array<Slot, most + 1> slots_{};  // index 0 is both ends
    std::array<uint8_t, 64> buckets_{};
    uint32_t count_ = 0;
    uint8_t unused_ = 0;
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
        uint64_t known = std::clamp<uint64_t>(pages_.size(), from, to);
        const HandleId* pages = pages_.data();
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
            uint64_t from = at;
            bool filled = handle(at) != 0;
            while (at < end && (handle(at) != 0) == filled) at = up(at + 1);
            at = std::min(at, end);
            look(from, at - from, filled);
        }
    }

    // The page that a block is filed under in `holes`: its first whole one, if it has one.
    uint64_t hole(uint64_t address) const { return (up(address) - address_) >> shift_; }
    bool has_hole(uint64_t address, uint64_t nbytes) const { return up(address) + page() <= address + nbytes; }
    BlockId hole_at(uint64_t address) const { return holes.below((address - address_) >> shift_); }

    BlockId end = 0;                   // the addresses that were never used; 0 when all were
    std::map<uint64_t, BlockId> held;  // blocks that are lifted or filling, by address
    BlocksByPage holes;                       // blocks in the free index

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
