// The scheduler: who is served next, from what memory, and what has to be done for it. The only place that decides.
//
// Sans-I/O: an event comes in, the state changes, effects go out. It calls no driver, no event loop, no clock and no
// Python; the time comes with each event. The caller carries out the effects afterwards, and tells their end by
// further events. DESIGN.md has the table of both.
//
// Every public method takes the lock for a bounded piece of work, and may be called from any thread and any finalizer.
#pragma once

#include <deque>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "source.hpp"

namespace asyncmem::scheduler {

// How often each means against a lack of memory was used.
enum class Means : uint8_t { Grow, Look, Flush, Merge, Wait, Trim, Spill, Collect, Ask };
constexpr size_t means_count = 9;

struct Hold {
    uint64_t owner = 0;  // 0: no owner any more
    BlockId block = 0;   // 0: not used
    uint64_t since = 0;  // how many owners had been forgotten then
};

// An owner that cannot be served whatever others do, as a deadlock was found.
struct Stuck {
    uint64_t owner;
    RequestId request;  // 0: a claim
    uint64_t nbytes, held;
    double since;
};

struct Gauges {
    uint64_t waiting, waiting_bytes;  // behind other holders of memory
    uint64_t growing, growing_bytes;
    uint64_t coming, leaving, overtaken, under_way;
    int64_t grows, trims, foreign, progress;
    double moved, waited;
    uint8_t pressure;
    int64_t means[means_count];
};

class Scheduler {
public:
    Scheduler(Heap& heap, const Policy& policy, double now);
    void set_guarded(bool guarded) { lock_.set_guarded(guarded); }

    // -- shares, by their account in the heap ---------------------------------------------------------------------------
    // `up`: the account of the share around it, -1 for the inside of a lease, which `part_of` counts all the same.
    void open_share(uint32_t account, int64_t up, uint32_t part_of, int32_t arena, bool waits, double bypass);
    void close_share(uint32_t account, double now);  // fails what waits there and further inside
    void set_limit(uint32_t account, uint64_t limit, double now);
    void configure(const Policy& policy, double now);
    Tally tally(uint32_t account) const { return lock_.with([&] { return need_share(account).tally; }); }
    void add_spillable(uint32_t account, int64_t nbytes, double now);
    void note_handed_back(uint32_t account);
    void note_foreign() { lock_.with([&] { ++figures_.foreign; }); }  // another stream's memory was taken by other ways

    // -- requests ------------------------------------------------------------------------------------------------------
    // `pieces`: sizes of a batch, none empty. The state tells what became of it.
    RequestId submit(const Ask& ask, std::vector<uint64_t> pieces, const Terms& terms, double now);
    void set_caller(RequestId id, uint64_t caller) {
        std::lock_guard lock(lock_);
        if (Request* request = requests_.find(id)) request->caller = caller;
    }
    // The call has returned: from now on an effect tells the end of the request, unless the answer is one.
    State leave_to(RequestId id);
    State state(RequestId id) const { return lock_.with([&] { return need(id).state; }); }
    const Request* look_up(RequestId id) const { return lock_.with([&] { return requests_.find(id); }); }
    // Take the memory of a granted request, a block a size, and end it.
    std::vector<Granted> claim(RequestId id);
    // End a failed request.
    void forget(RequestId id);
    // End a request that waits; false where it has memory or has failed.
    bool cancel(RequestId id, double now);
    // Fail a request that waits, for a reason of the caller's.
    void fail(RequestId id, Reason reason, double now);
    // Serve a request that waits with a block that is live already.
    void give(RequestId id, BlockId block, uint64_t address, double now);
    // The uses that its stream has to be ordered behind; then either of these.
    Entries owed(RequestId id) const;
    void ordered(RequestId id, double now);
    void unordered(RequestId id, double now);
    // A task begins or ends to sleep on it.
    void asleep(RequestId id, uint64_t owner, double now);
    void awake(RequestId id);

    // -- what is held until a block ends ---------------------------------------------------------------------------------
    uint32_t hold(uint64_t owner, BlockId block);
    void release(uint32_t hold);
    void forget_owner(uint64_t owner);
    std::vector<Hold> holds() const;

    // Who was stuck when a deadlock was found last.
    std::vector<Stuck> stuck() const { return lock_.with([&] { return stuck_; }); }

    // -- events --------------------------------------------------------------------------------------------------------
    void freed(uint32_t flags, double now);
    void looked(uint64_t found, double now);
    // `rest`: where the second segment lies, 0 for none.
    void grew(JobId job, uint64_t address, uint64_t nbytes, uint32_t stream, bool ready, double now, double seconds,
              uint64_t rest = 0);
    void grow_failed(JobId job, bool out_of_memory, double now);
    void trimmed(JobId job, size_t count, double now);
    void remapped(JobId job, size_t moved, size_t unmapped, size_t mapped, bool out_of_memory, double now, double seconds);
    void waited(JobId job, bool seen, double now);
    void ended(JobId job, Ending ending, double now);    // of whatever else
    void expire(double now);
    void quiet(double now, const std::vector<Claim>& claims);
    void tick(double now);                               // a few times a second
    void begin_beat();                                   // pages: every few milliseconds, for as long as it says
    double end_beat(double now);
    void set_capturing(bool capturing);
    void note_claim(double now);                         // one more waits without a request of the queue
    void shift_clock(double seconds);
    void drain(double now);
    void close(double now);

    // What a request without a sleeping caller may ask for; as effects.
    void trim(uint64_t keep, double now);
    void grow_ahead(double now);
    // Others need memory of the device: what has been in no use between the last calls goes back.
    void offer(double now);

    // -- effects -------------------------------------------------------------------------------------------------------
    bool next(Effect& effect);
    // One that could not be carried out is the next again.
    void put_back(Effect effect) { lock_.with([&] { effects_.push_front(std::move(effect)); }); }

    Gauges gauges() const;
    std::vector<RequestId> queued() const;  // waiting or growing, in order of arrival
    std::string check() const;

private:
    enum class Try { Served, Making, Blocked, Suspended };

    void begin();
    void pump(double now);
    void serve_growing();
    void serve_waiting();
    void serve_lease(Share& lease);
    Try attempt(Request& request);
    Try try_all(Request& request);
    Try provide(Request& request);
    Try cut(Request& request);
    bool take(Request& request);
    bool find(Request& request);
    bool find_block(Request& request, bool anywhere);
    bool take_foreign(Request& request, bool anywhere);
    void put_back(Request& request);
    Ask ask_for(const Request& request, bool anywhere) const;
    bool must_look(int depth, uint32_t stream, std::vector<uint32_t> streams);
    bool looked_since(int depth) const { return look_event_ == event_ && look_depth_ >= depth; }
    bool tidy();
    bool flush();
    bool start(Decision job, Request* request, Means means);
    Job end_job(JobId id);
    void admit(Request& request);
    void readmit(Request& request);  // back from growing to waiting
    bool may_not_pass(const Request& request, const Request& other) const;
    void count_overtaking(const Request& request);
    void grant(Request& request);
    void leave(Request& request);
    void settle(Request& request, State state, Reason reason);
    void log_end(const Request& request);
    void fail(Request& request, Reason reason);
    void explain(Request& request);
    void remove(Request& request);
    void leave_to_outer(Share& share, double now);
    void note_fresh();
    void note(Request& request);
    void join(Request& request);
    void refuse_callers();
    void spill_for_waiting();
    bool start_spill(Request& request, Share& share, uint64_t nbytes);
    bool last_resort(Request& request);
    void start_plainly(Effect::Kind kind, Request& request);
    bool no_memory_will_come() const;
    void shrink();
    bool set_gates(uint64_t returns);
    void look_at_pressure();
    void fit_caches();
    void defragment();
    void expire_due();
    void expire_later(const Request& request);
    void arm_deadline();
    void arm_quiet();
    void wait_for_quiet(double seconds);
    uint64_t owner_of(const Hold& hold) const;
    void refuse_hopeless(Share& share, uint64_t limit);
    void take_promises_back(const Share& share);
    std::vector<Request*> growing_inside(const Share& share) const;
    void refuse_waiting(Share& share, uint64_t limit);
    void emit(Effect effect);
    Share* share_of(uint32_t account) const {
        return account < by_account_.size() ? by_account_[account].get() : nullptr;
    }
    Share& need_share(uint32_t account) const;
    Request& need(RequestId id) const;
    uint64_t capacity(const Share& share) const;
    class Proof;
    void count(Request& request, int64_t sign);
    template <typename Count>
    void each_tally(Request& request, Count&& count) {
        for (Share* one = request.share; one; one = one->part_of) count(one->tally);
    }

    mutable Lock lock_;
    Heap& heap_;
    Journal* const journal_;  // the heap's; mostly none
    Policy policy_;
    std::unique_ptr<Source> source_;
    Shares shares_;
    std::vector<std::unique_ptr<Share>> by_account_;
    Share* root_ = nullptr;
    mutable Requests requests_;
    RequestQueue growing_;                 // within every limit, in order; the others wait in their shares
    std::vector<Share*> waiting_leases_;
    std::vector<Share*> spilling_;         // shares of which something may move
    std::vector<RequestId> callers_;       // synchronous callers that are refused rather than queued

    std::deque<Effect> effects_;
    std::unordered_map<JobId, Job> jobs_;
    JobId last_job_ = 0;
    JobId queue_job_ = 0, shrink_job_ = 0, spill_job_ = 0, split_job_ = 0;

    double now_ = 0;
    uint64_t version_ = 1;                 // of the heap, as far as it matters to who found nothing
    uint64_t event_ = 1, look_event_ = 0;  // what was looked at stays so until something happens
    int look_depth_ = 0;
    bool suspended_ = false;               // a look is under way that a decision waits for
    bool lacks_pages_ = false;
    bool capturing_ = false;
    bool closed_ = false, draining_ = false;
    std::vector<RequestId> fresh_;         // taken in, and not noted yet
    uint64_t sequence_ = 0;
    int64_t queued_bytes_ = 0;
    Gauges figures_{};                     // what is counted as it happens; gauges() fills in the rest

    std::set<std::pair<double, RequestId>> deadlines_;  // of requests that are queued
    double armed_deadline_ = never;

    Slots<Hold> holds_{1};                 // number 0 stands for none
    std::unordered_map<uint64_t, uint64_t> forgotten_;  // owners that are gone: their number among all that ever were
    uint64_t forgets_ = 0;
    size_t sleeping_ = 0;                  // requests without a deadline on which a task sleeps
    bool quiet_armed_ = false;
    int64_t progress_seen_ = -1;
    int64_t facts_ = 0;                    // goes up with whatever a proof rests on, beside progress
    int64_t proved_at_ = -1;               // both, at the last proof
    int64_t alone_at_ = -1;                // progress, when an owner was found to wait for its own memory alone
    std::vector<Stuck> stuck_;

    bool squeezed_ = false;
    uint64_t returns_ = 0;                 // how often blocks had been given back, as of what was tried last
    uint64_t beat_frees_ = 0, merged_frees_ = 0, settled_frees_ = 0;
    uint32_t quiet_beats_ = 0;
    bool beating_ = false, beat_gained_ = false;
    uint64_t last_use_ = 0, recent_peak_ = 0, needed_ = 0;  // needed: in the last two ticks
    uint32_t quiet_ticks_ = 0;
    double used_at_ = 0;
    bool shrunk_ = false, tidied_ = false;
};

}  // namespace asyncmem::scheduler
