#include "table.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>

namespace asyncmem::gpu {
namespace {

std::atomic<bool> forked{false};
std::atomic<bool> running{false};
std::atomic<int (*)()> finalizing{nullptr};

void in_child() { forked.store(true); }

} // namespace

void *open_library(const char *library, Missing &why) {
    void *found = dlopen(library, RTLD_NOW);
    if (found == nullptr) {
        const char *text = dlerror();
        std::snprintf(why.text, sizeof why.text, "%s", text ? text : library);
    }
    return found;
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
