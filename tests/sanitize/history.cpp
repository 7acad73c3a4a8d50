// Random histories over the C++ heap alone: one thread with check() along the way, then several threads at once.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "heap/heap.hpp"

using namespace asyncmem;

namespace {

constexpr uint64_t segment = uint64_t{1} << 26;
constexpr uint64_t space = uint64_t{1} << 40;
constexpr uint64_t page = uint64_t{1} << 16;
constexpr int streams = 3;

void demand(bool holds, const std::string& what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what.c_str());
    std::abort();
}

void sound(const Heap& heap) {
    std::string wrong = heap.check();
    demand(wrong.empty(), wrong);
}

// One thread's part: blocks that only it knows, and all the operations that threads may do at the same time.
class Actor {
public:
    Actor(Heap& heap, unsigned seed) : heap_(heap), draw_(seed) {}

    void step() {
        switch (below(19)) {
            case 0: return take_foreign();
            case 1: return take_many();
            case 2: return finish_epoch();
            case 3: return lease();
            case 4: return look();
            case 5: return free_some();
            case 6: return grow();
            case 7: return give_back();
            case 8: return read_log();
            default: return below(2) ? take() : free_one();
        }
    }

    void free_all() {
        while (!live_.empty()) free_one();
        if (reader_) heap_.close_log(reader_);
    }

private:
    uint64_t below(uint64_t n) { return draw_() % n; }
    Ask ask() {
        uint64_t sizes[] = {512, 4096, 4096, 4096, 65536, 1 << 20, 1 + below(1 << 21)};
        return {.nbytes = sizes[below(7)], .stream = static_cast<uint32_t>(below(streams)), .anywhere = below(2) == 0};
    }

    // Read along what all threads do; readers come and go, and some leave more unread than is kept for them.
    void read_log() {
        if (!reader_) {
            Log::Rows held;
            reader_ = heap_.open_log(below(2) ? 1000 : UINT64_MAX, held);
            time_ = 0;
            return;
        }
        Log::Part part = heap_.read_log(reader_, below(3000), true);
        for (const LogRow& row : part.rows) {
            demand(row.time_ns >= time_, "rows are in the order of their times");
            demand(row.number != LogRow::none && row.nbytes > 0, "a row is whole");
            time_ = row.time_ns;
        }
        if (below(16)) return;
        heap_.close_log(reader_);
        reader_ = 0;
    }

    void take() {
        Outcome outcome;
        if (BlockId block = heap_.take(ask(), outcome)) live_.push_back(block);
    }

    void take_foreign() {
        Outcome outcome;
        Entries owed;
        BlockId block = heap_.take_foreign(ask(), below(2), owed, outcome);
        if (!block) return;
        if (below(2))
            live_.push_back(block);
        else
            heap_.put_back(block, owed);
    }

    void take_many() {
        Outcome outcome;
        std::vector<uint64_t> sizes(below(8));
        for (uint64_t& size : sizes) size = ask().nbytes;
        std::vector<Granted> granted(sizes.size());
        if (!heap_.take_many(ask(), sizes, granted, outcome)) return;
        for (Granted& one : granted) live_.push_back(one.block);
    }

    void free_one() {
        if (live_.empty()) return;
        std::swap(live_[below(live_.size())], live_.back());
        BlockId block = live_.back();
        live_.pop_back();
        uint32_t stream = static_cast<uint32_t>(below(streams));
        if (below(4))
            heap_.free(block);
        else
            heap_.free(block, Entries{{stream, heap_.epochs(stream).open}});
    }

    void free_some() {
        size_t count = std::min<size_t>(live_.size(), below(20));
        heap_.free_many(std::span(live_).last(count));
        live_.resize(live_.size() - count);
    }

    void finish_epoch() {
        uint32_t stream = static_cast<uint32_t>(below(streams));
        uint64_t epoch = heap_.close_epoch(stream);
        heap_.publish(stream, epoch);
        if (below(2)) heap_.mark_done(stream, epoch);
    }

    void lease() {
        Outcome outcome;
        BlockId block = heap_.take({.nbytes = 1 << 20, .stream = 0}, outcome);
        if (!block) return;
        uint64_t start = outcome.address;
        uint32_t arena = heap_.open_lease(block);
        uint32_t account = heap_.add_account(-1, no_limit);
        Ask inside{.nbytes = 5000, .stream = 1, .account = account, .arena = static_cast<int32_t>(arena)};
        Entries owed;
        if (BlockId inner = heap_.take_foreign(inside, true, owed, outcome)) live_.push_back(inner);
        for (int i = 0; i < 8; ++i) {
            inside.nbytes = 1 + below(1 << 16);
            inside.stream = static_cast<uint32_t>(below(streams));
            uint64_t at = start + 512 * below(1024);
            BlockId there = heap_.take_at(inside, at, true, owed, outcome);
            if (!there) continue;
            demand(outcome.address == at, "a block that lies elsewhere");
            if (below(3))
                heap_.free(there);
            else
                live_.push_back(there);
        }
        heap_.close_lease(arena);
        heap_.remove_account(account);
    }

    void grow() {
        Ask wanted = ask();
        uint64_t much = uint64_t{1} << 50;
        Plan plan = heap_.plan(wanted, below(2) ? much : 0, below(2) ? much : page);
        if (!plan.found) return;
        carry_out(plan);
        Outcome outcome;
        Entries owed;
        wanted.anywhere = false;
        if (BlockId block = heap_.take_foreign(wanted, true, owed, outcome)) live_.push_back(block);
        if (!below(10)) heap_.go_around(below(3));
    }

    void give_back() {
        Plan plan = heap_.reclaim(below(32) * page);
        if (plan.found) carry_out(plan);
    }

    // The driver's steps, of which some may fail; in the end all is let go.
    void carry_out(const Plan& plan) {
        uint64_t steps = below(4) ? 1000000 : below(8);
        auto step = [&] { return steps && steps--; };
        for (const Move& move : plan.moves) {
            if (!step()) break;
            if (move.to) {
                heap_.set_moved(move, plan.segment);
            } else {
                heap_.set_bare(move.segment, move.address, move.nbytes);
            }
        }
        for (const Range& range : plan.fresh)
            if (step()) heap_.set_mapped(plan.segment, range.address, range.nbytes);
        for (const Move& move : plan.moves) heap_.let_go(move.segment, move.address, move.nbytes);
        if (plan.nbytes) heap_.let_go(plan.segment, plan.address, plan.nbytes);
    }

    void look() {
        heap_.counts();
        heap_.largest(-1);
        heap_.pending_bytes();
        heap_.handles();
        if (below(8) == 0) heap_.flush(-1);
        if (below(8) == 0) heap_.merge();
        if (below(64) == 0) sound(heap_);
    }

    Heap& heap_;
    std::mt19937 draw_;
    std::vector<BlockId> live_;
    uint32_t reader_ = 0;
    int64_t time_ = 0;  // of the row read last
};

void wrong_arguments_change_nothing(Heap& heap, const std::vector<uint32_t>& spaces) {
    Outcome outcome;
    Entries owed;
    auto refused = [&](auto call) {
        try {
            call();
        } catch (const std::invalid_argument&) {
            return;
        }
        demand(false, "a wrong argument was accepted");
    };
    refused([&] { heap.take({.nbytes = 0}, outcome); });
    refused([&] { heap.take({.nbytes = ~uint64_t{0}}, outcome); });
    refused([&] { heap.take({.nbytes = 512, .stream = 99}, outcome); });
    refused([&] { heap.free(BlockId{0}); });
    refused([&] { heap.free(BlockId{1} << 31); });
    refused([&] { heap.close_lease(7); });
    refused([&] { heap.remove_segment(1000); });
    refused([&] { heap.plan({.nbytes = 0}, 0, 0); });
    refused([&] { heap.plan({.nbytes = ~uint64_t{0}}, 0, 0); });
    refused([&] { heap.plan({.nbytes = page, .arena = 99}, 0, 0); });
    refused([&] { heap.set_mapped(spaces[0], space, page); });
    refused([&] { heap.set_bare(spaces[0], ~uint64_t{0}, page); });
    refused([&] { heap.let_go(spaces[0], space, ~uint64_t{0}); });
    for (Move move : {Move{spaces[0], space, page, space}, Move{spaces[0], ~uint64_t{0}, page, 0}, Move{1000, space, page, space}})
        refused([&] { heap.set_moved(move, spaces[0]); });
    refused([&] { heap.take_at({.nbytes = page, .arena = 1}, 1, false, owed, outcome); });
    refused([&] { heap.remove_space(1000); });
    BlockId block = heap.take_foreign({.nbytes = 512}, true, owed, outcome);
    heap.free(block);
    refused([&] { heap.free(block); });
    sound(heap);
}

void settle_down(Heap& heap, const std::vector<uint32_t>& spaces) {
    for (uint32_t s = 0; s < streams; ++s) heap.mark_done(s, heap.close_epoch(s));
    heap.flush(-1);
    heap.merge();
    sound(heap);
    demand(heap.live() == 0, "bytes are live that nobody holds");
    demand(heap.free_bytes() == heap.reserved(), "not everything is free after everything was freed");
    for (const Move& move : heap.reclaim(~uint64_t{0}).moves) {
        heap.set_bare(move.segment, move.address, move.nbytes);
        heap.let_go(move.segment, move.address, move.nbytes);
        sound(heap);
    }
    for (uint32_t one : spaces) heap.remove_space(one);
    sound(heap);
    std::vector<Piece> empty = heap.empty_segments();
    demand(empty.size() == heap.segments().size(), "a segment did not come together again");
    for (const Piece& one : empty) heap.remove_segment(one.segment);
    demand(heap.reserved() == 0, "a removed segment still counts");
}

}  // namespace

int main(int argc, char** argv) {
    int threads = argc > 1 ? std::atoi(argv[1]) : 1;
    int steps = argc > 2 ? std::atoi(argv[2]) : 20000;
    for (unsigned seed = 0; seed < 4; ++seed) {
        Heap heap(512, Tuning{.best_fit = seed % 2 == 0});
        for (int i = 1; i < streams; ++i) heap.add_stream();
        for (uint32_t i = 0; i < 4; ++i) heap.add_segment((i + 1) * 2 * segment, segment / 4, i % 2, 0);
        std::vector<uint32_t> spaces;
        for (uint32_t arena : {0, 1}) spaces.push_back(heap.add_space((arena + 1) * space, segment, arena, page));
        std::vector<std::thread> crew;
        for (int t = 0; t < threads; ++t)
            crew.emplace_back([&heap, seed, steps, t] {
                Actor actor(heap, seed * 100 + static_cast<unsigned>(t));
                for (int i = 0; i < steps; ++i) actor.step();
                actor.free_all();
            });
        for (std::thread& one : crew) one.join();
        wrong_arguments_change_nothing(heap, spaces);
        settle_down(heap, spaces);
    }
    std::printf("%d thread(s) x %d steps x 4 histories: sound\n", threads, steps);
}
