// The heap: which block serves which request, and what must be waited for first. Integers in, integers out.
//
// Knows no Python, no driver, and no time but in its log. Every public method takes the one lock for a bounded piece of
// work, calls nothing while it holds it, and may be used from any thread with or without the GIL. Wrong arguments throw
// std::invalid_argument and change nothing. The rules are explained in HEAP.md and spelled out once more, in plain
// Python, in tests/reference.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache.hpp"
#include "free_index.hpp"
#include "lock.hpp"
#include "types.hpp"

namespace asyncmem {

class Heap {
public:
    Heap(uint64_t granule, const Tuning& tuning);

    // Whether every caller holds the interpreter's lock, which then serves for the heap's own (see Lock).
    void set_guarded(bool guarded) { lock_.set_guarded(guarded); }

    void configure(const Tuning& tuning);
    Tuning tuning() const { return lock_.with([&] { return tuning_; }); }

    uint32_t add_stream();
    uint32_t stream_count() const { return lock_.with([&] { return static_cast<uint32_t>(streams_.size()); }); }
    Epochs epochs(uint32_t stream) const { return lock_.with([&] { return need_stream(stream).epochs; }); }
    bool lags() const;  // whether a recorded fence is not known to be done
    uint64_t close_epoch(uint32_t stream);
    void publish(uint32_t stream, uint64_t epoch);
    void mark_done(uint32_t stream, uint64_t epoch);

    uint32_t add_segment(uint64_t address, uint64_t nbytes, uint32_t arena, uint32_t stream, uint64_t epoch = open_epoch);
    Entries remove_segment(uint32_t segment);
    void place_from(uint64_t nbytes);  // blocks of so many bytes or more are not cached from now on
    // Takes of so many bytes or more miss rather than leave `least` or more of the segment that ends there, while it is free.
    void keep_whole(uint64_t end, uint64_t nbytes, uint64_t least);
    void go_around(bool around);  // whether takes find memory wherever it lies, or by addresses alone
    std::vector<SegmentInfo> segments() const;
    std::vector<Piece> empty_segments() const;

    // Spaces: ranges of addresses of which pages are mapped and unmapped (pages.cpp).
    uint32_t add_space(uint64_t address, uint64_t nbytes, uint32_t arena, uint64_t page);
    void remove_space(uint32_t segment);
    void set_mapped(uint32_t segment, uint64_t address, uint64_t nbytes);
    void set_bare(uint32_t segment, uint64_t address, uint64_t nbytes);
    void set_moved(const Move& move, uint32_t segment);
    void let_go(uint32_t segment, uint64_t address, uint64_t nbytes);
    std::vector<Piece> handles() const;
    // What to do for a request that missed, with at most `room` bytes of new memory before any is taken back, and at most
    // `most` more where too little can be, in handles of at most a `parts`-th of it (1: one for each gap), moving memory that
    // only its own stream still uses where it may be `early`; without `moves` memory goes back instead, and comes anew. And which
    // idle memory to give back, the oldest first. New memory goes on behind the request for up to `spare` bytes.
    Plan plan(const Ask& ask, uint64_t room, uint64_t most, Bound bound = Bound::Any, uint64_t parts = usual_parts,
              uint64_t spare = 0, bool early = true, bool moves = true);
    // Whether a plan would find addresses among those that were used before.
    bool has_addresses(const Ask& ask, Bound bound = Bound::Any);
    Plan reclaim(uint64_t nbytes);
    // Large handles in no use that are to come again, at the same addresses, in parts of `size` or a little less: the largest,
    // and no more than make `most` parts, for which one handle's are larger.
    Plan plan_split(uint64_t size, uint64_t most);
    Piece idle_memory() const;  // all of it together
    std::vector<uint32_t> unfenced() const;  // streams whose uses of handles no recorded fence covers yet
    uint64_t spread() const;                 // bytes of addresses that were ever used, in spaces, and of segments

    // Each take fills `outcome`; 0 or false is a miss. The block is the caller's until freed.
    BlockId take(const Ask& ask, Outcome& outcome);
    BlockId take_foreign(const Ask& ask, bool late, Entries& owed, Outcome& outcome);
    // The same for just these bytes of a lease; a miss where some of them are in use.
    BlockId take_at(const Ask& ask, uint64_t address, bool late, Entries& owed, Outcome& outcome);
    bool take_many(const Ask& ask, std::span<const uint64_t> sizes, std::span<Granted> granted, Outcome& outcome);
    uint32_t put_back(BlockId block, const Entries& owed);
    uint32_t free(BlockId block);
    uint32_t free(BlockId block, std::span<const Entry> extra);
    uint32_t free_everywhere(BlockId block);
    uint32_t free_many(std::span<const BlockId> blocks);

    void set_home(BlockId block, uint32_t stream);
    BlockInfo info(BlockId block) const;  // of one that is live or leased

    uint64_t flush(int64_t stream);
    uint64_t merge(int64_t arena = -1);
    uint32_t open_lease(BlockId block);
    uint32_t close_lease(uint32_t arena);

    uint32_t add_account(int64_t parent, uint64_t limit);
    bool remove_account(uint32_t account);
    // The same for all of a list that can go, and take them out of it. One above goes after the last below it.
    void remove_accounts(std::vector<uint32_t>& ended) {
        while (std::erase_if(ended, [&](uint32_t one) { return remove_account(one); })) continue;
    }
    void set_limit(uint32_t account, uint64_t limit);
    Account account(uint32_t account) const {
        std::lock_guard lock(lock_);
        Account found = need_account(account);
        if (!account) found.peak = accounts_.peak();
        return found;
    }
    uint64_t recent_peak() { return lock_.with([&] { return accounts_.recent_peak(); }); }
    // Bytes that count in an account, and in all above it, as if they were live.
    void promise(uint32_t account, int64_t nbytes);
    // Accounts to which bytes came back, since this was asked last.
    std::vector<uint32_t> take_touched() { return lock_.with([&] { return accounts_.take_touched(); }); }
    uint64_t set_gate(uint32_t account, bool closed);  // how often blocks were given back until then
    // Frees that the scheduler is still to be told of, because a fence behind them is to be recorded first.
    void expect_news(int32_t change) { news_ += change; }
    bool expects_news() const { return news_ > 0; }
    uint64_t returns() const { return lock_.with([&] { return accounts_.returns(); }); }
    void leave_ajar(uint64_t allowance, uint64_t wanted) {
        std::lock_guard lock(lock_);
        if (accounts_[0].gated) accounts_.leave_ajar(allowance, wanted);
    }
    uint64_t close_up() {
        std::lock_guard lock(lock_);
        accounts_.close_up();
        return accounts_.passed();
    }
    void set_marks(uint64_t live_low, uint64_t live_high) {
        std::lock_guard lock(lock_);
        live_low_ = live_low;
        live_high_ = live_high;
    }
    void reset_peaks();

    uint64_t largest(int32_t arena) const;
    uint64_t live() const { return lock_.with([&] { return accounts_[0].live; }); }
    uint64_t reserved() const { return lock_.with([&] { return reserved_; }); }
    uint64_t free_bytes() const { return lock_.with([&] { return unused(); }); }
    uint64_t cached_bytes() const { return lock_.with([&] { return cached_; }); }
    uint64_t pending_bytes() const;
    Counts counts() const;
    std::vector<BlockInfo> blocks() const;
    Waste waste() const;
    std::string check() const;  // empty, or the broken invariant in words

    // A reader of all that is taken and freed from now on, and what is live now; the log ends with the last.
    uint32_t open_log(uint64_t keep, Log::Rows& held);
    bool logged() const { return lock_.with([&] { return log_ != nullptr; }); }
    Log::Part read_log(uint32_t reader, uint64_t most, bool consume) {
        return lock_.with([&] { return log_ ? log_->read(reader, most, consume) : Log::Part{}; });
    }
    void close_log(uint32_t reader);
    // What is live now, for as long as there is a log.
    Log::Rows held() const { return lock_.with([&] { return log_ ? log_->held() : Log::Rows{}; }); }
    void note(LogRow row);   // of what the pool does; nothing where there is no log

    // Write down what this heap and its scheduler are told from now on, to be called before either is told anything.
    void start_journal();
    Journal* journal() const { return journal_.get(); }

private:
    struct Stream {
        Epochs epochs;
        BinTable<8> cache;
    };
    struct Arena {
        std::vector<std::unique_ptr<FreeIndex>> by_key;  // 0 clean, 1 several streams, 2 + s only stream s
        uint32_t segment = 0;  // a lease's own range
        uint32_t space = 0;    // 1 + the segment that is its space, 0 for none
        bool used = false;

        FreeIndex* index(size_t key) const;  // none where it holds nothing
    };
    struct Search {
        uint64_t granules;
        uint32_t stream;
        Bound bound;
        uint32_t window;  // candidates looked at in one class
        uint32_t touched = 0;
        bool bare = false;  // a block was found, and memory is missing behind it
        bool cuts = true;   // the segment that stays whole will do as well
        bool uncut = false;  // a block was found, and is that segment
    };
    // The searches that one request goes through, each of which finds what the one before did not; the first is take()'s.
    static constexpr uint32_t narrow = 32, wide = 4096;
    static constexpr uint32_t aged = 256;  // candidates of one index that are looked at for the oldest
    struct Reach {
        Bound bound;
        uint32_t window;
    };
    static constexpr Reach reaches[] = {
        {Bound::Done, narrow}, {Bound::Done, wide}, {Bound::Recorded, wide}, {Bound::Any, wide}};

    // The lock, for all that looks at blocks and their neighbours, but for takes and frees: it finds all joined.
    class Coalesced {
    public:
        explicit Coalesced(const Heap& heap) : turn_(heap.journal()), guard_(heap.lock_) {
            if (turn_ && heap.deferred_.count) [[unlikely]] heap.journal()->add("coalesce");
            const_cast<Heap&>(heap).coalesce();
        }

    private:
        Journal::Turn turn_;
        std::lock_guard<Lock> guard_;
    };

    uint64_t bytes(const Node& node) const { return node.granules << shift_; }
    uint64_t unused() const { return reserved_ - accounts_[0].live - cached_ - lifted_; }  // free, outside of leases
    uint64_t rounded(uint64_t nbytes) const {
        uint64_t mask = (uint64_t{1} << shift_) - 1;
        return (nbytes + mask) & ~mask;
    }
    // Of a free block, the bytes that have memory behind them.
    uint64_t mapped(const Node& node) const { return bytes(node) - (node.bare ? bare_bytes(node) : 0); }
    uint64_t bare_bytes(const Node& node) const { return node.bare * space_of(node.segment).page(); }
    // How many pages have no memory behind them in the lower part of a block; such pages always lie wholly in it.
    uint32_t bare_pages(const Node& node, uint64_t nbytes) const {
        return space_of(node.segment).bare(node.address, nbytes);
    }
    uint32_t natural_arena(uint64_t nbytes) const { return nbytes < tuning_.small_limit ? 0 : 1; }
    // Whether it is one free block, and could go back to the device.
    bool is_empty(const Segment& segment) const {
        const Node& first = nodes_[segment.first];
        return segment.used && !segment.container && !segment.space && first.state == State::Free && !first.after;
    }
    bool cacheable(const Node& node) const { return node.arena == natural_arena(bytes(node)); }

    // placing (place.cpp; merge_in() and place_at() in coalesce.cpp)
    bool eligible(const Node& node, uint32_t stream, Bound bound) const;
    static bool better(const Node& a, const Node& b);
    BlockId best_of(const CandidateList& list, bool fit, bool all, Search& search) const;
    BlockId find(const FreeIndex& index, bool all, Search& search, BlockId known) const;
    BlockId find_eligible(const SmallIndex& few, Search& search) const;
    BlockId find_listed(const FreeIndex& index, bool all, Search& search, BlockId known) const;
    BlockId place(const Arena& arena, Search& search) const;
    BlockId place_foreign(const Arena& arena, Search& search) const;
    BlockId oldest_of(const Arena& arena, Search& search) const;
    uint64_t age_of(const Node& node, uint32_t taker) const;
    BlockId place(const Ask& ask, Search& search);
    bool stays_whole(const Node& hole, uint64_t granules) const;
    BlockId take_placed(uint64_t granules, const Ask& ask, Outcome& outcome);
    BlockId take_reaching(uint64_t granules, const Ask& ask, bool late, Outcome& outcome);
    BlockId place_at(const Segment& range, uint64_t address, Search& search);
    void carve(BlockId block, uint64_t granules);
    void settle(BlockId block);
    BlockId join(BlockId block);
    void merge_in(const Arena& arena);
    bool sinks(const Node& node) const;
    bool stays_apart(const Node& node) const;
    void sink(BlockId block, uint64_t granules);
    void link(BlockId before, BlockId block);
    BlockId take_front(BlockId block, uint64_t granules);
    bool joins(const Node& a, const Node& b) const;
    bool lists_join(const Node& a, const Node& b) const;
    void absorb(BlockId low, BlockId high);
    void unite(BlockId low, BlockId high);
    void unite_entries(Node& a, Node& b);
    FreeIndex& index_of(const Node& node);
    static void add_index(std::vector<std::unique_ptr<FreeIndex>>& by_key, uint32_t key);
    void index_add(BlockId block);
    void index_remove(Node& node);
    void move_hole(BlockId block, uint64_t address, uint64_t granules);
    void join_hole(BlockId block);

    // coalescing that is put off (coalesce.cpp; defer_again() in heap.cpp)
    bool defer(BlockId block, bool sinks);
    bool defer_again(BlockId block);
    BlockId take_deferred(uint64_t granules, const Ask& ask, Outcome& outcome);
    void sync_index();
    void coalesce() {
        if (deferred_.count) coalesce_all();
    }
    void coalesce_all();

    // entries (place.cpp)
    static uint32_t key_of(const Node& node) { return node.more ? 1 : node.epoch ? 2 + node.stream : 0; }
    Entries undone(Entries entries) const;
    void purge(Node& node);
    Entries resolve(Node& node, uint32_t stream);
    void adopt(Node& node, uint32_t stream);

    // taking and freeing (heap.cpp)
    BlockId find_block(const Ask& ask, Outcome& outcome);
    BlockId find_hole(const Ask& ask, Outcome& outcome);
    void enliven(BlockId block, const Ask& ask, uint32_t level);
    void raise_marks(Outcome& outcome);
    bool refused(const Ask& ask, uint64_t nbytes, Outcome& outcome);
    [[noreturn]] void explain(const Ask& ask) const;
    BlockId take_cached(uint64_t granules, const Ask& ask, Outcome& outcome);
    BlockId take_shared(uint64_t granules, uint32_t stream, Outcome& outcome);
    void grant(BlockId block, const Ask& ask, Outcome& outcome);
    BlockId grant_owing(BlockId block, const Ask& ask, Entries& owed, Outcome& outcome);
    uint32_t free_locked(BlockId block, std::span<const Entry> extra);
    bool keep(BlockId block, bool only_home);
    bool keep_shared(BlockId block);
    bool vacate(BinTable<8>& cache, uint64_t granules);
    void release(Node& node);
    uint64_t drain(Cache& cache, Bin& bin, uint32_t most);
    void retract(BlockId block, const Entries& owed);
    void give_back(BlockId block, std::span<const Entry> extra);
    void owe(Node& node, std::span<const Entry> extra);
    void strike(Cache& cache, Bin& bin, uint64_t granules);
    void note_reserved() {
        total_.peak_reserved = std::max(total_.peak_reserved, reserved_);
        total_.peak_cached = std::max(total_.peak_cached, reserved_ - accounts_[0].live);
    }
    // Flags of an operation that gave bytes back.
    uint32_t released_flags() {
        uint64_t free = reserved_ - accounts_[0].live;
        total_.peak_cached = std::max(total_.peak_cached, free);
        uint32_t flags = accounts_.told(free) ? uint32_t{Waiting} : 0;
        if (accounts_[0].live < live_low_) {
            live_low_ = 0;
            flags |= LiveCrossed;
        }
        return flags;
    }
    // The same for bytes that went back to a lease: of interest to those who wait for memory of that lease.
    uint32_t flags_inside(uint32_t account) const { return accounts_.barred(account) ? uint32_t{Waiting} : 0; }
    bool known_arena(int64_t arena) const {
        return arena >= 0 && static_cast<size_t>(arena) < arenas_.size() && arenas_[arena].used;
    }
    void need_live(BlockId block) const;
    Stream& need_stream(int64_t stream) const;
    const Account& need_account(int64_t account) const;

    // logging (report.cpp); the first three while there is a log
    void log_take(BlockId block, const Ask& ask);
    void log_free(BlockId block, std::span<const Entry> extra);
    void log_lease_end(const Segment& range);
    LogRow row_of(const Node& node) const;

    // streams, leases and segments (segments.cpp)
    uint32_t add_range(Segment segment, uint64_t epoch, uint32_t stream);
    void drop_segment(uint32_t segment);
    void placed_from(uint64_t nbytes);
    void adopt_range(const Segment& range, const Node& container);
    SegmentInfo survey(uint32_t segment) const;
    BlockInfo describe(const Node& node) const;

    // spaces (pages.cpp)
    Space& space_of(uint32_t segment) const;
    BlockId part_of(const Node& whole);
    BlockId cut(BlockId block, uint64_t granules);
    void lift(Space& space, BlockId block, uint64_t address, uint64_t nbytes);
    BlockId held_around(const Space& space, uint64_t address, uint64_t nbytes, State state) const;
    BlockId held_part(Space& space, uint64_t address, uint64_t nbytes, State state);
    // Note what a freed block still waits for at each handle that it lay on, unless that is noted there already.
    void note_free(const Node& node) {
        Space* space = segments_[node.segment].space.get();
        if (!space) return;
        if (node.more || !node.epoch || !space->note(node.address, bytes(node), node.stream, node.epoch)) note_uses(node);
    }
    void note_uses(const Node& node);
    void find_holes() const;
    BlockId idle(const Handle& handle) const;
    std::vector<HandleId> idle_handles() const;
    bool belong(const Node& a, const Node& b) const;
    bool alike(const Node& a, const Node& b) const;
    void put(Space& space, BlockId block, bool filled);
    BlockId reunite(BlockId block);
    void release(Space& space, uint64_t address, uint64_t nbytes);
    std::string check_space(uint32_t segment) const;
    bool is_done(const Entry& entry) const { return entry.epoch <= streams_[entry.stream]->epochs.done; }
    Entries uses(HandleId id) const { return undone(handles_.uses(id)); }  // what keeps it from being unmapped

    // planning (plan.cpp)
    static uint64_t bare_behind(const Space& space, uint64_t from, uint64_t end);
    class Picking;
    // Where a request may lie: an address, how many bytes from there on lack memory, and the blocks side by side that it is
    // in: the first, their size and their end.
    struct Spot {
        BlockId block = 0;
        uint64_t address = 0, missing = UINT64_MAX, size = UINT64_MAX, end = 0;
    };
    Spot cheapest(const Space& space, uint64_t nbytes, uint32_t stream, bool anew) const;
    bool has_spot(const Ask& ask, uint64_t granules);
    BlockId find_addresses(const Ask& ask, uint32_t arena, uint64_t granules, Bound bound);
    BlockId extend(Space& space, const Ask& ask, BlockId last, uint64_t more, Bound bound);
    BlockId last_used(const Space& space, const Ask& ask, Bound bound);

    // What the walk over all blocks finds of each kind.
    struct Sums {
        uint64_t live = 0, free = 0, cached = 0, reserved = 0, live_blocks = 0, free_blocks = 0, mixed = 0;
        std::vector<uint64_t> charged, requested;  // by account
    };
    std::string check_segment(uint32_t segment, Sums& sums) const;
    std::string check_block(BlockId block, const Segment& segment) const;
    void sum_up(const Node& node, const Segment& segment, Sums& sums) const;
    std::string check_sums(const Sums& sums) const;
    std::string check_caches() const;

    mutable Lock lock_;
    std::atomic<int32_t> news_{0};
    const uint32_t shift_;
    std::unique_ptr<Log> log_;  // mostly none: a branch on each hit
    std::unique_ptr<Journal> journal_;  // the same
    Tuning tuning_;
    NodeTable nodes_;
    EntryPool entry_pool_;
    std::vector<std::unique_ptr<Stream>> streams_;
    Slots<Arena> arenas_{2};
    Slots<Segment> segments_;
    Handles handles_;
    Deferred deferred_;
    BlockId newest_ = 0;    // the latest that was placed
    uint64_t in_turn_ = 0;  // how many blocks in a row were freed before another was placed
    Accounts accounts_;
    BinTable<10> shared_;
    // The smallest page there is, or what place_from() says. Where memory comes and goes, blocks from there on are placed each
    // time: cached, they would keep it from that.
    uint64_t paged_from_ = UINT64_MAX;  // granules
    uint64_t whole_end_ = 0, whole_from_ = UINT64_MAX, whole_least_ = 0;  // of what stays whole: its address, and granules
    bool around_ = false;
    uint64_t live_low_ = 0, live_high_ = no_limit;
    uint64_t reserved_ = 0, cached_ = 0, lifted_ = 0;
    uint64_t leases_closed_ = 0;  // blocks that ended as the container of a lease, without a free
    Counts total_{};  // counters and peaks that no account has; counts() fills in the rest
};

}  // namespace asyncmem
