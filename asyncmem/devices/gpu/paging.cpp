#include "paging.hpp"

namespace asyncmem::gpu {
namespace {

constexpr int pinned = 1;
constexpr int on_device = 1;
constexpr int no_access = 0;
constexpr int read_and_write = 3;

// Up to where spans from the first on lie one behind the other, and are at most `step` bytes or one span.
std::size_t stretch_end(const std::vector<Span> &spans, std::size_t first, std::uint64_t step) {
    const std::uint64_t begin = spans[first].address;
    std::uint64_t end = begin + spans[first].nbytes;
    std::size_t next = first + 1;
    while (next < spans.size() && spans[next].address == end && end - begin + spans[next].nbytes <= step)
        end += spans[next++].nbytes;
    return next;
}

} // namespace

Outcome Paging::called(const char *call, Code code) {
    context_.call_count.fetch_add(1, std::memory_order_relaxed);
    return {code, call};
}

Progress Paging::remap(const std::vector<Span> &unmap, const std::vector<Span> &map, const std::vector<int> &devices,
                       std::uint64_t step) {
    Progress done;
    if (gone())
        return {0, 0, {deinitialized, "cuMemUnmap"}};
    retry();
    for (std::size_t at = 0; at < unmap.size(); at = done.unmapped) {
        const std::size_t next = stretch_end(unmap, at, step);
        done.outcome = take_away(unmap, at, next);
        if (done.outcome.code != success)
            break;
        done.unmapped = next;
    }
    for (std::size_t at = 0; at < map.size() && done.outcome.code == success;) {
        Pieces stretch;
        const std::size_t next = stretch_end(map, at, step);
        for (std::size_t i = at; i < next && done.outcome.code == success; ++i)
            done.outcome = put(map[i], stretch);
        if (done.outcome.code == success)
            done.outcome = open(stretch, devices, true);
        if (done.outcome.code != success) {
            undo(stretch);
            break;
        }
        mapped_.merge(stretch);
        done.mapped += next - at;
        at = next;
    }
    Outcome released = release_spare();
    if (done.outcome.code == success)
        done.outcome = released;
    return done;
}

// One call for spans that lie one behind the other, of which each was mapped as a whole: all of them go, or none.
Outcome Paging::take_away(const std::vector<Span> &spans, std::size_t first, std::size_t end) {
    std::uint64_t nbytes = 0;
    for (std::size_t i = first; i < end; ++i) {
        auto found = mapped_.find(spans[i].address);
        if (found == mapped_.end() || found->second.nbytes != spans[i].nbytes)
            return {invalid_value, "cuMemUnmap"};
        nbytes += spans[i].nbytes;
    }
    Outcome outcome = called("cuMemUnmap", context_.driver.cuMemUnmap(spans[first].address, nbytes));
    if (outcome.code != success)
        return outcome;
    for (std::size_t i = first; i < end; ++i) {
        auto found = mapped_.find(spans[i].address);
        spare_.emplace(spans[i].nbytes, found->second.handle);
        mapped_.erase(found);
    }
    return outcome;
}

Outcome Paging::put(const Span &span, Pieces &stretch) {
    auto spare = spare_.find(span.nbytes);
    if (spare == spare_.end()) {
        Handle made;
        const Properties wish{pinned, 0, {on_device, context_.device()}, nullptr, {}};
        Outcome outcome = called("cuMemCreate", context_.driver.cuMemCreate(&made, span.nbytes, &wish, 0));
        if (outcome.code != success)
            return outcome;
        spare = spare_.emplace(span.nbytes, made);
    }
    Outcome outcome = called("cuMemMap", context_.driver.cuMemMap(span.address, span.nbytes, 0, spare->second, 0));
    if (outcome.code == success) {
        stretch[span.address] = {span.nbytes, spare->second};
        spare_.erase(spare);
    }
    return outcome;
}

// One call for pieces that lie one behind the other.
Outcome Paging::open(const Pieces &stretch, const std::vector<int> &devices, bool allowed) {
    if (stretch.empty() || devices.empty())
        return {};
    std::vector<Access> accesses;
    for (int device : devices)
        accesses.push_back({{on_device, device}, allowed ? read_and_write : no_access});
    const std::uint64_t begin = stretch.begin()->first;
    const std::uint64_t end = stretch.rbegin()->first + stretch.rbegin()->second.nbytes;
    return called("cuMemSetAccess",
                  context_.driver.cuMemSetAccess(begin, end - begin, accesses.data(), accesses.size()));
}

void Paging::undo(Pieces &stretch) {
    for (const auto &[address, piece] : stretch) {
        if (called("cuMemUnmap", context_.driver.cuMemUnmap(address, piece.nbytes)).code == success)
            spare_.emplace(piece.nbytes, piece.handle);
        else
            half_[address] = piece;
    }
}

void Paging::retry() {
    Pieces half;
    half.swap(half_);
    undo(half);
}

Outcome Paging::release_spare() {
    for (auto one = spare_.begin(); one != spare_.end(); one = spare_.erase(one)) {
        Outcome outcome = called("cuMemRelease", context_.driver.cuMemRelease(one->second));
        if (outcome.code != success)
            return outcome;
    }
    return {};
}

Outcome Paging::allow(const std::vector<int> &devices, bool allowed, std::uint64_t step) {
    Outcome outcome;
    for (auto at = mapped_.begin(); at != mapped_.end();) {
        if (gone())
            return {deinitialized, "cuMemSetAccess"};
        Pieces stretch;
        std::uint64_t nbytes = 0, end = at->first;
        while (at != mapped_.end() && at->first == end && (!nbytes || nbytes + at->second.nbytes <= step)) {
            nbytes += at->second.nbytes;
            end += at->second.nbytes;
            stretch.insert(*at++);
        }
        const Outcome one = open(stretch, devices, allowed);
        if (outcome.code == success)
            outcome = one;
        if (allowed && outcome.code != success)
            break; // while the loop that forbids goes on, and forbids what can be
    }
    return outcome;
}

bool Paging::bare(const Span &range) {
    if (!half_.empty() && !gone()) {
        retry();
        release_spare();
    }
    auto none = [&](const Pieces &pieces) {
        auto first = pieces.lower_bound(range.address);
        return first == pieces.end() || first->first >= range.address + range.nbytes;
    };
    return none(mapped_) && none(half_);
}

void Paging::forget() {
    mapped_.clear();
    half_.clear();
    spare_.clear();
}

} // namespace asyncmem::gpu
