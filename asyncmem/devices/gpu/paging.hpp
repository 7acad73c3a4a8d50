// Physical memory under reserved ranges of addresses, whose pieces move: unmapped here, mapped there, each batch in one go
// without the interpreter's lock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "context.hpp"

namespace asyncmem::gpu {

// What became of several calls: the first that failed, and its code.
struct Outcome {
    Code code = success;
    const char *call = "";
};

using Span = std::pair<std::uint64_t, std::uint64_t>; // an address and bytes
using Move = std::pair<Span, std::uint64_t>;          // what is mapped, and the address to map it at as well

// How far a remap came, and what stopped it.
struct Progress {
    std::size_t moved = 0, unmapped = 0, mapped = 0;
    Outcome outcome;
};

// Its user makes the context current, and keeps other threads off it.
class Paging {
  public:
    explicit Paging(Context &context) : context_(context) {}

    // Maps memory at a second address, then unmaps spans, then maps others with what was unmapped as far as the sizes agree;
    // gives back what is left, sooner if the device is full. Calls are for a stretch at a time, of at most `step` bytes
    // where spans allow.
    Progress remap(const std::vector<Move> &moves, const std::vector<Span> &unmap, const std::vector<Span> &map,
                   const std::vector<int> &devices, std::uint64_t step) {
        Progress done;
        if (gone())
            return {0, 0, 0, {deinitialized, "cuMemUnmap"}};
        retry();
        std::vector<Span> targets;
        for (const auto &[span, to] : moves)
            targets.emplace_back(to, span.second);
        done.outcome = put_all(targets, devices, step, done.moved, [&](std::size_t i, Pieces &stretch) {
            return share(moves[i], stretch);
        });
        while (done.outcome.code == success && done.unmapped < unmap.size()) {
            const std::size_t next = stretch_end(unmap, done.unmapped, step);
            done.outcome = take_away(unmap, done.unmapped, next);
            if (done.outcome.code == success)
                done.unmapped = next;
        }
        if (done.outcome.code == success)
            done.outcome = put_all(map, devices, step, done.mapped, [&](std::size_t i, Pieces &stretch) {
                return put(map[i], stretch);
            });
        Outcome released = release_spare();
        if (done.outcome.code == success)
            done.outcome = released;
        return done;
    }

    // Lets devices use all that is mapped, or forbids it.
    Outcome allow(const std::vector<int> &devices, bool allowed, std::uint64_t step) {
        Outcome outcome;
        for (auto at = mapped_.begin(); at != mapped_.end();) {
            if (gone())
                return {deinitialized, "cuMemSetAccess"};
            const std::uint64_t begin = at->first;
            std::uint64_t end = begin + at->second.nbytes;
            while (++at != mapped_.end() && at->first == end && end - begin + at->second.nbytes <= step)
                end += at->second.nbytes;
            const Outcome one = open(begin, end, devices, allowed);
            if (outcome.code == success)
                outcome = one;
            if (allowed && outcome.code != success)
                break; // while the loop that forbids goes on, and forbids what can be
        }
        return outcome;
    }

    // Whether nothing of a range is mapped, half undone stretches included. What could not go back is tried once more.
    bool bare(std::uint64_t address, std::uint64_t nbytes) {
        if ((!half_.empty() || !spare_.empty()) && !gone()) {
            retry();
            release_spare();
        }
        auto none = [&](const Pieces &pieces) {
            auto first = pieces.lower_bound(address);
            return first == pieces.end() || first->first >= address + nbytes;
        };
        return none(mapped_) && none(half_);
    }

    // Forgets all, where no call may be made any more.
    void forget() {
        mapped_.clear();
        half_.clear();
        spare_.clear();
    }

  private:
    static constexpr int pinned = 1, on_device = 1, no_access = 0, read_and_write = 3;
    struct Piece {
        std::uint64_t nbytes;
        std::shared_ptr<const Number> handle; // one for all addresses that it is mapped at
    };
    using Pieces = std::map<std::uint64_t, Piece>; // by address

    // Up to where spans from the first on lie one behind the other, and are at most `step` bytes or one span.
    static std::size_t stretch_end(const std::vector<Span> &spans, std::size_t first, std::uint64_t step) {
        const auto [begin, nbytes] = spans[first];
        std::uint64_t end = begin + nbytes;
        std::size_t next = first + 1;
        while (next < spans.size() && spans[next].first == end && end - begin + spans[next].second <= step)
            end += spans[next++].second;
        return next;
    }

    Outcome called(const char *call, Code code) {
        context_.call_count.fetch_add(1, std::memory_order_relaxed);
        return {code, call};
    }

    // One call for spans that lie one behind the other, of which each was mapped as a whole: all of them go, or none.
    Outcome take_away(const std::vector<Span> &spans, std::size_t first, std::size_t end) {
        std::uint64_t whole = 0;
        for (std::size_t i = first; i < end; ++i) {
            const auto [address, nbytes] = spans[i];
            auto found = mapped_.find(address);
            if (found == mapped_.end() || found->second.nbytes != nbytes)
                return {invalid_value, "cuMemUnmap"};
            whole += nbytes;
        }
        Outcome outcome = called("cuMemUnmap", context_.driver.cuMemUnmap(spans[first].first, whole));
        for (std::size_t i = first; i < end && outcome.code == success; ++i)
            drop(mapped_.extract(spans[i].first).mapped());
        return outcome;
    }

    // A mapping is gone, and its memory is spare if that was the last.
    void drop(const Piece &piece) {
        if (piece.handle.use_count() == 1)
            spare_.emplace(piece.nbytes, *piece.handle);
    }

    // Maps spans, a stretch at a time; a stretch that fails is undone. `count` says how many are mapped.
    template <class Put>
    Outcome put_all(const std::vector<Span> &spans, const std::vector<int> &devices, std::uint64_t step,
                    std::size_t &count, Put put_one) {
        while (count < spans.size()) {
            Pieces stretch;
            Outcome outcome;
            const std::size_t next = stretch_end(spans, count, step);
            for (std::size_t i = count; i < next && outcome.code == success; ++i)
                outcome = put_one(i, stretch);
            if (outcome.code == success)
                outcome = open(spans[count].first, spans[next - 1].first + spans[next - 1].second, devices, true);
            if (outcome.code != success) {
                undo(stretch);
                return outcome;
            }
            mapped_.merge(stretch);
            count = next;
        }
        return {};
    }

    Outcome share(const Move &move, Pieces &stretch) {
        const auto [span, to] = move;
        auto found = mapped_.find(span.first);
        if (found == mapped_.end() || found->second.nbytes != span.second)
            return {invalid_value, "cuMemMap"};
        return map(to, found->second, stretch);
    }

    Outcome put(const Span &span, Pieces &stretch) {
        const auto [address, nbytes] = span;
        auto spare = spare_.find(nbytes);
        if (spare == spare_.end()) {
            Number made;
            const Properties wish{pinned, 0, {on_device, context_.device()}, nullptr, {}};
            auto make = [&] { return called("cuMemCreate", context_.driver.cuMemCreate(&made, nbytes, &wish, 0)); };
            Outcome outcome = make();
            // The device is full, but what was unmapped has not gone back yet.
            if (outcome.code == out_of_memory && !spare_.empty() && release_spare().code == success)
                outcome = make();
            if (outcome.code != success)
                return outcome;
            spare = spare_.emplace(nbytes, made);
        }
        const Outcome outcome = map(address, {nbytes, std::make_shared<const Number>(spare->second)}, stretch);
        if (outcome.code == success)
            spare_.erase(spare);
        return outcome;
    }

    Outcome map(std::uint64_t address, const Piece &piece, Pieces &stretch) {
        const Outcome outcome = called("cuMemMap", context_.driver.cuMemMap(address, piece.nbytes, 0, *piece.handle, 0));
        if (outcome.code == success)
            stretch[address] = piece;
        return outcome;
    }

    // One call for pieces that lie one behind the other.
    Outcome open(std::uint64_t begin, std::uint64_t end, const std::vector<int> &devices, bool allowed) {
        if (devices.empty())
            return {};
        std::vector<Access> accesses;
        for (int device : devices)
            accesses.push_back({{on_device, device}, allowed ? read_and_write : no_access});
        Code code = context_.driver.cuMemSetAccess(begin, end - begin, accesses.data(), accesses.size());
        return called("cuMemSetAccess", code);
    }

    void undo(Pieces &stretch) {
        while (!stretch.empty()) {
            auto one = stretch.extract(stretch.begin());
            if (called("cuMemUnmap", context_.driver.cuMemUnmap(one.key(), one.mapped().nbytes)).code == success)
                drop(one.mapped());
            else
                half_.insert(std::move(one));
        }
    }

    void retry() {
        Pieces half;
        half.swap(half_);
        undo(half);
    }

    Outcome release_spare() {
        Outcome first;
        for (auto one = spare_.begin(); one != spare_.end();) {
            const Outcome outcome = called("cuMemRelease", context_.driver.cuMemRelease(one->second));
            if (outcome.code == success) {
                one = spare_.erase(one);
                continue;
            }
            if (first.code == success)
                first = outcome;
            ++one;
        }
        return first;
    }

    Context &context_;
    Pieces mapped_;
    Pieces half_; // mapped, but not to be: a stretch that could not be opened, nor undone
    std::multimap<std::uint64_t, Number> spare_; // mapped nowhere, by size; empty between calls, unless a release failed
};

} // namespace asyncmem::gpu
