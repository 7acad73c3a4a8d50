// The other way to learn of fences: a host function behind each, on a stream that waits for it.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <unordered_map>

#include "watch.hpp"

namespace asyncmem::cuda {
namespace {

// How often fences are asked for all the same, because after an error of the context no host function runs.
constexpr std::chrono::milliseconds watch_period{50};

struct Signal {
    Watched watched;
    std::atomic<bool> told;
    std::atomic<bool> run;
};

// On a thread of the driver's: it may call no driver function, so what the signal holds is let go elsewhere.
void run_signal(void *data) {
    auto *signal = static_cast<Signal *>(data);
    if (!signal->told.exchange(true))
        signal->watched.sink->put({signal->watched.token, success});
    signal->run.store(true, std::memory_order_release);
}

class Signaller final : public Watcher, public std::enable_shared_from_this<Signaller> {
  public:
    explicit Signaller(Context &context) : context_(context) {}

    Code watch(Fence *fence, std::shared_ptr<Sink> sink, std::uint64_t token) override {
        std::lock_guard<std::mutex> guard(lock_);
        Entered entered(context_);
        Handle stream = nullptr;
        Code code = entered.code() == success ? stream_behind(fence->origin, &stream) : entered.code();
        auto *signal = new Signal{{fence, std::move(sink), token}, {false}, {false}};
        if (code == success)
            code = context_.driver.cuStreamWaitEvent(stream, fence->event, 0);
        if (code == success)
            code = context_.driver.cuLaunchHostFunc(stream, run_signal, signal);
        if (code != success) {
            delete signal;
            context_.release(fence);
            return code;
        }
        signals_.push_back(signal);
        if (!running_) {
            running_ = true;
            stopping_ = false;
            std::thread([self = shared_from_this()] { self->run(); }).detach();
        }
        return success;
    }

    void forget(const Sink *sink, std::uint64_t token) override {
        std::lock_guard<std::mutex> guard(lock_);
        for (Signal *signal : signals_) {
            if (signal->watched.sink.get() == sink && signal->watched.token == token)
                signal->told.store(true);
        }
    }

    void stop(bool wait) override {
        std::unique_lock<std::mutex> guard(lock_);
        stopping_ = true;
        changed_.notify_one();
        if (wait)
            ended_.wait(guard, [this] { return !running_; });
    }

  private:
    // A stream for each that fences come from: a fence that is not reached holds up those behind it on one stream.
    Code stream_behind(std::uint64_t origin, Handle *stream) {
        Handle &known = streams_[origin];
        Code code = known == nullptr ? context_.driver.cuStreamCreate(&known, 1) : success;
        *stream = known;
        return code;
    }

    void run() {
        pthread_setname_np(pthread_self(), "asyncmem-fences");
        std::unique_lock<std::mutex> guard(lock_);
        while (!gone() && !(stopping_ && signals_.empty())) {
            changed_.wait_for(guard, watch_period, [this] { return stopping_; });
            auto reaped = [this](Signal *one) { return reap(one); };
            if (!gone())
                signals_.erase(std::remove_if(signals_.begin(), signals_.end(), reaped), signals_.end());
        }
        running_ = false;
        ended_.notify_all();
    }

    bool reap(Signal *signal) {
        if (signal->run.load(std::memory_order_acquire)) {
            context_.release(signal->watched.fence);
            delete signal;
            return true;
        }
        Code code = context_.ask(signal->watched.fence);
        if (code == success || code == not_ready)
            return false;
        if (!signal->told.exchange(true))
            signal->watched.sink->put({signal->watched.token, code});
        context_.release(signal->watched.fence);
        return true; // the signal itself stays: the driver has its address
    }

    Context &context_;
    std::mutex lock_;
    std::condition_variable changed_;
    std::vector<Signal *> signals_;
    std::unordered_map<std::uint64_t, Handle> streams_;
    std::condition_variable ended_;
    bool running_ = false;
    bool stopping_ = false;
};

} // namespace

std::shared_ptr<Watcher> make_signaller(Context &context) { return std::make_shared<Signaller>(context); }

} // namespace asyncmem::cuda
