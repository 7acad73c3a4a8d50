#include "context.hpp"

#include "gathering.hpp"

#include <algorithm>
#include <map>
#include <new>
#include <thread>
#include <utility>

namespace asyncmem::gpu {
namespace {

constexpr unsigned disable_timing = 2;
constexpr unsigned non_blocking = 1;

// Never destroyed: threads may come here while the process ends.
std::mutex &open_lock() {
    static auto *lock = new std::mutex;
    return *lock;
}

using Key = std::pair<const Table *, int>; // a driver and the number of its device

std::map<Key, Context *> &contexts() {
    static auto *known = new std::map<Key, Context *>;
    return *known;
}

Context *self(void *context) { return static_cast<Context *>(context); }
Fence *fence_of(void *fence) { return static_cast<Fence *>(fence); }

int call_record(void *context, std::uint64_t stream, void **fence) {
    return self(context)->record_outside(stream, reinterpret_cast<Fence **>(fence));
}

int call_order(void *context, std::uint64_t earlier, std::uint64_t later, void **fence, int *refused) {
    return self(context)->order(earlier, later, reinterpret_cast<Fence **>(fence), refused);
}

int call_record_all(void *context, void **fence) {
    return self(context)->record_all(reinterpret_cast<Fence **>(fence));
}

int call_query(void *context, void *fence) {
    Code code = self(context)->query(fence_of(fence));
    return code == not_ready ? -1 : code;
}

int call_wait(void *context, std::uint64_t stream, void *fence) { return self(context)->wait(stream, fence_of(fence)); }

int call_block(void *context, void *fence) {
    return self(context)->block(fence_of(fence), Clock::now(), Time::max());
}

int call_capturing(void *context, std::uint64_t stream) { return self(context)->capturing(stream); }

void call_release(void *context, void *fence) { self(context)->release(fence_of(fence)); }

void note_over_budget(void *, void *data, Handle) { self(data)->over_budget.fetch_add(1, std::memory_order_relaxed); }

} // namespace

Current::Current(Context &context) : driver_(context.driver) {
    if (gone()) {
        code_ = deinitialized;
        return;
    }
    Handle current = nullptr;
    code_ = driver_.cuCtxGetCurrent(&current);
    if (code_ == success && current != context.handle_) {
        code_ = driver_.cuCtxPushCurrent(context.handle_);
        pushed_ = code_ == success;
    }
}

Current::~Current() {
    Handle popped = nullptr;
    if (pushed_)
        driver_.cuCtxPopCurrent(&popped);
}

Relaxed::Relaxed(const Table &driver) : driver_(driver), mode_(relaxed) {
    if (gone() || driver_.cuThreadExchangeStreamCaptureMode(&mode_) != success)
        mode_ = relaxed;
}

Relaxed::~Relaxed() {
    if (mode_ != relaxed)
        driver_.cuThreadExchangeStreamCaptureMode(&mode_);
}

Entered::Entered(Context &context) : current_(context), relaxed_(context.driver) {}

Context::Context(const Table &table, int ordinal)
    : driver(table), calls{this,      call_record, call_order,     call_record_all, call_query,
                           call_wait, call_block,  call_capturing, call_release},
      ordinal_(ordinal), gathering_(std::make_unique<Gathering>(*this)) {}

Context::~Context() = default;

Code Context::open(const Table &driver, int ordinal, Context **context) {
    std::lock_guard<std::mutex> guard(open_lock());
    Context *&known = contexts()[{&driver, ordinal}];
    auto *fresh = new Context(driver, ordinal);
    Code code = fresh->retain();
    if (code != success) {
        delete fresh;
        return code;
    }
    if (known != nullptr && known->alive_.load() && known->id_ == fresh->id_) {
        // To learn whether it is the same, it was retained once more.
        known->retained_ += driver.cuDevicePrimaryCtxRelease(fresh->device_) != success;
        delete fresh;
    } else {
        // The former one was released, or the device was reset and everything there is gone.
        if (known != nullptr)
            known->alive_.store(false);
        known = fresh;
        known->alive_.store(true);
    }
    known->use();
    *context = known;
    return success;
}

Code Context::retain() {
    Code code = driver.cuDeviceGet(&device_, ordinal_);
    if (code == success)
        code = driver.cuDevicePrimaryCtxRetain(&handle_, device_);
    if (code != success)
        return code;
    code = driver.cuCtxGetId(handle_, &id_);
    if (code != success)
        driver.cuDevicePrimaryCtxRelease(device_);
    return code;
}

void Context::end_use() {
    if (gone() || uses_.fetch_sub(1, std::memory_order_acq_rel) != 1)
        return;
    std::lock_guard<std::mutex> guard(open_lock());
    // It may have been opened again before the lock was ours.
    if (uses_.load(std::memory_order_acquire) == 0 && alive_.load())
        close();
}

void Context::close() {
    alive_.store(false);
    {
        Entered entered(*this);
        for (Fence *fence = spare_; fence != nullptr;) {
            Fence *next = fence->next;
            driver.cuEventDestroy(fence->event);
            delete fence;
            fence = next;
        }
        spare_ = nullptr;
    }
    for (; retained_ > 0; --retained_)
        driver.cuDevicePrimaryCtxRelease(device_);
}

template <typename Call> Code Context::on_stream(std::uint64_t stream, Call call) {
    if (stream > per_thread) {
        Code code = call();
        if (code != invalid_context)
            return code;
        // A thread without any context: a stream knows its own, but not every driver asks it.
    }
    Current current(*this);
    return current.code() == success ? call() : current.code();
}

Code Context::take(Fence **fence) {
    {
        std::lock_guard<Lock> guard(spare_lock_);
        if (spare_ != nullptr) {
            *fence = spare_;
            spare_ = spare_->next;
            return success;
        }
    }
    auto *made = new (std::nothrow) Fence{nullptr, this, {0}, {false}, nullptr};
    if (made == nullptr)
        return out_of_memory;
    Entered entered(*this);
    Code code = entered.code();
    if (code == success)
        code = driver.cuEventCreate(&made->event, disable_timing);
    if (code != success) {
        delete made;
        return code;
    }
    *fence = made;
    return success;
}

void Context::put(Fence *fence) {
    std::lock_guard<Lock> guard(spare_lock_);
    fence->next = spare_;
    spare_ = fence;
}

Code Context::issue(Fence *made, Code code, Fence **fence) {
    if (code != success) {
        put(made);
        return code;
    }
    made->reached.store(false, std::memory_order_relaxed);
    made->gathered = false;
    made->references.store(1, std::memory_order_relaxed);
    use();
    *fence = made;
    return success;
}

Code Context::record(std::uint64_t stream, Fence **fence) {
    if (closed())
        return deinitialized;
    call_count.fetch_add(1, std::memory_order_relaxed);
    return make(stream, fence);
}

int Context::record_outside(std::uint64_t stream, Fence **fence) {
    if (closed())
        return deinitialized;
    int refusal = refusal_of(stream);
    call_count.fetch_add(refusal == 0 ? 2 : 1, std::memory_order_relaxed);
    return refusal == 0 ? make(stream, fence) : refusal;
}

int Context::order(std::uint64_t earlier, std::uint64_t later, Fence **fence, Code *refused) {
    if (closed())
        return deinitialized;
    int calls = 1, answer = refusal_of(earlier);
    if (answer == 0) {
        ++calls;
        answer = refusal_of(later);
    }
    if (answer == 0) {
        ++calls;
        answer = make(earlier, fence);
    }
    if (answer == 0) {
        ++calls;
        *refused = follow(later, *fence);
    }
    call_count.fetch_add(calls, std::memory_order_relaxed);
    return answer;
}

Code Context::make(std::uint64_t stream, Fence **fence) {
    Fence *made = nullptr;
    Code code = take(&made);
    if (code != success)
        return code;
    code = on_stream(stream, [&] { return driver.cuEventRecord(made->event, as_handle(stream)); });
    return issue(made, code, fence);
}

Code Context::follow(std::uint64_t stream, Fence *fence) {
    return on_stream(stream, [&] { return driver.cuStreamWaitEvent(as_handle(stream), fence->event, 0); });
}

int Context::refusal_of(std::uint64_t stream) {
    int status = 0;
    Code code = on_stream(stream, [&] { return driver.cuStreamIsCapturing(as_handle(stream), &status); });
    if (code != success)
        return -code;
    return status == 0 ? 0 : ASYNCMEM_CAPTURED;
}

Code Context::record_all(Fence **fence) {
    if (closed())
        return deinitialized;
    call_count.fetch_add(1, std::memory_order_relaxed);
    // The driver would refuse as well, and end the capture with it. A capture that we were not told of it ends.
    if (may_capture())
        return capture_unsupported;
    Fence *made = nullptr;
    Code code = take(&made);
    if (code != success)
        return code;
    if (driver.cuCtxRecordEvent != nullptr) {
        Entered entered(*this);
        code = entered.code() == success ? driver.cuCtxRecordEvent(handle_, made->event) : entered.code();
        return issue(made, code, fence);
    }
    issue(made, success, fence);
    code = gather(made);
    if (code != success)
        release(made);
    return code;
}

Code Context::gather(Fence *made) {
    made->gathered = true;
    made->failure.store(success, std::memory_order_relaxed);
    share(made);
    if (gathering_->add(made))
        return success;
    release(made);
    return out_of_memory;
}

bool Context::any_capture() {
    std::lock_guard<std::mutex> guard(streams_lock_);
    return std::any_of(streams_.begin(), streams_.end(),
                       [this](std::uint64_t stream) { return refusal_of(stream) == ASYNCMEM_CAPTURED; });
}

Code Context::query(Fence *fence) {
    if (!fence->reached.load(std::memory_order_acquire))
        call_count.fetch_add(1, std::memory_order_relaxed);
    return ask(fence);
}

Code Context::ask(Fence *fence) {
    if (fence->reached.load(std::memory_order_acquire))
        return success;
    if (closed())
        return deinitialized;
    if (fence->gathered) {
        Code failure = fence->failure.load(std::memory_order_acquire);
        return failure == success ? not_ready : failure;
    }
    Code code;
    {
        Relaxed quiet(driver);
        code = driver.cuEventQuery(fence->event);
    }
    if (code == invalid_context) {
        Entered entered(*this);
        code = entered.code() == success ? driver.cuEventQuery(fence->event) : entered.code();
    }
    if (code == success)
        fence->reached.store(true, std::memory_order_release);
    return code;
}

Code Context::wait(std::uint64_t stream, Fence *fence) {
    if (closed())
        return deinitialized;
    if (fence->reached.load(std::memory_order_acquire))
        return success;
    if (fence->gathered)
        return block(fence, Clock::now(), Time::max());
    call_count.fetch_add(1, std::memory_order_relaxed);
    return follow(stream, fence);
}

// By asking again and again: the driver's own wait can neither be given up nor hear of a lost device in every case.
// The pauses grow with the wait, so it ends at most a sixteenth late and a long one costs no processor.
Code Context::block(Fence *fence, Time began, Time until) {
    using namespace std::chrono;
    Code code = query(fence);
    for (Time now = Clock::now(); code == not_ready && now < until; now = Clock::now()) {
        if (fence->gathered && captures_.load() > 0)
            return capture_unsupported; // who waits may be the one to end them
        auto waited = duration_cast<microseconds>(now - began);
        if (waited > microseconds(20))
            std::this_thread::sleep_for(std::clamp(waited / 16, microseconds(5), microseconds(1000)));
        code = ask(fence);
    }
    return code;
}

Code Context::block_for(Fence *fence, std::int64_t waited, std::int64_t more) {
    using std::chrono::microseconds;
    Time now = Clock::now();
    return block(fence, now - microseconds(waited), now + microseconds(more));
}

int Context::capturing(std::uint64_t stream) {
    if (closed())
        return -deinitialized;
    call_count.fetch_add(1, std::memory_order_relaxed);
    int refusal = refusal_of(stream);
    return refusal == ASYNCMEM_CAPTURED ? 1 : refusal;
}

void Context::release(Fence *fence) {
    if (fence->references.fetch_sub(1, std::memory_order_acq_rel) != 1 || gone())
        return;
    put(fence);
    end_use();
}

Code Context::create_stream(std::uint64_t *stream) {
    if (closed())
        return deinitialized;
    call_count.fetch_add(1, std::memory_order_relaxed);
    Entered entered(*this);
    Handle made = nullptr;
    Code code = entered.code();
    if (code == success)
        code = driver.cuStreamCreate(&made, non_blocking);
    if (code != success)
        return code;
    *stream = reinterpret_cast<std::uint64_t>(made);
    use();
    add_stream(*stream);
    return success;
}

// The driver lets queued work end first, and fences of everything cover it.
void Context::destroy_stream(std::uint64_t stream) {
    if (gone())
        return;
    call_count.fetch_add(1, std::memory_order_relaxed);
    {
        Entered entered(*this);
        remove_stream(stream);
        driver.cuStreamDestroy(as_handle(stream));
    }
    end_use();
}

void Context::add_stream(std::uint64_t stream) {
    if (gone())
        return;
    std::lock_guard<std::mutex> guard(streams_lock_);
    streams_.push_back(stream);
}

void Context::remove_stream(std::uint64_t stream) {
    if (gone())
        return;
    std::lock_guard<std::mutex> guard(streams_lock_);
    auto found = std::find(streams_.begin(), streams_.end(), stream);
    if (found != streams_.end())
        streams_.erase(found);
}

Code Context::listen() {
    if (gone() || driver.cuDeviceRegisterAsyncNotification == nullptr)
        return not_found;
    std::lock_guard<std::mutex> guard(listening_lock_);
    Code code = success;
    if (listening_ == nullptr)
        code = driver.cuDeviceRegisterAsyncNotification(device_, note_over_budget, this, &listening_);
    listeners_ += code == success;
    return code;
}

void Context::stop_listening() {
    if (gone())
        return;
    std::lock_guard<std::mutex> guard(listening_lock_);
    if (--listeners_ == 0) {
        driver.cuDeviceUnregisterAsyncNotification(device_, listening_);
        listening_ = nullptr;
    }
}

} // namespace asyncmem::gpu
