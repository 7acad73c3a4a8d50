# heap/heap.hpp as Cython sees it. Methods that check their arguments raise ValueError for std::invalid_argument.

cdef extern from "heap/heap.hpp" namespace "asyncmem" nogil:
    const uint64_t max_size
    const uint64_t no_limit

    cdef enum class State(uint8_t):
        Live, Free, Cached, Leased, Bare, Lifted, Filling

    cdef enum class Bound(uint8_t):
        Done, Recorded, Any

    cdef struct Entry:
        uint32_t stream
        uint64_t epoch

    cdef cppclass EntrySpan "std::span<const asyncmem::Entry>":
        EntrySpan()
        EntrySpan(const Entry* first, size_t count)
        EntrySpan(const vector[Entry]& entries)

    cdef struct Epochs:
        uint64_t open, recorded, done

    cdef struct Tuning:
        uint64_t small_limit
        bint best_fit
        uint64_t stream_cache_blocks, stream_cache_bytes, shared_cache_blocks, shared_cache_bytes

    cdef struct Caller:
        uint32_t site, task
        uint16_t tag, thread

    cdef struct Cause:
        int64_t span_ns
        Caller caller
        bint missed

    ctypedef int LogWhat "asyncmem::LogRow::What"

    cdef cppclass LogRow:
        LogRow()
        uint64_t nbytes, address
        int64_t span_ns
        Caller caller
        uint16_t stream
        LogWhat what
        uint8_t level

    cdef cppclass LogPart "asyncmem::Log::Part":
        vector[LogRow] rows
        uint64_t lost
        bint cut

    uint16_t thread_number()
    int64_t log_now "asyncmem::Log::now"()

    cdef struct Ask:
        uint64_t nbytes
        uint32_t stream
        uint32_t account
        int32_t arena
        bint anywhere
        bint fast
        bint again
        bint caused
        Cause cause

    cdef struct Outcome:
        uint8_t level
        int reason
        uint32_t flags
        uint32_t touched
        uint64_t address

    cdef struct Granted:
        uint32_t block
        uint64_t address

    cdef struct Account:
        uint64_t limit, live, requested, peak, frees
        uint64_t hits[3]
        int32_t parent
        uint64_t blocks()

    cdef struct Counts:
        uint64_t reserved, live, free, cached, lifted, empty
        uint64_t peak_live, peak_cached, peak_reserved
        uint64_t allocations, frees, stream_hits, shared_hits, placed, foreign, misses, refusals, barred, splits, merges
        uint64_t live_blocks, free_blocks, cached_blocks, segments, streams, accounts, leases, touched

    cdef struct SegmentInfo:
        uint32_t segment "id"
        uint32_t arena
        uint64_t address, nbytes, live, free, cached, largest, live_blocks

    cdef struct Range:
        uint64_t address, nbytes

    cdef struct CMove "asyncmem::Move":
        uint32_t segment
        uint64_t address, nbytes, to
        vector[Entry] uses

    cdef cppclass CPlan "asyncmem::Plan":
        bint found
        uint32_t segment
        uint64_t address, nbytes
        vector[CMove] moves
        vector[Range] fresh
        vector[Entry] waits

    cdef cppclass CPiece "asyncmem::Piece":
        uint32_t segment
        uint64_t address, nbytes
        vector[Entry] uses

    cdef cppclass CBlockInfo "asyncmem::BlockInfo":
        uint64_t address, nbytes
        State state
        uint32_t arena, stream, account
        vector[Entry] entries

    cdef cppclass CJournal "asyncmem::Journal":
        string read() except +
        bint is_cut()

    cdef cppclass CHeap "asyncmem::Heap":
        CHeap(uint64_t granule, const Tuning& tuning) except +
        void set_guarded(bint guarded)
        void configure(const Tuning& tuning) except +
        Tuning tuning()
        uint32_t add_stream() except +
        Epochs epochs(uint32_t stream) except +
        uint64_t close_epoch(uint32_t stream) except +
        void publish(uint32_t stream, uint64_t epoch) except +
        void mark_done(uint32_t stream, uint64_t epoch) except +
        uint32_t add_segment(uint64_t address, uint64_t nbytes, uint32_t arena, uint32_t stream) except +
        vector[Entry] remove_segment(uint32_t segment) except +
        uint32_t add_space(uint64_t address, uint64_t nbytes, uint32_t arena, uint64_t page) except +
        void remove_space(uint32_t segment) except +
        void set_mapped(uint32_t segment, uint64_t address, uint64_t nbytes) except +
        void set_bare(uint32_t segment, uint64_t address, uint64_t nbytes) except +
        void set_moved(const CMove& move, uint32_t segment) except +
        void let_go(uint32_t segment, uint64_t address, uint64_t nbytes) except +
        vector[CPiece] handles() except +
        CPlan plan(const Ask& ask, uint64_t room, uint64_t most, Bound bound, uint64_t parts, uint64_t spare, bint early) except +
        bint has_addresses(const Ask& ask, Bound bound) except +
        void go_around(bint around)
        CPlan reclaim(uint64_t nbytes) except +
        CPlan plan_split(uint64_t size, uint64_t most) except +
        CPiece idle_memory() except +
        vector[uint32_t] unfenced() except +
        uint64_t spread()
        vector[SegmentInfo] segments() except +
        vector[CPiece] empty_segments() except +
        uint32_t take(const Ask& ask, Outcome& outcome) except +
        uint32_t take_foreign(const Ask& ask, bint late, vector[Entry]& owed, Outcome& outcome) except +
        uint32_t take_at(const Ask& ask, uint64_t address, bint late, vector[Entry]& owed, Outcome& outcome) except +
        bint take_many(const Ask& ask, const vector[uint64_t]& sizes, vector[Granted]& granted, Outcome& outcome) except +
        uint32_t put_back(uint32_t block, const vector[Entry]& owed) except +
        uint32_t free(uint32_t block) except +
        uint32_t free_entries "free"(uint32_t block, EntrySpan extra) except +
        uint32_t free_everywhere(uint32_t block) except +
        uint32_t free_many(const vector[uint32_t]& blocks) except +
        void set_home(uint32_t block, uint32_t stream) except +
        CBlockInfo info(uint32_t block) except +
        uint64_t flush(int64_t stream) except +
        uint64_t merge(int64_t arena) except +
        uint32_t open_lease(uint32_t block) except +
        uint32_t close_lease(uint32_t arena) except +
        uint32_t add_account(int64_t parent, uint64_t limit) except +
        bint remove_account(uint32_t account) except +
        void remove_accounts(vector[uint32_t]& ended) except +
        void set_limit(uint32_t account, uint64_t limit) except +
        Account account(uint32_t account) except +
        void set_gate(uint32_t account, bint closed) except +
        void expect_news(int32_t change)
        void leave_ajar(uint64_t allowance, uint64_t wanted)
        uint64_t close_up()
        void set_marks(uint64_t live_low, uint64_t live_high)
        void reset_peaks()
        uint64_t largest(int32_t arena) except +
        uint64_t live()
        uint64_t reserved()
        uint64_t pending_bytes() except +
        Counts counts() except +
        vector[CBlockInfo] blocks() except +
        string check() except +
        uint32_t open_log(uint64_t keep, vector[LogRow]& held) except +
        bint logged()
        LogPart read_log(uint32_t reader, uint64_t most, bint consume) except +
        void close_log(uint32_t reader)
        vector[LogRow] held() except +
        void note(LogRow row)
        void start_journal() except +
        CJournal* journal()
