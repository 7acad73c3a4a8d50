// HIP's runtime as a second way into the same fake: its names, and its own forms where they differ. A library with the
// fake in it is a driver of CUDA or a runtime of HIP by the name that it is built for; nobody calls both of one copy.
// The rules that are HIP's alone are kept here, so that code which leans on CUDA's is found out.
#include <cctype>
#include <cstdlib>
#include <utility>

#include "call.hpp"

namespace {

constexpr int VIRTUAL_MEMORY = 89, MEMORY_POOLS = 88;  // HIP numbers attributes in its own order
constexpr int CUDAS_VIRTUAL_MEMORY = 102, CUDAS_MEMORY_POOLS = 115;

int cudas_attribute(int attribute) {
    if (attribute == VIRTUAL_MEMORY) return CUDAS_VIRTUAL_MEMORY;
    return attribute == MEMORY_POOLS ? CUDAS_MEMORY_POOLS : 199;
}

// A thread works with device 0 until it says another.
CUresult in_device() {
    Machine& m = machine();
    Lock lock(m.mutex);
    if (m.visible > 0) m.work_on(m.working_on());
    return SUCCESS;
}

// Handles from before HIP 6.2: 1 names no stream, and one that was destroyed is told by another error.
CUresult known(Handle stream) {
    Machine& m = machine();
    Lock lock(m.mutex);
    if (stream == LEGACY_STREAM) return INVALID_HANDLE;
    return stream <= PER_THREAD_STREAM || m.streams.live.contains(stream) ? SUCCESS : CONTEXT_IS_DESTROYED;
}

// One whole mapping, and no other.
CUresult one_mapping(CUdeviceptr address, std::size_t nbytes) {
    Machine& m = machine();
    Lock lock(m.mutex);
    auto found = m.memories.find(address);
    return found != m.memories.end() && found->second.nbytes == nbytes ? SUCCESS : INVALID_VALUE;
}

Handle primary(int device) {
    Machine& m = machine();
    Lock lock(m.mutex);
    return device >= 0 && device < m.visible ? m.primary(device).handle : 0;
}

thread_local CUresult last_error = SUCCESS;

CUresult told(CUresult code) {
    if (code != SUCCESS && code != NOT_READY) last_error = code;
    return code;
}

// CUDA_ERROR_NOT_READY is hipErrorNotReady.
CUresult hips_name(const char** name) {
    static auto* made = new std::map<std::string, std::string>;
    Lock lock(machine().mutex);
    std::string& own = (*made)[*name];
    if (own.empty()) {
        own = "hip";
        bool first = true;
        for (const char* letter = *name + 5; *letter; ++letter) {
            if (*letter != '_') own += char(first ? *letter : std::tolower(*letter));
            first = *letter == '_';
        }
    }
    *name = own.c_str();
    return SUCCESS;
}

#define HIP(name, parameters, ...) \
    API CUresult name parameters { return told((__VA_ARGS__)); }
// Refused before it is tried.
#define IF_RIGHT(check, then) [&] { const CUresult wrong = check; return wrong ? wrong : then; }()
#define ON(stream, then) IF_RIGHT(in_device(), IF_RIGHT(known(stream), then))

}  // namespace

HIP(hipInit, (unsigned flags), cuInit(flags))
HIP(hipDrvGetErrorName, (int code, const char** name), IF_RIGHT(cuGetErrorName(code, name), hips_name(name)))
HIP(hipGetDeviceCount, (int* count), cuDeviceGetCount(count))
HIP(hipDeviceGet, (int* device, int ordinal), cuDeviceGet(device, ordinal))
HIP(hipDeviceTotalMem, (std::size_t* nbytes, int device), cuDeviceTotalMem_v2(nbytes, device))
HIP(hipDeviceGetAttribute, (int* value, int attribute, int device),
    cuDeviceGetAttribute(value, cudas_attribute(attribute), device))
HIP(hipDeviceCanAccessPeer, (int* can, int device, int peer), cuDeviceCanAccessPeer(can, device, peer))
HIP(hipDeviceEnablePeerAccess, (int peer, unsigned flags),
    IF_RIGHT(in_device(), cuCtxEnablePeerAccess(primary(peer), flags)))
HIP(hipDeviceDisablePeerAccess, (int peer), IF_RIGHT(in_device(), cuCtxDisablePeerAccess(primary(peer))))

API CUresult hipGetLastError() { return std::exchange(last_error, SUCCESS); }

HIP(hipDriverGetVersion, (int* version), call("cuDriverGetVersion", UNINITIALIZED, [&](Machine&) {
        const char* wanted = std::getenv("FAKE_HIP_VERSION");
        *version = wanted ? std::atoi(wanted) : 60'342'134;
    }))

HIP(hipGetDevice, (int* device), call("hipGetDevice", ANYWHERE, [&](Machine& m) { *device = m.working_on(); }))

HIP(hipSetDevice, (int device), call("hipSetDevice", ANYWHERE, [&](Machine& m) {
        m.device(device);
        m.work_on(device);
    }))

HIP(hipDeviceSynchronize, (), IF_RIGHT(in_device(), cuCtxSynchronize()))
HIP(hipThreadExchangeStreamCaptureMode, (int* mode), cuThreadExchangeStreamCaptureMode(mode))
HIP(hipStreamCreateWithFlags, (Handle* stream, unsigned flags), IF_RIGHT(in_device(), cuStreamCreate(stream, flags)))
HIP(hipStreamDestroy, (Handle stream), ON(stream, cuStreamDestroy_v2(stream)))
// Unlike CUDA's it ends no capture.
HIP(hipStreamGetDevice, (Handle stream, int* device),
    ON(stream, call("hipStreamGetDevice", ANYWHERE, [&](Machine& m) { *device = m.stream(stream)->context->device; })))
HIP(hipStreamGetId, (Handle stream, unsigned long long* id), ON(stream, cuStreamGetId(stream, id)))
HIP(hipStreamIsCapturing, (Handle stream, int* answer), ON(stream, cuStreamIsCapturing(stream, answer)))
HIP(hipStreamGetCaptureInfo_v2,
    (Handle stream, int* answer, std::uint64_t* id, Handle* graph, const Handle** dependencies, std::size_t* count),
    ON(stream, cuStreamGetCaptureInfo_v2(stream, answer, id, graph, dependencies, count)))
HIP(hipStreamSynchronize, (Handle stream), ON(stream, cuStreamSynchronize(stream)))
HIP(hipStreamWaitEvent, (Handle stream, Handle event, unsigned flags),
    ON(stream, cuStreamWaitEvent(stream, event, flags)))
HIP(hipStreamBeginCapture, (Handle stream, int mode), ON(stream, cuStreamBeginCapture_v2(stream, mode)))
HIP(hipStreamEndCapture, (Handle stream, Handle* graph), ON(stream, cuStreamEndCapture(stream, graph)))
HIP(hipGraphDestroy, (Handle graph), cuGraphDestroy(graph))

HIP(hipLaunchHostFunc, (Handle stream, CUhostFn function, void* argument),
    ON(stream, cuLaunchHostFunc(stream, function, argument)))

HIP(hipEventCreateWithFlags, (Handle* event, unsigned flags), IF_RIGHT(in_device(), cuEventCreate(event, flags)))
HIP(hipEventDestroy, (Handle event), IF_RIGHT(in_device(), cuEventDestroy_v2(event)))
HIP(hipEventRecord, (Handle event, Handle stream), ON(stream, cuEventRecord(event, stream)))
HIP(hipEventQuery, (Handle event), cuEventQuery(event))

HIP(hipMalloc, (CUdeviceptr* made, std::size_t nbytes), IF_RIGHT(in_device(), cuMemAlloc_v2(made, nbytes)))
HIP(hipFree, (CUdeviceptr address), IF_RIGHT(in_device(), cuMemFree_v2(address)))
HIP(hipHostMalloc, (void** made, std::size_t nbytes, unsigned flags),
    IF_RIGHT(in_device(), cuMemHostAlloc(made, nbytes, flags & ~(1u << 30))))  // coherent, of which CUDA knows nothing
HIP(hipHostFree, (void* bytes), IF_RIGHT(in_device(), cuMemFreeHost(bytes)))
HIP(hipMemGetInfo, (std::size_t* free, std::size_t* total), IF_RIGHT(in_device(), cuMemGetInfo_v2(free, total)))
HIP(hipPointerGetAttribute, (void* value, int attribute, CUdeviceptr address),
    IF_RIGHT(in_device(), cuPointerGetAttribute(value, attribute, address)))

HIP(hipMemcpyHtoDAsync, (CUdeviceptr target, const void* source, std::size_t nbytes, Handle stream),
    ON(stream, cuMemcpyHtoDAsync_v2(target, source, nbytes, stream)))
HIP(hipMemcpyDtoHAsync, (void* target, CUdeviceptr source, std::size_t nbytes, Handle stream),
    ON(stream, cuMemcpyDtoHAsync_v2(target, source, nbytes, stream)))
HIP(hipMemcpyDtoDAsync, (CUdeviceptr target, CUdeviceptr source, std::size_t nbytes, Handle stream),
    ON(stream, cuMemcpyDtoDAsync_v2(target, source, nbytes, stream)))
HIP(hipMemcpyPeerAsync, (CUdeviceptr target, int to, CUdeviceptr source, int from, std::size_t nbytes, Handle stream),
    ON(stream, cuMemcpyPeerAsync(target, primary(to), source, primary(from), nbytes, stream)))
HIP(hipMemsetD8Async, (CUdeviceptr address, unsigned char value, std::size_t count, Handle stream),
    ON(stream, cuMemsetD8Async(address, value, count, stream)))

HIP(hipMemGetAllocationGranularity, (std::size_t* granularity, const CUmemAllocationProp* wish, int option),
    cuMemGetAllocationGranularity(granularity, wish, option))
HIP(hipMemAddressReserve, (CUdeviceptr* made, std::size_t nbytes, std::size_t alignment, CUdeviceptr wish,
                           unsigned long long flags),
    cuMemAddressReserve(made, nbytes, alignment, wish, flags))
HIP(hipMemAddressFree, (CUdeviceptr address, std::size_t nbytes), cuMemAddressFree(address, nbytes))
HIP(hipMemCreate, (Handle* made, std::size_t nbytes, const CUmemAllocationProp* wish, unsigned long long flags),
    cuMemCreate(made, nbytes, wish, flags))
HIP(hipMemRelease, (Handle handle), cuMemRelease(handle))
HIP(hipMemMap, (CUdeviceptr address, std::size_t nbytes, std::size_t offset, Handle handle, unsigned long long flags),
    cuMemMap(address, nbytes, offset, handle, flags))
HIP(hipMemUnmap, (CUdeviceptr address, std::size_t nbytes),
    IF_RIGHT(one_mapping(address, nbytes), cuMemUnmap(address, nbytes)))
HIP(hipMemSetAccess, (CUdeviceptr address, std::size_t nbytes, const CUmemAccessDesc* wishes, std::size_t count),
    IF_RIGHT(one_mapping(address, nbytes), cuMemSetAccess(address, nbytes, wishes, count)))
HIP(hipMemGetAccess, (unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address),
    cuMemGetAccess(flags, location, address))

HIP(hipMemPoolCreate, (Handle* pool, const CUmemPoolProps* properties), cuMemPoolCreate(pool, properties))
HIP(hipMemPoolDestroy, (Handle pool), cuMemPoolDestroy(pool))
HIP(hipMemPoolTrimTo, (Handle pool, std::size_t keep), cuMemPoolTrimTo(pool, keep))
HIP(hipMemPoolSetAttribute, (Handle pool, int attribute, void* value), cuMemPoolSetAttribute(pool, attribute, value))
HIP(hipMemPoolSetAccess, (Handle pool, const CUmemAccessDesc* wishes, std::size_t count),
    wishes && count && wishes->flags == ACCESS_NONE ? INVALID_DEVICE : cuMemPoolSetAccess(pool, wishes, count))
HIP(hipMemPoolGetAccess, (int* flags, Handle pool, CUmemLocation* location), cuMemPoolGetAccess(flags, pool, location))
HIP(hipMallocFromPoolAsync, (CUdeviceptr* made, std::size_t nbytes, Handle pool, Handle stream),
    ON(stream, cuMemAllocFromPoolAsync(made, nbytes, pool, stream)))
HIP(hipFreeAsync, (CUdeviceptr address, Handle stream), ON(stream, cuMemFreeAsync(address, stream)))
