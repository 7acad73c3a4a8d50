// Capturing streams into graphs, and replaying those. A graph keeps what was submitted, in that order.
#include <algorithm>

#include "call.hpp"

namespace {

constexpr int NOT_CAPTURING = 0, CAPTURING = 1, INVALIDATED = 2;

int status(const Stream& stream) {
    if (!stream.capture) return NOT_CAPTURING;
    return stream.capture->invalid ? INVALIDATED : CAPTURING;
}

// Asking the legacy stream would draw a capturing blocking stream in.
void refuse_implicit(const Stream& stream) {
    if (!stream.legacy) return;
    for (auto& other : stream.context->streams) require(!other->blocking() || !other->capture, CAPTURE_IMPLICIT);
}

void instantiate(Handle* made, Handle graph) {
    require(made);
    Machine& m = machine();
    auto kept = m.graphs.at(graph, INVALID_VALUE);
    auto ready = std::make_shared<KeptGraph>(*kept);
    *made = m.executables.add(ready);
}

}  // namespace

void Machine::run_or_capture(Stream& stream, Step step) {
    if (!stream.capture) {
        step(stream);
        return;
    }
    require(!stream.capture->invalid, CAPTURE_INVALIDATED);
    ++stream.capture->members[&stream][stream.id];
    stream.capture->graph.steps.push_back(std::move(step));
}

void Machine::refuse_while_capturing() {
    if (my_capture_mode == CAPTURE_RELAXED) return;
    bool forbidden = false;
    for (auto& capture : captures) {
        const bool mine = capture->thread == my_thread() && capture->mode != CAPTURE_RELAXED;
        const bool everybodys = my_capture_mode == CAPTURE_GLOBAL && capture->mode == CAPTURE_GLOBAL;
        if (mine || everybodys) forbidden = capture->invalid = true;
    }
    require(!forbidden, CAPTURE_UNSUPPORTED);
}

API CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
    return call("cuThreadExchangeStreamCaptureMode", ANYWHERE, [&](Machine&) {
        require(mode && *mode >= CAPTURE_GLOBAL && *mode <= CAPTURE_RELAXED);
        std::swap(*mode, my_capture_mode);
    });
}

API CUresult cuStreamBeginCapture_v2(Handle stream, int mode) {
    return call("cuStreamBeginCapture", ANYWHERE, [&](Machine& m) {
        require(mode >= CAPTURE_GLOBAL && mode <= CAPTURE_RELAXED);
        auto origin = m.stream(stream);
        require(!origin->legacy, CAPTURE_UNSUPPORTED);
        require(!origin->capture, CAPTURE_UNSUPPORTED);
        auto capture = std::make_shared<Capture>();
        capture->mode = mode;
        capture->id = ++m.last_id;
        capture->thread = my_thread();
        capture->origin = origin.get();
        capture->members[origin.get()];
        origin->capture = capture;
        m.captures.push_back(capture);
    });
}

API CUresult cuStreamEndCapture(Handle stream, Handle* graph) {
    return call("cuStreamEndCapture", ANYWHERE, [&](Machine& m) {
        require(graph);
        *graph = 0;
        auto origin = m.stream(stream);
        auto capture = origin->capture;
        require(capture != nullptr, INVALID_VALUE);
        require(capture->origin == origin.get(), CAPTURE_UNMATCHED);
        require(capture->mode == CAPTURE_RELAXED || capture->thread == my_thread(), CAPTURE_WRONG_THREAD);
        std::erase(m.captures, capture);
        const Clock& reached = capture->members[origin.get()];
        bool joined = true;
        for (auto& [handle, context] : m.contexts.live)
            for (auto& member : context->streams) {
                if (member->capture != capture) continue;
                member->capture = nullptr;
                const auto work = capture->members[member.get()][member->id];
                joined &= !work || covers(reached, member->id, work);
            }
        require(!capture->invalid, CAPTURE_INVALIDATED);
        require(joined, CAPTURE_UNJOINED);
        auto kept = std::make_shared<KeptGraph>();
        kept->steps = capture->graph.steps;
        *graph = m.graphs.add(kept);
    });
}

API CUresult cuStreamIsCapturing(Handle stream, int* answer) {
    return call("cuStreamIsCapturing", ANYWHERE, [&](Machine& m) {
        require(answer);
        auto asked = m.stream(stream);
        refuse_implicit(*asked);
        *answer = status(*asked);
    });
}

API CUresult cuStreamGetCaptureInfo_v2(Handle stream, int* answer, std::uint64_t* id, Handle* graph,
                                       const Handle** dependencies, std::size_t* count) {
    return call("cuStreamGetCaptureInfo", ANYWHERE, [&](Machine& m) {
        require(answer);
        auto asked = m.stream(stream);
        refuse_implicit(*asked);
        *answer = status(*asked);
        if (*answer != CAPTURING) return;
        if (id) *id = asked->capture->id;
        if (graph) *graph = 0;
        if (dependencies) *dependencies = nullptr;
        if (count) *count = 0;
    });
}

API CUresult cuStreamGetCaptureInfo_v3(Handle stream, int* answer, std::uint64_t* id, Handle* graph,
                                       const Handle** dependencies, const void** edges, std::size_t* count) {
    if (edges) *edges = nullptr;
    return cuStreamGetCaptureInfo_v2(stream, answer, id, graph, dependencies, count);
}

API CUresult cuGraphInstantiateWithFlags(Handle* made, Handle graph, unsigned long long) {
    return call("cuGraphInstantiate", ANYWHERE, [&](Machine&) { instantiate(made, graph); });
}

API CUresult cuGraphLaunch(Handle graph, Handle stream) {
    return call("cuGraphLaunch", ANYWHERE, [&](Machine& m) {
        auto ready = m.executables.at(graph, INVALID_VALUE);
        auto target = m.stream(stream);
        for (const Step& step : ready->steps) m.run_or_capture(*target, step);
    });
}

API CUresult cuGraphExecDestroy(Handle graph) {
    return call("cuGraphExecDestroy", ANYWHERE, [&](Machine& m) {
        m.executables.at(graph, INVALID_VALUE);
        m.executables.remove(graph);
    });
}

API CUresult cuGraphDestroy(Handle graph) {
    return call("cuGraphDestroy", ANYWHERE, [&](Machine& m) {
        m.graphs.at(graph, INVALID_VALUE);
        m.graphs.remove(graph);
    });
}

EXPORT(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode)
EXPORT(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2)
EXPORT(cuStreamEndCapture, 10000, cuStreamEndCapture)
EXPORT(cuStreamIsCapturing, 10000, cuStreamIsCapturing)
EXPORT(cuStreamGetCaptureInfo, 11030, cuStreamGetCaptureInfo_v2)
EXPORT(cuStreamGetCaptureInfo, 12030, cuStreamGetCaptureInfo_v3)
EXPORT(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags)
EXPORT(cuGraphInstantiate, 12000, cuGraphInstantiateWithFlags)
EXPORT(cuGraphLaunch, 10000, cuGraphLaunch)
EXPORT(cuGraphExecDestroy, 10000, cuGraphExecDestroy)
EXPORT(cuGraphDestroy, 10000, cuGraphDestroy)
