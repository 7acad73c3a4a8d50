// A thread waits for memory by the scheduler while another gives it back without a lock that both would hold: whatever of the
// two comes first, the free is not lost. Arguments: rounds.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "scheduler/scheduler.hpp"

using namespace asyncmem;
using scheduler::Effect;
using scheduler::Policy;
using scheduler::RequestId;
using scheduler::Scheduler;
using scheduler::Terms;
using Waits = scheduler::State;

namespace {

constexpr uint64_t whole = uint64_t{64} << 20;

// Frees what it is handed, a while after it was, and tells the scheduler what the heap says.
class Other {
public:
    Other(Heap& heap, Scheduler& scheduler) : heap_(heap), scheduler_(scheduler), thread_([this] { run(); }) {}
    ~Other() {
        ends_ = true;
        thread_.join();
    }

    void hand(BlockId block, uint32_t pause) {
        pause_ = pause;
        block_ = block;
    }
    void wait() const {
        while (block_) std::this_thread::yield();
    }

private:
    void run() {
        for (std::atomic<uint32_t> i{0}; !ends_; i = 0) {
            if (!block_) {
                std::this_thread::yield();
                continue;
            }
            while (i < pause_) ++i;
            if (uint32_t flags = heap_.free(block_)) scheduler_.freed(flags, 0);
            block_ = 0;
        }
    }

    Heap& heap_;
    Scheduler& scheduler_;
    std::atomic<BlockId> block_{0};
    std::atomic<uint32_t> pause_{0};
    std::atomic<bool> ends_{false};
    std::thread thread_;
};

// Rounds in which all that an account may have is held, wanted, and freed; returns in how many nobody was served.
int play(Heap& heap, Scheduler& scheduler, uint32_t account, uint64_t nbytes, int rounds) {
    Other other(heap, scheduler);
    std::minstd_rand draw(1);
    Effect effect;
    Terms terms;
    terms.calls = true;
    int lost = 0;
    for (int i = 0; i < rounds; ++i) {
        Outcome outcome;
        Ask ask;
        ask.nbytes = nbytes;
        ask.account = account;
        BlockId held = heap.take(ask, outcome);
        if (!held) std::abort();
        other.hand(held, static_cast<uint32_t>(draw() % 1500));
        RequestId request = scheduler.submit(ask, {}, terms, 0);
        other.wait();
        while (scheduler.next(effect)) continue;
        if (scheduler.state(request) != Waits::Granted) {
            ++lost;
            scheduler.cancel(request, 0);
            scheduler.forget(request);
            continue;
        }
        for (const Granted& one : scheduler.claim(request)) scheduler.freed(heap.free(one.block), 0);
    }
    return lost;
}

}  // namespace

int main(int, char** arguments) {
    int rounds = std::atoi(arguments[1]);
    Heap heap(512, Tuning{});
    Policy policy;
    policy.limit = policy.segment_size = whole;
    Scheduler scheduler(heap, policy, 0);
    heap.add_segment(uint64_t{1} << 32, whole, 1, 0);
    uint32_t budget = heap.add_account(0, whole / 2);
    scheduler.open_share(budget, 0, 0, -1, true, 2);
    int lost = play(heap, scheduler, 0, whole, rounds);
    heap.flush(-1);
    int lost_in_budget = play(heap, scheduler, budget, whole / 2, rounds);
    std::printf("of %d frees %d were lost, and %d in a budget\n", rounds, lost, lost_in_budget);
    return lost || lost_in_budget;
}
