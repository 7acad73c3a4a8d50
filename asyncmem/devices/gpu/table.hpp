// A driver's functions by pointer: found at run time, so that nothing of CUDA or HIP is needed to build or to import.
#pragma once

#include <cstddef>
#include <cstdint>

namespace asyncmem::gpu {

using Code = int; // CUresult, and hipError_t, whose numbers mean the same
using Handle = void *; // CUcontext, CUstream, CUevent, CUasyncCallbackHandle

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

// What is needed of a driver. Each member is named as CUDA's symbol and has its signature; what another driver has under
// another name is put here as it is, and what it has in another form is brought into this one (`hip.cpp`). Those marked
// "may be null" came with a later driver than the oldest supported, or are CUDA's alone.
struct Table {
    std::uint64_t legacy; // the handle of the default stream that all blocking streams wait for
    Code (*cuInit)(unsigned flags);
    Code (*cuDriverGetVersion)(int *version);
    Code (*cuGetErrorName)(Code code, const char **name);
    Code (*hipGetLastError)(); // forgets it; CUDA's driver remembers none
    Code (*cuDeviceGetCount)(int *count);
    Code (*cuDeviceGet)(int *device, int ordinal);
    Code (*cuDevicePrimaryCtxRetain)(Handle *context, int device);
    Code (*cuDevicePrimaryCtxRelease)(int device);
    Code (*cuCtxGetId)(Handle context, unsigned long long *id);
    Code (*cuCtxGetCurrent)(Handle *context);
    Code (*cuCtxPushCurrent)(Handle context);
    Code (*cuCtxPopCurrent)(Handle *context);
    Code (*cuCtxRecordEvent)(Handle context, Handle event); // may be null: 12.5
    Code (*cuCtxSynchronize)();
    Code (*cuThreadExchangeStreamCaptureMode)(int *mode);
    Code (*cuStreamCreate)(Handle *stream, unsigned flags);
    Code (*cuStreamDestroy)(Handle stream);
    Code (*cuStreamGetId)(Handle stream, unsigned long long *id); // ends a capture on it
    Code (*cuStreamGetCtx)(Handle stream, Handle *context);
    Code (*cuStreamIsCapturing)(Handle stream, int *status);
    Code (*cuStreamGetCaptureInfo)(Handle stream, int *status, unsigned long long *id, Handle *graph,
                                   const Handle **dependencies, std::size_t *count);
    Code (*cuStreamWaitEvent)(Handle stream, Handle event, unsigned flags);
    Code (*cuEventCreate)(Handle *event, unsigned flags);
    Code (*cuEventDestroy)(Handle event);
    Code (*cuEventRecord)(Handle event, Handle stream);
    Code (*cuEventQuery)(Handle event);
    Code (*cuMemCreate)(unsigned long long *handle, std::size_t nbytes, const Properties *wish, unsigned long long flags);
    Code (*cuMemRelease)(unsigned long long handle);
    Code (*cuMemMap)(std::uint64_t address, std::size_t nbytes, std::size_t offset, unsigned long long handle,
                     unsigned long long flags);
    Code (*cuMemUnmap)(std::uint64_t address, std::size_t nbytes);
    Code (*cuMemSetAccess)(std::uint64_t address, std::size_t nbytes, const Access *accesses, std::size_t count);
    Code (*cuDeviceRegisterAsyncNotification)( // may be null: 12.4, and not on every system
        int device, void (*function)(void *info, void *data, Handle handle), void *data, Handle *handle);
    Code (*cuDeviceUnregisterAsyncNotification)(int device, Handle handle);
};

// Why there is no table.
struct Missing {
    char text[512];
};

// Each loads its driver once; null, with the reason, where it cannot be. Any thread. HIP's library has several places,
// of which one is named.
const Table *load_cuda(Missing &why);
const Table *load_hip(const char *library, Missing &why);
// What both begin with.
void *open_library(const char *library, Missing &why);

// True where no driver call may be made any more: in a child forked after the driver was started, and once the
// interpreter is ending, when the driver may have gone before us.
bool gone();

// Tells `load` how to ask whether the interpreter is ending.
void set_finalizing(int (*ask)());

// Notes that a driver has been started in this process, so that a forked child keeps off all of them.
void started();

inline Handle as_handle(std::uint64_t number) { return reinterpret_cast<Handle>(number); }

} // namespace asyncmem::gpu
