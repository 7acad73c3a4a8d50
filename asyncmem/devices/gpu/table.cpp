// Loading a driver, and CUDA's as a table: it is asked for one version of each function, that of the table's signature.
#include "table.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <type_traits>

namespace asyncmem::gpu {
namespace {

using Find = Code (*)(const char *symbol, void **function, int version, std::uint64_t flags, int *result);
using FindBefore12 = Code (*)(const char *symbol, void **function, int version, std::uint64_t flags);

const char *fill(void *library, Table &table) {
    auto find = reinterpret_cast<Find>(dlsym(library, "cuGetProcAddress_v2"));
    auto find_before_12 = reinterpret_cast<FindBefore12>(dlsym(library, "cuGetProcAddress"));
    if (find == nullptr && find_before_12 == nullptr)
        return "cuGetProcAddress: it is older than CUDA 11.3";
    const char *missing = nullptr;
    auto get = [&](auto &function, const char *symbol, int version, bool needed) {
        void *found = nullptr;
        int result = 0;
        Code code = find ? find(symbol, &found, version, 0, &result) : find_before_12(symbol, &found, version, 0);
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(code == success ? found : nullptr);
        if (function == nullptr && needed && missing == nullptr)
            missing = symbol;
    };
    table.legacy = 1;
#define CALL(name, version, hip, signature)                                                                              \
    if (version > 0)                                                                                                     \
        get(table.name, #name, version, true);
#define MAYBE(name, version, hip, signature) get(table.name, #name, version, false);
    ASYNCMEM_DRIVER_CALLS(CALL, MAYBE)
#undef CALL
#undef MAYBE
    table.hipGetLastError = [] { return success; };
    return missing;
}

std::atomic<bool> forked{false};
std::atomic<bool> running{false};
std::atomic<int (*)()> finalizing{nullptr};

void in_child() { forked.store(true); }

} // namespace

std::string Loader::load(const char *library, Fill fill, const Table **table) {
    std::lock_guard<std::mutex> guard(lock_);
    if (!loaded_) {
        void *found = dlopen(library, RTLD_NOW);
        if (found == nullptr) {
            const char *text = dlerror();
            return text ? text : library;
        }
        if (const char *missing = fill(found, table_))
            return std::string(library) + " has no " + missing;
        loaded_ = true;
    }
    *table = &table_;
    return {};
}

std::string load_cuda(const Table **table) {
    static Loader loader;
    return loader.load("libcuda.so.1", fill, table);
}

bool gone() {
    int (*ask)() = finalizing.load(std::memory_order_relaxed);
    return forked.load(std::memory_order_relaxed) || (ask != nullptr && ask() != 0);
}

void set_finalizing(int (*ask)()) { finalizing.store(ask); }

void started() {
    if (!running.exchange(true))
        pthread_atfork(nullptr, nullptr, in_child);
}

} // namespace asyncmem::gpu
