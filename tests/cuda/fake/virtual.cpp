// Addresses and memory apart: reserve, create, map, give access, and all of it back.
#include <algorithm>

#include "call.hpp"

namespace {

bool paged(std::uint64_t number) { return number && number % PAGE == 0; }

// The mappings that make up exactly [address, address + nbytes); refuses a gap, and a part of a mapping.
std::vector<Memory*> mappings(Machine& m, std::uint64_t address, std::uint64_t nbytes) {
    require(paged(nbytes));
    std::vector<Memory*> found;
    for (const auto end = address + nbytes; address < end;) {
        auto here = m.memories.find(address);
        require(here != m.memories.end() && here->second.kind == Kind::mapped);
        address += here->second.nbytes;
        require(address <= end);
        found.push_back(&here->second);
    }
    return found;
}

bool overlaps(Machine& m, std::uint64_t address, std::uint64_t nbytes) {
    auto next = m.memories.lower_bound(address);
    return m.find(address) || (next != m.memories.end() && next->first < address + nbytes);
}

void destroy_if_unused(Machine& m, const std::shared_ptr<Physical>& physical) {
    if (physical->references || !physical->mappings.empty()) return;
    m.destroy(physical->device, physical->offset, physical->nbytes);
    m.physicals.remove(physical->handle);
}

void check(Machine& m, const CUmemAllocationProp* wish) {
    require(wish && wish->type == 1 && wish->location.type == AT_DEVICE);
    const Device& device = m.device(wish->location.id);
    require(!device.lost, device.lost);
}

}  // namespace

API CUresult cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* wish, int option) {
    return call("cuMemGetAllocationGranularity", ANYWHERE, [&](Machine& m) {
        require(granularity && option >= 0 && option <= 1);
        check(m, wish);
        *granularity = PAGE;
    });
}

API CUresult cuMemAddressReserve(CUdeviceptr* made, std::size_t nbytes, std::size_t alignment, CUdeviceptr,
                                 unsigned long long flags) {
    return call("cuMemAddressReserve", UNSAFE, [&](Machine& m) {
        require(made && paged(nbytes) && flags == 0 && (alignment & (alignment - 1)) == 0);
        const auto address = m.space.reserve(nbytes, std::max(alignment, PAGE));
        require(address, OUT_OF_MEMORY);
        m.reservations[address] = nbytes;
        *made = address;
    });
}

API CUresult cuMemAddressFree(CUdeviceptr address, std::size_t nbytes) {
    return call("cuMemAddressFree", UNSAFE, [&](Machine& m) {
        auto found = m.reservations.find(address);
        require(found != m.reservations.end() && found->second == nbytes && !overlaps(m, address, nbytes));
        m.reservations.erase(found);
        m.space.release(address, nbytes);
    });
}

API CUresult cuMemCreate(Handle* made, std::size_t nbytes, const CUmemAllocationProp* wish, unsigned long long flags) {
    return call("cuMemCreate", UNSAFE, [&](Machine& m) {
        require(made && paged(nbytes) && flags == 0);
        check(m, wish);
        auto physical = std::make_shared<Physical>();
        physical->device = wish->location.id;
        physical->nbytes = nbytes;
        physical->offset = m.create(physical->device, nbytes);
        physical->properties = *wish;
        *made = m.physicals.add(physical);
    });
}

API CUresult cuMemRelease(Handle handle) {
    return call("cuMemRelease", UNSAFE, [&](Machine& m) {
        auto physical = m.physicals.at(handle, INVALID_VALUE);
        require(physical->references);  // else its mappings alone keep it
        --physical->references;
        destroy_if_unused(m, physical);
    });
}

API CUresult cuMemRetainAllocationHandle(Handle* handle, void* address) {
    return call("cuMemRetainAllocationHandle", ANYWHERE, [&](Machine& m) {
        const Memory* memory = m.find(reinterpret_cast<std::uint64_t>(address));
        require(handle && memory && memory->kind == Kind::mapped);
        ++m.physicals.at(memory->owner)->references;
        *handle = memory->owner;
    });
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* wish, Handle handle) {
    return call("cuMemGetAllocationPropertiesFromHandle", ANYWHERE, [&](Machine& m) {
        require(wish);
        *wish = m.physicals.at(handle, INVALID_VALUE)->properties;
    });
}

API CUresult cuMemMap(CUdeviceptr address, std::size_t nbytes, std::size_t offset, Handle handle,
                      unsigned long long flags) {
    return call("cuMemMap", UNSAFE, [&](Machine& m) {
        require(paged(address) && paged(nbytes) && offset == 0 && flags == 0);
        auto physical = m.physicals.at(handle, INVALID_VALUE);
        require(physical->references && nbytes <= physical->nbytes);
        auto next = m.reservations.upper_bound(address);
        require(next != m.reservations.begin());
        auto [start, length] = *std::prev(next);
        require(address + nbytes <= start + length && !overlaps(m, address, nbytes));
        m.space.map(address, nbytes, physical->offset, false);
        m.memories[address] = {.address = address, .nbytes = nbytes, .kind = Kind::mapped, .device = physical->device,
                               .owner = handle, .offset = physical->offset, .block_id = ++m.last_id};
        if (const auto before = m.used_at(*physical)) m.checker.copy(before, nbytes, address);
        else m.checker.add(address, nbytes);
        physical->mappings.push_back(address);
    });
}

API CUresult cuMemUnmap(CUdeviceptr address, std::size_t nbytes) {
    return call("cuMemUnmap", UNSAFE, [&](Machine& m) {
        const auto gone = mappings(m, address, nbytes);
        m.checker.remove(address, nbytes, "cuMemUnmap");
        m.space.unmap(address, nbytes);
        for (Memory* memory : gone) {
            auto physical = m.physicals.at(memory->owner);
            std::erase(physical->mappings, memory->address);
            m.memories.erase(memory->address);
            destroy_if_unused(m, physical);
        }
    });
}

API CUresult cuMemSetAccess(CUdeviceptr address, std::size_t nbytes, const CUmemAccessDesc* wishes, std::size_t count) {
    return call("cuMemSetAccess", UNSAFE, [&](Machine& m) {
        require(wishes && count);
        const auto set = mappings(m, address, nbytes);
        for (std::size_t i = 0; i < count; ++i) {
            require(wishes[i].location.type == AT_DEVICE);
            m.device(wishes[i].location.id);
            require(wishes[i].flags == ACCESS_NONE || wishes[i].flags == ACCESS_READ ||
                    wishes[i].flags == ACCESS_READ_WRITE);
        }
        for (Memory* memory : set) {
            for (std::size_t i = 0; i < count; ++i) {
                if (wishes[i].flags) memory->access[wishes[i].location.id] = wishes[i].flags;
                else memory->access.erase(wishes[i].location.id);
            }
            m.space.protect(memory->address, memory->nbytes, !memory->access.empty());
        }
    });
}

API CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
    return call("cuMemGetAccess", ANYWHERE, [&](Machine& m) {
        require(flags && location && location->type == AT_DEVICE);
        m.device(location->id);
        const Memory* memory = m.find(address);
        require(memory && memory->kind == Kind::mapped);
        auto found = memory->access.find(location->id);
        *flags = found == memory->access.end() ? ACCESS_NONE : found->second;
    });
}

EXPORT(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity)
EXPORT(cuMemAddressReserve, 10020, cuMemAddressReserve)
EXPORT(cuMemAddressFree, 10020, cuMemAddressFree)
EXPORT(cuMemCreate, 10020, cuMemCreate)
EXPORT(cuMemRelease, 10020, cuMemRelease)
EXPORT(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle)
EXPORT(cuMemGetAllocationPropertiesFromHandle, 10020, cuMemGetAllocationPropertiesFromHandle)
EXPORT(cuMemMap, 10020, cuMemMap)
EXPORT(cuMemUnmap, 10020, cuMemUnmap)
EXPORT(cuMemSetAccess, 10020, cuMemSetAccess)
EXPORT(cuMemGetAccess, 10020, cuMemGetAccess)
