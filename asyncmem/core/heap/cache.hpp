// Bins: blocks of exactly one size, most of them handed out newest first. A table of them makes a cache.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#include "node.hpp"

namespace asyncmem {

struct Bin {
    uint64_t granules = 0;  // the size this bin serves
    BlockId head = 0, tail = 0;
    uint32_t count = 0;
    uint16_t strikes = 0;  // misses by other sizes since this bin was last asked for its own
    uint8_t flushes = 0;   // that took blocks of it since one served
    uint8_t more = 0;      // times that it is to be asked for beyond the usual, before anything is kept
    uint8_t asked = 0;     // how often in a row its size was asked for and not here
    uint32_t since = 0;    // how many requests found nothing in the cache, up to the latest of its own

    // Whether it is worth keeping blocks for. By chance two requests of random sizes are alike now and then, and what is
    // kept of a large one divides the hole that all others come from: so those are to be asked for three times.
    bool hot(bool large) const { return asked >= 2 + large + more; }

    // A block served.
    void serve() {
        strikes = 0;
        flushes = 0;
        more = 0;
    }

    // Large blocks went back before one served. From the 64th time in a row on the size has to be asked for twice as often
    // as before, each time: else what is kept and flushed by turns costs a flush each time.
    void doubt() {
        if (flushes < patient) ++flushes;
        if (flushes < patient) return;
        more = static_cast<uint8_t>(std::min(2 * more + 3, most_asked - 3));
        asked = 0;
    }

    static constexpr int most_asked = 192, patient = 64;
};

// What a table of bins has in common whatever its size: caps, totals, and how blocks come and go.
class Cache {
public:

    bool has_room(uint64_t nbytes) const { return blocks_ < max_blocks && bytes_ + nbytes <= max_bytes; }
    // Whether a block is larger than all that the cap allows, so that it may only be the one that lies beside it.
    bool is_outsize(uint64_t nbytes) const { return nbytes > max_bytes && max_bytes && blocks_ < max_blocks; }
    BlockId outsize() const { return outsize_; }

    void push(NodeTable& nodes, Bin& bin, BlockId id, uint64_t nbytes) {
        Node& node = nodes[id];
        node.state = State::Cached;
        node.slot = bin.head;
        node.link = 0;
        (bin.head ? nodes[bin.head].link : bin.tail) = id;
        bin.head = id;
        count(bin, id, nbytes);
    }

    // To the end that is looked at last.
    void append(NodeTable& nodes, Bin& bin, BlockId id, uint64_t nbytes) {
        Node& node = nodes[id];
        node.state = State::Cached;
        node.slot = 0;
        node.link = bin.tail;
        (bin.tail ? nodes[bin.tail].slot : bin.head) = id;
        bin.tail = id;
        count(bin, id, nbytes);
    }

    void remove(NodeTable& nodes, Bin& bin, BlockId id, uint64_t nbytes) {
        Node& node = nodes[id];
        if (node.link) {
            nodes[node.link].slot = node.slot;
        } else {
            bin.head = node.slot;
        }
        (node.slot ? nodes[node.slot].link : bin.tail) = node.link;
        --bin.count;
        --blocks_;
        if (id == outsize_) [[unlikely]]
            outsize_ = 0;
        else
            bytes_ -= nbytes;
    }

    uint64_t blocks() const { return blocks_; }
    uint64_t bytes() const { return bytes_; }  // without the outsize block

    // A request for a bin's size, which has none.
    void ask(Bin& bin, bool large) {
        uint32_t now = ++misses_;
        // Large ones are in a row only where they follow each other closely: no kept block should outlast hundreds of others.
        if (large && !bin.hot(large) && now - bin.since > nearby) bin.asked = 0;
        bin.asked += bin.asked < Bin::most_asked;
        bin.since = now;
    }

    // A request for a size that is never kept.
    void pass() { ++misses_; }

    // A request for another size takes an empty bin over.
    void take_over(Bin& bin, uint64_t granules) {
        ++misses_;
        if (!bin.head) bin = Bin{.granules = granules, .asked = 1, .since = misses_};
    }

    uint64_t max_blocks = 0;
    uint64_t max_bytes = 0;

private:
    static constexpr uint32_t nearby = 512;

    void count(Bin& bin, BlockId id, uint64_t nbytes) {
        ++bin.count;
        ++blocks_;
        if (nbytes > max_bytes) [[unlikely]]
            outsize_ = id;
        else
            bytes_ += nbytes;
    }

    uint64_t blocks_ = 0;
    uint64_t bytes_ = 0;
    BlockId outsize_ = 0;
    uint32_t misses_ = 0;
};

// A table of 2**bits bins, inside the object that holds it. A small size has its place in one of a few bins side by side, so
// that batches of many sizes find room. A large one has a single bin: what is kept of it keeps whole segments in use.
template <uint32_t bits>
class BinTable : public Cache {
public:
    // The bin of a size, or none.
    Bin* find(uint64_t granules, bool large) {
        uint64_t place = hash(granules);
        Bin* first = &table_[large ? place : place / ways * ways];
        for (Bin* one = first; one < first + (large ? 1 : ways); ++one)
            if (one->granules == granules) return one;
        return nullptr;
    }

    // The bin that a size which has none is to take over: of several the empty ones in turn, else the one with most strikes.
    Bin& find_weakest(uint64_t granules, bool large) {
        if (large) return table_[hash(granules)];
        uint64_t row = hash(granules) / ways;
        Bin* first = &table_[row * ways];
        for (uint64_t i = 0; i < ways; ++i)
            if (Bin& one = first[turns_[row]++ % ways]; !one.head) return one;
        return *std::max_element(first, first + ways, [](const Bin& a, const Bin& b) { return a.strikes < b.strikes; });
    }

    std::span<const Bin> bins() const { return table_; }
    std::span<Bin> bins() { return table_; }

private:
    static constexpr uint64_t ways = 4;

    static uint64_t hash(uint64_t granules) { return (granules * 0x9E3779B97F4A7C15u) >> (64 - bits); }

    Bin table_[1u << bits];
    uint8_t turns_[(1u << bits) / ways] = {};
};

}  // namespace asyncmem
