# scheduler.hpp as Cython sees it.

cdef extern from "scheduler/scheduler.hpp" namespace "asyncmem::scheduler" nogil:
    const double never
    const char** effort_names
    const char** state_names
    const char** reason_names
    const char** ending_names
    const char** effect_names "asyncmem::scheduler::Effect::names"

    cdef enum class Effort(uint8_t):
        Take, Tidy, All

    cdef enum class Ending(uint8_t):
        Done

    cdef enum class CState "asyncmem::scheduler::State"(uint8_t):
        Waiting, Growing, Ordering, Granted, Failed

    cdef enum class CReason "asyncmem::scheduler::Reason"(uint8_t):
        NoMemory, Expired, Error

    cdef enum class CShortage "asyncmem::scheduler::Shortage"(uint8_t):
        Size

    cdef struct Terms:
        double deadline
        int32_t priority
        Effort effort
        bint waits, calls, on_loop, captured

    cdef cppclass CShare "asyncmem::scheduler::Share":
        uint32_t account

    cdef cppclass CRequest "asyncmem::scheduler::Request":
        Ask ask
        Terms terms
        CShare* share
        double since
        CState state
        CReason reason
        CShortage shortage
        uint32_t level
        uint64_t owner, caller, ahead

    cdef struct Span "asyncmem::scheduler::Effect::Span":
        uint64_t address, nbytes

    cdef enum class EffectKind "asyncmem::scheduler::Effect::Kind"(uint8_t):
        Granted, Order, Failed, Look, Deadline, Quiet

    cdef cppclass CEffect "asyncmem::scheduler::Effect":
        EffectKind kind
        bint by_caller, joins
        uint8_t level
        uint32_t arena, stream, account
        uint64_t request, job, nbytes, need, rest
        double seconds
        vector[uint32_t] streams
        vector[CPiece] returns
        vector[Entry] uses
        vector[pair[Span, uint64_t]] moves
        vector[Span] out, into
        size_t vacated

    cdef struct CTally "asyncmem::scheduler::Tally":
        int64_t waiting, waiting_bytes, growing, growing_bytes
        int64_t waits, growth_waits, misses, timeouts, cancellations, handed_back, deadlocks
        double wait_seconds, longest_wait, growth_seconds

    cdef struct Claim:
        uint64_t owner, nbytes
        uint32_t account

    cdef struct Hold:
        uint64_t owner
        uint32_t block

    cdef struct Stuck:
        uint64_t owner, request, nbytes, held
        double since

    cdef struct CGauges "asyncmem::scheduler::Gauges":
        uint64_t waiting, waiting_bytes, growing, growing_bytes, coming, leaving, overtaken, under_way
        int64_t grows, trims, foreign, progress
        double moved, waited
        uint8_t pressure
        int64_t means[9]

    cdef cppclass CScheduler "asyncmem::scheduler::Scheduler":
        CScheduler(CHeap& heap, const Policy& policy, double now) except +
        void set_guarded(bint guarded)
        void open_share(uint32_t account, int64_t up, uint32_t part_of, int32_t arena, bint waits, double bypass) except +
        void close_share(uint32_t account, double now) except +
        void set_limit(uint32_t account, uint64_t limit, double now) except +
        void configure(const Policy& policy, double now) except +
        CTally tally(uint32_t account) except +
        void add_spillable(uint32_t account, int64_t nbytes, double now) except +
        void note_handed_back(uint32_t account) except +
        void note_foreign() except +
        uint64_t submit(const Ask& ask, vector[uint64_t] pieces, const Terms& terms, double now) except +
        void set_caller(uint64_t id, uint64_t caller)
        CState leave_to(uint64_t request) except +
        void note_claim(double now) except +
        CState state(uint64_t id) except +
        const CRequest* look_up(uint64_t id)
        vector[Granted] claim(uint64_t id) except +
        void forget(uint64_t id) except +
        bint cancel(uint64_t id, double now) except +
        void fail(uint64_t id, CReason reason, double now) except +
        void give(uint64_t id, uint32_t block, uint64_t address, double now) except +
        vector[Entry] owed(uint64_t id) except +
        void ordered(uint64_t id, double now) except +
        void unordered(uint64_t id, double now) except +
        void asleep(uint64_t id, uint64_t owner, double now) except +
        void awake(uint64_t id) except +
        uint32_t hold(uint64_t owner, uint32_t block) except +
        void release(uint32_t hold) except +
        void forget_owner(uint64_t owner) except +
        vector[Hold] holds()
        vector[Stuck] stuck()
        void freed(uint32_t flags, double now) except +
        void looked(uint64_t found, double now) except +
        void grew(uint64_t job, uint64_t address, uint64_t nbytes, uint32_t stream, bint ready, double now, double seconds,
                  uint64_t rest) except +
        void grow_failed(uint64_t job, bint out_of_memory, double now) except +
        void trimmed(uint64_t job, size_t count, double now) except +
        void remapped(uint64_t job, size_t moved, size_t unmapped, size_t mapped, bint out_of_memory, double now, double seconds) except +
        void waited(uint64_t job, bint seen, double now) except +
        void ended(uint64_t job, Ending ending, double now) except +
        void expire(double now) except +
        void quiet(double now, const vector[Claim]& claims) except +
        void tick(double now) except +
        void offer(double now) except +
        void begin_beat() except +
        double end_beat(double now) except +
        void set_capturing(bint capturing) except +
        void shift_clock(double seconds) except +
        void drain(double now) except +
        void close(double now) except +
        void trim(uint64_t keep, double now) except +
        void grow_ahead(double now) except +
        bint next(CEffect& effect)
        void put_back(CEffect effect)
        CGauges gauges()
        vector[uint64_t] queued()
        string check() except +
