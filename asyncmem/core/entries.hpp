// What a free block still waits for: {stream: epoch}, and how far each stream has come.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "slots.hpp"

namespace asyncmem {

struct Entry {
    uint32_t stream;
    uint64_t epoch;
    bool operator==(const Entry&) const = default;
};

using Entries = std::vector<Entry>;  // sorted by stream, one entry a stream

// How far a stream has come. Epochs of one stream finish in order, so three numbers say everything.
struct Epochs {
    uint64_t open = 1;      // the epoch that frees join now
    uint64_t recorded = 0;  // highest epoch that a recorded fence covers
    uint64_t done = 0;      // highest epoch known to be complete

    bool covers(uint64_t epoch) const { return epoch <= std::max(done, recorded); }
};

// Add an entry; of one stream the later epoch stays.
inline void include(Entries& all, const Entry& entry) {
    auto at = std::ranges::lower_bound(all, entry.stream, {}, &Entry::stream);
    if (at == all.end() || at->stream != entry.stream) {
        all.insert(at, entry);
    } else {
        at->epoch = std::max(at->epoch, entry.epoch);
    }
}

// The union, the only way in which obligations are ever joined; what is added need not be sorted.
inline Entries joined(Entries all, const Entries& more) {
    for (const Entry& entry : more) include(all, entry);
    return all;
}

// What something waits for: one entry, or the list of several that an EntryPool keeps for it.
struct Owed {
    uint64_t epoch = 0;   // the entry's, 0 where there is none or a list
    uint32_t stream = 0;  // the entry's
    uint32_t more = 0;    // the list, 0 where there is none
};

// Entry lists of the few that wait for more than one stream. Index 0 is never used.
class EntryPool {
public:
    template <class Look>
    void each(const Owed& owed, Look look) const {
        if (!owed.more) {
            if (owed.epoch) look(Entry{owed.stream, owed.epoch});
            return;
        }
        for (const Entry& entry : lists_[owed.more]) look(entry);
    }

    Entries all(const Owed& owed) const {
        Entries found;
        each(owed, [&](const Entry& entry) { found.push_back(entry); });
        return found;
    }

    // Let it wait for just these; where there are none its stream stays.
    void store(Owed& owed, Entries entries) {
        if (owed.more) release(owed.more);
        owed.more = 0;
        owed.epoch = 0;
        if (entries.size() == 1) {
            owed.stream = entries[0].stream;
            owed.epoch = entries[0].epoch;
        } else if (!entries.empty()) {
            owed.more = lists_.acquire();
            lists_[owed.more] = std::move(entries);
        }
    }

    // Let it wait for a second stream too, by a list in the memory of one that was released.
    void add(Owed& owed, const Entry& second) {
        Entry first{owed.stream, owed.epoch};
        owed.epoch = 0;
        owed.more = lists_.acquire();
        lists_[owed.more].push_back(first.stream < second.stream ? first : second);
        lists_[owed.more].push_back(first.stream < second.stream ? second : first);
    }

    [[gnu::noinline]] uint32_t copy(uint32_t from) {
        uint32_t at = lists_.acquire();
        lists_[at] = lists_[from];
        return at;
    }
    const Entries& operator[](uint32_t at) const { return lists_[at]; }
    size_t used() const { return lists_.used() - 1; }

private:
    void release(uint32_t at) {
        lists_[at].clear();
        lists_.release(at);
    }

    Slots<Entries> lists_{1};
};

}  // namespace asyncmem
