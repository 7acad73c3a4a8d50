// Events: points in streams.
#include "call.hpp"

namespace {

EventPtr of_host(Machine& m, Handle event) {
    auto marked = m.events.at(event);
    const CUresult lost = m.devices[marked->context->device].lost;
    require(!lost, lost);
    if (marked->capture) {
        marked->capture->invalid = true;
        refuse(CAPTURED_EVENT);
    }
    return marked;
}

}  // namespace

API CUresult cuEventCreate(Handle* event, unsigned flags) {
    return call("cuEventCreate", IN_CONTEXT, [&](Machine& m) {
        require(event && flags < 8 && !((flags & 4) && !(flags & EVENT_DISABLE_TIMING)));
        auto made = std::make_shared<Event>();
        made->context = &m.current();
        made->flags = flags;
        *event = m.events.add(made);
    });
}

API CUresult cuEventDestroy_v2(Handle event) {
    return call("cuEventDestroy", IN_CONTEXT, [&](Machine& m) {
        m.events.at(event);
        m.events.remove(event);
    });
}

API CUresult cuEventRecord(Handle event, Handle stream) {
    return call("cuEventRecord", IN_CONTEXT, [&](Machine& m) {
        auto marked = m.events.at(event);
        auto recording = m.stream(stream);
        require(marked->context == recording->context, INVALID_HANDLE);
        if (recording->capture) {
            require(!recording->capture->invalid, CAPTURE_INVALIDATED);
            marked->capture = recording->capture;
            marked->captured = recording->capture->members[recording.get()];
            marked->mark = nullptr;
            return;
        }
        marked->capture = nullptr;
        marked->mark = m.submit(*recording, {});
    });
}

API CUresult cuEventRecordWithFlags(Handle event, Handle stream, unsigned flags) {
    return flags > 1 ? INVALID_VALUE : cuEventRecord(event, stream);
}

API CUresult cuEventQuery(Handle event) {
    return call("cuEventQuery", UNSAFE, [&](Machine& m) {
        auto marked = of_host(m, event);
        require(!marked->mark || marked->mark->done, NOT_READY);
        m.seen(marked->mark);
    });
}

API CUresult cuEventSynchronize(Handle event) {
    return call("cuEventSynchronize", IN_CONTEXT | UNSAFE, [&](Machine& m) {
        auto marked = of_host(m, event);
        m.wait(marked->mark, *marked->context);
    });
}

API CUresult cuEventElapsedTime_v2(float* milliseconds, Handle start, Handle end) {
    return call("cuEventElapsedTime", IN_CONTEXT, [&](Machine& m) {
        auto from = of_host(m, start), to = of_host(m, end);
        require(milliseconds && from->context == to->context, INVALID_HANDLE);
        require(!((from->flags | to->flags) & EVENT_DISABLE_TIMING), INVALID_HANDLE);
        require(from->mark && to->mark, INVALID_HANDLE);
        require(from->mark->done && to->mark->done, NOT_READY);
        *milliseconds = (to->mark->done_at - from->mark->done_at) / 1e6f;
    });
}

EXPORT(cuEventCreate, 2000, cuEventCreate)
EXPORT(cuEventDestroy, 4000, cuEventDestroy_v2)
EXPORT(cuEventRecord, 2000, cuEventRecord)
EXPORT(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags)
EXPORT(cuEventQuery, 2000, cuEventQuery)
EXPORT(cuEventSynchronize, 2000, cuEventSynchronize)
EXPORT(cuEventElapsedTime, 2000, cuEventElapsedTime_v2)
