// What both kinds of sources have in common, and segments.
#include "source.hpp"

#include <algorithm>
#include <numeric>
#include <span>

namespace asyncmem::scheduler {

// -- common ------------------------------------------------------------------------------------------------------------

bool Source::keeps_apart(const Request& request) const {
    if (request.share->arena != -1 || request.pressed || (request.terms.calls && request.terms.on_loop)) return false;
    return (policy_.overlap_bytes || policy_.overlap_share > 0) && slack() >= 0 && can_grow(request);
}

uint64_t Source::left() const {
    uint64_t used = reserved_or_leaving() + coming_;
    return policy_.limit - std::min(policy_.limit, used);
}

int64_t Source::slack() const {
    uint64_t most = policy_.overlap_bytes;
    if (policy_.overlap_share > 0) {
        auto share = static_cast<uint64_t>(policy_.overlap_share * static_cast<double>(heap_.account(0).peak));
        most = std::max(share, policy_.overlap_least);
    }
    return static_cast<int64_t>(std::min<uint64_t>(most, INT64_MAX)) - static_cast<int64_t>(free());
}

bool Source::tight() const {
    constexpr uint64_t part = 64;
    uint64_t reserved = heap_.reserved();
    return reserved + reserved / part > policy_.limit;
}

uint64_t Source::shortage(uint64_t nbytes) const {
    uint64_t most = refuses() ? heap_.reserved() : policy_.limit, live = heap_.live();
    uint64_t room = most - std::min(most, live);
    return std::max<uint64_t>(nbytes - std::min(nbytes, room), 1);
}

bool Source::may_be_patient(const Request& request, double now) const {
    if (request.terms.captured || (request.terms.calls && request.terms.on_loop)) return false;
    return lifetime_.may_wait(policy_, now, now - request.since) > 0;
}

// All that may be waited at once must save a 32nd of the peak.
Decision Source::wait_patiently(const Request& request, const std::vector<Piece>& later, double now) const {
    constexpr double price = 1.0 / 32, late = 2;
    double most = lifetime_.may_wait(policy_, now, now - request.since), whole = lifetime_.patience(policy_, now);
    double best = 0, end = now, until = now;
    uint64_t gain = 0;
    Entries uses, worth;
    for (const Piece& part : later) {
        end = latency_.known() ? std::max(end, latency_.end(part.uses, now)) : now + most;
        if (end > now + most) break;
        gain += part.nbytes;
        for (const Entry& use : part.uses) include(uses, use);
        double value = static_cast<double>(gain) / static_cast<double>(std::max<uint64_t>(peak_, 1)) - (end - now) / whole * price;
        if (value > best) {
            best = value;
            until = end;
            worth = uses;
        }
    }
    if (worth.empty() || until <= now) return {};
    // A fence is often done a little later than others were.
    Decision wait = wait_for(std::move(worth), std::min(most, late * (until - now)));
    wait->patient = true;
    return wait;
}

// -- segments ----------------------------------------------------------------------------------------------------------

namespace {

// Segments that go back before more is reserved than ever, or are cut: for this share of the pool's life, and those that go
// back no larger than so many times what comes.
constexpr double exchange_share = 0.02;
constexpr uint64_t uneven = 8;
// A program that comes out a little short in each of its rounds would have its caches emptied every time, and is better off
// with a little more memory: so many allocations an emptying has to last for, or growth comes first, as long as no more is
// reserved than so many times the most that was live.
constexpr int64_t lately = 10'000;
constexpr double little = 1.125;
constexpr uint64_t uncached = 2 << 20;  // blocks of so many bytes keep no segment that could be joined in use by lying in a cache
constexpr uint64_t refused = 0;  // of a segment's size: the limit or the device forbids it

class SegmentSource final : public Source {
public:
    SegmentSource(Heap& heap, const Policy& policy, double now) : Source(heap, policy, now) {
        if (policy.joins) heap.place_from(uncached);
    }

    bool may_hold(uint64_t nbytes) const override { return free() >= nbytes; }

    bool should_flush(const Request& request) override {
        if (!may_hold(request.total) || !heap_.cached_bytes()) return false;
        Account whole = heap_.account(0);
        auto taken = static_cast<int64_t>(whole.grants());
        auto grown = static_cast<double>(heap_.reserved() + coming_ + request.total);
        if (taken - flushed_ < lately && grown <= little * static_cast<double>(whole.peak) && can_grow(request)) return false;
        flushed_ = taken;
        return true;
    }

    bool should_tidy(const Request& request, bool first) override {
        if (!may_hold(request.total) || !(first || slack() < 0)) return false;
        // One stream's free memory is joined at each free as it is: all that can be gained are its caches.
        return several_streams() || heap_.cached_bytes() >= request.total;
    }

    bool can_grow(const Request& request) const override {
        return size_for(request.total, arena_for(request.largest), UINT64_MAX) != refused;
    }

    Decision patience(const Request& request, double now, bool looked) override {
        Effect order = may_be_patient(request, now) ? order_for(request) : Effect{};
        if (!order.nbytes || policy_.direct || over(order) <= 0) return {};
        std::vector<Piece> empty = candidates(request, order, now);
        if (!worthwhile(empty, over(order))) return {};
        if (!looked)
            if (Decision look = look_at(empty)) return look;
        std::erase_if(empty, [](const Piece& one) { return one.uses.empty(); });
        return wait_patiently(request, empty, now);
    }

    // Before more is reserved than ever, segments go back that are free and done with, and too small to serve. A program
    // whose sizes change would collect them else.
    Decision grow(const Request& request, double now, bool looked) override {
        Effect order = order_for(request);
        if (!order.nbytes) return {};
        if (order.arena && !request.terms.captured)
            if (Decision joined = join_for(request, order)) return joined;
        int64_t more = over(order);
        std::vector<Piece> empty;
        if (!request.terms.captured && !policy_.direct && policy_.take_back && more > 0)
            empty = candidates(request, order, now);
        if (!looked)
            if (Decision look = look_at(empty)) return look;
        std::erase_if(empty, [](const Piece& one) { return !one.uses.empty(); });
        if (!empty.empty() && worthwhile(empty, more)) {
            uint64_t keep = policy_.ready - std::min(policy_.ready, order.nbytes);
            order.returns = take_out(empty, static_cast<uint64_t>(more), keep);
        }
        return ordered(std::move(order), request.ask.stream);
    }

    // Free segments in two, so that what the request leaves of them can be extended.
    Decision cut(const Request& request, double now) override {
        if (!lifetime_.may_cut(now, exchange_share)) return {};
        std::vector<Piece> all = joinable(request.ask.stream);
        auto [run, nbytes] = smallest_run(all, request.total, 1);
        uint64_t part = up(request.total);
        return run.empty() || nbytes <= part ? Decision{} : joined(run, 0, request.ask.stream, nbytes - part);
    }

    Decision grow_part(const Request& request) override {
        if (request.pieces.size() < 2 || free() + left() < request.total) return {};
        uint64_t need = std::max(request.largest, request.total - std::min(request.total, free()));
        return ordered(order_of(need, arena_for(request.largest), UINT64_MAX), request.ask.stream);
    }

    Decision make_room(const Request& request, double now) override {
        uint64_t missing = request.total - std::min(request.total, left());
        std::vector<Piece> empty = largest_first();
        uint64_t sum = 0;
        for (const Piece& one : empty) sum += one.nbytes;
        if (!refuses() && sum < missing) empty.clear();
        if (empty.empty() && stranded_.empty()) return {};
        if (request.terms.calls) {
            // What goes back is waited for without a bound, which is for the worker to do.
            Entries uses;
            for (const std::vector<Piece>* all : {&empty, &stranded_})
                for (const Piece& one : *all)
                    for (const Entry& use : one.uses)
                        if (use.epoch > heap_.epochs(use.stream).done) include(uses, use);
            if (!uses.empty() && request.terms.on_loop) return {};
            if (Decision wait = wait_for(std::move(uses), request.terms.deadline - now)) return wait;
        }
        return give_back(take_out(empty, refuses() ? no_limit : std::max<uint64_t>(missing, 1), 0));
    }

    Decision grow_ahead(double) override {
        uint64_t reserved = heap_.reserved() + coming_;
        if (policy_.ready <= reserved) return {};
        uint64_t need = up(policy_.ready - reserved);
        return ordered(order_of(need, arena_for(need), UINT64_MAX), last_stream_);
    }

    Decision join(uint32_t stream) override {
        keep_last_whole();
        std::vector<Piece> all = joinable(stream);
        std::span<const Piece> found;
        each_run(all, [&](std::span<const Piece> run, uint64_t) {
            // What all are done with stays every stream's, until it is needed: one that is joined is first this stream's.
            if (run.size() > 1 && !(several_streams() && std::ranges::all_of(run, &Entries::empty, &Piece::uses))) found = run;
        });
        return found.empty() ? Decision{} : joined(found, 0, stream);
    }

    Decision trim(uint64_t wanted, uint64_t keep, double now, bool asked) override {
        std::vector<Piece> returns = take_out(largest_first(), wanted, keep);
        bool again = !stranded_.empty() && (asked || now >= pauses_until_);
        return returns.empty() && !again ? Decision{} : give_back(std::move(returns));
    }

    void grew(const Job& job, uint64_t address, uint64_t nbytes, uint64_t rest, uint32_t stream, bool ready,
              double seconds) override {
        const Effect& order = job.effect;
        coming_ -= order.nbytes + order.rest;
        add(address, nbytes, order.arena, stream);
        if (rest) add(rest, order.rest, order.arena, stream);
        if (ready) heap_.mark_done(stream, heap_.close_epoch(stream));
        last_stream_ = stream;
        default_works_ |= stream == 0;
        note_peak();
        keep_last_whole();
        if (order.joins) {
            lifetime_.shaped += seconds;
            return;
        }
        if (!order.returns.empty()) lifetime_.moved += seconds;
        ++grows;
    }

    void grow_failed(const Job& job, bool out_of_memory) override {
        coming_ -= job.effect.nbytes + job.effect.rest;
        if (out_of_memory) refused_ = job.effect.need;
    }

    void trimmed(Job& job, size_t count, double now) override {
        std::vector<Piece>& returns = job.effect.returns;
        if (job.effect.joins) keep(std::span(returns).subspan(count), job.effect.stream);
        for (size_t i = 0; i < returns.size(); ++i) {
            if (i < count) {
                leaving_ -= returns[i].nbytes;
                trims += !job.effect.joins;
            } else if (!job.effect.joins) {
                pauses_until_ = now + refused_pause;
                stranded_bytes_ += returns[i].nbytes;
                stranded_.push_back(std::move(returns[i]));
            }
        }
        returns.resize(count);
        if (count) refused_ = no_limit;
        keep_last_whole();
    }

protected:
    uint64_t free() const override { return heap_.reserved() - heap_.live(); }
    uint64_t reserved_or_leaving() const override { return heap_.reserved() + leaving_; }

private:
    // By how much more would be reserved than ever.
    int64_t over(const Effect& order) const {
        return static_cast<int64_t>(heap_.reserved() + leaving_ + coming_ + order.nbytes) - static_cast<int64_t>(peak_);
    }

    // Which arena a request of this size grows: 0 for small ones, 1 for others.
    uint32_t arena_for(uint64_t nbytes) const { return nbytes < policy_.small_limit && !policy_.direct ? 0 : 1; }

    uint64_t up(uint64_t nbytes) const {
        return (nbytes + policy_.granularity - 1) / policy_.granularity * policy_.granularity;
    }

    // Segments that nothing but this stream's work may still use, by address.
    std::vector<Piece> joinable(uint32_t stream) const {
        if (!policy_.joins || !policy_.take_back) return {};
        std::vector<Piece> empty = heap_.empty_segments();
        std::erase_if(empty, [&](const Piece& one) {
            return !one.arena || std::ranges::any_of(one.uses, [&](const Entry& use) { return use.stream != stream; });
        });
        std::ranges::sort(empty, {}, &Piece::address);
        return empty;
    }

    // Look at those that lie side by side, and how many bytes they are.
    template <typename Look>
    static void each_run(std::span<const Piece> all, Look look) {
        for (size_t count, i = 0; i < all.size(); i += count) {
            uint64_t nbytes = all[i].nbytes;
            for (count = 1; i + count < all.size() && all[i].address + nbytes == all[i + count].address; ++count)
                nbytes += all[i + count].nbytes;
            look(all.subspan(i, count), nbytes);
        }
    }

    // The least memory that so many segments side by side, or more, have for a request, and how many bytes it is.
    static std::pair<std::span<const Piece>, uint64_t> smallest_run(std::span<const Piece> all, uint64_t need, size_t count) {
        std::span<const Piece> best;
        uint64_t least = no_limit;
        each_run(all, [&](std::span<const Piece> run, uint64_t nbytes) {
            if (run.size() < count || nbytes < need || nbytes >= least) return;
            best = run;
            least = nbytes;
        });
        return {best, least};
    }

    // The least memory that joined segments have for a request. Else the last ones are to serve it with what they lack, which the
    // device gives behind them; where it did not, all of it comes by itself.
    Decision join_for(const Request& request, const Effect& order) {
        std::vector<Piece> all = joinable(request.ask.stream);
        auto [best, least] = smallest_run(all, order.need, 2);
        if (!best.empty()) return joined(best, order.need, request.ask.stream);
        uint64_t last = 0;
        each_run(all, [&](std::span<const Piece> run, uint64_t nbytes) {
            if (run.back().address + run.back().nbytes == end_) last = nbytes;
        });
        if (!last || last >= order.need || extended_ == request.id) return {};
        extended_ = request.id;
        return ordered(order_of(order.need - last, order.arena, 0), request.ask.stream);
    }

    // Only the last segment can be extended, and only while all of it is free. So what needs a large part of it has a segment of
    // its own, cut from there. What is cut is first one stream's, so that is for pools in which one stream does all the work.
    void keep_last_whole() {
        constexpr uint64_t part = 8;  // of what is reserved
        bool cuts = policy_.joins && policy_.take_back && one_stream_works();
        heap_.keep_whole(end_, cuts ? std::max(uncached, heap_.reserved() / part) : no_limit, policy_.granularity);
    }

    // Stream 0 is there in every pool, though no work may come on it.
    bool one_stream_works() const { return heap_.stream_count() - !default_works_ <= 1; }

    void add(uint64_t address, uint64_t nbytes, uint32_t arena, uint32_t stream, uint64_t epoch = open_epoch) {
        heap_.add_segment(address, nbytes, arena, stream, epoch);
        in_arena_[arena] += nbytes;
        end_ = std::max(end_, address + nbytes);
    }

    // As they were: nothing but this stream's work may still use them.
    void keep(std::span<const Piece> pieces, uint32_t stream) {
        for (const Piece& one : pieces) {
            leaving_ -= one.nbytes;
            uint64_t epoch = one.uses.empty() ? heap_.epochs(stream).done : one.uses.front().epoch;
            add(one.address, one.nbytes, 1, stream, epoch);
        }
    }

    // One segment where these are, or two, the second of `rest` bytes.
    Decision joined(std::span<const Piece> run, uint64_t need, uint32_t stream, uint64_t rest = 0) {
        Effect order{.kind = Effect::Kind::Grow, .joins = true, .arena = 1, .need = need, .rest = rest};
        order.returns = take_out({run.begin(), run.end()}, no_limit, 0);
        if (order.returns.size() < run.size()) {  // a thread took from one meanwhile
            keep(order.returns, stream);
            return {};
        }
        for (const Piece& one : order.returns) order.nbytes += one.nbytes;
        order.nbytes -= rest;
        return ordered(std::move(order), stream);
    }

    // How large the next segment should be so that `need` bytes fit in one piece; `most` is what it should not exceed,
    // unless the need does. Small requests have segments of their own, which start small and grow with what is there.
    uint64_t size_for(uint64_t need, uint32_t arena, uint64_t most) const {
        if (need >= refused_) return refused;
        uint64_t unit = policy_.granularity, rounded = up(need), left = this->left(), usual = policy_.segment_size;
        if (policy_.joins && arena) usual = need < usual ? up(usual / need * need) : 0;  // so that nothing is left over
        if (!arena) usual = std::min(usual, std::max(2 * policy_.small_limit, in_arena_[arena] / 2));
        uint64_t wish = policy_.direct ? rounded : std::max(rounded, std::min(up(usual), most - most % unit));
        if (wish <= left) return wish;
        uint64_t whole = left - left % unit;
        if (rounded <= whole) return policy_.direct ? rounded : whole;
        return need <= left ? left : refused;  // the rest of an odd limit: the device rounds it up by itself
    }

    Effect order_of(uint64_t need, uint32_t arena, uint64_t most) const {
        uint64_t nbytes = size_for(need, arena, most);
        return {.kind = Effect::Kind::Grow, .arena = arena, .nbytes = nbytes, .need = std::min(need, nbytes)};
    }

    // Growth that holds a whole request, or what one size class lacks for a batch of both: a piece that lay in the other
    // class's segment would never be cached. What is there to keep streams apart adds no more than `overlap` allows.
    Effect order_for(const Request& request) const {
        Part part = missing_part(request);
        uint64_t most = part.most;
        if ((policy_.overlap_bytes || policy_.overlap_share > 0) && several_streams() && free() >= part.nbytes)
            most = std::min(most, part.nbytes + std::max<int64_t>(0, slack() - static_cast<int64_t>(coming_)));
        return order_of(part.nbytes, arena_for(part.largest), most);
    }

    struct Part {
        uint64_t nbytes, largest, most = UINT64_MAX;
    };

    // What of a request has no room: all of it, unless it is a batch of both classes and each can have memory of its own.
    Part missing_part(const Request& request) const {
        Part whole{request.total, request.largest};
        std::vector<Part> parts;
        uint64_t least = 0, last = 0;  // what they take when nothing is added, together and the last one
        for (uint32_t arena : {0, 1}) {
            std::vector<uint64_t> pieces = pieces_of(request, arena);
            if (pieces.size() == request.pieces.size()) return whole;
            if (pieces.empty() || fits(request, pieces)) continue;
            parts.push_back({std::accumulate(pieces.begin(), pieces.end(), uint64_t{0}), *std::max_element(pieces.begin(), pieces.end())});
            last = size_for(parts.back().nbytes, arena, parts.back().nbytes);
            if (last == refused) return whole;
            least += last;
        }
        if (parts.empty() || least > left()) return whole;
        if (parts.size() == 2) parts[0].most = left() - last;
        return parts[0];
    }

    std::vector<uint64_t> pieces_of(const Request& request, uint32_t arena) const {
        std::vector<uint64_t> part;
        for (uint64_t piece : request.pieces)
            if (uint64_t nbytes = rounded(piece); arena_for(nbytes) == arena) part.push_back(nbytes);
        return part;
    }

    // Whether these could be taken now, each from segments of its own class.
    bool fits(const Request& request, const std::vector<uint64_t>& pieces) const {
        Ask ask = request.ask;
        ask.again = true;
        ask.anywhere = ask.caused = false;
        Outcome outcome;
        std::vector<Granted> granted(pieces.size());
        if (!heap_.take_many(ask, pieces, granted, outcome)) return false;
        for (const Granted& one : granted) heap_.put_back(one.block, {});
        return true;
    }

    Decision ordered(Effect order, uint32_t stream) {
        if (order.nbytes == refused) return {};
        coming_ += order.nbytes + order.rest;
        order.stream = stream;
        return job_of(std::move(order));
    }

    // At the fences of what the segments wait for.
    static Decision look_at(const std::vector<Piece>& empty) {
        std::vector<uint32_t> streams;
        for (const Piece& one : empty)
            for (const Entry& use : one.uses)
                if (std::ranges::find(streams, use.stream) == streams.end()) streams.push_back(use.stream);
        if (streams.empty()) return {};
        return job_of({.kind = Effect::Kind::Look, .streams = std::move(streams)});
    }

    // With what the device did not take back before.
    Decision give_back(std::vector<Piece> returns) {
        for (Piece& one : std::exchange(stranded_, {})) returns.push_back(std::move(one));
        stranded_bytes_ = 0;
        return job_of({.kind = Effect::Kind::Trim, .returns = std::move(returns)});
    }

    std::vector<Piece> largest_first() const {
        std::vector<Piece> empty = heap_.empty_segments();
        std::stable_sort(empty.begin(), empty.end(), [](auto& a, auto& b) { return a.nbytes > b.nbytes; });
        return empty;
    }

    // What could go back for this growth. Where that is for one class of a batch, the other's memory is not: it has come for it.
    std::vector<Piece> candidates(const Request& request, const Effect& order, double now) const {
        if (!lifetime_.may_move(now, exchange_share)) return {};
        std::vector<Piece> empty = largest_first();
        std::erase_if(empty, [&](const Piece& one) {
            return one.nbytes > uneven * order.nbytes || (order.need < request.total && one.arena != order.arena);
        });
        return empty;
    }

    // Whether to give these segments back. Each leaves a gap of addresses, across which its neighbours are not joined; so
    // together they must be at least half of what would be reserved more.
    bool worthwhile(const std::vector<Piece>& empty, int64_t more) const {
        uint64_t sum = 0;
        for (const Piece& one : empty) sum += one.nbytes;
        return !policy_.joins || sum >= static_cast<uint64_t>(more) / 2;
    }

    std::vector<Piece> take_out(const std::vector<Piece>& empty, uint64_t wanted, uint64_t keep) {
        std::vector<Piece> out;
        uint64_t spare = heap_.reserved() - std::min(heap_.reserved(), keep);
        for (const Piece& one : empty) {
            if (!wanted) break;
            if (one.nbytes > spare) continue;
            spare -= one.nbytes;
            if (wanted != no_limit) wanted -= std::min(wanted, one.nbytes);
            Entries uses;
            try {
                uses = heap_.remove_segment(one.segment);
            } catch (const std::invalid_argument&) {
                continue;  // without the interpreter's lock a thread may have taken from it since it was listed
            }
            in_arena_[one.arena] -= std::min(in_arena_[one.arena], one.nbytes);
            leaving_ += one.nbytes;
            if (one.address + one.nbytes == end_) end_ = one.address;
            out.push_back({one.segment, one.address, one.nbytes, std::move(uses)});
        }
        return out;
    }

    int64_t flushed_ = -lately;     // allocations when caches were emptied last
    uint64_t in_arena_[2] = {};
    uint64_t end_ = 0;              // of the addresses that the device has given
    RequestId extended_ = 0;        // for which more was to come right behind there
    bool default_works_ = false;    // memory has come for stream 0
    uint32_t last_stream_ = 0;      // whose request brought the newest segment
    std::vector<Piece> stranded_;   // what the device did not take back
};

}  // namespace

std::unique_ptr<Source> make_pages(Heap& heap, const Policy& policy, double now);

std::unique_ptr<Source> make_source(Heap& heap, const Policy& policy, double now) {
    if (policy.paged) return make_pages(heap, policy, now);
    return std::make_unique<SegmentSource>(heap, policy, now);
}

}  // namespace asyncmem::scheduler
