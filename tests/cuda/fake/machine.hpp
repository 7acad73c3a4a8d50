// Everything the fake knows, under one lock, and the rules that several calls share.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "checker.hpp"
#include "memory.hpp"
#include "space.hpp"
#include "work.hpp"

struct Refused {  // thrown by a call that returns with an error
    CUresult code;
};
[[noreturn]] inline void refuse(CUresult code) { throw Refused{code}; }
inline void require(bool holds, CUresult otherwise = INVALID_VALUE) {
    if (!holds) refuse(otherwise);
}

// Handles go to the next object as soon as they are free, as a driver's pointers do.
template <class Object>
class Table {
   public:
    explicit Table(Handle base) : next_(base) {}
    Handle add(std::shared_ptr<Object> object) {
        Handle handle = next_;
        if (spare_.empty()) next_ += 64;
        else handle = spare_.back(), spare_.pop_back();
        live[handle] = object;
        return object->handle = handle;
    }
    std::shared_ptr<Object> at(Handle handle, CUresult otherwise = INVALID_HANDLE) const {
        auto found = live.find(handle);
        require(found != live.end(), otherwise);
        return found->second;
    }
    void remove(Handle handle) {
        if (live.erase(handle)) spare_.push_back(handle);
    }
    bool was(Handle handle) const {  // whether it named an object that was removed, and no other since
        return std::find(spare_.begin(), spare_.end(), handle) != spare_.end();
    }
    void clear() {  // what was given out before is never valid again
        live.clear();
        spare_.clear();
    }
    std::map<Handle, std::shared_ptr<Object>> live;

   private:
    Handle next_;
    std::vector<Handle> spare_;
};

struct Notification {
    Handle handle = 0;
    CUdevice device = 0;
    CUasyncCallback callback = nullptr;
    void* argument = nullptr;
};
struct KeptGraph : Graph {
    Handle handle = 0;
};

struct Device {
    std::uint64_t total = 0, used = 0, others = 0;  // bytes; others: what other processes have
    CUresult lost = SUCCESS;
    int number = 0;  // on the bus, whatever the process is shown
    Context* primary = nullptr;
    Handle default_pool = 0, current_pool = 0;
    std::map<int, int> attributes;  // what a test says otherwise
};

struct Fault {
    std::string call;
    std::uint64_t skip, times;  // calls that go well first, then those that fail
    CUresult code;
};

struct Latency {
    std::int64_t ns = 0;
    std::uint64_t skip = 0, times = UINT64_MAX;  // calls that are quick first, then those that are not
};

using Lock = std::unique_lock<std::mutex>;

class Machine {
   public:
    std::mutex mutex;
    bool initialized = false;
    int version = 13000;
    std::vector<Device> devices;
    int visible = 0;  // how many of them callers see
    Checker checker;
    Space space;
    std::int64_t pace = 0;  // ns that every piece of work takes at least
    std::uint64_t epoch = 0;  // counts resets: contexts from before are gone
    std::uint64_t last_id = 0;

    std::unordered_map<std::string, std::uint64_t> calls;
    std::unordered_map<std::string, Latency> latencies;
    std::vector<Fault> faults;

    Table<Context> contexts{0x5500'1000'0000};
    Table<Stream> streams{0x5500'2000'0000};
    Table<Event> events{0x5500'3000'0000};
    Table<Pool> pools{0x5500'4000'0000};
    Table<Physical> physicals{0x5500'5000'0000};
    Table<KeptGraph> graphs{0x5500'6000'0000}, executables{0x5500'7000'0000};
    Table<Notification> notifications{0x5500'8000'0000};
    std::vector<std::shared_ptr<Capture>> captures;
    std::map<std::uint64_t, Memory> memories;            // by address
    std::map<std::uint64_t, std::uint64_t> reservations;  // address: bytes

    Machine();
    void reset();
    void set_devices(int count, std::uint64_t bytes);  // no faults, no delays, nothing lost, and so many devices

    // work.cpp: streams
    StreamPtr new_stream(Context& context, unsigned flags, int priority);
    StreamPtr stream(Handle handle);  // 0, 1 and 2 mean the current context's
    WorkPtr submit(Stream& stream, Work work, const char* call = "", const std::vector<Span>& reads = {},
                   const std::vector<Span>& writes = {});
    WorkPtr gather(Context& context);
    void follow(Stream& stream, const WorkPtr& mark);
    void progress();
    void wait(const WorkPtr& work, Context& context);  // lets the lock go meanwhile
    void seen(const WorkPtr& work);
    void run_or_capture(Stream& stream, Step step);
    void lose(CUdevice device, CUresult code);
    void timekeeper();
    void host_functions();

    // context.cpp
    Context& current();
    Context& context_of(CUdevice device);  // its primary one
    Context& primary(CUdevice device);     // the same, made where there is none yet
    CUdevice working_on();                 // HIP's way: a thread is with a device, and needs no context
    void work_on(CUdevice device);
    void end(Context& context);

    // memory.cpp
    Device& device(CUdevice ordinal, CUresult otherwise = INVALID_DEVICE);
    std::uint64_t create(CUdevice device, std::uint64_t nbytes);  // accounts for it, refuses when there is too little
    void destroy(CUdevice device, std::uint64_t offset, std::uint64_t nbytes);
    Memory* find(std::uint64_t address);
    bool there(std::uint64_t address, std::uint64_t nbytes);
    std::uint64_t used_at(const Physical& physical);          // the latest address with access, which work uses alone; or 0
    bool moved(std::uint64_t address, std::uint64_t nbytes);  // whether some of it is used at another address by now
    bool may_use(CUdevice device, std::uint64_t address, std::uint64_t nbytes);
    bool backed(std::uint64_t address, std::uint64_t nbytes);  // also what is given back only in the order of a stream
    void free_plain(const Memory& memory);

    // pool.cpp
    void trim(Pool& pool, std::uint64_t keep);
    void release_unused();  // as the driver does when the host has waited for something

    // capture.cpp
    void refuse_while_capturing();

   private:
    std::condition_variable changed_, due_, functions_waiting_;
    std::deque<WorkPtr> functions_;
    bool timekeeper_runs_ = false, functions_run_ = false;

    bool advance(Stream& stream, std::int64_t now);
    std::int64_t next_end();
};

Machine& machine();  // made at the first use and never destroyed: threads may outlive everything
inline thread_local Lock* my_lock = nullptr;
inline thread_local const char* my_call = "";  // the name of the call that this thread is in
inline thread_local int my_capture_mode = CAPTURE_GLOBAL;
std::uint64_t my_thread();  // a number that no other thread gets
std::int64_t now_ns();
