// A driver's functions by pointer: found at run time, so that nothing of CUDA or HIP is needed to build or to import.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace asyncmem::gpu {

using Code = int; // CUresult, and hipError_t, whose numbers mean the same
using Handle = void *; // CUcontext, CUstream, CUevent, CUasyncCallbackHandle
using Number = unsigned long long;

inline constexpr Code success = 0;
inline constexpr Code invalid_value = 1;
inline constexpr Code out_of_memory = 2;
inline constexpr Code not_initialized = 3;
inline constexpr Code deinitialized = 4;
inline constexpr Code invalid_context = 201;
inline constexpr Code not_found = 500;
inline constexpr Code not_ready = 600;
inline constexpr Code capture_unsupported = 900;

inline constexpr int relaxed = 2; // the stream capture mode
inline constexpr std::uint64_t per_thread = 2; // the highest handle that means another stream in another context

// What the driver is asked for: physical memory, and access to it. HIP has the same layouts and numbers.
struct Location {
    int kind, id;
};
struct Properties {
    int kind, handle_types;
    Location location;
    void *windows;
    unsigned char flags[8];
};
struct Access {
    Location location;
    int flags;
};

using Callback = void (*)(void *info, void *data, Handle handle);

// What is needed of a driver: CUDA's symbol, the version of CUDA whose signature it has here (0: HIP's alone), HIP's symbol
// (null: HIP has it in another form, which `hip.cpp` brings into this one), and the signature. Those under MAYBE came with
// a later driver than the oldest supported, or are CUDA's alone, and may be null.
#define ASYNCMEM_DRIVER_CALLS(CALL, MAYBE)                                                                               \
    CALL(cuInit, 2000, "hipInit", (unsigned flags))                                                                      \
    CALL(cuDriverGetVersion, 2020, "hipDriverGetVersion", (int *version))                                                \
    CALL(cuGetErrorName, 6000, "hipDrvGetErrorName", (Code code, const char **name))                                     \
    CALL(hipGetLastError, 0, "hipGetLastError", ()) /* forgets it; CUDA's driver remembers none */                       \
    CALL(cuDeviceGetCount, 2000, "hipGetDeviceCount", (int *count))                                                      \
    CALL(cuDeviceGet, 2000, "hipDeviceGet", (int *device, int ordinal))                                                  \
    CALL(cuDevicePrimaryCtxRetain, 7000, nullptr, (Handle *context, int device))                                         \
    CALL(cuDevicePrimaryCtxRelease, 11000, nullptr, (int device))                                                        \
    MAYBE(cuCtxGetId, 12000, nullptr, (Handle context, Number *id)) /* a driver without it is too old in any case */     \
    CALL(cuCtxGetCurrent, 4000, nullptr, (Handle *context))                                                              \
    CALL(cuCtxPushCurrent, 4000, nullptr, (Handle context))                                                              \
    CALL(cuCtxPopCurrent, 4000, nullptr, (Handle *context))                                                              \
    MAYBE(cuCtxRecordEvent, 12050, nullptr, (Handle context, Handle event))                                              \
    CALL(cuCtxSynchronize, 2000, "hipDeviceSynchronize", ())                                                             \
    CALL(cuThreadExchangeStreamCaptureMode, 10010, "hipThreadExchangeStreamCaptureMode", (int *mode))                    \
    CALL(cuStreamCreate, 2000, "hipStreamCreateWithFlags", (Handle *stream, unsigned flags))                             \
    CALL(cuStreamDestroy, 4000, "hipStreamDestroy", (Handle stream))                                                     \
    MAYBE(cuStreamGetId, 12000, nullptr, (Handle stream, Number *id)) /* ends a capture on it */                         \
    CALL(cuStreamGetCtx, 9020, nullptr, (Handle stream, Handle *context))                                                \
    CALL(cuStreamIsCapturing, 10000, "hipStreamIsCapturing", (Handle stream, int *status))                               \
    CALL(cuStreamGetCaptureInfo, 11030, nullptr,                                                                         \
         (Handle stream, int *status, Number *id, Handle *graph, const Handle **dependencies, std::size_t *count))       \
    CALL(cuStreamWaitEvent, 3020, "hipStreamWaitEvent", (Handle stream, Handle event, unsigned flags))                   \
    CALL(cuEventCreate, 2000, "hipEventCreateWithFlags", (Handle *event, unsigned flags))                                \
    CALL(cuEventDestroy, 4000, "hipEventDestroy", (Handle event))                                                        \
    CALL(cuEventRecord, 2000, "hipEventRecord", (Handle event, Handle stream))                                           \
    CALL(cuEventQuery, 2000, "hipEventQuery", (Handle event))                                                            \
    CALL(cuMemCreate, 10020, "hipMemCreate",                                                                             \
         (Number *handle, std::size_t nbytes, const Properties *wish, Number flags))                                     \
    CALL(cuMemRelease, 10020, "hipMemRelease", (Number handle))                                                          \
    CALL(cuMemMap, 10020, "hipMemMap",                                                                                   \
         (std::uint64_t address, std::size_t nbytes, std::size_t offset, Number handle, Number flags))                   \
    CALL(cuMemUnmap, 10020, "hipMemUnmap", (std::uint64_t address, std::size_t nbytes))                                  \
    CALL(cuMemSetAccess, 10020, "hipMemSetAccess",                                                                       \
         (std::uint64_t address, std::size_t nbytes, const Access *accesses, std::size_t count))                         \
    MAYBE(cuDeviceRegisterAsyncNotification, 12040, nullptr,                                                             \
          (int device, Callback function, void *data, Handle *handle)) /* and not on every system */                       \
    MAYBE(cuDeviceUnregisterAsyncNotification, 12040, nullptr, (int device, Handle handle))

struct Table {
    std::uint64_t legacy; // the handle of the default stream that all blocking streams wait for
#define DECLARE(name, version, hip, signature) Code(*name) signature;
    ASYNCMEM_DRIVER_CALLS(DECLARE, DECLARE)
#undef DECLARE
};

// Loads a driver's library, once, and fills its table; returns why that cannot be, or nothing. Any thread.
class Loader {
  public:
    // Returns the symbol that the library lacks, or null.
    using Fill = const char *(*)(void *library, Table &table);
    std::string load(const char *library, Fill fill, const Table **table);

  private:
    std::mutex lock_;
    Table table_{};
    bool loaded_ = false;
};

std::string load_cuda(const Table **table);
// HIP's library has several places, of which one is named.
std::string load_hip(const char *library, const Table **table);

// True where no driver call may be made any more: in a child forked after the driver was started, and once the
// interpreter is ending, when the driver may have gone before us.
bool gone();

// Tells `gone` how to ask whether the interpreter is ending.
void set_finalizing(int (*ask)());

// Notes that a driver has been started in this process, so that a forked child keeps off all of them.
void started();

inline Handle as_handle(std::uint64_t number) { return reinterpret_cast<Handle>(number); }

} // namespace asyncmem::gpu
