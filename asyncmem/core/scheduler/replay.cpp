// The loop of a replay, and a virtual device that carries out the scheduler's effects.
#include "replay.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <limits>
#include <memory>

#include "scheduler.hpp"

namespace asyncmem::replay {

namespace {

using scheduler::Effect;
using scheduler::RequestId;
using scheduler::State;

constexpr double beat_us = 4000;  // how often fences are recorded where memory comes in segments
// A large free has a fence of its own for so many of them after a wait of one stream for another; see retire.pxi.
constexpr uint64_t large = 1 << 20, few = 64, most_eager = 4096;
constexpr double dear = 0.03;  // the driver's part of what moves may take, which is three fifths
constexpr double never = std::numeric_limits<double>::infinity();

double nanoseconds() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::nano>(now).count();
}

// The model of a GPU that is late: each fence is done a fixed time after it was recorded. Times are in microseconds.
class Timeline {
public:
    Timeline(Heap& heap, uint32_t streams, double lag) : heap_(heap), lag_(lag), dirty_(streams, 0) {}

    // Something was freed there that no fence covers yet.
    void touch(uint32_t stream) { dirty_[stream] = 1; }

    // Record a fence on each stream that has been touched, and return how many.
    uint64_t record(double now) {
        uint64_t recorded = 0;
        for (uint32_t stream = 0; stream < dirty_.size(); ++stream) {
            if (!dirty_[stream]) continue;
            record(stream, now);
            ++recorded;
        }
        return recorded;
    }

    // Record one on this stream.
    void record(uint32_t stream, double now) {
        uint64_t epoch = heap_.close_epoch(stream);
        heap_.publish(stream, epoch);
        fences_.push_back({now + lag_, {stream, epoch}});
        dirty_[stream] = 0;
    }

    // Tell the heap which fences are done by now, and return how many.
    uint64_t observe(double now) {
        uint64_t done = 0;
        for (; !fences_.empty() && fences_.front().done <= now; ++done) {
            heap_.mark_done(fences_.front().entry.stream, fences_.front().entry.epoch);
            fences_.pop_front();
        }
        return done;
    }

    // Whether nothing happens until something is freed.
    bool idle() const { return fences_.empty() && std::find(dirty_.begin(), dirty_.end(), 1) == dirty_.end(); }

    // When all of these uses are done, if all of them are recorded.
    double end(const Entries& entries) const {
        double latest = 0;
        for (const Entry& entry : entries)
            for (const Fence& fence : fences_)
                if (fence.entry.stream == entry.stream && fence.entry.epoch >= entry.epoch) {
                    latest = std::max(latest, fence.done);
                    break;
                }
        return latest;
    }

private:
    struct Fence {
        double done;
        Entry entry;
    };

    Heap& heap_;
    double lag_;
    std::vector<uint8_t> dirty_;
    std::deque<Fence> fences_;  // they end in the order in which they were recorded
};

class Replay {
public:
    Replay(const Steps& steps, const Setup& setup)
        : steps_(steps),
          setup_(setup),
          heap_(512, setup.policy.tuning),
          timeline_(heap_, steps.streams, setup.lag_us),
          blocks_(steps.slots),
          next_sample_(setup.sample_us > 0 ? 0 : never) {
        heap_.set_guarded(true);  // no other thread knows it
        for (uint32_t s = 1; s < steps.streams; ++s) heap_.add_stream();
        if (setup.policy.paged)
            for (uint32_t arena : {0, 1}) heap_.add_space(max_size << arena, max_size, arena, setup.policy.page);
        scheduler::Policy policy = setup.policy;
        policy.dear = dear;
        scheduler_ = std::make_unique<scheduler::Scheduler>(heap_, policy, 0);
        scheduler_->set_guarded(true);
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
        tally_.peak_reserved = std::max(tally_.peak_reserved, counts.peak_reserved);
        tally_.takes = counts.allocations;
        tally_.frees = counts.frees;
        tally_.end_us = now_;
        if (setup_.sample_us > 0) sample();
        return std::move(tally_);
    }

private:
    double seconds() const { return now_ * 1e-6; }
    // What is on its way back to the device is reserved until it is there.
    uint64_t reserved() const { return heap_.reserved() + leaving_; }

    void take(uint64_t nbytes) {
        requested_ += nbytes;
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
        requested_ -= nbytes;
        if (!block) return;
        auto stream = static_cast<uint32_t>(steps_.stream[step_]);
        timeline_.touch(stream);
        if (steps_.streams == 1) {
            tell(heap_.free(block));
            return;
        }
        uint32_t home = heap_.info(block).stream;
        timeline_.touch(home);
        Entry use{stream, heap_.epochs(stream).open};
        tell(heap_.free(block, {&use, 1}));
        if (eager_ == 0 || nbytes < large || few * nbytes < heap_.reserved()) return;
        --eager_;
        fence(stream);
        if (home != stream) fence(home);
    }

    void tell(uint32_t flags) {
        if (!flags) return;
        scheduler_->freed(flags, seconds());
        carry_out();
    }

    void fence(uint32_t stream) {
        pay(Call::Record, 0);
        timeline_.record(stream, now_);
    }

    // What is due by the clock.
    void due() {
        while (now_ >= next_beat_) {
            double pause = beat_us, now = now_;
            now_ = next_beat_;
            if (setup_.policy.paged) {
                scheduler_->begin_beat();
                carry_out();
                double next = scheduler_->end_beat(seconds());
                carry_out();
                pause = next == never ? never : next * 1e6;
            } else {
                fences();
                end_trims(now_);
                scheduler_->begin_beat();
                carry_out();
                if (timeline_.idle() && trims_.empty()) pause = never;
            }
            now_ = now;
            // Beats fall on whole multiples; after a pause of the program they go on at its time.
            bool sleeps = pause == never;
            pause = sleeps ? beat_us : pause;
            next_beat_ = (std::floor((sleeps ? now_ : next_beat_) / pause) + 1) * pause;
        }
        if (now_ >= next_sample_) {
            sample();
            next_sample_ = now_ + setup_.sample_us;
        }
        next_ = std::min(next_beat_, next_sample_);
    }

    // Record fences where something was freed since the last, and see what is done; returns how much was.
    uint64_t fences() {
        for (uint64_t recorded = timeline_.record(now_); recorded; --recorded) pay(Call::Record, 0);
        return timeline_.observe(now_);
    }

    void sample() {
        tally_.samples.push_back({now_, requested_, heap_.live(), reserved(), heap_.waste().largest});
    }

    void pay(Call call, uint64_t nbytes) { tally_.bill.add(setup_.costs, call, nbytes); }

    void wait_until(double time) {
        if (time <= now_) return;
        ++tally_.waits;
        tally_.wait_us += time - now_;
        now_ = time;
    }

    // A request that missed.
    BlockId serve(const Ask& ask) {
        ++tally_.misses;
        end_trims(now_);
        RequestId id = scheduler_->submit(ask, {}, {}, seconds());
        carry_out();
        BlockId block = 0;
        if (scheduler_->state(id) == State::Granted) {
            block = scheduler_->claim(id)[0].block;
        } else {
            tally_.completed = false;
            tally_.failed_step = step_;
            tally_.failed_bytes = ask.nbytes;
        }
        if (reserved() == setup_.survey_at && tally_.waste.stranded.empty()) tally_.waste = heap_.waste();
        return block;
    }

    // -- the virtual device --------------------------------------------------------------------------------------------

    void carry_out() {
        Effect effect;
        while (scheduler_->next(effect)) {
            switch (effect.kind) {
                case Effect::Kind::Look:
                    scheduler_->looked(fences(), seconds());
                    break;
                case Effect::Kind::Order:
                    order(effect.request);
                    break;
                case Effect::Kind::Grow:
                    grow(effect);
                    break;
                case Effect::Kind::Trim:
                    trim(std::move(effect));
                    break;
                case Effect::Kind::Remap:
                    remap(effect);
                    break;
                case Effect::Kind::Wait:
                    wait(effect);
                    break;
                case Effect::Kind::LastResort:
                    scheduler_->ended(effect.job, scheduler::Ending::Refused, seconds());
                    break;
                default:  // no task sleeps here, and there is no host to move to
                    break;
            }
        }
    }

    // Streams wait for each other as the device does it, which holds up no caller.
    void order(RequestId id) {
        for (size_t waits = scheduler_->owed(id).size(); waits; --waits) pay(Call::Wait, 0);
        ++tally_.foreign;
        eager_ = most_eager;
        scheduler_->ordered(id, seconds());
    }

    void grow(const Effect& effect) {
        bool direct = setup_.policy.direct;
        double before = tally_.bill.us;
        uint64_t address = next_address_, had = 0;
        for (const Piece& one : effect.returns) {
            // What goes back in a stream's order is not unmapped, so a large one costs what a small one does.
            pay(direct ? Call::Free : Call::FreeAsync, effect.joins ? 0 : one.nbytes);
            if (effect.joins) address = std::min(address, one.address), had += one.nbytes;
        }
        if (!effect.returns.empty()) scheduler_->trimmed(effect.job, effect.returns.size(), seconds());
        uint64_t whole = effect.nbytes + effect.rest, more = whole - had;
        if (more) pay(direct ? Call::Alloc : Call::AllocAsync, more);
        if (had) pay(Call::AllocAsync, 0);  // of what the device's pool has by then
        if (effect.rest) pay(Call::AllocAsync, 0);
        timeline_.touch(effect.stream);
        next_address_ = std::max(next_address_, address + whole + (setup_.policy.joins ? 0 : setup_.policy.page));
        uint64_t rest = effect.rest ? address + effect.nbytes : 0;
        double spent = (tally_.bill.us - before) * 1e-6;
        scheduler_->grew(effect.job, address, effect.nbytes, effect.stream, false, seconds(), spent, rest);
        tally_.peak_reserved = std::max(tally_.peak_reserved, reserved());
    }

    // What no request waits for goes back once its uses are done.
    void trim(Effect effect) {
        fences();
        double end = 0;
        for (const Piece& one : effect.returns) end = std::max(end, timeline_.end(one.uses));
        if (effect.request) wait_until(end);
        for (const Piece& one : effect.returns) leaving_ += one.nbytes;
        trims_.push_back({end, std::move(effect)});
        end_trims(now_);
    }

    void end_trims(double now) {
        std::erase_if(trims_, [&](const auto& trim) {
            const auto& [end, effect] = trim;
            if (end > now) return false;
            for (const Piece& one : effect.returns) {
                pay(setup_.policy.direct ? Call::Free : Call::FreeAsync, one.nbytes);
                leaving_ -= one.nbytes;
            }
            scheduler_->trimmed(effect.job, effect.returns.size(), seconds());
            return true;
        });
    }

    void remap(const Effect& effect) {
        double before = tally_.bill.us;
        std::vector<Effect::Span> shown;
        for (auto& [span, to] : effect.moves) shown.push_back({span.segment, to, span.nbytes});
        for (const Effect::Span& span : shown) pay(Call::Map, span.nbytes);
        pay_for_stretches(Call::SetAccess, std::move(shown));
        pay_for_stretches(Call::Unmap, effect.out);
        for (const Effect::Span& span : std::span(effect.out).subspan(effect.vacated)) pay(Call::Release, span.nbytes);
        for (const Effect::Span& span : effect.into) {
            pay(Call::Create, span.nbytes);
            pay(Call::Map, span.nbytes);
        }
        pay_for_stretches(Call::SetAccess, effect.into);
        double spent = (tally_.bill.us - before) * 1e-6;
        scheduler_->remapped(effect.job, effect.moves.size(), effect.out.size(), effect.into.size(), false, seconds(), spent);
    }

    // Handles that lie one behind the other share a call, which costs by the handle all the same.
    void pay_for_stretches(Call call, std::vector<Effect::Span> handles) {
        std::sort(handles.begin(), handles.end(), [](auto& a, auto& b) { return a.address < b.address; });
        uint64_t end = 0;
        for (const Effect::Span& handle : handles) {
            tally_.bill.add(setup_.costs, call, handle.nbytes, handle.address == end);
            end = handle.address + handle.nbytes;
        }
    }

    void wait(const Effect& effect) {
        double end = timeline_.end(effect.uses), last = now_ + effect.seconds * 1e6;
        if (effect.request) wait_until(std::min(end, last));
        timeline_.observe(now_);
        scheduler_->waited(effect.job, end <= now_, seconds());
    }

    struct Held {
        BlockId block = 0;
        uint64_t nbytes = 0;
    };

    const Steps& steps_;
    const Setup& setup_;
    Heap heap_;
    Timeline timeline_;
    std::unique_ptr<scheduler::Scheduler> scheduler_;
    std::vector<Held> blocks_;
    uint64_t leaving_ = 0;
    std::vector<std::pair<double, Effect>> trims_;  // segments on their way back, and when their uses are done
    Tally tally_;
    size_t step_ = 0;
    uint64_t requested_ = 0, frees_ = 0, eager_ = 0;
    double now_ = 0;
    double next_ = 0, next_beat_ = 0, next_sample_;
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
            refuse_argument("a slot must be below the number of slots");
        if (steps.stream[i] < 0 || static_cast<uint32_t>(steps.stream[i]) >= steps.streams)
            refuse_argument("a stream must be below the number of streams");
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
