// What a free block still waits for: {stream: epoch}, and how far each stream has come.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

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
};

// The union with the later epoch of each stream: the only way in which obligations are ever joined.
inline Entries joined(const Entries& a, const Entries& b) {
    Entries all;
    all.reserve(a.size() + b.size());
    auto i = a.begin(), j = b.begin();
    while (i != a.end() || j != b.end()) {
        if (j == b.end() || (i != a.end() && i->stream < j->stream)) {
            all.push_back(*i++);
        } else if (i == a.end() || j->stream < i->stream) {
            all.push_back(*j++);
        } else {
            all.push_back({i->stream, std::max(i->epoch, j->epoch)});
            ++i, ++j;
        }
    }
    return all;
}

// The same for one entry more.
inline void include(Entries& all, const Entry& entry) {
    auto at = std::find_if(all.begin(), all.end(), [&](const Entry& one) { return one.stream >= entry.stream; });
    if (at == all.end() || at->stream != entry.stream) {
        all.insert(at, entry);
    } else {
        at->epoch = std::max(at->epoch, entry.epoch);
    }
}

inline void normalise(Entries& entries) {
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
        return a.stream != b.stream ? a.stream < b.stream : a.epoch > b.epoch;
    });
    entries.erase(std::unique(entries.begin(), entries.end(),
                              [](const Entry& a, const Entry& b) { return a.stream == b.stream; }),
                  entries.end());
}

inline bool same_streams(const Entries& a, const Entries& b) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](const Entry& x, const Entry& y) {
               return x.stream == y.stream;
           });
}

// Entry lists of the few blocks that wait for more than one stream. Index 0 is never used.
class EntryPool {
public:
    uint32_t add(Entries entries) {
        if (reuse_.empty()) {
            lists_.push_back(std::move(entries));
            return static_cast<uint32_t>(lists_.size() - 1);
        }
        uint32_t at = reuse_.back();
        reuse_.pop_back();
        lists_[at] = std::move(entries);
        return at;
    }
    [[gnu::noinline]] uint32_t copy(uint32_t at) { return add(Entries(lists_[at])); }
    // A list of two, in the memory of one that was released.
    uint32_t add(const Entry& a, const Entry& b) {
        if (reuse_.empty()) return add(Entries{a.stream < b.stream ? a : b, a.stream < b.stream ? b : a});
        uint32_t at = reuse_.back();
        reuse_.pop_back();
        lists_[at].push_back(a.stream < b.stream ? a : b);
        lists_[at].push_back(a.stream < b.stream ? b : a);
        return at;
    }
    void release(uint32_t at) {
        lists_[at].clear();
        reuse_.push_back(at);
    }
    const Entries& operator[](uint32_t at) const { return lists_[at]; }
    size_t used() const { return lists_.size() - 1 - reuse_.size(); }

private:
    std::vector<Entries> lists_{1};
    std::vector<uint32_t> reuse_;
};

}  // namespace asyncmem
