// The kernels of tests/gpu/kernels.ptx, the empty one of `asyncmem bench` and the long ones of `asyncmem replay`, known by
// their names: what they do is done on the host, in stream order.
#include <atomic>
#include <cstring>

#include "call.hpp"

namespace {

using Parameters = void**;
using Kernel = void (*)(Machine& m, const StreamPtr& stream, Parameters values);

template <class Value>
Value read(Parameters values, int index) {
    Value value;
    std::memcpy(&value, values[index], sizeof value);
    return value;
}

std::atomic_ref<std::uint32_t> word(std::uint64_t address) {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address));
}

// A kernel's wild address is no error of its launch: the device is lost when it runs.
bool usable(CUdevice device, std::uint64_t address, std::uint64_t nbytes) {
    Machine& m = machine();
    const bool there = m.backed(address, nbytes);
    if (!there) m.lose(device, ILLEGAL_ADDRESS);
    return there;
}

void hold(Machine& m, const StreamPtr& stream, Parameters values) {
    const auto gate = read<std::uint64_t>(values, 0);
    const auto value = read<std::uint32_t>(values, 1);
    const auto limit = read<std::uint64_t>(values, 2);
    m.run_or_capture(*stream, [=](Stream& running) {
        Work work;
        work.lasts = std::int64_t(limit);
        work.until = [=] { return word(gate).load() >= value; };
        machine().submit(running, std::move(work), "hold");
    });
}

void fill(Machine& m, const StreamPtr& stream, Parameters values) {
    const auto address = read<std::uint64_t>(values, 0), count = read<std::uint64_t>(values, 1);
    const auto value = read<std::uint32_t>(values, 2);
    const auto device = stream->context->device;
    m.run_or_capture(*stream, [=](Stream& running) {
        Work work;
        work.effect = [=] {
            if (usable(device, address, count * 4))
                for (std::uint64_t i = 0; i < count; ++i) std::memcpy(reinterpret_cast<char*>(address) + 4 * i, &value, 4);
        };
        machine().submit(running, std::move(work), "fill", {}, {{address, count * 4}});
    });
}

void count_others(Machine& m, const StreamPtr& stream, Parameters values) {
    const auto address = read<std::uint64_t>(values, 0), count = read<std::uint64_t>(values, 1);
    const auto value = read<std::uint32_t>(values, 2);
    const auto found = read<std::uint64_t>(values, 3);
    const auto device = stream->context->device;
    m.run_or_capture(*stream, [=](Stream& running) {
        Work work;
        work.effect = [=] {
            if (!usable(device, address, count * 4)) return;
            std::uint32_t others = 0, one;
            for (std::uint64_t i = 0; i < count; ++i) {
                std::memcpy(&one, reinterpret_cast<char*>(address) + 4 * i, 4);
                others += one != value;
            }
            word(found) += others;
        };
        machine().submit(running, std::move(work), "count_others", {{address, count * 4}}, {});
    });
}

void nothing(Machine& m, const StreamPtr& stream, Parameters) {
    m.run_or_capture(*stream, [](Stream& running) { machine().submit(running, Work{}, "nothing"); });
}

void note_time(Machine& m, const StreamPtr& stream, Parameters values) {
    const auto where = read<std::uint64_t>(values, 0);
    const auto device = stream->context->device;
    m.run_or_capture(*stream, [=](Stream& running) {
        Work work;
        work.effect = [=] {
            const auto now = now_ns();
            if (usable(device, where, sizeof now)) std::memcpy(reinterpret_cast<char*>(where), &now, sizeof now);
        };
        machine().submit(running, std::move(work), "note_time", {}, {{where, 8}});
    });
}

// The time that was noted is read as the kernel is launched: whoever does that has waited for it.
void spin(Machine& m, const StreamPtr& stream, Parameters values) {
    const auto where = read<std::uint64_t>(values, 0), nanoseconds = read<std::uint64_t>(values, 1);
    const auto device = stream->context->device;
    m.run_or_capture(*stream, [=](Stream& running) {
        if (!usable(device, where, 8)) return;
        Work work;
        work.lasts = 1;
        std::memcpy(&work.ends, reinterpret_cast<char*>(where), sizeof work.ends);
        work.ends += std::int64_t(nanoseconds);
        machine().submit(running, std::move(work), "spin");
    });
}

struct Named_kernel {
    const char* name;
    Kernel run;
};
constexpr Named_kernel KERNELS[] = {
    {"hold", hold}, {"fill", fill}, {"count_others", count_others}, {"nothing", nothing}, {"note_time", note_time},
    {"spin", spin}};

int the_module;  // there is only one, and it is never gone

}  // namespace

API CUresult cuModuleLoadData(void** module, const void* image) {
    return call("cuModuleLoadData", IN_CONTEXT, [&](Machine&) {
        require(module && image);
        *module = &the_module;
    });
}

API CUresult cuModuleUnload(const void* module) {
    return call("cuModuleUnload", IN_CONTEXT, [&](Machine&) { require(module == &the_module, INVALID_HANDLE); });
}

API CUresult cuModuleGetFunction(const void** function, const void* module, const char* name) {
    return call("cuModuleGetFunction", IN_CONTEXT, [&](Machine&) {
        require(function && name);
        require(module == &the_module, INVALID_HANDLE);
        for (const Named_kernel& kernel : KERNELS)
            if (!std::strcmp(kernel.name, name)) *function = &kernel;
        require(*function, NOT_FOUND);
    });
}

API CUresult cuLaunchKernel(const Named_kernel* kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, Handle stream, void** values, void**) {
    return call("cuLaunchKernel", ANYWHERE, [&](Machine& m) {
        require(kernel && (values || kernel->run == nothing));
        kernel->run(m, m.stream(stream), values);
    });
}

EXPORT(cuModuleLoadData, 2000, cuModuleLoadData)
EXPORT(cuModuleUnload, 2000, cuModuleUnload)
EXPORT(cuModuleGetFunction, 2000, cuModuleGetFunction)
EXPORT(cuLaunchKernel, 4000, cuLaunchKernel)
