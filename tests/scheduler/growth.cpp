// What each operation of the scheduler costs with a thousand to a million requests, without Python: `growth [MOST] [FACTOR]`.
//
// A line for each operation: nanoseconds apiece at 1,000, 10,000, ... requests. A million requests lie in no cache of the
// processor, so whatever looks for one of them grows: the floor is a std::map of as many nodes as large as a request,
// taken out in random order. The program fails where an operation grows more than FACTOR times as much as the floor does.
// What goes by the number of requests grows a hundred times as much by then.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "scheduler/scheduler.hpp"

using namespace asyncmem;
using namespace asyncmem::scheduler;

namespace {

constexpr uint64_t limit = 16 << 20;
constexpr int repeats = 3;
constexpr double patience = 20;  // seconds for one operation

using Kind = Effect::Kind;

void demand(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::exit(2);
}

// A pool of one segment, all of it in use, and whoever asks for memory.
class World {
public:
    explicit World(int budgets = 0, uint64_t nbytes = limit)
        : heap_(512, Tuning{}), scheduler_(heap_, policy(nbytes), 0), draw_(1) {
        heap_.add_segment(uint64_t{1} << 30, nbytes, 1, 0);
        full_ = take(nbytes);
        accounts_.push_back(0);
        for (int i = 0; i < budgets; ++i) {
            uint32_t up = i % 3 ? accounts_.back() : 0;  // three deep
            uint32_t account = heap_.add_account(up, limit);
            scheduler_.open_share(account, up, up, -1, true, 2);
            accounts_.push_back(account);
        }
    }

    uint64_t size() {
        double most = std::log(4 << 20), least = std::log(512);
        return static_cast<uint64_t>(std::exp(std::uniform_real_distribution<>(least, most)(draw_)));
    }

    RequestId submit(uint64_t nbytes, double deadline = never, int32_t priority = 0) {
        Ask ask;
        ask.nbytes = nbytes;
        ask.account = accounts_[draw_() % accounts_.size()];
        Terms terms;
        terms.deadline = deadline;
        terms.priority = priority;
        RequestId id = scheduler_.submit(ask, {}, terms, now_);
        scheduler_.leave_to(id);
        carry_out();
        return id;
    }

    std::vector<RequestId> submit_many(size_t count, double deadline = never) {
        std::vector<RequestId> ids(count);
        for (RequestId& id : ids) id = submit(size(), deadline);
        return ids;
    }

    // Free what stands in the way, and everything that is granted from then on, until nobody waits; how many there were.
    size_t serve_all() {
        size_t served = 0;
        held_.push_back(full_);
        while (!held_.empty()) {
            uint32_t flags = heap_.free(held_.back());
            held_.pop_back();
            if (flags) scheduler_.freed(flags, now_);
            served += carry_out();
        }
        full_ = take(limit);
        return served;
    }

    // What the effects want, as far as there is something to do; how many requests have got their memory.
    size_t carry_out() {
        size_t served = 0;
        Effect effect;
        while (scheduler_.next(effect)) {
            if (effect.kind == Kind::Granted) {
                held_.push_back(scheduler_.claim(effect.request)[0].block);
                ++served;
            } else if (effect.kind == Kind::Failed) {
                scheduler_.forget(effect.request);
                ++failed_;
            } else if (effect.kind == Kind::Look) {
                scheduler_.looked(0, now_);
            }
        }
        return served;
    }

    BlockId take(uint64_t nbytes) {
        Ask ask;
        ask.nbytes = nbytes;
        ask.anywhere = true;
        Outcome outcome;
        return heap_.take(ask, outcome);
    }

    void cancel(RequestId id) {
        scheduler_.cancel(id, now_);
        carry_out();
    }

    void expire(double now) {
        now_ = now;
        scheduler_.expire(now);
        carry_out();
    }

    void set_limit(uint32_t account, uint64_t nbytes) {
        scheduler_.set_limit(account, nbytes, now_);
        carry_out();
    }

    void empty() const {
        Gauges gauges = scheduler_.gauges();
        demand(!gauges.waiting && !gauges.growing, "somebody still waits");
        demand(heap_.live() == limit, "memory is lost");
        std::string wrong = scheduler_.check() + heap_.check();
        demand(wrong.empty(), wrong.c_str());
    }

    Heap heap_;
    Scheduler scheduler_;
    std::mt19937 draw_;
    double now_ = 1;
    BlockId full_ = 0;
    std::vector<uint32_t> accounts_;
    std::vector<BlockId> held_;
    size_t failed_ = 0;

private:
    static Policy policy(uint64_t nbytes) {
        Policy policy;
        policy.limit = policy.segment_size = nbytes;
        policy.tuning.stream_cache_blocks = policy.tuning.shared_cache_blocks = 0;
        return policy;
    }
};

// Runs an operation on so many requests, and tells the seconds that one took.
using Measure = std::function<double(size_t)>;

// Of the processor's time: what a busy machine does besides is not ours.
class Timer {
public:
    double seconds() const { return static_cast<double>(std::clock() - began_) / CLOCKS_PER_SEC; }

private:
    std::clock_t began_ = std::clock();
};

// A tree of the standard library's, each of whose nodes is as large as a request.
double floor_of(size_t count) {
    struct Node {
        char bytes[sizeof(Request)];
    };
    std::mt19937 draw(1);
    std::map<uint64_t, Node> tree;
    std::vector<uint64_t> keys(count);
    for (uint64_t& key : keys) tree.emplace(key = uint64_t{draw()} << 32 | draw(), Node{});
    std::shuffle(keys.begin(), keys.end(), draw);
    Timer timer;
    for (uint64_t key : keys) tree.erase(key);
    return timer.seconds() / static_cast<double>(count);
}

double submit(size_t count, int budgets) {
    World world(budgets);
    Timer timer;
    world.submit_many(count);
    double took = timer.seconds() / static_cast<double>(count);
    demand(world.scheduler_.gauges().waiting == count, "somebody was served from nothing");
    return took;
}

double grant(size_t count, int budgets) {
    World world(budgets);
    world.submit_many(count);
    Timer timer;
    demand(world.serve_all() == count, "somebody was not served");
    double took = timer.seconds() / static_cast<double>(count);
    world.empty();
    return took;
}

double cancel(size_t count, int budgets) {
    World world(budgets);
    std::vector<RequestId> ids = world.submit_many(count, 10);
    std::shuffle(ids.begin(), ids.end(), world.draw_);
    Timer timer;
    for (RequestId id : ids) world.cancel(id);
    double took = timer.seconds() / static_cast<double>(count);
    world.empty();
    return took;
}

double expire_together(size_t count) {
    World world;
    world.submit_many(count, 10);
    Timer timer;
    world.expire(10);
    double took = timer.seconds() / static_cast<double>(count);
    demand(world.failed_ == count, "somebody did not expire");
    world.empty();
    return took;
}

double expire_apart(size_t count) {
    World world;
    std::vector<double> deadlines(count);
    for (size_t i = 0; i < count; ++i) deadlines[i] = 10 + static_cast<double>(i);
    std::shuffle(deadlines.begin(), deadlines.end(), world.draw_);
    for (double deadline : deadlines) world.submit(world.size(), deadline);
    Timer timer;
    for (size_t i = 0; i < count; ++i) world.expire(10 + static_cast<double>(i));
    double took = timer.seconds() / static_cast<double>(count);
    world.empty();
    return took;
}

// The limit goes up and down while so many wait; now and then it is too low for somebody.
double change_limit(size_t count, bool root) {
    World world(9);
    world.submit_many(count);
    uint32_t account = root ? 0 : world.accounts_[3];
    constexpr size_t changes = 200;
    Timer timer;
    for (size_t i = 0; i < changes; ++i) world.set_limit(account, i % 2 ? limit : limit - (i << 9));
    return timer.seconds() / changes;
}

// An asker comes, sleeps, and goes again, while so many wait before him.
double come_and_go(size_t count) {
    World world;
    world.submit_many(count);
    constexpr size_t askers = 10000;
    Timer timer;
    for (size_t i = 0; i < askers; ++i) {
        RequestId id = world.submit(world.size(), 10, static_cast<int32_t>(i % 3) - 1);
        world.scheduler_.asleep(id, 8 * i + 8, world.now_);
        world.scheduler_.awake(id);
        world.cancel(id);
    }
    return timer.seconds() / askers;
}

// Budgets, as leases do, open and end one after another while others wait.
double open_and_close(size_t count) {
    World world;
    world.submit_many(count);
    constexpr size_t times = 1000;
    Timer timer;
    for (size_t i = 0; i < times; ++i) {
        uint32_t account = world.heap_.add_account(0, limit);
        world.scheduler_.open_share(account, 0, 0, -1, true, 2);
        world.scheduler_.close_share(account, world.now_);
        world.heap_.remove_account(account);
        world.carry_out();
    }
    return timer.seconds() / times;
}

// Owners note what they hold, let go of it, and are forgotten, as many at a time as there are requests.
double hold(size_t count) {
    World world;
    std::vector<uint32_t> holds(count);
    Timer timer;
    for (size_t i = 0; i < count; ++i) holds[i] = world.scheduler_.hold(8 * i + 8, world.full_);
    std::shuffle(holds.begin(), holds.end(), world.draw_);
    for (uint32_t one : holds) world.scheduler_.release(one);
    return timer.seconds() / static_cast<double>(count);
}

double forget_owner(size_t count) {
    World world;
    for (size_t i = 0; i < count; ++i) world.scheduler_.hold(8 * i + 8, world.full_);
    size_t most = std::min<size_t>(count, 2000);
    Timer timer;
    for (size_t i = 0; i < most; ++i) world.scheduler_.forget_owner(8 * (i * (count / most)) + 8);
    return timer.seconds() / static_cast<double>(most);
}

// The proof that there is no deadlock, apiece: each waits for what the next one holds, and the last one for nobody.
double prove(size_t count) {
    World world(0, 1024 * count);
    world.heap_.free(world.full_);
    std::vector<BlockId> blocks(count);
    for (BlockId& block : blocks) block = world.take(512);
    BlockId other = world.take(512 * count);
    for (size_t i = 0; i < count; ++i) {
        world.scheduler_.hold(8 * i + 8, blocks[i]);
        RequestId id = world.submit(512 * (2 * count - i - 1));
        world.scheduler_.asleep(id, 8 * i + 8, world.now_);
    }
    world.carry_out();
    Timer timer;
    world.scheduler_.quiet(world.now_ + 1, {});
    double took = timer.seconds() / static_cast<double>(count);
    world.carry_out();
    demand(!world.failed_, "a deadlock was found where there is none");
    world.heap_.free(other);
    return took;
}

struct Operation {
    const char* name;
    Measure measure;
};

}  // namespace

int main(int count, char** arguments) {
    size_t most = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1000000;
    double factor = count > 2 ? std::strtod(arguments[2], nullptr) : 6;
    std::vector<Operation> operations = {
        {"floor", floor_of},
        {"submit", [](size_t n) { return submit(n, 0); }},
        {"submit, budgets", [](size_t n) { return submit(n, 99); }},
        {"grant", [](size_t n) { return grant(n, 0); }},
        {"grant, budgets", [](size_t n) { return grant(n, 99); }},
        {"cancel", [](size_t n) { return cancel(n, 0); }},
        {"cancel, budgets", [](size_t n) { return cancel(n, 99); }},
        {"expire together", expire_together},
        {"expire apart", expire_apart},
        {"limit of the pool", [](size_t n) { return change_limit(n, true); }},
        {"limit of a budget", [](size_t n) { return change_limit(n, false); }},
        {"come and go", come_and_go},
        {"open and close", open_and_close},
        {"hold and release", hold},
        {"forget an owner", forget_owner},
        {"prove no deadlock", prove},
    };
    std::vector<size_t> sizes;
    for (size_t n = 1000; n <= most; n *= 10) sizes.push_back(n);
    std::printf("%-20s", "ns apiece");
    for (size_t n : sizes) std::printf("%10zu", n);
    std::printf("%10s%10s\n", "growth", "of floor");
    std::vector<double> floor;
    bool good = true;
    for (const Operation& operation : operations) {
        std::printf("%-20s", operation.name);
        std::vector<double> took;
        Timer timer;
        for (size_t n : sizes) {
            if (timer.seconds() > patience) {  // each of the next ones would take ten times as long at least
                std::printf("%10s", "-");
                continue;
            }
            double best = operation.measure(n);
            for (int again = 1; again < repeats && n < 1000000 && timer.seconds() < patience; ++again)
                best = std::min(best, operation.measure(n));
            took.push_back(best * 1e9);
            std::printf("%10.0f", took.back());
            std::fflush(stdout);
        }
        if (floor.empty()) floor = took;
        double growth = took.back() / took[0], of_floor = growth / (floor[took.size() - 1] / floor[0]);
        bool fits = of_floor <= factor;
        good = good && fits;
        std::printf("%10.1f%10.2f%s\n", growth, of_floor, fits ? "" : "  too much");
    }
    return good ? 0 : 1;
}
