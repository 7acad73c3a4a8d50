// CUDA's driver as a table: it is asked for one version of each function, the one whose signature the table has.
#include "table.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <mutex>

namespace asyncmem::gpu {
namespace {

constexpr char library[] = "libcuda.so.1";

using Find = Code (*)(const char *symbol, void **function, int version, std::uint64_t flags, int *result);
using FindBefore12 = Code (*)(const char *symbol, void **function, int version, std::uint64_t flags);

class Finder {
  public:
    explicit Finder(void *loaded)
        : find_(reinterpret_cast<Find>(dlsym(loaded, "cuGetProcAddress_v2"))),
          find_before_12_(reinterpret_cast<FindBefore12>(dlsym(loaded, "cuGetProcAddress"))) {}

    bool works() const { return find_ != nullptr || find_before_12_ != nullptr; }

    template <typename Function> void get(Function &function, const char *symbol, int version, bool needed = true) {
        void *found = nullptr;
        int result = 0;
        Code code = find_ ? find_(symbol, &found, version, 0, &result) : find_before_12_(symbol, &found, version, 0);
        if (code != success)
            found = nullptr;
        function = reinterpret_cast<Function>(found);
        if (found == nullptr && needed && missing == nullptr)
            missing = symbol;
    }

    const char *missing = nullptr;

  private:
    Find find_;
    FindBefore12 find_before_12_;
};

void fill(Table &table, Finder &finder) {
#define GET(name, version) finder.get(table.name, #name, version)
    GET(cuInit, 2000);
    GET(cuDriverGetVersion, 2020);
    GET(cuGetErrorName, 6000);
    GET(cuDeviceGetCount, 2000);
    GET(cuDeviceGet, 2000);
    GET(cuDevicePrimaryCtxRetain, 7000);
    GET(cuDevicePrimaryCtxRelease, 11000);
    GET(cuCtxGetCurrent, 4000);
    GET(cuCtxPushCurrent, 4000);
    GET(cuCtxPopCurrent, 4000);
    GET(cuCtxSynchronize, 2000);
    GET(cuThreadExchangeStreamCaptureMode, 10010);
    GET(cuStreamCreate, 2000);
    GET(cuStreamDestroy, 4000);
    GET(cuStreamGetCtx, 9020);
    GET(cuStreamIsCapturing, 10000);
    GET(cuStreamGetCaptureInfo, 11030);
    GET(cuStreamWaitEvent, 3020);
    GET(cuEventCreate, 2000);
    GET(cuEventDestroy, 4000);
    GET(cuEventRecord, 2000);
    GET(cuEventQuery, 2000);
    GET(cuMemCreate, 10020);
    GET(cuMemRelease, 10020);
    GET(cuMemMap, 10020);
    GET(cuMemUnmap, 10020);
    GET(cuMemSetAccess, 10020);
#undef GET
    // An old driver has none of these; that it is too old is said later, by its version and not by a symbol.
    finder.get(table.cuCtxGetId, "cuCtxGetId", 12000, false);
    finder.get(table.cuStreamGetId, "cuStreamGetId", 12000, false);
    finder.get(table.cuCtxRecordEvent, "cuCtxRecordEvent", 12050, false);
    finder.get(table.cuDeviceRegisterAsyncNotification, "cuDeviceRegisterAsyncNotification", 12040, false);
    finder.get(table.cuDeviceUnregisterAsyncNotification, "cuDeviceUnregisterAsyncNotification", 12040, false);
}

} // namespace

const Table *load_cuda(Missing &why) {
    static std::mutex lock;
    static Table table;
    static bool loaded = false;
    std::lock_guard<std::mutex> guard(lock);
    if (loaded)
        return &table;
    void *found = open_library(library, why);
    if (found == nullptr)
        return nullptr;
    Finder finder(found);
    if (!finder.works()) {
        std::snprintf(why.text, sizeof why.text, "%s has no cuGetProcAddress: it is older than CUDA 11.3", library);
        return nullptr;
    }
    table.legacy = 1;
    table.hipGetLastError = [] { return success; };
    fill(table, finder);
    if (finder.missing != nullptr) {
        std::snprintf(why.text, sizeof why.text, "%s has no %s", library, finder.missing);
        return nullptr;
    }
    loaded = true;
    return &table;
}

} // namespace asyncmem::gpu
