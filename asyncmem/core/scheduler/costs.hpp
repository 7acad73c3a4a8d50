// What driver calls cost by their size, and the bill that a replay runs up.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace asyncmem::replay {

// The order is that of the names in asyncmem/replay/costs.py.
enum class Call : uint8_t { Create, Map, SetAccess, Unmap, Release, AllocAsync, FreeAsync, Alloc, Free, Record, Wait };
constexpr size_t call_count = 11;

struct Point {
    uint64_t nbytes;
    double us;
};

// Straight lines between points of rising size; the first point's cost below it, and the last line goes on for ever.
class Curve {
public:
    Curve() = default;
    explicit Curve(std::vector<Point> points) : points_(std::move(points)) {}

    double at(uint64_t nbytes) const {
        if (points_.empty()) return 0;
        if (points_.size() == 1 || nbytes <= points_[0].nbytes) return points_[0].us;
        size_t i = 1;
        while (i + 1 < points_.size() && nbytes > points_[i].nbytes) ++i;
        const Point &a = points_[i - 1], &b = points_[i];
        double slope = (b.us - a.us) / static_cast<double>(b.nbytes - a.nbytes);
        return std::max(0.0, a.us + slope * static_cast<double>(nbytes - a.nbytes));
    }

private:
    std::vector<Point> points_;
};

using Costs = std::array<Curve, call_count>;

struct Bill {
    std::array<uint64_t, call_count> calls{};
    double us = 0;

    // What is part of a call that was counted already costs, and counts no more.
    void add(const Costs& costs, Call call, uint64_t nbytes, bool part = false) {
        auto at = static_cast<size_t>(call);
        calls[at] += !part;
        us += costs[at].at(nbytes);
    }
};

}  // namespace asyncmem::replay
