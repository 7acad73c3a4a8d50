// A pool, its budgets and the insides of its leases: who waits in each, and who of them may be next.
//
// A budget that is used up holds up nobody outside of it, so its requests are looked for only as far as it has room.
// What was found is kept for each share until something on its way changes: a grant in one budget costs nothing in others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "queue.hpp"

namespace asyncmem::scheduler {

struct Tally {
    int64_t waits = 0, growth_waits = 0, misses = 0;
    int64_t timeouts = 0, cancellations = 0, handed_back = 0, deadlocks = 0;
    double wait_seconds = 0, longest_wait = 0, growth_seconds = 0;
};

struct Share {
    uint32_t account = 0;
    Share* up = nullptr;         // the share whose limit bounds this one too; none for a pool and for a lease
    Share* part_of = nullptr;    // the share that counts what happens here too
    uint32_t depth = 0;          // shares on the way up
    int32_t arena = -1;          // a lease's range
    bool waits = true;           // whether its requests are queued; a lease's wait for nothing but memory that moves
    double bypass = 0;           // smaller requests may overtake for so many times the limit
    uint64_t limit = 0;

    RequestQueue queue;          // requests of this share itself that wait
    std::vector<Share*> inside;  // shares right inside of this one in which somebody waits
    size_t requests = 0;         // of this share itself, waiting or not yet forgotten
    size_t parts = 0;            // shares right inside of this one, whether somebody waits there or not
    size_t listed = 0;           // place in the list of the one above, from 1 on
    uint64_t overtaken = 0;      // bytes that were granted out of order
    uint64_t spillable = 0;      // bytes that could move to the host and would make room here
    bool gated = false;
    Tally tally;

    bool stale = true;           // what is below is not known any more
    Request* head = nullptr;     // the first in order whom all shares inside let pass
    Request* out = nullptr;      // the first in order whom this one lets pass, too

    bool is_inside(const Share& share) const {
        for (const Share* one = this; one; one = one->up)
            if (one == &share) return true;
        return false;
    }
    bool part_of_lease() const {
        for (const Share* one = this; one; one = one->up)
            if (one->arena != -1) return true;
        return false;
    }
};

class Shares {
public:
    explicit Shares(Heap& heap) : heap_(heap) {}

    // Something changed about a share: who waits there, its limit, or what is live.
    static void touch(Share& share) {
        for (Share* one = &share; one; one = one->up) one->stale = true;
    }

    void join(Request& request) {
        Share& share = *request.share;
        share.queue.insert(request);
        for (Share* one = &share; one->up && !one->listed; one = one->up) {
            one->up->inside.push_back(one);
            one->listed = one->up->inside.size();
        }
        touch(share);
    }

    void leave(Request& request) {
        Share& share = *request.share;
        share.queue.remove(request);
        for (Share* one = &share; one->up && one->listed && one->queue.empty() && one->inside.empty(); one = one->up) {
            std::vector<Share*>& list = one->up->inside;
            list.back()->listed = one->listed;
            list[one->listed - 1] = list.back();
            list.pop_back();
            one->listed = 0;
            if (one->gated) turned_.push_back(one);
        }
        touch(share);
    }

    // The first in order whom all shares inside of this one let pass; it may not fit here.
    Request* head(Share& share) {
        refresh(share);
        return share.head;
    }

    // The first in order that fits here and in all shares inside, and asks for at most so much.
    Request* first(Share& share, uint64_t most) {
        refresh(share);
        if (!share.out || share.out->total <= most) return share.out;
        return search(share, most);
    }

    // How many bytes may still be granted past a request, in a share on its way.
    static uint64_t allowance(const Share& share, const Request& request) {
        uint64_t mark = request.overtaken[request.share->depth - share.depth];
        auto bypass = static_cast<uint64_t>(std::min(share.bypass * static_cast<double>(share.limit), 9e18));
        uint64_t passed = share.overtaken - mark;
        return bypass - std::min(bypass, passed);
    }

    // Shares in which somebody waits before newcomers now, or nobody any more, since this was asked last.
    std::vector<Share*> turned() { return std::exchange(turned_, {}); }
    void forget(Share& share) { std::erase(turned_, &share); }

private:
    void refresh(Share& share) {
        if (!share.stale) return;
        share.head = share.queue.first();
        for (Share* one : share.inside) {
            refresh(*one);
            if (one->out && (!share.head || before(*one->out, *share.head))) share.head = one->out;
        }
        share.out = share.head ? search(share, UINT64_MAX) : nullptr;
        share.stale = false;
        if (share.gated != (share.head != nullptr)) turned_.push_back(&share);
    }

    // Smaller requests may pass one that does not fit, as far as the allowance goes.
    Request* search(Share& share, uint64_t most) {
        uint64_t room = heap_.account(share.account).room();
        if (share.head->total > room) room = std::min(room, allowance(share, *share.head));
        most = std::min(most, room);
        if (share.head->total <= most) return share.head;
        Request* best = share.queue.first(most);
        for (Share* one : share.inside) {
            Request* found = one->out;
            if (!found || (best && before(*best, *found))) continue;
            if (found->total > most) found = search(*one, most);
            if (found && (!best || before(*found, *best))) best = found;
        }
        return best;
    }

    Heap& heap_;
    std::vector<Share*> turned_;
};

}  // namespace asyncmem::scheduler
