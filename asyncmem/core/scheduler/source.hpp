// Where a pool's memory comes from: what is decided about growing, taking back and giving back.
//
// A source makes no call of the device. It changes what the heap and the pool count, and returns an effect; the events
// that end the effect come back to it. Segments and pages are the two kinds.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "queue.hpp"

namespace asyncmem::scheduler {

// How far behind the device is: when what a stream was given is likely to be done.
class Latency {
public:
    explicit Latency(const Heap& heap) : heap_(heap) {}

    // Fences were recorded and looked at.
    void look(double now) {
        streams_.resize(heap_.stream_count());
        for (uint32_t s = 0; s < streams_.size(); ++s) {
            Stream& stream = streams_[s];
            Epochs epochs = heap_.epochs(s);
            for (; !stream.fences.empty() && stream.fences.front().epoch <= epochs.done; stream.fences.pop_front())
                add(now - stream.fences.front().recorded);
            if (epochs.recorded > epochs.done && (stream.fences.empty() || stream.fences.back().epoch < epochs.recorded))
                stream.fences.push_back({epochs.recorded, now});
        }
    }

    // Whether any fence was seen done yet; before, nothing is known.
    bool known() const { return !seen_.empty(); }

    void shift(double seconds) {
        for (Stream& stream : streams_)
            for (Fence& fence : stream.fences) fence.recorded += seconds;
    }

    // When all of these uses are likely to be done.
    double end(const Entries& uses, double now) const {
        double latest = now;
        for (const Entry& use : uses) {
            double recorded = now;
            if (use.stream < streams_.size())
                for (const Fence& fence : streams_[use.stream].fences)
                    if (fence.epoch >= use.epoch) {
                        recorded = fence.recorded;
                        break;
                    }
            latest = std::max(latest, recorded + usual());
        }
        return latest;
    }

private:
    struct Fence {
        uint64_t epoch;
        double recorded;
    };
    struct Stream {
        std::deque<Fence> fences;
    };
    static constexpr size_t samples = 8;

    // Fences are seen done some time after they are, so the least of the last few is the nearest to the truth.
    double usual() const { return seen_.empty() ? 0 : *std::min_element(seen_.begin(), seen_.end()); }
    void add(double seconds) {
        if (seen_.size() == samples) seen_.pop_front();
        seen_.push_back(seconds);
    }

    const Heap& heap_;
    std::vector<Stream> streams_;
    std::deque<double> seen_;
};

// What is to become of pages: plans of the heap.
struct Change {
    std::vector<Plan> plans;

    static uint64_t fresh(const Plan& plan) {
        uint64_t sum = 0;
        for (const Range& range : plan.fresh) sum += range.nbytes;
        return sum;
    }
    // Bytes that the device is to give,
    uint64_t fresh() const {
        uint64_t sum = 0;
        for (const Plan& plan : plans) sum += fresh(plan);
        return sum;
    }
    // beyond those that it gets back before,
    uint64_t more() const {
        uint64_t back = 0;
        for (const Plan& plan : plans)
            for (const Move& move : plan.moves) back += move.to ? 0 : move.nbytes;
        return fresh() - std::min(fresh(), back);
    }
    // and that no request waits for.
    uint64_t ahead() const {
        uint64_t sum = 0;
        for (const Plan& plan : plans) sum += plan.ahead;
        return sum;
    }
};

// An effect under way, or one to begin.
struct Job {
    Effect effect{};
    double started = 0;
    Change change{};
    bool reclaims = false;  // idle memory goes back, perhaps after a wait for its uses
    uint64_t leaving = 0;   // bytes of it
    bool splits = false;    // large handles become small ones
    bool patient = false;   // a wait that growth chose
};

// What is decided: a job, which may be a look at fences before all else, or nothing.
using Decision = std::optional<Job>;

inline Job job_of(Effect effect) { return {.effect = std::move(effect)}; }

constexpr double refused_pause = 0.25;  // seconds without a try after memory could not go back

constexpr double recent_seconds = 1;    // what pages took to move, and the time for it, count for about so long

// How much of the pool's life has gone into saving memory.
struct Lifetime {
    double began = 0, waited = 0, moved = 0, shaped = 0;  // shaped: segments were joined and cut
    double lately = 0, noted = 0;                         // of `moved`, what still counted when that was noted

    void shift(double seconds) {
        began += seconds;
        noted += seconds;
    }
    void note_moved(double seconds, double now) {
        lately = moved_lately(now) + seconds;
        noted = now;
        moved += seconds;
    }
    // The time that counts, and what moving took of it: who had nothing to move for long may not do so for long at once.
    double lived_lately(double now) const { return -recent_seconds * std::expm1((began - now) / recent_seconds); }
    double moved_lately(double now) const { return lately * std::exp((noted - now) / recent_seconds); }

    // Seconds that a request of this age may wait for memory that is about to be ready; 0 for none.
    double may_wait(const Policy& policy, double now, double age) const {
        constexpr double least = 1e-4;
        double most = policy.patience - age;
        if (policy.patience_share < never) most = std::min(most, policy.patience_share * (now - began) - waited);
        return most >= least ? most : 0;
    }
    // All that may be waited by now, of which the worth of each wait is a part.
    double patience(const Policy& policy, double now) const {
        return policy.patience_share < never ? policy.patience_share * (now - began) : policy.patience;
    }
    bool may_move(double now, double share) const { return moved <= share * (now - began); }
    bool may_cut(double now, double share) const { return moved + shaped <= share * (now - began); }
};

class Source {
public:
    Source(Heap& heap, const Policy& policy, double now) : heap_(heap), policy_(policy), latency_(heap) {
        lifetime_.began = now;
    }
    virtual ~Source() = default;

    // The clock has changed by so much.
    virtual void shift(double seconds) {
        lifetime_.shift(seconds);
        pauses_until_ += seconds;
        latency_.shift(seconds);
    }

    // -- what a request may expect ------------------------------------------------------------------------------------
    virtual bool may_hold(uint64_t nbytes) const = 0;       // so much is free, in whatever pieces
    virtual bool should_flush(const Request& request) = 0;  // emptying caches may serve it
    virtual bool should_tidy(const Request& request, bool first) = 0;
    virtual bool can_grow(const Request& request) const = 0;
    // Whether to grow rather than make a stream wait for another: little is free.
    bool keeps_apart(const Request& request) const;
    // Whether to grow even rather than ask what other streams are done with: next to nothing is reserved.
    virtual bool grows_apart(const Request&) const { return false; }

    // -- what to do for a request --------------------------------------------------------------------------------------
    virtual Decision patience(const Request& request, double now, bool looked) = 0;  // before more is reserved than ever
    virtual Decision grow(const Request& request, double now, bool looked) = 0;
    virtual Decision cut(const Request&, double) { return {}; }         // free segments, so that it gets one of its own
    virtual Decision grow_part(const Request&) { return {}; }           // for what free memory lacks of a batch
    virtual Decision wait(const Request&, double) { return {}; }        // for what is idle and in use
    virtual Decision make_room(const Request& request, double now) = 0;  // give back, so that growth fits

    // -- what to do without a request -----------------------------------------------------------------------------------
    virtual Decision grow_ahead(double now) = 0;
    virtual Decision join(uint32_t) { return {}; }  // what lies side by side, free in this stream's order, becomes one
    // `no_limit` for all. Where that is `asked` for by name, with what the device has just refused to take back, and with the
    // vacated addresses, all of which a pool that ends must have unmapped.
    virtual Decision trim(uint64_t wanted, uint64_t keep, double now, bool asked = false) = 0;
    virtual std::vector<uint32_t> unfenced() const { return {}; }

    // -- what became of it ---------------------------------------------------------------------------------------------
    // Of segments: one came or did not, perhaps with the rest of what it was cut from; so many of the returns went back, and the
    // others are offered again.
    virtual void grew(const Job&, uint64_t, uint64_t, uint64_t, uint32_t, bool, double) {}
    virtual void grow_failed(const Job&, bool) {}
    virtual void trimmed(Job&, size_t, double) {}
    // Of pages: so many were moved, unmapped and mapped; and what follows the wait for the uses of idle memory.
    virtual void remapped(Job&, size_t, size_t, size_t, bool, double, double) {}
    virtual Decision reclaim(uint64_t) { return {}; }
    // Addresses that memory has vacated are to be unmapped: those that the device is done with, and whether there are any.
    virtual Decision unmap_vacated(double) { return {}; }
    virtual Decision split(double) { return {}; }  // large handles that nobody uses become small ones
    virtual bool has_vacated() const { return false; }
    virtual void waited(const Job& job, double now) {
        if (job.patient) lifetime_.waited += now - job.started;
    }

    // Fences were looked at.
    void looked(double now) {
        if (policy_.patience > 0) latency_.look(now);
    }
    uint64_t coming() const { return coming_; }
    // Bytes that go back to the device just now, and addresses that are being unmapped.
    virtual uint64_t leaving() const { return leaving_; }
    bool refuses() const { return refused_ != no_limit; }
    void forget_refusal() { refused_ = no_limit; }
    // Bytes that are being given back to the device just now.
    uint64_t returning() const { return leaving_ - stranded_bytes_; }
    double moved() const { return lifetime_.moved; }
    double waited() const { return lifetime_.waited; }
    void note_peak() { peak_ = std::max(peak_, heap_.reserved()); }
    bool tight() const;  // the limit is near
    uint64_t shortage(uint64_t nbytes) const;  // what has to become free before so much fits, at least 1

    int64_t grows = 0, trims = 0;

protected:
    // A wait of the host, where there is anything to wait for.
    static Decision wait_for(Entries uses, double seconds) {
        if (uses.empty()) return {};
        return job_of({.kind = Effect::Kind::Wait, .seconds = seconds, .uses = std::move(uses)});
    }
    bool several_streams() const { return heap_.stream_count() > 1; }
    uint64_t left() const;  // what the limit leaves for growth
    virtual uint64_t free() const = 0;
    // Which of these uses, in the order in which they were freed, are worth waiting for rather than growing.
    Decision wait_patiently(const Request& request, const std::vector<Piece>& later, double now) const;
    bool may_be_patient(const Request& request, double now) const;
    int64_t slack() const;  // by how much less is free than streams may have side by side
    virtual uint64_t reserved_or_leaving() const = 0;

    Heap& heap_;
    const Policy& policy_;
    Latency latency_;
    Lifetime lifetime_;
    uint64_t coming_ = 0, leaving_ = 0, stranded_bytes_ = 0;
    uint64_t refused_ = no_limit;  // the least that the device refused since something last changed
    uint64_t peak_ = 0;            // the most that was reserved
    double pauses_until_ = -never;  // until when nothing is tried again, as memory could not go back
};

std::unique_ptr<Source> make_source(Heap& heap, const Policy& policy, double now);

}  // namespace asyncmem::scheduler
