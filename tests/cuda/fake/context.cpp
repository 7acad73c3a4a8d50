// Primary contexts, and which one each thread works in.
#include <algorithm>

#include "call.hpp"

namespace {

struct Stack {
    std::uint64_t epoch = 0;
    std::vector<Handle> contexts;
};
thread_local Stack stack;

std::vector<Handle>& mine() {
    if (stack.epoch != machine().epoch) stack = {machine().epoch, {}};
    return stack.contexts;
}

}  // namespace

Context& Machine::current() {
    const auto& stacked = mine();
    require(!stacked.empty() && stacked.back(), INVALID_CONTEXT);
    return *contexts.at(stacked.back(), CONTEXT_IS_DESTROYED);
}

Context& Machine::primary(CUdevice ordinal) {
    Device& owner = device(ordinal);
    if (!owner.primary) {
        auto made = std::make_shared<Context>();
        made->id = ++last_id;
        made->device = ordinal;
        contexts.add(made);
        made->legacy = new_stream(*made, 0, 0);
        made->legacy->handle = LEGACY_STREAM;
        made->legacy->legacy = true;
        made->gathering = new_stream(*made, STREAM_NON_BLOCKING, 0);
        owner.primary = made.get();
    }
    return *owner.primary;
}

CUdevice Machine::working_on() { return mine().empty() ? 0 : contexts.at(mine().back())->device; }

void Machine::work_on(CUdevice ordinal) { mine().assign(1, primary(ordinal).handle); }

Context& Machine::context_of(CUdevice ordinal) {
    Device& owner = device(ordinal);
    require(owner.primary, INVALID_CONTEXT);
    return *owner.primary;
}

void Machine::end(Context& context) {
    for (auto& stream : context.streams)
        for (auto& work : stream->queue) work->done = true;
    std::erase_if(streams.live, [&](auto& entry) { return entry.second->context == &context; });
    std::erase_if(events.live, [&](auto& entry) { return entry.second->context == &context; });
    std::vector<Memory> plain;
    for (auto& [address, memory] : memories)
        if (memory.kind == Kind::plain && memory.owner == context.handle) plain.push_back(memory);
    for (auto& memory : plain) {
        checker.drop(memory.address, memory.nbytes);
        free_plain(memory);
    }
    devices[context.device].primary = nullptr;
    contexts.remove(context.handle);
}

API CUresult cuDevicePrimaryCtxRetain(Handle* context, CUdevice ordinal) {
    return call("cuDevicePrimaryCtxRetain", ANYWHERE, [&](Machine& m) {
        require(context);
        Device& device = m.device(ordinal);
        require(!device.lost, device.lost);
        ++m.primary(ordinal).retained;
        *context = device.primary->handle;
    });
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    return call("cuDevicePrimaryCtxRelease", ANYWHERE, [&](Machine& m) {
        Context& context = m.context_of(ordinal);
        if (--context.retained == 0) m.end(context);
    });
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* active) {
    return call("cuDevicePrimaryCtxGetState", ANYWHERE, [&](Machine& m) {
        Device& device = m.device(ordinal);
        require(flags && active);
        *active = device.primary != nullptr;
        *flags = device.primary ? device.primary->flags : 0;
    });
}

API CUresult cuCtxPushCurrent_v2(Handle context) {
    return call("cuCtxPushCurrent", ANYWHERE, [&](Machine& m) {
        m.contexts.at(context, INVALID_CONTEXT);
        mine().push_back(context);
    });
}

API CUresult cuCtxPopCurrent_v2(Handle* context) {
    return call("cuCtxPopCurrent", ANYWHERE, [&](Machine&) {
        require(!mine().empty(), INVALID_CONTEXT);
        if (context) *context = mine().back();
        mine().pop_back();
    });
}

API CUresult cuCtxSetCurrent(Handle context) {
    return call("cuCtxSetCurrent", ANYWHERE, [&](Machine& m) {
        if (context) m.contexts.at(context, INVALID_CONTEXT);
        if (!mine().empty()) mine().pop_back();
        if (context) mine().push_back(context);
    });
}

API CUresult cuCtxGetCurrent(Handle* context) {
    return call("cuCtxGetCurrent", ANYWHERE, [&](Machine&) {
        require(context);
        *context = mine().empty() ? 0 : mine().back();
    });
}

API CUresult cuCtxGetDevice(CUdevice* ordinal) {
    return call("cuCtxGetDevice", IN_CONTEXT, [&](Machine& m) {
        require(ordinal);
        *ordinal = m.current().device;
    });
}

API CUresult cuCtxGetDevice_v2(CUdevice* ordinal, Handle context) {
    return call("cuCtxGetDevice", ANYWHERE, [&](Machine& m) {
        require(ordinal);
        *ordinal = context ? m.contexts.at(context, INVALID_CONTEXT)->device : m.current().device;
    });
}

API CUresult cuCtxGetFlags(unsigned* flags) {
    return call("cuCtxGetFlags", IN_CONTEXT, [&](Machine& m) {
        require(flags);
        *flags = m.current().flags;
    });
}

API CUresult cuCtxGetId(Handle context, unsigned long long* id) {
    return call("cuCtxGetId", ANYWHERE, [&](Machine& m) {
        require(id);
        *id = context ? m.contexts.at(context, INVALID_CONTEXT)->id : m.current().id;
    });
}

API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return call("cuCtxGetStreamPriorityRange", IN_CONTEXT, [&](Machine&) {
        if (least) *least = 0;
        if (greatest) *greatest = -5;
    });
}

API CUresult cuCtxSynchronize() {
    return call("cuCtxSynchronize", IN_CONTEXT, [](Machine& m) {
        Context& context = m.current();
        for (auto& stream : context.streams) require(!stream->capture, CAPTURE_UNSUPPORTED);
        m.wait(m.gather(context), context);
    });
}

API CUresult cuCtxSynchronize_v2(Handle handle) {
    return call("cuCtxSynchronize", ANYWHERE, [&](Machine& m) {
        Context& context = handle ? *m.contexts.at(handle, INVALID_CONTEXT) : m.current();
        for (auto& stream : context.streams) require(!stream->capture, CAPTURE_UNSUPPORTED);
        m.wait(m.gather(context), context);
    });
}

API CUresult cuCtxRecordEvent(Handle handle, Handle event) {
    return call("cuCtxRecordEvent", ANYWHERE, [&](Machine& m) {
        auto context = m.contexts.at(handle, INVALID_CONTEXT);
        require(!m.devices[context->device].lost, m.devices[context->device].lost);
        auto marked = m.events.at(event);
        require(marked->context == context.get(), INVALID_HANDLE);
        for (auto& stream : context->streams) {
            if (!stream->capture) continue;
            stream->capture->invalid = true;
            refuse(CAPTURE_UNSUPPORTED);
        }
        marked->mark = m.gather(*context);
        marked->capture = nullptr;
    });
}

API CUresult cuCtxWaitEvent(Handle handle, Handle event) {
    return call("cuCtxWaitEvent", ANYWHERE, [&](Machine& m) {
        auto context = m.contexts.at(handle, INVALID_CONTEXT);
        auto marked = m.events.at(event);
        for (auto& stream : context->streams) require(!stream->capture, CAPTURE_UNSUPPORTED);
        if (!marked->mark) return;
        const auto streams = context->streams;  // one that is made later is not behind it here
        for (auto& stream : streams) m.follow(*stream, marked->mark);
    });
}

EXPORT(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)
EXPORT(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2)
EXPORT(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState)
EXPORT(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2)
EXPORT(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)
EXPORT(cuCtxSetCurrent, 4000, cuCtxSetCurrent)
EXPORT(cuCtxGetCurrent, 4000, cuCtxGetCurrent)
EXPORT(cuCtxGetDevice, 2000, cuCtxGetDevice)
EXPORT(cuCtxGetDevice, 13000, cuCtxGetDevice_v2)
EXPORT(cuCtxGetFlags, 7000, cuCtxGetFlags)
EXPORT(cuCtxGetId, 12000, cuCtxGetId)
EXPORT(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange)
EXPORT(cuCtxSynchronize, 2000, cuCtxSynchronize)
EXPORT(cuCtxSynchronize, 13000, cuCtxSynchronize_v2)
EXPORT(cuCtxRecordEvent, 12050, cuCtxRecordEvent)
EXPORT(cuCtxWaitEvent, 12050, cuCtxWaitEvent)
