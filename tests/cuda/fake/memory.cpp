// Plain device memory, page-locked host memory, and the accounts of all memory.
#include <sys/mman.h>

#include <algorithm>

#include "call.hpp"

namespace {

constexpr std::uint64_t SMALL = 1 << 20, OFF_PAGE = 512;

std::uint64_t whole_pages(std::uint64_t nbytes) { return (nbytes + PAGE - 1) / PAGE * PAGE; }

void host_alloc(Machine& m, void** made, std::size_t nbytes) {
    require(made && nbytes);
    require(nbytes < 1ull << 40, OUT_OF_MEMORY);
    void* bytes = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(bytes != MAP_FAILED, OUT_OF_MEMORY);
    const auto address = reinterpret_cast<std::uint64_t>(bytes);
    m.memories[address] = {.address = address, .nbytes = nbytes, .kind = Kind::host, .device = m.current().device,
                           .owner = m.current().handle, .block_id = ++m.last_id};
    m.checker.add(address, nbytes);
    *made = bytes;
}

}  // namespace

std::uint64_t Machine::create(CUdevice ordinal, std::uint64_t nbytes) {
    Device& owner = device(ordinal);
    require(nbytes <= owner.total && owner.used + owner.others <= owner.total - nbytes, OUT_OF_MEMORY);
    const auto offset = space.create(nbytes);
    require(offset, OUT_OF_MEMORY);
    owner.used += nbytes;
    return offset;
}

void Machine::destroy(CUdevice ordinal, std::uint64_t offset, std::uint64_t nbytes) {
    space.destroy(offset, nbytes);
    devices[ordinal].used -= nbytes;
}

Memory* Machine::find(std::uint64_t address) {
    auto next = memories.upper_bound(address);
    if (next == memories.begin()) return nullptr;
    auto& memory = std::prev(next)->second;
    return address < memory.address + memory.nbytes ? &memory : nullptr;
}

bool Machine::there(std::uint64_t address, std::uint64_t nbytes) {
    for (const auto end = address + nbytes; address < end;) {
        const Memory* memory = find(address);
        if (!memory) return false;
        address = memory->address + memory->nbytes;
    }
    return true;
}

std::uint64_t Machine::used_at(const Physical& physical) {
    const auto& all = physical.mappings;
    auto found = std::find_if(all.rbegin(), all.rend(), [&](auto at) { return !memories.at(at).access.empty(); });
    return found == all.rend() ? 0 : *found;
}

bool Machine::moved(std::uint64_t address, std::uint64_t nbytes) {
    for (const auto end = address + nbytes; address < end;) {
        const Memory* memory = find(address);
        if (!memory) return false;
        if (memory->kind == Kind::mapped && used_at(*physicals.at(memory->owner)) != memory->address) return true;
        address = memory->address + memory->nbytes;
    }
    return false;
}

bool Machine::may_use(CUdevice user, std::uint64_t address, std::uint64_t nbytes) {
    for (const auto end = address + nbytes; address < end;) {
        const Memory* memory = find(address);
        if (!memory) return false;
        bool may = memory->device == user;
        if (memory->kind == Kind::host) may = true;
        if (memory->kind == Kind::mapped) may = memory->access.contains(user);
        if (memory->kind == Kind::plain && !may) may = context_of(user).peers.contains(memory->device);
        if (memory->kind == Kind::pooled && !may) may = pools.live.at(memory->owner)->access.contains(user);
        if (!may) return false;
        address = memory->address + memory->nbytes;
    }
    return true;
}

bool Machine::backed(std::uint64_t address, std::uint64_t nbytes) {
    for (const auto end = address + nbytes; address < end;) {
        if (const Memory* memory = find(address); memory && memory->kind != Kind::pooled) {
            if (memory->kind == Kind::mapped && memory->access.empty()) return false;
            address = memory->address + memory->nbytes;
            continue;
        }
        std::uint64_t next = 0;
        for (auto& [handle, pool] : pools.live)
            for (auto& chunk : pool->chunks)
                if (address >= chunk.address && address < chunk.address + chunk.nbytes) next = chunk.address + chunk.nbytes;
        if (!next) return false;
        address = next;
    }
    return true;
}

void Machine::free_plain(const Memory& memory) {
    const auto start = memory.address / PAGE * PAGE, nbytes = whole_pages(memory.address - start + memory.nbytes);
    const Memory gone = memory;
    memories.erase(gone.address);
    space.unmap(start, nbytes);
    space.release(start, nbytes);
    destroy(gone.device, gone.offset, nbytes);
}

API CUresult cuMemAlloc_v2(CUdeviceptr* made, std::size_t nbytes) {
    return call("cuMemAlloc", IN_CONTEXT | UNSAFE, [&](Machine& m) {
        require(made && nbytes);
        require(nbytes < 1ull << 43, OUT_OF_MEMORY);
        Context& context = m.current();
        // A driver puts small pieces between others, where no page starts.
        const auto shift = nbytes < SMALL ? OFF_PAGE : 0;
        const auto length = whole_pages(nbytes + shift);
        const auto offset = m.create(context.device, length);
        const auto start = m.space.reserve(length, PAGE);
        m.space.map(start, length, offset, true);
        const auto address = start + shift;
        m.memories[address] = {.address = address, .nbytes = nbytes, .kind = Kind::plain, .device = context.device,
                               .owner = context.handle, .offset = offset, .block_id = ++m.last_id};
        m.checker.add(address, nbytes);
        *made = address;
    });
}

void free_pooled(Machine& m, const Memory& memory);

API CUresult cuMemFree_v2(CUdeviceptr address) {
    return call("cuMemFree", IN_CONTEXT | UNSAFE, [&](Machine& m) {
        if (!address) return;
        auto found = m.memories.find(address);
        require(found != m.memories.end());
        const Memory memory = found->second;
        require(memory.kind == Kind::plain || memory.kind == Kind::pooled);
        m.checker.remove(address, memory.nbytes, "cuMemFree");
        if (memory.kind == Kind::plain) m.free_plain(memory);
        else free_pooled(m, memory);
    });
}

API CUresult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
    return call("cuMemGetInfo", IN_CONTEXT, [&](Machine& m) {
        const Device& device = m.devices[m.current().device];
        const auto taken = std::min(device.used + device.others, device.total);
        if (free) *free = device.total - taken;
        if (total) *total = device.total;
    });
}

API CUresult cuMemHostAlloc(void** made, std::size_t nbytes, unsigned flags) {
    return call("cuMemHostAlloc", IN_CONTEXT | UNSAFE, [&](Machine& m) {
        require(flags < 8);
        host_alloc(m, made, nbytes);
    });
}

API CUresult cuMemAllocHost_v2(void** made, std::size_t nbytes) {
    return call("cuMemAllocHost", IN_CONTEXT | UNSAFE, [&](Machine& m) { host_alloc(m, made, nbytes); });
}

API CUresult cuMemFreeHost(void* bytes) {
    return call("cuMemFreeHost", IN_CONTEXT | UNSAFE, [&](Machine& m) {
        auto found = m.memories.find(reinterpret_cast<std::uint64_t>(bytes));
        require(found != m.memories.end() && found->second.kind == Kind::host);
        m.checker.remove(found->first, found->second.nbytes, "cuMemFreeHost");
        munmap(bytes, found->second.nbytes);
        m.memories.erase(found);
    });
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* bytes, unsigned flags) {
    return call("cuMemHostGetDevicePointer", IN_CONTEXT, [&](Machine& m) {
        const Memory* memory = m.find(reinterpret_cast<std::uint64_t>(bytes));
        require(address && flags == 0 && memory && memory->kind == Kind::host);
        *address = reinterpret_cast<CUdeviceptr>(bytes);
    });
}

EXPORT(cuMemAlloc, 3020, cuMemAlloc_v2)
EXPORT(cuMemFree, 3020, cuMemFree_v2)
EXPORT(cuMemGetInfo, 3020, cuMemGetInfo_v2)
EXPORT(cuMemHostAlloc, 2020, cuMemHostAlloc)
EXPORT(cuMemAllocHost, 3020, cuMemAllocHost_v2)
EXPORT(cuMemFreeHost, 2000, cuMemFreeHost)
EXPORT(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2)
