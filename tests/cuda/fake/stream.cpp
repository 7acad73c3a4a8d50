// Streams: making them, asking them, and the host functions that run in their order.
#include "call.hpp"

namespace {

void refuse_captured(Stream& stream) {
    if (!stream.capture) return;
    stream.capture->invalid = true;
    refuse(CAPTURE_UNSUPPORTED);
}

void create(Machine& m, Handle* made, unsigned flags, int priority) {
    require(made && flags <= STREAM_NON_BLOCKING);
    *made = m.streams.add(m.new_stream(m.current(), flags, priority));
}

}  // namespace

API CUresult cuStreamCreate(Handle* stream, unsigned flags) {
    return call("cuStreamCreate", IN_CONTEXT, [&](Machine& m) { create(m, stream, flags, 0); });
}

API CUresult cuStreamCreateWithPriority(Handle* stream, unsigned flags, int priority) {
    return call("cuStreamCreateWithPriority", IN_CONTEXT, [&](Machine& m) { create(m, stream, flags, priority); });
}

API CUresult cuStreamDestroy_v2(Handle stream) {
    return call("cuStreamDestroy", IN_CONTEXT, [&](Machine& m) {
        require(stream > PER_THREAD_STREAM, INVALID_HANDLE);
        auto gone = m.stream(stream);
        if (gone->capture) gone->capture->invalid = true;
        gone->destroyed = true;  // what is queued still runs
        m.streams.remove(stream);
    });
}

API CUresult cuStreamQuery(Handle stream) {
    return call("cuStreamQuery", IN_CONTEXT | UNSAFE, [&](Machine& m) {
        auto asked = m.stream(stream);
        refuse_captured(*asked);
        if (asked->legacy) {
            for (auto& other : asked->context->streams)
                require(!other->blocking() || other->queue.empty(), NOT_READY);
        }
        require(asked->queue.empty(), NOT_READY);
        if (asked->legacy)
            for (auto& other : asked->context->streams)
                if (other->blocking()) m.seen(other->last);
        m.seen(asked->last);
    });
}

API CUresult cuStreamSynchronize(Handle stream) {
    return call("cuStreamSynchronize", IN_CONTEXT | UNSAFE, [&](Machine& m) {
        auto asked = m.stream(stream);
        refuse_captured(*asked);
        m.wait(asked->legacy ? m.submit(*asked, {}) : asked->last, *asked->context);
    });
}

API CUresult cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    return call("cuStreamWaitEvent", IN_CONTEXT, [&](Machine& m) {
        require(flags <= 1);
        auto waiting = m.stream(stream);
        auto marked = m.events.at(event);
        if (marked->capture) {
            require(!marked->capture->invalid, CAPTURE_INVALIDATED);
            require(!waiting->capture || waiting->capture == marked->capture, CAPTURE_MERGE);
            require(!waiting->legacy, CAPTURE_IMPLICIT);
            waiting->capture = marked->capture;
            join(waiting->capture->members[waiting.get()], marked->captured);
            return;
        }
        if (waiting->capture) {
            waiting->capture->invalid = true;
            refuse(CAPTURE_ISOLATION);
        }
        if (marked->mark) m.follow(*waiting, marked->mark);
    });
}

API CUresult cuStreamGetId(Handle stream, unsigned long long* id) {
    return call("cuStreamGetId", ANYWHERE, [&](Machine& m) {
        require(id);
        auto asked = m.stream(stream);
        refuse_captured(*asked);
        *id = asked->id;
    });
}

API CUresult cuStreamGetCtx(Handle stream, Handle* context) {
    return call("cuStreamGetCtx", IN_CONTEXT, [&](Machine& m) {
        require(context);
        *context = m.stream(stream)->context->handle;
    });
}

API CUresult cuStreamGetCtx_v2(Handle stream, Handle* context, Handle* green) {
    if (green) *green = 0;
    return cuStreamGetCtx(stream, context);
}

API CUresult cuStreamGetDevice(Handle stream, CUdevice* device) {
    return call("cuStreamGetDevice", IN_CONTEXT, [&](Machine& m) {
        require(device);
        auto asked = m.stream(stream);
        refuse_captured(*asked);
        *device = asked->context->device;
    });
}

API CUresult cuStreamGetFlags(Handle stream, unsigned* flags) {
    return call("cuStreamGetFlags", IN_CONTEXT, [&](Machine& m) {
        require(flags);
        auto asked = m.stream(stream);
        refuse_captured(*asked);
        *flags = asked->flags;
    });
}

API CUresult cuStreamGetPriority(Handle stream, int* priority) {
    return call("cuStreamGetPriority", IN_CONTEXT, [&](Machine& m) {
        require(priority);
        *priority = m.stream(stream)->priority;
    });
}

API CUresult cuLaunchHostFunc(Handle stream, CUhostFn function, void* argument) {
    return call("cuLaunchHostFunc", IN_CONTEXT, [&](Machine& m) {
        require(function != nullptr);
        m.run_or_capture(*m.stream(stream), [function, argument](Stream& stream) {
            Work work;
            work.function = function;
            work.argument = argument;
            machine().submit(stream, std::move(work));
        });
    });
}

API CUresult cuLaunchHostFunc_v2(Handle stream, CUhostFn function, void* argument, unsigned) {
    return cuLaunchHostFunc(stream, function, argument);
}

EXPORT(cuStreamCreate, 2000, cuStreamCreate)
EXPORT(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority)
EXPORT(cuStreamDestroy, 4000, cuStreamDestroy_v2)
EXPORT(cuStreamQuery, 2000, cuStreamQuery)
EXPORT(cuStreamSynchronize, 2000, cuStreamSynchronize)
EXPORT(cuStreamWaitEvent, 3020, cuStreamWaitEvent)
EXPORT(cuStreamGetId, 12000, cuStreamGetId)
EXPORT(cuStreamGetCtx, 9020, cuStreamGetCtx)
EXPORT(cuStreamGetCtx, 12050, cuStreamGetCtx_v2)
EXPORT(cuStreamGetDevice, 12080, cuStreamGetDevice)
EXPORT(cuStreamGetFlags, 5050, cuStreamGetFlags)
EXPORT(cuStreamGetPriority, 5050, cuStreamGetPriority)
EXPORT(cuLaunchHostFunc, 10000, cuLaunchHostFunc)
EXPORT(cuLaunchHostFunc, 13020, cuLaunchHostFunc_v2)
