// Handles: physical memory behind some pages of a space, each mapped and unmapped as a whole.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "entries.hpp"

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

    // Note a use, where all that is known are uses by the same stream; else answer false.
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

}  // namespace asyncmem
