// Vector clocks: for every stream, by its id, how much of its work is certain to be complete at some point.
#pragma once

#include <cstdint>
#include <map>

using Clock = std::map<std::uint64_t, std::uint64_t>;

inline void join(Clock& into, const Clock& from) {
    for (auto [stream, count] : from) {
        auto& known = into[stream];
        if (known < count) known = count;
    }
}

inline bool covers(const Clock& clock, std::uint64_t stream, std::uint64_t count) {
    auto found = clock.find(stream);
    return found != clock.end() && found->second >= count;
}
