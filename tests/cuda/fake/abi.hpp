// What of the driver's binary interface the fake speaks: codes, enumerations and layouts, declared without its headers.
#pragma once

#include <cstddef>
#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using Handle = std::uint64_t;  // contexts, streams, events, pools, graphs: pointers to callers, numbers here

enum : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    PEER_ACCESS_NOT_ENABLED = 705,
    CONTEXT_IS_DESTROYED = 709,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};

constexpr Handle LEGACY_STREAM = 1, PER_THREAD_STREAM = 2;  // 0 is the legacy one too
constexpr unsigned STREAM_NON_BLOCKING = 1;
constexpr unsigned EVENT_DISABLE_TIMING = 2;
constexpr std::size_t PAGE = 2 << 20;

enum CaptureMode : int { CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2 };
enum LocationType : int { AT_NOTHING = 0, AT_DEVICE = 1, AT_HOST = 2 };
enum AccessFlags : int { ACCESS_NONE = 0, ACCESS_READ = 1, ACCESS_READ_WRITE = 3 };

struct CUmemLocation {
    int type;
    int id;
};
struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
};
struct CUmemAllocationProp {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void* win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
};
struct CUmemPoolProps {
    int allocType;
    int handleTypes;
    CUmemLocation location;
    void* win32SecurityAttributes;
    std::size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
};
struct PoolPointer {  // CUmemPoolPtrExportData: 64 bytes of the driver's own
    Handle pool, address, block_id;
    unsigned char reserved[40];
};
constexpr int FILE_DESCRIPTOR = 1;  // of the kinds of handles that pools can have
struct CUuuid {
    unsigned char bytes[16];
};
struct CUasyncNotificationInfo {
    int type;
    union {
        unsigned long long bytesOverBudget;
    } info;
};
using CUhostFn = void (*)(void*);
using CUasyncCallback = void (*)(CUasyncNotificationInfo*, void*, Handle);

static_assert(sizeof(CUmemLocation) == 8 && sizeof(CUmemAccessDesc) == 12);
static_assert(sizeof(CUmemAllocationProp) == 32 && sizeof(CUmemPoolProps) == 88);
static_assert(sizeof(PoolPointer) == 64);
