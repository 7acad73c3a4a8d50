// Memory pools: stream-ordered allocation, reuse between streams, and what a pool keeps from the device.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "call.hpp"

namespace {

constexpr std::uint64_t GRAIN = 512;

std::uint64_t up(std::uint64_t nbytes, std::uint64_t unit) { return (nbytes + unit - 1) / unit * unit; }

// Blocks become one, as far as they touch, that nothing waits for any more, or only what this stream has freed.
void merge(Pool& pool, std::uint64_t stream) {
    auto whole = [&](const Block& block) { return block.free_now() || (!block.used && block.stream == stream); };
    for (auto block = pool.blocks.begin(); block != pool.blocks.end();) {
        auto next = std::next(block);
        if (next == pool.blocks.end()) break;
        Block &a = block->second, &b = next->second;
        if (block->first + a.nbytes != next->first || !whole(a) || !whole(b)) {
            ++block;
            continue;
        }
        const std::uint64_t nbytes = a.nbytes + b.nbytes;
        if (a.free_now() || (!b.free_now() && b.count > a.count)) a = b;
        a.nbytes = nbytes;
        if (a.free_now()) a.freed = nullptr;
        pool.blocks.erase(next);
    }
}

enum class Order { finished, certain, waits };  // how a block that was freed becomes another stream's

bool fits(const Pool& pool, const Block& block, const Stream& stream, Order order) {
    if (block.used) return false;
    if (!block.freed || block.stream == stream.id) return true;
    if (order == Order::waits) return pool.reuse[2];
    if (block.freed->done) return pool.reuse[1];
    return order == Order::certain && pool.reuse[0] && covers(stream.clock, block.stream, block.count);
}

// The smallest that fits, as a real one does it.
Block* take(Pool& pool, std::uint64_t nbytes, const Stream& stream, Order order, std::uint64_t& address) {
    merge(pool, stream.id);
    Block* best = nullptr;
    for (auto& [start, block] : pool.blocks) {
        if (block.nbytes < nbytes || !fits(pool, block, stream, order) || (best && block.nbytes >= best->nbytes)) continue;
        best = &block;
        address = start;
    }
    if (best && best->nbytes > nbytes) {
        Block rest = *best;
        rest.nbytes -= nbytes;
        pool.blocks[address + nbytes] = rest;
        best->nbytes = nbytes;
    }
    return best;
}

void grow(Machine& m, Pool& pool, std::uint64_t nbytes) {
    const auto length = up(nbytes, PAGE);
    require(!pool.most || pool.reserved + length <= pool.most, OUT_OF_MEMORY);
    Chunk chunk;
    chunk.offset = m.create(pool.device, length);
    chunk.nbytes = length;
    chunk.address = m.space.reserve(length, PAGE);
    m.space.map(chunk.address, length, chunk.offset, true);
    pool.blocks[chunk.address] = {.nbytes = length, .freed = nullptr};
    pool.chunks.push_back(std::move(chunk));
    pool.reserved += length;
    pool.reserved_high = std::max(pool.reserved_high, pool.reserved);
}

void allocate(Machine& m, CUdeviceptr* made, std::size_t nbytes, Pool& pool, Stream& stream) {
    require(made && nbytes);
    require(!pool.source, NOT_SUPPORTED);
    require(nbytes < 1ull << 43, OUT_OF_MEMORY);
    if (stream.capture) {  // an allocation of the graph's own, which nobody here needs
        stream.capture->invalid = true;
        refuse(NOT_SUPPORTED);
    }
    const auto length = up(nbytes, GRAIN);
    std::uint64_t address = 0;
    Block* block = take(pool, length, stream, Order::certain, address);
    if (!block) {
        try {
            grow(m, pool, length);
            block = take(pool, length, stream, Order::finished, address);
        } catch (const Refused&) {
            block = take(pool, length, stream, Order::waits, address);
            if (!block) throw;
        }
    }
    Work work;
    if (block->freed) work.behind.push_back(block->freed);
    block->used = true;
    pool.used += length;
    pool.used_high = std::max(pool.used_high, pool.used);
    m.submit(stream, std::move(work));
    m.memories[address] = {.address = address, .nbytes = nbytes, .kind = Kind::pooled, .device = pool.device,
                           .owner = pool.handle, .block_id = ++m.last_id};
    m.checker.add(address, nbytes, {stream.id, stream.clock[stream.id]});
    *made = address;
}

const Chunk& chunk_of(const Pool& pool, std::uint64_t address) {
    auto found = std::ranges::find_if(pool.chunks, [&](auto& one) { return address - one.address < one.nbytes; });
    require(found != pool.chunks.end());
    return *found;
}

// Who has imported memory of a pool is to free it, and its stream to have got there, before the pool's owner does.
void check_not_lent(Machine& m, const Pool& owner, std::uint64_t address) {
    m.progress();
    const Chunk& chunk = chunk_of(owner, address);
    const auto at = chunk.offset + address - chunk.address;
    for (auto& [handle, pool] : m.pools.live)
        for (auto& lent : pool->chunks)
            if (pool->source == owner.handle && at - lent.offset < lent.nbytes)
                if (auto found = pool->blocks.find(lent.address + at - lent.offset); found != pool->blocks.end() && !found->second.free_now())
                    m.checker.violations.push_back("cuMemFreeAsync: the memory is open elsewhere");
}

void end_if_unused(Machine& m, const std::shared_ptr<Pool>& pool) {
    if (!pool->destroyed || pool->used) return;
    m.trim(*pool, 0);
    if (pool->chunks.empty()) m.pools.remove(pool->handle);
}

Block& block_of(Pool& pool, std::uint64_t address) {
    auto found = pool.blocks.find(address);
    require(found != pool.blocks.end());
    return found->second;
}

std::shared_ptr<Pool> usable(Machine& m, Handle pool) {
    auto found = m.pools.at(pool, INVALID_VALUE);
    require(!found->destroyed);
    return found;
}

std::uint64_t* figure(Pool& pool, int attribute) {
    switch (attribute) {
        case 4: return &pool.threshold;
        case 5: return &pool.reserved;
        case 6: return &pool.reserved_high;
        case 7: return &pool.used;
        case 8: return &pool.used_high;
        default: refuse(INVALID_VALUE);
    }
}

}  // namespace

void free_pooled(Machine& m, const Memory& gone) {
    const Memory memory = gone;
    auto pool = m.pools.at(memory.owner, INVALID_VALUE);
    Block& block = block_of(*pool, memory.address);
    block.used = false;
    block.freed = nullptr;
    pool->used -= block.nbytes;
    m.memories.erase(memory.address);
    end_if_unused(m, pool);
}

void Machine::trim(Pool& pool, std::uint64_t keep) {
    merge(pool, 0);
    std::erase_if(pool.chunks, [&](Chunk& chunk) {
        auto around = std::prev(pool.blocks.upper_bound(chunk.address));
        auto [start, block] = *around;
        const std::uint64_t end = chunk.address + chunk.nbytes, after = start + block.nbytes;
        if (!block.free_now() || after < end || pool.reserved < keep + chunk.nbytes) return false;
        pool.blocks.erase(around);
        for (auto [from, to] : {std::pair{start, chunk.address}, std::pair{end, after}})
            if (from < to) pool.blocks[from] = {.nbytes = to - from, .freed = nullptr};
        pool.reserved -= chunk.nbytes;
        space.unmap(chunk.address, chunk.nbytes);
        space.release(chunk.address, chunk.nbytes);
        if (!chunk.lent) destroy(pool.device, chunk.offset, chunk.nbytes);
        return true;
    });
}

void Machine::release_unused() {
    const auto all = pools.live;
    for (auto& [handle, pool] : all) {
        if (pool->reserved > pool->threshold) trim(*pool, pool->threshold);
        end_if_unused(*this, pool);
    }
}

API CUresult cuMemPoolCreate(Handle* pool, const CUmemPoolProps* properties) {
    return call("cuMemPoolCreate", UNSAFE, [&](Machine& m) {
        require(pool && properties && properties->allocType == 1);
        require(properties->location.type == AT_DEVICE, NOT_SUPPORTED);
        const Device& device = m.device(properties->location.id, INVALID_VALUE);
        require(!device.lost, device.lost);
        for (unsigned char byte : properties->reserved) require(byte == 0);
        const auto shares = device.attributes.find(119);  // kinds of handles; none where no test says otherwise
        require(!(properties->handleTypes & ~(shares == device.attributes.end() ? 0 : shares->second)), NOT_SUPPORTED);
        auto made = std::make_shared<Pool>();
        made->device = properties->location.id;
        made->most = properties->maxSize;
        made->properties = *properties;
        *pool = m.pools.add(made);
    });
}

API CUresult cuMemPoolDestroy(Handle pool) {
    return call("cuMemPoolDestroy", UNSAFE, [&](Machine& m) {
        auto gone = usable(m, pool);
        for (auto& device : m.devices) require(device.default_pool != pool);
        gone->destroyed = true;  // its memory stays until it is freed
        for (auto& device : m.devices)
            if (device.current_pool == pool) device.current_pool = device.default_pool;
        end_if_unused(m, gone);
    });
}

API CUresult cuMemPoolTrimTo(Handle pool, std::size_t keep) {
    return call("cuMemPoolTrimTo", UNSAFE, [&](Machine& m) { m.trim(*usable(m, pool), keep); });
}

API CUresult cuMemPoolSetAttribute(Handle pool, int attribute, void* value) {
    return call("cuMemPoolSetAttribute", ANYWHERE, [&](Machine& m) {
        require(value);
        auto set = usable(m, pool);
        if (attribute >= 1 && attribute <= 3) {
            set->reuse[attribute - 1] = *static_cast<int*>(value);
            return;
        }
        std::uint64_t* what = figure(*set, attribute);
        const auto wish = *static_cast<std::uint64_t*>(value);
        require(attribute == 4 || ((attribute == 6 || attribute == 8) && wish == 0));  // marks can only be reset
        *what = attribute == 6 ? set->reserved : attribute == 8 ? set->used : wish;
    });
}

API CUresult cuMemPoolGetAttribute(Handle pool, int attribute, void* value) {
    return call("cuMemPoolGetAttribute", ANYWHERE, [&](Machine& m) {
        require(value);
        auto asked = usable(m, pool);
        if (attribute >= 1 && attribute <= 3) *static_cast<int*>(value) = asked->reuse[attribute - 1];
        else *static_cast<std::uint64_t*>(value) = *figure(*asked, attribute);
    });
}

API CUresult cuMemPoolSetAccess(Handle pool, const CUmemAccessDesc* wishes, std::size_t count) {
    return call("cuMemPoolSetAccess", ANYWHERE, [&](Machine& m) {
        auto set = usable(m, pool);
        require(wishes || !count);
        for (std::size_t i = 0; i < count; ++i) {
            require(wishes[i].location.type == AT_DEVICE);
            m.device(wishes[i].location.id);
            require(wishes[i].flags == ACCESS_NONE || wishes[i].flags == ACCESS_READ_WRITE);
            require(wishes[i].location.id != set->device || wishes[i].flags == ACCESS_READ_WRITE);
        }
        for (std::size_t i = 0; i < count; ++i) {
            if (wishes[i].flags) set->access[wishes[i].location.id] = wishes[i].flags;
            else set->access.erase(wishes[i].location.id);
        }
    });
}

API CUresult cuMemPoolGetAccess(int* flags, Handle pool, CUmemLocation* location) {
    return call("cuMemPoolGetAccess", ANYWHERE, [&](Machine& m) {
        require(flags && location && location->type == AT_DEVICE);
        m.device(location->id);
        auto asked = usable(m, pool);
        const bool may = asked->device == location->id || asked->access.contains(location->id);
        *flags = may ? ACCESS_READ_WRITE : ACCESS_NONE;
    });
}

API CUresult cuDeviceGetDefaultMemPool(Handle* pool, CUdevice device) {
    return call("cuDeviceGetDefaultMemPool", ANYWHERE, [&](Machine& m) {
        require(pool);
        *pool = m.device(device).default_pool;
    });
}

API CUresult cuDeviceGetMemPool(Handle* pool, CUdevice device) {
    return call("cuDeviceGetMemPool", ANYWHERE, [&](Machine& m) {
        require(pool);
        *pool = m.device(device).current_pool;
    });
}

API CUresult cuDeviceSetMemPool(CUdevice device, Handle pool) {
    return call("cuDeviceSetMemPool", ANYWHERE, [&](Machine& m) {
        require(usable(m, pool)->device == device);
        m.device(device).current_pool = pool;
    });
}

API CUresult cuMemAllocAsync(CUdeviceptr* made, std::size_t nbytes, Handle stream) {
    return call("cuMemAllocAsync", IN_CONTEXT, [&](Machine& m) {
        auto home = m.stream(stream);
        allocate(m, made, nbytes, *m.pools.at(m.devices[home->context->device].current_pool), *home);
    });
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr* made, std::size_t nbytes, Handle pool, Handle stream) {
    return call("cuMemAllocFromPoolAsync", IN_CONTEXT, [&](Machine& m) {
        auto home = m.stream(stream);
        allocate(m, made, nbytes, *usable(m, pool), *home);
    });
}

API CUresult cuMemFreeAsync(CUdeviceptr address, Handle stream) {
    return call("cuMemFreeAsync", IN_CONTEXT, [&](Machine& m) {
        auto home = m.stream(stream);
        if (!address) return;
        auto found = m.memories.find(address);
        require(found != m.memories.end());
        const Memory memory = found->second;
        require(memory.kind == Kind::pooled || memory.kind == Kind::plain);
        if (home->capture) {
            home->capture->invalid = true;
            refuse(NOT_SUPPORTED);
        }
        require(memory.kind == Kind::pooled, NOT_SUPPORTED);  // plain memory too, on a real driver; nobody needs it
        auto pool = m.pools.at(memory.owner, INVALID_VALUE);
        Block& block = block_of(*pool, address);
        check_not_lent(m, *pool, address);
        m.memories.erase(found);
        block.used = false;
        pool->used -= block.nbytes;
        block.freed = m.submit(*home, {});
        block.stream = home->id;
        block.count = home->clock[home->id];
        m.checker.remove_behind(address, memory.nbytes, home->clock, {home->id, block.count}, "cuMemFreeAsync");
        end_if_unused(m, pool);
    });
}

API CUresult cuMemPoolExportToShareableHandle(int* file, Handle pool, int kind, unsigned long long flags) {
    return call("cuMemPoolExportToShareableHandle", ANYWHERE, [&](Machine& m) {
        require(file && kind == FILE_DESCRIPTOR && !flags);
        auto exported = usable(m, pool);
        require(exported->properties.handleTypes & kind);
        *file = memfd_create("fake pool", MFD_CLOEXEC);
        require(*file >= 0 && pwrite(*file, &pool, sizeof pool, 0) == sizeof pool, OUT_OF_MEMORY);
    });
}

API CUresult cuMemPoolImportFromShareableHandle(Handle* pool, void* file, int kind, unsigned long long flags) {
    return call("cuMemPoolImportFromShareableHandle", UNSAFE, [&](Machine& m) {
        Handle source = 0;
        require(pool && kind == FILE_DESCRIPTOR && !flags);
        require(pread(int(reinterpret_cast<std::intptr_t>(file)), &source, sizeof source, 0) == sizeof source);
        auto made = std::make_shared<Pool>();
        made->device = usable(m, source)->device;
        made->source = source;
        *pool = m.pools.add(made);
    });
}

API CUresult cuMemPoolExportPointer(PoolPointer* exported, CUdeviceptr address) {
    return call("cuMemPoolExportPointer", ANYWHERE, [&](Machine& m) {
        const Memory* memory = m.find(address);
        require(exported && memory && memory->address == address && memory->kind == Kind::pooled);
        require(usable(m, memory->owner)->properties.handleTypes & FILE_DESCRIPTOR);
        *exported = {.pool = memory->owner, .address = address, .block_id = memory->block_id, .reserved = {}};
    });
}

API CUresult cuMemPoolImportPointer(CUdeviceptr* made, Handle pool, PoolPointer* exported) {
    return call("cuMemPoolImportPointer", UNSAFE, [&](Machine& m) {
        require(made && exported);
        auto imported = usable(m, pool);
        const Memory* memory = m.find(exported->address);
        require(imported->source && imported->source == exported->pool);
        require(memory && memory->address == exported->address && memory->block_id == exported->block_id);
        Chunk chunk = chunk_of(*m.pools.at(exported->pool), exported->address);
        const auto begin = exported->address - chunk.address, nbytes = up(memory->nbytes, GRAIN);
        chunk.address = m.space.reserve(chunk.nbytes, PAGE);
        chunk.lent = true;
        m.space.map(chunk.address, chunk.nbytes, chunk.offset, true);
        const auto address = chunk.address + begin, rest = chunk.nbytes - begin - nbytes;
        if (begin) imported->blocks[chunk.address] = {.nbytes = begin, .freed = nullptr};
        imported->blocks[address] = {.nbytes = nbytes, .used = true, .freed = nullptr};
        if (rest) imported->blocks[address + nbytes] = {.nbytes = rest, .freed = nullptr};
        imported->reserved += chunk.nbytes;
        imported->used += nbytes;
        m.memories[address] = {.address = address, .nbytes = memory->nbytes, .kind = Kind::pooled,
                               .device = imported->device, .owner = pool, .block_id = ++m.last_id};
        m.checker.copy(exported->address, memory->nbytes, address);
        imported->chunks.push_back(chunk);
        *made = address;
    });
}

EXPORT(cuMemPoolCreate, 11020, cuMemPoolCreate)
EXPORT(cuMemPoolDestroy, 11020, cuMemPoolDestroy)
EXPORT(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo)
EXPORT(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute)
EXPORT(cuMemPoolGetAttribute, 11020, cuMemPoolGetAttribute)
EXPORT(cuMemPoolSetAccess, 11020, cuMemPoolSetAccess)
EXPORT(cuMemPoolGetAccess, 11020, cuMemPoolGetAccess)
EXPORT(cuMemPoolExportToShareableHandle, 11020, cuMemPoolExportToShareableHandle)
EXPORT(cuMemPoolImportFromShareableHandle, 11020, cuMemPoolImportFromShareableHandle)
EXPORT(cuMemPoolExportPointer, 11020, cuMemPoolExportPointer)
EXPORT(cuMemPoolImportPointer, 11020, cuMemPoolImportPointer)
EXPORT(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool)
EXPORT(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool)
EXPORT(cuDeviceSetMemPool, 11020, cuDeviceSetMemPool)
EXPORT(cuMemAllocAsync, 11020, cuMemAllocAsync)
EXPORT(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync)
EXPORT(cuMemFreeAsync, 11020, cuMemFreeAsync)
