#include "checker.hpp"

#include <cstdio>

constexpr std::size_t MOST_VIOLATIONS = 1000;  // one mistake in a long run tells enough

void Checker::split(std::uint64_t at) {
    auto next = cells_.upper_bound(at);
    if (next == cells_.begin()) return;
    auto here = std::prev(next);
    if (here->first == at || here->second.end <= at) return;
    Cell upper = here->second;
    here->second.end = at;
    cells_.emplace(at, std::move(upper));
}

void Checker::erase(std::uint64_t start, std::uint64_t end) {
    split(start);
    split(end);
    cells_.erase(cells_.lower_bound(start), cells_.lower_bound(end));
}

bool Checker::whole(std::uint64_t start, std::uint64_t end) {
    for (auto cell = cells_.lower_bound(start); start < end; ++cell) {
        if (cell == cells_.end() || cell->first != start) return false;
        start = cell->second.end;
    }
    return true;
}

void Checker::add(std::uint64_t start, std::uint64_t nbytes, Use birth) {
    erase(start, start + nbytes);
    cells_.emplace(start, Cell{.end = start + nbytes, .birth = birth});
}

void Checker::copy(std::uint64_t start, std::uint64_t nbytes, std::uint64_t to) {
    split(start);
    split(start + nbytes);
    erase(to, to + nbytes);
    for (auto cell = cells_.lower_bound(start); cell != cells_.end() && cell->first < start + nbytes; ++cell) {
        Cell made = cell->second;
        made.end = made.end - start + to;
        cells_.emplace(cell->first - start + to, std::move(made));
    }
}

void Checker::remove(std::uint64_t start, std::uint64_t nbytes, const char* call) {
    remove_behind(start, nbytes, host, {}, call);
}

void Checker::remove_behind(std::uint64_t start, std::uint64_t nbytes, const Clock& clock, Use doer, const char* call) {
    split(start);
    split(start + nbytes);
    for (auto cell = cells_.lower_bound(start); cell != cells_.end() && cell->first < start + nbytes; ++cell)
        check(cell->second, cell->first, true, clock, call, doer);
    erase(start, start + nbytes);
}

bool Checker::touch(std::uint64_t start, std::uint64_t nbytes, bool write, const Clock& clock, Use doer,
                    const char* call) {
    if (nbytes == 0) return true;
    const auto end = start + nbytes;
    split(start);
    split(end);
    if (!whole(start, end)) {
        report(call, start, end, doer, "nothing is there", {});
        return false;
    }
    for (auto cell = cells_.lower_bound(start); cell != cells_.end() && cell->first < end; ++cell) {
        check(cell->second, cell->first, write, clock, call, doer);
        if (!write) cell->second.reads[doer.stream] = doer.count;
    }
    if (write) {
        erase(start, end);
        cells_.emplace(start, Cell{.end = end, .write = doer});
    }
    return true;
}

void Checker::check(const Cell& cell, std::uint64_t start, bool write, const Clock& clock, const char* call, Use doer) {
    const auto follows = [&](const Use& use) { return !use.stream || covers(clock, use.stream, use.count); };
    if (!follows(cell.birth)) report(call, start, cell.end, doer, "given out by", cell.birth);
    if (!follows(cell.write)) report(call, start, cell.end, doer, "written by", cell.write);
    if (!write) return;
    for (auto [stream, count] : cell.reads)
        if (!covers(clock, stream, count)) report(call, start, cell.end, doer, "read by", {stream, count});
}

void Checker::report(const char* call, std::uint64_t start, std::uint64_t end, Use doer, const char* what, Use other) {
    if (violations.size() >= MOST_VIOLATIONS) return;
    const auto by = doer.stream ? " on " + called(doer.stream) : std::string(" by the host");
    const auto why = other.stream ? " work of " + called(other.stream) + " that nothing orders before it" : "";
    char range[64];
    std::snprintf(range, sizeof range, "%llu bytes at %#llx: ", (unsigned long long)(end - start),
                  (unsigned long long)start);
    violations.push_back(std::string(range) + call + by + ": " + what + why);
}

std::string Checker::called(std::uint64_t stream) {
    auto found = names_.find(stream);
    return found == names_.end() ? "stream " + std::to_string(stream) : found->second;
}
