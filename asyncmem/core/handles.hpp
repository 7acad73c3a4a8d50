// Handles: physical memory behind some pages of a space, each mapped and unmapped as a whole.
#pragma once

#include <cstdint>
#include <vector>

#include "entries.hpp"

namespace asyncmem {

using HandleId = uint32_t;  // 0 means "no handle"

struct Handle {
    uint64_t address = 0, nbytes = 0;
    // The latest use of each stream by any block that lay on it since it was mapped; what is free around it may have been
    // used later.
    Entries uses;
    uint32_t segment = 0;
    HandleId older = 0, newer = 0;
    bool queued = false;
};

// All handles, and of those that may be idle a queue in the order in which blocks on them were freed. Who finds one there
// that is in use takes it out: the free that ends the use puts it back.
class Handles {
public:
    Handle& operator[](HandleId id) { return table_[id]; }
    const Handle& operator[](HandleId id) const { return table_[id]; }
    HandleId oldest() const { return table_[0].newer; }

    HandleId add(uint32_t segment, uint64_t address, uint64_t nbytes) {
        HandleId id;
        if (reuse_.empty()) {
            id = static_cast<HandleId>(table_.size());
            table_.emplace_back();
        } else {
            id = reuse_.back();
            reuse_.pop_back();
        }
        Handle& handle = table_[id];
        handle.address = address;
        handle.nbytes = nbytes;
        handle.segment = segment;
        touch(id);
        return id;
    }

    void remove(HandleId id) {
        drop(id);
        Handle& handle = table_[id];
        handle.nbytes = 0;
        handle.uses.clear();
        reuse_.push_back(id);
    }

    void queue(HandleId id) {
        if (!table_[id].queued) touch(id);
    }

    // Make it the newest of the queue.
    void touch(HandleId id) {
        if (table_[0].older == id) return;
        drop(id);
        HandleId last = table_[0].older;
        table_[id].older = last;
        table_[id].newer = 0;
        table_[id].queued = true;
        table_[last].newer = id;
        table_[0].older = id;
    }

    void drop(HandleId id) {
        Handle& handle = table_[id];
        if (!handle.queued) return;
        table_[handle.older].newer = handle.newer;
        table_[handle.newer].older = handle.older;
        handle.queued = false;
    }

    const std::vector<Handle>& all() const { return table_; }

private:
    std::vector<Handle> table_{1};  // index 0 is the queue's both ends
    std::vector<HandleId> reuse_;
};

}  // namespace asyncmem
