#include "call.hpp"

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <cerrno>

namespace {

std::atomic<bool> forked = false;  // a driver does not survive a fork

using Names = std::map<std::string, std::map<int, void*>>;
Names& names() {
    static auto* all = new Names;
    return *all;
}

void sleep_ns(std::int64_t ns) {
    timespec left{ns / 1'000'000'000, ns % 1'000'000'000};
    while (nanosleep(&left, &left) == -1 && errno == EINTR) {}
}

std::int64_t latency(Machine& m, const char* name) {
    auto found = m.latencies.find(name);
    if (found == m.latencies.end()) found = m.latencies.find("*");
    if (found == m.latencies.end()) return 0;
    Latency& slow = found->second;
    if (slow.skip || !slow.times) {
        slow.skip -= slow.skip > 0;
        return 0;
    }
    --slow.times;
    return slow.ns;
}

CUresult fault(Machine& m, const char* name) {
    CUresult code = SUCCESS;
    for (auto fault = m.faults.begin(); fault != m.faults.end();) {
        if (fault->call != "*" && fault->call != name) {
            ++fault;
        } else if (fault->skip) {
            --fault->skip, ++fault;
        } else {
            code = fault->code;
            fault = --fault->times ? fault + 1 : m.faults.erase(fault);
        }
    }
    return code;
}

[[gnu::constructor]] void watch_forks() {
    pthread_atfork(nullptr, nullptr, [] { forked = machine().initialized; });
}

}  // namespace

CUresult enter(const char* name, unsigned rules) {
    if (forked) return NOT_INITIALIZED;
    Machine& m = machine();
    std::int64_t delay;
    {
        Lock lock(m.mutex);
        ++m.calls[name];
        if (!m.initialized && !(rules & UNINITIALIZED)) return NOT_INITIALIZED;
        if (const CUresult code = fault(m, name)) return code;
        delay = latency(m, name);
    }
    if (delay) sleep_ns(delay);
    return SUCCESS;
}

void check_rules(unsigned rules) {
    Machine& m = machine();
    m.progress();
    if (rules & IN_CONTEXT) {
        Context& context = m.current();
        if (!(rules & WHEN_LOST)) require(!m.devices[context.device].lost, m.devices[context.device].lost);
    }
    if (rules & UNSAFE) m.refuse_while_capturing();
}

Export::Export(const char* base, int since, void* address) { names()[base][since] = address; }

void* exported(const char* base, int version, bool& known) {
    auto found = names().find(base);
    known = found != names().end();
    if (!known) return nullptr;
    auto later = found->second.upper_bound(version);
    return later == found->second.begin() ? nullptr : std::prev(later)->second;
}
