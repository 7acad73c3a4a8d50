// The loop of a replay, and what it does for a request that misses.
#include "replay.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>

#include "timeline.hpp"

namespace asyncmem::replay {

namespace {

// How often fences are recorded and looked at, as in asyncmem/pool/upkeep.py; and near a limit.
constexpr double beat_us = 4000, tight_beat_us = 500;
constexpr uint32_t most_quiet = 16;  // beats at which nothing is under way, after which there is none for as long as that is so
// A large free has a fence of its own for so many of them after a wait of one stream for another; see retire.pxi.
constexpr uint64_t large = 1 << 20, few = 64, most_eager = 4096;
constexpr uint64_t merge_ratio = 32;  // live blocks for each free, up to which all are looked at for neighbours to join
constexpr uint64_t addresses = max_size;
constexpr double price = 1.0 / 32;    // see worth_waiting_for
constexpr uint64_t fine_parts = 512;  // of a limit: no handle is larger, as what lies below a border cannot be moved
constexpr uint64_t tight = 64;  // a limit is near of which such a part is left
constexpr uint64_t stocked = 256, most_stocked = 64 << 20, stock_parts = 4, far_off = 8;  // see stock
constexpr double dear_share = 0.03, grace_us = 20'000;  // of the time that moves may take, as in asyncmem/pool/paging.py
// The time that segments may take which are exchanged, and how much larger than what comes one may be that goes; as in
// asyncmem/pool/exchange.py.
constexpr double exchanging_share = 0.02;
constexpr uint64_t uneven = 8;
constexpr uint64_t parts = 12;  // of a request: handles are few where they need not fit below a limit, which cost by number
constexpr int most_tries = 8;     // growth for one request: what joins behind it may be the better place
constexpr uint64_t unbounded = uint64_t{1} << 60;
constexpr double never = std::numeric_limits<double>::infinity();

double nanoseconds() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::nano>(now).count();
}

class Replay {
public:
    Replay(const Steps& steps, const Setup& setup)
        : steps_(steps),
          setup_(setup),
          heap_(512, setup.tuning),
          timeline_(heap_, steps.streams, setup.lag_us),
          blocks_(steps.slots),
          next_sample_(setup.sample_us > 0 ? 0 : never) {
        heap_.set_guarded(true);  // nobody else knows it
        for (uint32_t s = 1; s < steps.streams; ++s) heap_.add_stream();
        if (setup.kind == Kind::Paged)
            for (uint32_t arena : {0, 1}) heap_.add_space(addresses << arena, addresses, arena, setup.page);
    }

    Tally run() {
        double start = nanoseconds();
        for (step_ = 0; step_ < steps_.count && tally_.completed; ++step_) {
            now_ = static_cast<double>(steps_.time_us[step_]) * setup_.pace + tally_.wait_us;
            if (now_ >= next_) due();
            if (steps_.nbytes[step_] >= 0) {
                take(static_cast<uint64_t>(steps_.nbytes[step_]));
            } else {
                free();
            }
        }
        tally_.loop_ns = nanoseconds() - start;
        Counts counts = heap_.counts();
        tally_.peak_live = counts.peak_live;
        tally_.peak_reserved = peak_;
        tally_.takes = counts.allocations;
        tally_.frees = counts.frees;
        tally_.end_us = now_;
        if (setup_.sample_us > 0) sample();
        return std::move(tally_);
    }

private:
    void take(uint64_t nbytes) {
        requested_ += nbytes;
        ++live_;
        tally_.peak_requested = std::max(tally_.peak_requested, requested_);
        if (!nbytes) return;
        Ask ask{.nbytes = nbytes, .stream = static_cast<uint32_t>(steps_.stream[step_])};
        Outcome outcome;
        BlockId block = heap_.take(ask, outcome);
        if (!block) [[unlikely]] block = serve(ask);
        blocks_[steps_.slot[step_]] = {block, nbytes};
    }

    void free() {
        auto [block, nbytes] = blocks_[steps_.slot[step_]];
        ++frees_;
        --live_;
        requested_ -= nbytes;
        if (!block) return;
        auto stream = static_cast<uint32_t>(steps_.stream[step_]);
        timeline_.touch(stream);
        if (steps_.streams == 1) {
            heap_.free(block);
            return;
        }
        uint32_t home = heap_.home(block);
        timeline_.touch(home);
        heap_.free_behind(block, {stream, heap_.open_epoch(stream)}, false);
        if (eager_ == 0 || nbytes < large || few * nbytes < heap_.reserved()) return;
        --eager_;
        fence(stream);
        if (home != stream) fence(home);
    }

    void fence(uint32_t stream) {
        pay(Call::Record, 0);
        timeline_.record(stream, now_);
    }

    // What is due by the clock.
    void due() {
        for (uint32_t quiet = 0; now_ >= next_beat_;) {
            fences(next_beat_);
            bool still = frees_ == beaten_ && timeline_.idle();
            beaten_ = frees_;
            if (setup_.kind == Kind::Paged) settle(still);
            quiet += still;
            double beat = heap_.reserved() + heap_.reserved() / tight > setup_.limit ? tight_beat_us : beat_us;
            next_beat_ = (std::floor((quiet < most_quiet ? next_beat_ : now_) / beat) + 1) * beat;
        }
        if (now_ >= next_sample_) {
            sample();
            next_sample_ = now_ + setup_.sample_us;
        }
        next_ = std::min(next_beat_, next_sample_);
    }

    // Caches hold pages that could go elsewhere, and what one stream freed is all streams' only once somebody has looked.
    // That is seen to by the clock, and not when pages are short: so blocks lie alike whether or not pages are taken back.
    // Once nothing is under way any more, neighbours are joined that waited for different streams when it was done last.
    void settle(bool still) {
        heap_.flush(-1);
        if (steps_.streams == 1 || (still ? frees_ == settled_ : (frees_ - merged_) * merge_ratio < live_)) return;
        heap_.merge();
        merged_ = frees_;
        if (still) settled_ = frees_;
    }

    // Fences are recorded then, and what is done by then is seen.
    void fences(double when) {
        for (uint64_t recorded = timeline_.record(when); recorded; --recorded) pay(Call::Record, 0);
        timeline_.observe(when);
        if (setup_.kind == Kind::Direct) return_segments(UINT64_MAX);
    }

    void sample() {
        tally_.samples.push_back({now_, requested_, heap_.live(), heap_.reserved(), heap_.waste().largest});
    }

    void pay(Call call, uint64_t nbytes) { tally_.bill.add(setup_.costs, call, nbytes); }

    void wait_until(double time) {
        if (time > now_) {
            ++tally_.waits;
            tally_.wait_us += time - now_;
            now_ = time;
        }
        timeline_.observe(now_);
    }

    // What the pool does for a request that missed.
    BlockId serve(const Ask& ask) {
        ++tally_.misses;
        BlockId block = setup_.kind == Kind::Paged ? serve_pages(ask) : serve_segments(ask);
        if (!block) {
            tally_.completed = false;
            tally_.failed_step = step_;
            tally_.failed_bytes = ask.nbytes;
        }
        if (heap_.reserved() == setup_.survey_at && tally_.waste.stranded.empty()) tally_.waste = heap_.waste();
        return block;
    }

    // Where blocks lie must not depend on which pages are mapped, or taking pages back could make things worse. So what
    // may change it is done only where there are no addresses, with pages or without; and where somebody is to wait. What
    // is known to be done changes nothing where there is one stream.
    BlockId serve_pages(const Ask& ask) {
        bool waits = setup_.limit != no_limit || allowance() > 0;
        bool looks = steps_.streams == 1 && setup_.take_back && heap_.reserved() - heap_.live() >= setup_.page;
        bool lacking = !heap_.has_addresses(ask);
        if (lacking || waits || looks) fences(now_);
        if (lacking) tidy();
        BlockId block = 0;
        for (int tries = 0; !block && tries < most_tries && grow_pages(ask); ++tries) {
            peak_ = std::max(peak_, heap_.reserved());
            block = take_any(ask);
        }
        return block;
    }

    // Make the most of what is there, then get more.
    BlockId serve_segments(const Ask& ask) {
        fences(now_);
        BlockId block = take_any(ask);
        if (!block && tidy()) block = take_any(ask);
        if (!block && grow_segment(ask)) block = take_any(ask);
        peak_ = std::max(peak_, heap_.reserved());
        return block;
    }

    // Make the most of what is there; says whether that changed anything.
    bool tidy() {
        bool changed = heap_.cached_bytes() && heap_.flush(-1);
        return (steps_.streams > 1 && heap_.merge()) || changed;
    }

    // Streams wait for each other as the device does it, which holds up no caller.
    BlockId take_any(const Ask& ask) {
        Entries owed;
        Outcome outcome;
        BlockId block = heap_.take_foreign(ask, true, owed, outcome);
        for (size_t i = 0; i < owed.size(); ++i) pay(Call::Wait, 0);
        if (!owed.empty()) {
            ++tally_.foreign;
            eager_ = most_eager;
        }
        return block;
    }

    // Pages.

    bool grow_pages(const Ask& ask) {
        if (setup_.limit != no_limit) return grow_below_limit(ask);
        bool dear = moving_us_ > grace_us + dear_share * now_;
        uint64_t room = setup_.take_back && !dear ? peak_ - heap_.reserved() : unbounded;
        bool patient = setup_.take_back && allowance() > 0;
        Plan plan = heap_.plan(ask, room, patient ? 0 : unbounded, Foreign::Any, parts);
        if (!plan.found && patient) {
            wait_until(worth_waiting_for(plan.later));
            plan = heap_.plan(ask, room, unbounded, Foreign::Any, parts);
        }
        if (plan.found) carry_out(plan, stock(ask, plan));
        return plan.found;
    }

    // What is mapped ahead of need with new memory: a little, where next to all is live and the limit is far off.
    Plan stock(const Ask& ask, const Plan& plan) {
        uint64_t fresh = 0;
        for (const Range& range : plan.fresh) fresh += range.nbytes;
        uint64_t reserved = heap_.reserved() + fresh, used = heap_.live() + ask.nbytes;
        uint64_t wanted = std::min(reserved / stocked, most_stocked) / setup_.page * setup_.page + used;
        if (!fresh || wanted <= reserved) return {};
        Ask more{.nbytes = (wanted - reserved + setup_.page - 1) / setup_.page * setup_.page, .stream = ask.stream, .arena = 1};
        if (setup_.limit - std::min(setup_.limit, reserved) < reserved / far_off) return {};
        Plan found = heap_.plan(more, more.nbytes, 0, Foreign::Never, stock_parts);
        return found.found ? found : Plan{};
    }

    // Waits for what is enough and done the soonest.
    bool grow_below_limit(const Ask& ask) {
        uint64_t fine = std::max(usual_parts, ask.nbytes / (setup_.limit / fine_parts + 1));
        for (;;) {
            uint64_t room = setup_.limit - std::min(setup_.limit, heap_.reserved());
            Plan plan = heap_.plan(ask, room, 0, Foreign::Any, fine);
            if (plan.found) carry_out(plan, stock(ask, plan));
            if (plan.found || plan.waits.empty() || !setup_.take_back) return plan.found;
            wait_until(timeline_.end(plan.waits));
        }
    }

    // For how long growth may wait now.
    double allowance() const {
        return setup_.patience_us > 0 ? setup_.patience_us : allowed() - tally_.wait_us;
    }

    // For how long it might have waited so far.
    double allowed() const { return setup_.patience_share * static_cast<double>(steps_.time_us[step_]) * setup_.pace; }

    // Until when to wait, so that what is gained is worth it: all that may be waited at once must save 1/32 of the peak.
    double worth_waiting_for(const std::vector<Later>& later) const {
        double most = allowance(), whole = setup_.patience_us > 0 ? setup_.patience_us : allowed();
        double best = 0, until = 0, end = now_;
        uint64_t gain = 0;
        for (const Later& part : later) {
            end = std::max(end, timeline_.end(part.uses));
            if (end - now_ > most) break;
            gain += part.nbytes;
            double value = static_cast<double>(gain) / static_cast<double>(peak_) - (end - now_) / whole * price;
            if (value > best) {
                best = value;
                until = end;
            }
        }
        return until;
    }

    void carry_out(const Plan& plan, const Plan& stock) {
        double before = tally_.bill.us;
        std::vector<Range> filled, emptied;
        for (const Move& move : plan.moves) {
            heap_.set_bare(move.segment, move.address, move.nbytes);
            heap_.let_go(move.segment, move.address, move.nbytes);
            emptied.push_back({move.address, move.nbytes});
            if (move.to) {
                filled.push_back({move.to, move.nbytes});
            } else {
                pay(Call::Release, move.nbytes);
            }
        }
        for (const Range& range : plan.fresh) {
            pay(Call::Create, range.nbytes);
            filled.push_back(range);
        }
        map(plan, std::move(filled));
        pay_for_stretches(Call::Unmap, std::move(emptied));
        for (const Range& range : stock.fresh) pay(Call::Create, range.nbytes);
        if (stock.nbytes) map(stock, stock.fresh);
        if (!plan.moves.empty()) moving_us_ += tally_.bill.us - before;
    }

    void map(const Plan& plan, std::vector<Range> filled) {
        for (const Range& range : filled) {
            heap_.set_mapped(plan.segment, range.address, range.nbytes);
            pay(Call::Map, range.nbytes);
        }
        pay_for_stretches(Call::SetAccess, std::move(filled));
        heap_.let_go(plan.segment, plan.address, plan.nbytes);
    }

    // Handles that lie one behind the other share a call, which costs by the handle all the same.
    void pay_for_stretches(Call call, std::vector<Range> handles) {
        std::sort(handles.begin(), handles.end(), [](const Range& a, const Range& b) { return a.address < b.address; });
        uint64_t end = 0;
        for (const Range& handle : handles) {
            tally_.bill.add(setup_.costs, call, handle.nbytes, handle.address == end);
            end = handle.address + handle.nbytes;
        }
    }

    // Segments.

    bool grow_segment(const Ask& ask) {
        uint32_t arena = ask.nbytes < setup_.tuning.small_limit ? 0 : 1;
        int64_t nbytes = setup_.growth(setup_.context, ask.nbytes, arena, in_arena_[arena], heap_.reserved());
        if (nbytes == no_growth && make_room(ask.nbytes))
            nbytes = setup_.growth(setup_.context, ask.nbytes, arena, in_arena_[arena], heap_.reserved());
        if (nbytes <= 0) return false;
        auto size = static_cast<uint64_t>(nbytes);
        double before = tally_.bill.us;
        bool exchanged = setup_.kind == Kind::Ordered && setup_.take_back && exchange(size);
        pay(setup_.kind == Kind::Direct ? Call::Alloc : Call::AllocAsync, size);
        if (exchanged) moving_us_ += tally_.bill.us - before;
        uint32_t segment = heap_.add_segment(next_address_, size, arena, ask.stream);
        if (segment >= arena_of_.size()) arena_of_.resize(segment + 1);
        arena_of_[segment] = static_cast<uint8_t>(arena);
        timeline_.touch(ask.stream);
        next_address_ += size + setup_.page;
        in_arena_[arena] += size;
        return true;
    }

    // Before more is reserved than ever, give back what is free and done with, as far as it is no much larger piece.
    bool exchange(uint64_t size) {
        auto over = [&] { return heap_.reserved() + size - std::min(heap_.reserved() + size, peak_); };
        if (!over() || moving_us_ > exchanging_share * now_) return false;
        if (allowance() > 0) wait_until(worth_waiting_for(unready(size)));
        uint64_t missing = over();
        bool any = false;
        for (const EmptySegment& one : exchangeable(size)) {
            if (!missing) break;
            if (!one.entries.empty()) continue;
            give_back(one);
            missing -= std::min(missing, one.nbytes);
            any = true;
        }
        return any;
    }

    std::vector<EmptySegment> exchangeable(uint64_t size) const {
        std::vector<EmptySegment> empty = largest_first();
        std::erase_if(empty, [&](auto& one) { return one.nbytes > uneven * size; });
        return empty;
    }

    std::vector<Later> unready(uint64_t size) const {
        std::vector<Later> later;
        for (EmptySegment& one : exchangeable(size))
            if (!one.entries.empty()) later.push_back({one.nbytes, std::move(one.entries)});
        return later;
    }

    // Give back wholly free segments, the largest first, until so much is missing no more; waits for their uses.
    bool make_room(uint64_t need) {
        fences(now_);
        uint64_t reserved = heap_.reserved(), room = setup_.limit > reserved ? setup_.limit - reserved : 0;
        return need > room && return_segments(need - room);
    }

    // Without a number, what is done with. Says whether it came to so much; if it would not, nothing goes back.
    bool return_segments(uint64_t missing) {
        bool wait = missing != UINT64_MAX;
        std::vector<EmptySegment> empty = largest_first();
        uint64_t sum = 0;
        for (const EmptySegment& one : empty) sum += one.nbytes;
        if (wait && sum < missing) return false;
        for (const EmptySegment& one : empty) {
            if (!missing) break;
            if (!wait && !one.entries.empty()) continue;
            if (wait) wait_until(timeline_.end(one.entries));
            give_back(one);
            if (wait) missing -= std::min(missing, one.nbytes);
        }
        return true;
    }

    std::vector<EmptySegment> largest_first() const {
        std::vector<EmptySegment> empty = heap_.empty_segments();
        std::sort(empty.begin(), empty.end(), [](auto& a, auto& b) { return a.nbytes > b.nbytes; });
        return empty;
    }

    void give_back(const EmptySegment& one) {
        in_arena_[arena_of_[one.id]] -= one.nbytes;
        heap_.remove_segment(one.id);
        pay(setup_.kind == Kind::Direct ? Call::Free : Call::FreeAsync, one.nbytes);
    }

    struct Held {
        BlockId block = 0;
        uint64_t nbytes = 0;
    };

    const Steps& steps_;
    const Setup& setup_;
    Heap heap_;
    Timeline timeline_;
    std::vector<Held> blocks_;
    Tally tally_;
    size_t step_ = 0;
    uint64_t requested_ = 0;
    uint64_t eager_ = 0;
    double now_ = 0;
    double next_ = 0, next_beat_ = 0, next_sample_;
    uint64_t peak_ = 0;  // reserved
    double moving_us_ = 0;
    uint64_t live_ = 0;  // blocks
    // Frees so far: now, at the last beat, at the last merge, and at the last one that found nothing under way.
    uint64_t frees_ = 0, beaten_ = 0, merged_ = 0, settled_ = 0;
    uint64_t in_arena_[2] = {};
    std::vector<uint8_t> arena_of_;  // by segment
    uint64_t next_address_ = uint64_t{1} << 40;
};

// What the loop costs without a heap: the columns are read, and what is live is counted.
double empty_loop(const Steps& steps, double pace) {
    std::vector<uint64_t> held(steps.slots);
    uint64_t requested = 0, peak = 0, streams = 0;
    double late = 0;
    double start = nanoseconds();
    for (size_t i = 0; i < steps.count; ++i) {
        double now = static_cast<double>(steps.time_us[i]) * pace;
        late = std::max(late, now);
        streams += static_cast<uint32_t>(steps.stream[i]);
        int64_t nbytes = steps.nbytes[i];
        if (nbytes >= 0) {
            requested += held[steps.slot[i]] = static_cast<uint64_t>(nbytes);
            peak = std::max(peak, requested);
        } else {
            requested -= held[steps.slot[i]];
        }
    }
    double spent = nanoseconds() - start;
    volatile double kept = late + static_cast<double>(peak + streams);  // or the loop would be left out
    (void)kept;
    return spent;
}

// The heap checks all but these two, which are places in tables of the replay's own.
void check(const Steps& steps) {
    for (size_t i = 0; i < steps.count; ++i) {
        if (steps.slot[i] < 0 || static_cast<uint32_t>(steps.slot[i]) >= steps.slots)
            throw std::invalid_argument("a slot must be below the number of slots");
        if (steps.stream[i] < 0 || static_cast<uint32_t>(steps.stream[i]) >= steps.streams)
            throw std::invalid_argument("a stream must be below the number of streams");
    }
}

}  // namespace

Tally run(const Steps& steps, const Setup& setup) {
    check(steps);
    Tally tally = std::make_unique<Replay>(steps, setup)->run();
    tally.empty_loop_ns = empty_loop(steps, setup.pace);
    return tally;
}

}  // namespace asyncmem::replay
