// What tests say to the fake and ask it. No part of the driver's interface; all sizes are bytes, all times ns.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "call.hpp"

namespace {

template <class Body>
int control(Body body) {
    try {
        Lock lock(machine().mutex);
        my_lock = &lock;
        body(machine());
        machine().progress();
        return SUCCESS;
    } catch (const Refused& refused) {
        return refused.code;
    }
}

StreamPtr stream_of(Machine& m, Handle handle) {
    if (handle > PER_THREAD_STREAM) return m.streams.at(handle);
    try {
        return m.stream(handle);
    } catch (const Refused&) {  // no context is current in a test's thread
        return m.context_of(0).legacy;
    }
}

std::vector<Span> spans(const std::uint64_t* pairs, int count) {
    std::vector<Span> all;
    for (int i = 0; i < count; ++i) all.push_back({pairs[2 * i], pairs[2 * i + 1]});
    return all;
}

bool reachable(Machine& m, CUdevice device, const std::vector<Span>& all) {
    return std::all_of(all.begin(), all.end(), [&](const Span& span) {
        return !m.there(span.address, span.nbytes) || m.may_use(device, span.address, span.nbytes);
    });
}

int write_out(const std::string& text, char* buffer, int room) {
    if (buffer && room > 0) {
        std::strncpy(buffer, text.c_str(), room);
        buffer[room - 1] = 0;
    }
    return int(text.size()) + 1;
}

std::uint64_t total_calls() {
    std::uint64_t sum = 0;
    for (auto& [call, count] : machine().calls) sum += count;
    return sum;
}

std::uint64_t calls_before;

}  // namespace

API int fake_reset() {
    return control([](Machine& m) { m.reset(); });
}

API int fake_set_devices(int devices, std::uint64_t bytes) {
    return control([&](Machine& m) { m.set_devices(devices, bytes); });
}

API int fake_version(int version) {
    return control([&](Machine& m) { m.version = version; });
}

API int fake_attribute(CUdevice device, int attribute, int value) {
    return control([&](Machine& m) { m.device(device).attributes[attribute] = value; });
}

API int fake_fail(const char* call, std::uint64_t nth, int code, std::uint64_t times) {
    return control([&](Machine& m) {
        require(nth && times);
        m.faults.push_back({call, nth - 1, times, code});
    });
}

API int fake_clear_faults() {
    return control([](Machine& m) { m.faults.clear(); });
}

API int fake_latency(const char* call, std::int64_t ns, std::uint64_t nth, std::uint64_t times) {
    return control([&](Machine& m) {
        require(nth && times);
        m.latencies[call] = {ns, nth - 1, times};
    });
}

API int fake_pace(std::int64_t ns) {
    return control([&](Machine& m) { m.pace = ns; });
}

API int fake_hold(Handle stream, int held) {
    return control([&](Machine& m) { stream_of(m, stream)->held = held; });
}

API int fake_release_all() {
    return control([](Machine& m) {
        for (auto& [handle, context] : m.contexts.live)
            for (auto& stream : context->streams) stream->held = false;
    });
}

API int fake_launch(Handle handle, std::int64_t ns, const std::uint64_t* reads, int read_count,
                    const std::uint64_t* writes, int write_count) {
    return control([&](Machine& m) {
        auto stream = stream_of(m, handle);
        const auto device = stream->context->device;
        require(!m.devices[device].lost, m.devices[device].lost);
        const auto in = spans(reads, read_count), out = spans(writes, write_count);
        m.run_or_capture(*stream, [=](Stream& running) {
            Machine& m = machine();
            Work work;
            work.lasts = ns;
            work.effect = [=] {
                for (const auto* all : {&in, &out})
                    for (const Span& span : *all)
                        if (!machine().backed(span.address, span.nbytes)) machine().lose(device, ILLEGAL_ADDRESS);
            };
            const bool may = reachable(m, device, in) && reachable(m, device, out);
            m.submit(running, std::move(work), "kernel", in, out);
            if (!may) {
                m.checker.violations.push_back("kernel uses memory that its device was not granted");
                m.lose(device, ILLEGAL_ADDRESS);
            }
        });
    });
}

API int fake_lose(CUdevice device, int code) {
    return control([&](Machine& m) {
        m.device(device);
        m.lose(device, code);
    });
}

API int fake_others(CUdevice device, std::uint64_t bytes) {
    return control([&](Machine& m) { m.device(device).others = bytes; });
}

API int fake_over_budget(CUdevice device, std::uint64_t bytes) {
    std::vector<Notification> heard;
    control([&](Machine& m) {
        for (auto& [handle, notification] : m.notifications.live)
            if (notification->device == device) heard.push_back(*notification);
    });
    for (auto& notification : heard) {
        CUasyncNotificationInfo info{.type = 1, .info = {bytes}};
        notification.callback(&info, notification.argument, notification.handle);
    }
    return int(heard.size());
}

API std::int64_t fake_calls(const char* name) {
    Lock lock(machine().mutex);
    if (!std::strcmp(name, "*")) return total_calls();
    auto found = machine().calls.find(name);
    return found == machine().calls.end() ? 0 : found->second;
}

API int fake_counts(char* buffer, int room) {
    std::string text;
    control([&](Machine& m) {
        for (auto& [call, count] : m.calls) text += call + " " + std::to_string(count) + "\n";
    });
    return write_out(text, buffer, room);
}

API std::uint64_t fake_used(CUdevice device) {
    Lock lock(machine().mutex);
    return machine().devices.at(device).used;
}

API int fake_violations(char* buffer, int room) {
    std::string text;
    control([&](Machine& m) {
        for (auto& violation : m.checker.violations) text += violation + "\n";
    });
    return write_out(text, buffer, room);
}

API int fake_forgive() {
    return control([](Machine& m) { m.checker.violations.clear(); });
}

API int fake_live(char* buffer, int room) {
    std::string text;
    control([&](Machine& m) {
        m.progress();
        m.release_unused();
        std::map<std::string, std::uint64_t> counts;
        for (auto& [handle, context] : m.contexts.live) counts["contexts"] += context->retained;
        for (auto& [address, memory] : m.memories) {
            static constexpr const char* KINDS[] = {"plain", "pooled", "mapped", "host"};
            ++counts[KINDS[int(memory.kind)]];
        }
        counts["streams"] = m.streams.live.size();
        counts["events"] = m.events.live.size();
        counts["pools"] = m.pools.live.size() - m.devices.size();
        counts["physicals"] = m.physicals.live.size();
        counts["reservations"] = m.reservations.size();
        counts["graphs"] = m.graphs.live.size();
        counts["executables"] = m.executables.live.size();
        counts["notifications"] = m.notifications.live.size();
        counts["captures"] = m.captures.size();
        for (auto& [what, count] : counts)
            if (count) text += what + " " + std::to_string(count) + "\n";
    });
    return write_out(text, buffer, room);
}

API int fake_report_at_exit() {
    {
        Lock lock(machine().mutex);
        calls_before = total_calls();
    }
    return std::atexit([] {
        char left[1024];
        fake_live(left, sizeof left);
        std::fprintf(stderr, "driver calls at exit: %d\n%s", int(total_calls() - calls_before), left);
    });
}
