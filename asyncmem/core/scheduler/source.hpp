// Where a pool's memory comes from: what is decided about growing, taking back and giving back.
//
// A source makes no call of the device. It changes what the heap and the pool count, and answers with an effect; the events
// that end the effect come back to it. Segments and pages are the two kinds.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "effects.hpp"
#include "growth.hpp"
#include "lag.hpp"
#include "policy.hpp"
#include "shares.hpp"

namespace asyncmem::scheduler {

// What is to become of pages: plans of the heap, and what is mapped beside them ahead of need.
struct Change {
    std::vector<Plan> plans;
    std::optional<Plan> stock;
    double decided = 0;

    uint64_t fresh() const;  // bytes that the device is to give
    uint64_t more() const;   // beyond those that it gets back before
    uint64_t ahead() const;  // bytes that nobody waits for
};

// An effect under way.
struct Job {
    JobId id = 0;
    Effect::Kind kind = Effect::Kind::Grow;
    RequestId request = 0;
    bool by_caller = false, ahead = false;
    double started = 0;
    uint64_t nbytes = 0, need = 0;  // of growth
    uint32_t arena = 0;
    std::vector<Return> returns{};
    Change change{};
    bool reclaims = false;          // a wait before idle memory goes back
    bool patient = false;           // a wait that growth chose
};

// Fences are to be recorded and looked at before more can be decided.
struct LookFirst {
    std::vector<uint32_t> streams;
};

// What a decision comes to: nothing, fences first, or an effect.
struct Step {
    enum class Kind : uint8_t { None, Look, Effect } kind = Kind::None;
    std::vector<uint32_t> streams{};
    Effect effect{};
    Job job{};

    explicit operator bool() const { return kind != Kind::None; }
};

// How much of the pool's life has gone into saving memory.
struct Lifetime {
    double began = 0, waited = 0, moved = 0;

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
    bool may_move(double now, double share, double grace = 0) const { return moved <= grace + share * (now - began); }
};

class Source {
public:
    Source(Heap& heap, const Policy& policy, double now) : heap_(heap), policy_(policy), growth_(policy), lag_(heap) {
        lifetime_.began = now;
    }
    virtual ~Source() = default;

    // The clock has changed by so much.
    virtual void shift(double seconds) {
        lifetime_.began += seconds;
        lag_.shift(seconds);
    }

    // -- what a request may expect ------------------------------------------------------------------------------------
    virtual bool may_hold(uint64_t nbytes) const = 0;       // so much is free, in whatever pieces
    virtual bool should_flush(const Request& request) = 0;  // emptying caches may serve it
    virtual bool should_tidy(const Request& request, bool first) = 0;
    virtual bool can_grow(const Request& request) const = 0;
    // Whether to grow rather than make a stream wait for another: little is free.
    bool keeps_apart(const Request& request) const;

    // -- what to do for a request --------------------------------------------------------------------------------------
    virtual Step patience(const Request& request, double now, bool looked) = 0;  // wait before more is reserved than ever
    virtual Step grow(const Request& request, double now, bool looked) = 0;
    virtual Step grow_part(const Request& request) = 0;             // for what free memory lacks of a batch
    virtual Step wait(const Request& request, double now) = 0;      // for what is idle and in use
    virtual Step make_room(const Request& request, double now) = 0;  // give back, so that growth fits

    // -- what to do for nobody -----------------------------------------------------------------------------------------
    virtual Step grow_ahead(double now) = 0;
    virtual Step trim(uint64_t wanted, uint64_t keep, double now) = 0;  // `no_limit` for all
    virtual std::vector<uint32_t> unfenced() const { return {}; }

    // -- what became of it ---------------------------------------------------------------------------------------------
    void grew(const Job& job, uint64_t address, uint64_t nbytes, uint32_t stream, bool ready, double seconds);
    void grow_failed(const Job& job, bool out_of_memory);
    void trimmed(Job& job, size_t count);  // so many of the returns went back; the others are offered again
    virtual void remapped(Job& job, size_t unmapped, size_t mapped, bool out_of_memory, double now, double seconds) = 0;
    virtual Step reclaim(Job&, double) { return {}; }  // after the wait for the uses of idle memory
    virtual void waited(const Job& job, double now) {
        if (job.patient) lifetime_.waited += now - job.started;
    }

    // Fences were looked at.
    void looked(double now) {
        if (policy_.patience > 0) lag_.look(now);
    }
    uint64_t coming() const { return coming_; }
    uint64_t leaving() const { return leaving_; }
    bool refuses() const { return refused_ != no_limit; }
    void forget_refusal() { refused_ = no_limit; }
    // Bytes that somebody is giving back to the device just now.
    uint64_t returning() const { return leaving_ - stranded_bytes_; }
    double moved() const { return lifetime_.moved; }
    double waited() const { return lifetime_.waited; }
    uint64_t peak() const { return peak_; }
    void note_peak() { peak_ = std::max(peak_, heap_.reserved()); }
    bool tight() const;  // the limit is near
    uint64_t shortage(uint64_t nbytes) const;  // what has to become free before so much can be had, at least 1

    int64_t grows = 0, trims = 0;

protected:
    bool several_streams() const { return heap_.stream_count() > 1; }
    uint64_t left() const;  // what the limit leaves for growth
    virtual uint64_t free() const = 0;
    // Which of these uses, in the order in which they were freed, are worth waiting for rather than growing.
    Step wait_patiently(const Request& request, const std::vector<Idle>& later, double now) const;
    bool may_be_patient(const Request& request, double now) const;
    int64_t slack() const;  // by how much less is free than streams may have side by side
    virtual uint64_t reserved_or_leaving() const = 0;

    Heap& heap_;
    const Policy& policy_;
    Growth growth_;
    Lag lag_;
    Lifetime lifetime_;
    uint64_t coming_ = 0, leaving_ = 0, stranded_bytes_ = 0;
    uint64_t refused_ = no_limit;  // the least that the device refused since something last changed
    uint64_t peak_ = 0;            // the most that was reserved
    uint64_t in_arena_[2] = {};
    uint32_t last_stream_ = 0;     // whose request brought the newest segment
    std::vector<Return> stranded_;  // what the device did not take back
    std::unordered_map<uint64_t, uint32_t> arena_of_;  // by address of the segment
};

std::unique_ptr<Source> make_source(Heap& heap, const Policy& policy, double now);

}  // namespace asyncmem::scheduler
