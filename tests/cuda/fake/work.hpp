// Streams as queues of work, and what else the driver hands out handles for.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "abi.hpp"
#include "clock.hpp"

struct Span {
    std::uint64_t address, nbytes;
};

struct Work {
    std::vector<std::shared_ptr<Work>> behind;
    std::int64_t lasts = 0;        // ns, from when it may start
    std::int64_t ends = -1;        // set when it starts
    std::function<bool()> until;   // ends it sooner; asked again and again, so it is for short waits
    std::function<void()> effect;  // run under the lock, when it ends
    CUhostFn function = nullptr;   // or called on the fake's own thread, without the lock
    void* argument = nullptr;
    bool running = false, done = false;
    std::int64_t done_at = 0;
    Clock clock;  // what is complete once it is
};
using WorkPtr = std::shared_ptr<Work>;

struct Context;
struct Capture;

struct Stream {
    Handle handle = 0;
    std::uint64_t id = 0;  // never used again, as the handle is
    Context* context = nullptr;
    unsigned flags = 0;
    int priority = 0;
    bool legacy = false, held = false, destroyed = false;
    std::deque<WorkPtr> queue;  // what is not complete
    WorkPtr last;
    Clock clock;
    std::shared_ptr<Capture> capture;

    bool blocking() const { return !(flags & STREAM_NON_BLOCKING); }
};
using StreamPtr = std::shared_ptr<Stream>;

struct Event {
    Handle handle = 0;
    Context* context = nullptr;
    unsigned flags = 0;
    WorkPtr mark;                      // none: never recorded, which counts as complete
    std::shared_ptr<Capture> capture;  // recorded in a capture: then it is no event of the host's
    Clock captured;                    // what of the capture it is behind
};
using EventPtr = std::shared_ptr<Event>;

using Step = std::function<void(Stream&)>;  // submits one thing, to the stream of a capture's replay too

struct Graph {
    std::vector<Step> steps;  // in the order of their capture, which honours every dependency
};

struct Capture {
    int mode = CAPTURE_GLOBAL;
    std::uint64_t id = 0, thread = 0;
    Stream* origin = nullptr;
    bool invalid = false;
    std::map<Stream*, Clock> members;  // how far each of its streams is behind the captured work of the others
    Graph graph;
};

struct Context {
    Handle handle = 0;
    std::uint64_t id = 0;
    CUdevice device = 0;
    unsigned retained = 0, flags = 0;
    StreamPtr legacy, gathering;  // gathering: where fences behind everything are marked
    std::map<std::uint64_t, StreamPtr> per_thread;
    std::vector<StreamPtr> streams;  // every one, also destroyed ones that still have work
    std::set<CUdevice> peers;        // whose plain memory its work may use
};
