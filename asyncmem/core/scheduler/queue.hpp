// Who waits, in order: in a pool, its budgets and the insides of its leases.
//
// A budget that is used up holds up no request outside of it, so its requests are looked for only as far as it has room.
// What was found is kept for each share until something on its way changes: a grant in one budget costs nothing in others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "request.hpp"

namespace asyncmem::scheduler {

// Whether `a` is served before `b`.
inline bool before(const Request& a, const Request& b) {
    if (a.key != b.key) return a.key < b.key;
    if (a.terms.priority != b.terms.priority) return a.terms.priority > b.terms.priority;
    return a.sequence < b.sequence;
}

// Requests in order, searchable by size: "the first in order that asks for at most so much" costs O(log n).
//
// A treap: a search tree by order, a heap by random weights. Each node knows the least and the most that its subtree asks
// for, so a search goes straight to the first that fits, however many different sizes wait.
class RequestQueue {
public:
    bool empty() const { return !root_; }
    size_t count() const { return count_of(root_); }
    uint64_t least() const { return root_ ? root_->least : 0; }

    void insert(Request& request) {
        request.weight = next_weight();
        root_ = with(root_, request);
        if (!first_ || before(request, *first_)) first_ = &request;
    }

    void remove(const Request& request) {
        root_ = without(root_, request);
        if (first_ != &request) return;
        first_ = root_;
        while (first_ && first_->left) first_ = first_->left;
    }

    Request* first() const { return first_; }

    // The first in order that asks for at most `nbytes`, or nullptr.
    Request* first(uint64_t nbytes) const {
        return find([=](uint64_t least, uint64_t) { return least <= nbytes; });
    }

    // The first in order that asks for more than `nbytes`, or nullptr.
    Request* first_above(uint64_t nbytes) const {
        return find([=](uint64_t, uint64_t most) { return most > nbytes; });
    }

    // All in order.
    template <typename Look>
    void each(Look&& look) const {
        each_below(root_, look);
    }

    // How many come before a request.
    size_t rank(const Request& request) const {
        size_t found = count_of(request.left);
        for (const Request* node = root_; node != &request;) {
            bool left = before(request, *node);
            if (!left) found += 1 + count_of(node->left);
            node = left ? node->left : node->right;
        }
        return found;
    }

    // Whether every rule of the structure holds.
    bool sound() const {
        bool good = !root_ == !first_;
        const Request* last = nullptr;
        each([&](const Request& one) {
            Request again = one;
            update(again);
            good = good && (last ? before(*last, one) : first_ == &one);
            good = good && one.least == again.least && one.most == again.most && one.count == again.count;
            for (const Request* child : {one.left, one.right}) good = good && (!child || child->weight <= one.weight);
            last = &one;
        });
        return good;
    }

private:
    uint32_t next_weight() {
        seed_ ^= seed_ << 13;
        seed_ ^= seed_ >> 17;
        return seed_ ^= seed_ << 5;
    }

    static uint32_t count_of(const Request* node) { return node ? node->count : 0; }

    static void update(Request& node) {
        node.least = node.most = node.total;
        node.count = 1;
        for (const Request* child : {node.left, node.right}) {
            if (!child) continue;
            node.least = std::min(node.least, child->least);
            node.most = std::max(node.most, child->most);
            node.count += child->count;
        }
    }

    // The first whose size `may` be it, where that tells from the least and the most of a subtree whether one may.
    template <typename May>
    Request* find(May may) const {
        Request* node = root_;
        if (!node || !may(node->least, node->most)) return nullptr;
        for (;;) {
            if (node->left && may(node->left->least, node->left->most)) {
                node = node->left;
            } else if (may(node->total, node->total)) {
                return node;
            } else {
                node = node->right;
            }
        }
    }

    template <typename Look>
    static void each_below(Request* node, Look& look) {
        if (!node) return;
        each_below(node->left, look);
        look(*node);
        each_below(node->right, look);
    }

    // Part a subtree into what comes before a request and what comes behind.
    static std::pair<Request*, Request*> split(Request* node, const Request& request) {
        if (!node) return {nullptr, nullptr};
        bool low = before(*node, request);
        auto parts = split(low ? node->right : node->left, request);
        if (low) {
            node->right = std::exchange(parts.first, node);
        } else {
            node->left = std::exchange(parts.second, node);
        }
        update(*node);
        return parts;
    }

    // Join two subtrees, of which all of `low` comes before all of `high`.
    static Request* merge(Request* low, Request* high) {
        if (!low || !high) return low ? low : high;
        bool below = low->weight >= high->weight;
        Request* top = below ? low : high;
        (below ? low->right : high->left) = below ? merge(low->right, high) : merge(low, high->left);
        update(*top);
        return top;
    }

    static Request* with(Request* node, Request& request) {
        if (!node || node->weight < request.weight) {
            std::tie(request.left, request.right) = split(node, request);
            update(request);
            return &request;
        }
        Request*& child = before(request, *node) ? node->left : node->right;
        child = with(child, request);
        node->least = std::min(node->least, request.total);
        node->most = std::max(node->most, request.total);
        ++node->count;
        return node;
    }

    static Request* without(Request* node, const Request& request) {
        if (node == &request) return merge(node->left, node->right);
        Request*& child = before(request, *node) ? node->left : node->right;
        child = without(child, request);
        --node->count;
        // Else this node or others have the least and the most, and its children need not be looked at.
        if (request.total != node->total && (request.total == node->least || request.total == node->most)) update(*node);
        return node;
    }

    Request* root_ = nullptr;
    Request* first_ = nullptr;
    uint32_t seed_ = 0x9E3779B9;
};

struct Tally {
    int64_t waiting = 0, waiting_bytes = 0, growing = 0, growing_bytes = 0;  // now
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
    std::vector<Share*> inside;  // shares right inside of this one in which a request waits
    size_t requests = 0;         // of this share itself, waiting or not yet forgotten
    size_t parts = 0;            // shares right inside of this one, whether a request waits there or not
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

    // Something changed about a share: what waits there, its limit, or what is live.
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

    // Shares in which requests have begun or ceased to wait before newcomers since this was asked last.
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
