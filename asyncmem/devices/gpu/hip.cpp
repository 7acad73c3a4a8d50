// HIP as a table. AMD's runtime has CUDA's driver interface under names of its own, and mostly in the same form; where the
// form differs, the difference ends here. Checked against the headers of HIP 6.3 and 7.15 and the source of 6.3; no hardware
// has seen it.
#include "table.hpp"

#include <dlfcn.h>

#include <type_traits>
#include <vector>

namespace asyncmem::gpu {
namespace {

constexpr Code invalid_handle = 400;
constexpr Code context_is_destroyed = 709;

// What the functions below need of the library.
struct {
    Code (*hipGetDevice)(int *device);
    Code (*hipSetDevice)(int device);
    Code (*hipStreamGetDevice)(Handle stream, int *device);
    Code (*hipStreamGetCaptureInfo_v2)(Handle stream, int *status, Number *id, Handle *graph,
                                       const Handle **dependencies, std::size_t *count);
    Code (*hipStreamGetId)(Handle stream, Number *id); // may be null: 7.15
} hip;

// HIP's contexts are deprecated, and were no more than its devices: a thread works with one, at first with number 0.
// Here one stands for its context, by a handle that is not null; nothing has to be retained.
Handle context_of(int device) { return as_handle(static_cast<std::uint64_t>(device) + 1); }
int device_of(Handle context) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(context) - 1); }

// The devices that this thread goes back to.
thread_local std::vector<int> former;

Code retain(Handle *context, int device) {
    *context = context_of(device);
    return success;
}

// A device that was reset looks like one that was not.
Code context_id(Handle, Number *id) {
    *id = 1;
    return success;
}

Code get_current(Handle *context) {
    int device = 0;
    const Code code = hip.hipGetDevice(&device);
    *context = context_of(device);
    return code;
}

Code push_current(Handle context) {
    int device = 0;
    Code code = hip.hipGetDevice(&device);
    if (code == success)
        code = hip.hipSetDevice(device_of(context));
    if (code == success)
        former.push_back(device);
    return code;
}

Code pop_current(Handle *context) {
    get_current(context);
    const int device = former.back();
    former.pop_back();
    return hip.hipSetDevice(device);
}

// CUDA says of a stream that is gone that its handle is invalid, HIP that its context is destroyed.
Code of_stream(Code code) { return code == context_is_destroyed ? invalid_handle : code; }

Code stream_context(Handle stream, Handle *context) {
    int device = 0;
    const Code code = hip.hipStreamGetDevice(stream, &device);
    *context = context_of(device);
    return of_stream(code);
}

// Without numbers of streams, the handle is one. Another stream may have it later, but none that runs beside the work of
// the first: the library waits for that when it destroys a stream.
Code stream_id(Handle stream, Number *id) {
    if (hip.hipStreamGetId != nullptr)
        return of_stream(hip.hipStreamGetId(stream, id));
    Handle context = nullptr;
    *id = reinterpret_cast<std::uintptr_t>(stream);
    return stream_context(stream, &context);
}

Code capture_info(Handle stream, int *status, Number *id, Handle *graph, const Handle **dependencies,
                  std::size_t *count) {
    return of_stream(hip.hipStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count));
}

const char *fill(void *library, Table &table) {
    const char *missing = nullptr;
    auto get = [&](auto &function, const char *symbol, bool needed = true) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
        if (function == nullptr && needed && missing == nullptr)
            missing = symbol;
    };
    get(hip.hipGetDevice, "hipGetDevice");
    get(hip.hipSetDevice, "hipSetDevice");
    get(hip.hipStreamGetDevice, "hipStreamGetDevice");
    get(hip.hipStreamGetCaptureInfo_v2, "hipStreamGetCaptureInfo_v2");
    get(hip.hipStreamGetId, "hipStreamGetId", false);
#define CALL(name, version, hip, signature)                                                                              \
    if (const char *symbol = hip)                                                                                        \
        get(table.name, symbol);
    ASYNCMEM_DRIVER_CALLS(CALL, CALL)
#undef CALL
    // The legacy default stream has the handle 1 only in later versions, and 0 in all.
    table.legacy = 0;
    table.cuDevicePrimaryCtxRetain = retain;
    table.cuDevicePrimaryCtxRelease = [](int) { return success; };
    table.cuCtxGetId = context_id;
    table.cuCtxGetCurrent = get_current;
    table.cuCtxPushCurrent = push_current;
    table.cuCtxPopCurrent = pop_current;
    table.cuStreamGetId = stream_id;
    table.cuStreamGetCtx = stream_context;
    table.cuStreamGetCaptureInfo = capture_info;
    return missing;
}

} // namespace

std::string load_hip(const char *library, const Table **table) {
    static Loader loader;
    return loader.load(library, fill, table);
}

} // namespace asyncmem::gpu
