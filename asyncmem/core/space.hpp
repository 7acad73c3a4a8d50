// A space: a range of addresses, the handles behind its pages, and its blocks that are out of the ordinary.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <vector>

#include "handles.hpp"
#include "holes.hpp"
#include "node.hpp"

namespace asyncmem {

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
    Holes holes;                       // blocks in the free index

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
