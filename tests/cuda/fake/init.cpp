// How a program gets at the driver: initialization, versions, function addresses and the names of errors.
#include "call.hpp"

namespace {

struct Named {
    int code;
    const char* name;
    const char* text;
};

constexpr Named ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate captures"},
    {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work"},
    {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capture"},
    {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate another thread's capture"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult look_up(int code, const char** answer, const char* Named::*field) {
    for (const Named& error : ERRORS)
        if (error.code == code) return *answer = error.*field, SUCCESS;
    *answer = nullptr;
    return INVALID_VALUE;
}

}  // namespace

API CUresult cuInit(unsigned flags) {
    return call("cuInit", UNINITIALIZED, [&](Machine& m) {
        require(flags == 0);
        require(m.visible > 0, NO_DEVICE);
        m.initialized = true;
    });
}

API CUresult cuDriverGetVersion(int* version) {
    return call("cuDriverGetVersion", UNINITIALIZED, [&](Machine& m) {
        require(version);
        *version = m.version;
    });
}

API CUresult cuGetErrorName(int code, const char** name) { return look_up(code, name, &Named::name); }

API CUresult cuGetErrorString(int code, const char** text) { return look_up(code, text, &Named::text); }

API CUresult cuGetProcAddress_v2(const char* name, void** address, int version, std::uint64_t, int* status) {
    if (!name || !address) return INVALID_VALUE;
    Machine& m = machine();
    Lock lock(m.mutex);
    bool known;
    *address = exported(name, version < m.version ? version : m.version, known);
    if (status) *status = *address ? 0 : known ? 2 : 1;
    return *address ? SUCCESS : NOT_FOUND;
}

API CUresult cuGetProcAddress(const char* name, void** address, int version, std::uint64_t flags) {
    return cuGetProcAddress_v2(name, address, version, flags, nullptr);
}

EXPORT(cuInit, 2000, cuInit)
EXPORT(cuDriverGetVersion, 2020, cuDriverGetVersion)
EXPORT(cuGetErrorName, 6000, cuGetErrorName)
EXPORT(cuGetErrorString, 6000, cuGetErrorString)
EXPORT(cuGetProcAddress, 11030, cuGetProcAddress)
EXPORT(cuGetProcAddress, 12000, cuGetProcAddress_v2)
