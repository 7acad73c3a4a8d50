#include "machine.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>

namespace {

int first_version() {
    const char* version = std::getenv("FAKE_CUDA_VERSION");
    return version ? std::atoi(version) : 13000;
}

// The numbers in a list like "2,0", up to the first that names no device, as a driver reads it.
std::vector<int> shown(const char* list, int count) {
    std::vector<int> numbers;
    for (char* end; *list; list = *end == ',' ? end + 1 : end) {
        const long number = std::strtol(list, &end, 10);
        if (end == list || number < 0 || number >= count) break;
        numbers.push_back(int(number));
    }
    return numbers;
}

}  // namespace

Machine& machine() {
    static auto* only = new Machine;
    return *only;
}

std::uint64_t my_thread() {
    static std::atomic<std::uint64_t> last = 0;
    thread_local const std::uint64_t mine = ++last;
    return mine;
}

std::int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// What a process that is started with the fake for its driver finds, as its environment says.
Machine::Machine() {
    const char* count = std::getenv("FAKE_CUDA_DEVICES");
    set_devices(count ? std::atoi(count) : 1, 1ull << 30);
    if (const char* list = std::getenv("CUDA_VISIBLE_DEVICES")) {
        const auto numbers = shown(list, visible);
        visible = int(numbers.size());
        for (int ordinal = 0; ordinal < visible; ++ordinal) devices[ordinal].number = numbers[ordinal];
    }
}

void Machine::reset() {
    ++epoch;
    for (auto& [handle, context] : contexts.live)
        for (auto& stream : context->streams)
            for (auto& work : stream->queue) work->done = true;  // whoever waits for it goes on
    functions_.clear();
    // Addresses from before stay taken, so that an old pointer never names new memory; the bytes behind them go.
    for (auto& [address, memory] : memories) {
        const auto start = address / PAGE * PAGE, nbytes = (address + memory.nbytes + PAGE - 1) / PAGE * PAGE - start;
        if (memory.kind == Kind::plain) space.destroy(memory.offset, nbytes);
        if (memory.kind == Kind::plain || memory.kind == Kind::mapped) space.unmap(start, nbytes);
    }
    for (auto& [handle, pool] : pools.live)
        for (auto& chunk : pool->chunks) {
            space.unmap(chunk.address, chunk.nbytes);
            space.destroy(chunk.offset, chunk.nbytes);
        }
    for (auto& [handle, physical] : physicals.live) space.destroy(physical->offset, physical->nbytes);
    contexts.clear(), streams.clear(), events.clear(), pools.clear(), physicals.clear();
    graphs.clear(), executables.clear(), notifications.clear();
    checker = Checker();
    captures.clear(), memories.clear(), reservations.clear();
    devices.clear();
    set_devices(0, 0);
}

void Machine::set_devices(int count, std::uint64_t bytes) {
    calls.clear(), latencies.clear(), faults.clear();
    checker.violations.clear();
    pace = 0;
    version = first_version();
    visible = count;
    for (auto& [handle, context] : contexts.live)
        for (auto& stream : context->streams) stream->held = false;
    while (int(devices.size()) < count) {
        auto pool = std::make_shared<Pool>();
        pool->device = int(devices.size());
        Device& made = devices.emplace_back();
        made.number = pool->device;
        made.default_pool = made.current_pool = pools.add(pool);
    }
    for (Device& device : devices) {
        device.total = bytes;
        device.others = 0;
        device.lost = SUCCESS;
        device.attributes.clear();
    }
    changed_.notify_all();
}
