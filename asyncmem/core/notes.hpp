// What was freed on pages lately, before it is noted at the handles there.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "entries.hpp"

namespace asyncmem {

// Pages that a block of one stream lay on when it was freed.
struct Note {
    uint64_t address = 0, nbytes = 0;  // whole pages
    uint32_t segment = 0;
    Entry use{};  // epoch 0: none
};

// The latest frees, oldest first, each range of pages once: a program that frees the same again and again pays for one
// look at the table instead of one at each handle. Noting them in this order comes to what noting each at once would.
class Notes {
public:
    bool empty() const { return count_ == 0; }
    bool full() const { return count_ == most; }

    // Whether the latest note says all of it.
    bool is_newest(const Note& note) const {
        const Note& known = slots_[slots_[0].older].note;
        return known.address == note.address && known.nbytes == note.nbytes && known.use == note.use;
    }

    // Whether a note about these pages could be renewed, and is the newest now.
    bool renew(const Note& note) {
        for (uint8_t at = bucket(note); at; at = slots_[at].next) {
            Note& known = slots_[at].note;
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
    void add(const Note& note) {
        uint8_t at = unused_ ? unused_ : static_cast<uint8_t>(count_ + 1);
        if (unused_) unused_ = slots_[at].next;
        slots_[at].note = note;
        slots_[at].next = bucket(note);
        bucket(note) = at;
        link(at);
        ++count_;
    }

    Note take_oldest() {
        uint8_t at = slots_[0].newer;
        Note note = slots_[at].note;
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
        Note note;
        uint8_t next = 0;  // in its bucket, or of those that are unused
        uint8_t older = 0, newer = 0;
    };

    uint8_t& bucket(const Note& note) {
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

}  // namespace asyncmem
