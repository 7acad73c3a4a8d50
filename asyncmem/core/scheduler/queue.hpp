// Requests in order, searchable by size: "the first in order that asks for at most so much" costs O(log n).
//
// A treap: a search tree by order, a heap by random weights. Each node knows the least and the most that its subtree asks
// for, so a search goes straight to the first that fits, however many different sizes wait.
#pragma once

#include <algorithm>
#include <cstdint>

#include "request.hpp"

namespace asyncmem::scheduler {

// Whether `a` is served before `b`.
inline bool before(const Request& a, const Request& b) {
    if (a.key != b.key) return a.key < b.key;
    if (a.terms.priority != b.terms.priority) return a.terms.priority > b.terms.priority;
    return a.sequence < b.sequence;
}

class RequestQueue {
public:
    bool empty() const { return !root_; }
    size_t count() const { return count_of(root_); }
    uint64_t bytes() const { return bytes_; }
    uint64_t least() const { return root_ ? root_->least : 0; }

    void insert(Request& request) {
        request.left = request.right = nullptr;
        request.weight = next_weight();
        Request** place = &root_;
        Request* up = nullptr;
        while (*place && (*place)->weight >= request.weight) {
            up = *place;
            place = before(request, *up) ? &up->left : &up->right;
        }
        split(*place, request);
        *place = &request;
        request.up = up;
        update(request);
        for (Request* node = up; node; node = node->up) {
            node->least = std::min(node->least, request.total);
            node->most = std::max(node->most, request.total);
            ++node->count;
        }
        bytes_ += request.total;
    }

    void remove(Request& request) {
        Request* up = request.up;
        Request* merged = merge(request.left, request.right);
        if (merged) merged->up = up;
        if (!up) {
            root_ = merged;
        } else if (up->left == &request) {
            up->left = merged;
        } else {
            up->right = merged;
        }
        for (Request* node = up; node; node = node->up) update(*node);
        request.left = request.right = request.up = nullptr;
        bytes_ -= request.total;
    }

    Request* first() const {
        Request* node = root_;
        while (node && node->left) node = node->left;
        return node;
    }

    // The first in order that asks for at most `nbytes`, or nullptr.
    Request* first(uint64_t nbytes) const {
        Request* node = root_;
        if (!node || node->least > nbytes) return nullptr;
        for (;;) {
            if (node->left && node->left->least <= nbytes) {
                node = node->left;
            } else if (node->total <= nbytes) {
                return node;
            } else {
                node = node->right;
            }
        }
    }

    // The first in order that asks for more than `nbytes`, or nullptr.
    Request* first_above(uint64_t nbytes) const {
        Request* node = root_;
        if (!node || node->most <= nbytes) return nullptr;
        for (;;) {
            if (node->left && node->left->most > nbytes) {
                node = node->left;
            } else if (node->total > nbytes) {
                return node;
            } else {
                node = node->right;
            }
        }
    }

    // The one behind a request in order, or nullptr.
    static Request* next(const Request& request) {
        if (Request* node = request.right) {
            while (node->left) node = node->left;
            return node;
        }
        const Request* node = &request;
        while (node->up && node->up->right == node) node = node->up;
        return node->up;
    }

    // How many come before a request.
    static size_t rank(const Request& request) {
        size_t before = count_of(request.left);
        for (const Request* node = &request; node->up; node = node->up)
            if (node->up->right == node) before += 1 + count_of(node->up->left);
        return before;
    }

    // Whether every rule of the structure holds.
    bool sound() const {
        size_t count = 0;
        uint64_t bytes = 0;
        bool good = !root_ || !root_->up;
        const Request* last = nullptr;
        for (Request* node = first(); node; node = next(*node)) {
            ++count;
            bytes += node->total;
            good = good && (!last || before(*last, *node));
            good = good && node->least == least_of(*node) && node->most == most_of(*node);
            good = good && node->count == 1 + count_of(node->left) + count_of(node->right);
            for (const Request* child : {node->left, node->right})
                good = good && (!child || (child->up == node && child->weight <= node->weight));
            last = node;
        }
        return good && count == this->count() && bytes == bytes_;
    }

private:
    uint32_t next_weight() {
        seed_ ^= seed_ << 13;
        seed_ ^= seed_ >> 17;
        return seed_ ^= seed_ << 5;
    }

    static uint64_t least_of(const Request& node) {
        uint64_t least = node.total;
        if (node.left) least = std::min(least, node.left->least);
        if (node.right) least = std::min(least, node.right->least);
        return least;
    }

    static uint64_t most_of(const Request& node) {
        uint64_t most = node.total;
        if (node.left) most = std::max(most, node.left->most);
        if (node.right) most = std::max(most, node.right->most);
        return most;
    }

    static uint32_t count_of(const Request* node) { return node ? node->count : 0; }

    static void update(Request& node) {
        node.least = least_of(node);
        node.most = most_of(node);
        node.count = 1 + count_of(node.left) + count_of(node.right);
    }

    // Part a subtree into what comes before a request and what comes behind, below that request.
    static void split(Request* tree, Request& request) {
        Request** low = &request.left;
        Request** high = &request.right;
        Request* low_up = &request;
        Request* high_up = &request;
        while (tree) {
            if (before(*tree, request)) {
                *low = tree;
                tree->up = low_up;
                low_up = tree;
                low = &tree->right;
                tree = tree->right;
            } else {
                *high = tree;
                tree->up = high_up;
                high_up = tree;
                high = &tree->left;
                tree = tree->left;
            }
        }
        *low = *high = nullptr;
        for (Request* node = low_up; node != &request; node = node->up) update(*node);
        for (Request* node = high_up; node != &request; node = node->up) update(*node);
    }

    // Join two subtrees, of which all of `low` comes before all of `high`.
    static Request* merge(Request* low, Request* high) {
        Request* top = nullptr;
        Request** place = &top;
        Request* up = nullptr;
        while (low && high) {
            if (low->weight >= high->weight) {
                *place = low;
                low->up = up;
                up = low;
                place = &low->right;
                low = low->right;
            } else {
                *place = high;
                high->up = up;
                up = high;
                place = &high->left;
                high = high->left;
            }
        }
        *place = low ? low : high;
        if (*place) (*place)->up = up;
        for (Request* node = up; node; node = node->up) {
            update(*node);
            if (node == top) break;
        }
        return top;
    }

    Request* root_ = nullptr;
    uint64_t bytes_ = 0;
    uint32_t seed_ = 0x9E3779B9;
};

}  // namespace asyncmem::scheduler
