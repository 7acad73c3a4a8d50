// Filling and copying, which really happen, in the order of their stream.
#include <cstring>

#include "call.hpp"

namespace {

constexpr std::uint64_t STAGED = 64 << 10;  // pageable bytes up to this are read before a copy's call returns

enum class Place { device, locked, pageable };

Place place(Machine& m, std::uint64_t address, std::uint64_t nbytes) {
    const Memory* memory = m.find(address);
    if (!memory) {
        require(!m.space.within(address));  // a device address with nothing there
        return Place::pageable;
    }
    require(m.there(address, nbytes));
    return memory->kind == Kind::host ? Place::locked : Place::device;
}

char* bytes_at(std::uint64_t address) { return reinterpret_cast<char*>(address); }

// True when the copy may go on: what it uses is still there, as it was when the copy was submitted.
bool still_there(Machine& m, CUdevice device, std::uint64_t address, std::uint64_t nbytes, Place where) {
    if (where == Place::pageable || m.backed(address, nbytes)) return true;
    m.lose(device, ILLEGAL_ADDRESS);
    return false;
}

struct Copy {
    std::uint64_t target, source, nbytes;
    CUdevice target_device, source_device;
    const char* call;
};

WorkPtr submit(Machine& m, Stream& stream, const Copy& copy, bool staged_here) {
    const Place from = place(m, copy.source, copy.nbytes), to = place(m, copy.target, copy.nbytes);
    std::vector<Span> reads, writes;
    if (from != Place::pageable) reads.push_back({copy.source, copy.nbytes});
    if (to != Place::pageable) writes.push_back({copy.target, copy.nbytes});
    std::vector<char> staged;
    if (staged_here) staged.assign(bytes_at(copy.source), bytes_at(copy.source) + copy.nbytes);
    Work work;
    work.effect = [&m, copy, from, to, staged_here, staged = std::move(staged)] {
        if (!still_there(m, copy.source_device, copy.source, copy.nbytes, from)) return;
        if (!still_there(m, copy.target_device, copy.target, copy.nbytes, to)) return;
        std::memmove(bytes_at(copy.target), staged_here ? staged.data() : bytes_at(copy.source), copy.nbytes);
    };
    return m.submit(stream, std::move(work), copy.call, reads, writes);
}

// How far a copy runs beside the host: pageable memory goes through the driver's own, and the host waits for that.
void run(Machine& m, Handle handle, Copy copy, bool blocking = false) {
    auto stream = m.stream(handle);
    if (!copy.nbytes) return;
    if (copy.target_device < 0) copy.target_device = copy.source_device = stream->context->device;
    const Place from = place(m, copy.source, copy.nbytes), to = place(m, copy.target, copy.nbytes);
    require(from == Place::pageable || m.may_use(copy.source_device, copy.source, copy.nbytes));
    require(to == Place::pageable || m.may_use(copy.target_device, copy.target, copy.nbytes));
    if (stream->capture) {
        m.run_or_capture(*stream, [copy](Stream& replaying) { submit(machine(), replaying, copy, false); });
        return;
    }
    const bool staged = from == Place::pageable && copy.nbytes <= STAGED && to != Place::pageable;
    auto work = submit(m, *stream, copy, staged);
    const bool waits = to == Place::pageable || (from == Place::pageable && !staged);
    if (waits || blocking) m.wait(work, *stream->context);
}

void fill(Machine& m, Handle handle, std::uint64_t address, std::uint64_t value, unsigned width, std::uint64_t count) {
    auto stream = m.stream(handle);
    const auto nbytes = count * width;
    if (!nbytes) return;
    require(address % width == 0);
    const auto device = stream->context->device;
    require(place(m, address, nbytes) != Place::pageable && m.may_use(device, address, nbytes));
    m.run_or_capture(*stream, [=](Stream& running) {
        Work work;
        work.effect = [=] {
            if (!still_there(machine(), device, address, nbytes, Place::device)) return;
            if (width == 1) std::memset(bytes_at(address), int(value), nbytes);
            else
                for (std::uint64_t i = 0; i < count; ++i) std::memcpy(bytes_at(address + i * width), &value, width);
        };
        machine().submit(running, std::move(work), "memset", {}, {{address, nbytes}});
    });
}

CUresult copy(const char* name, std::uint64_t target, std::uint64_t source, std::size_t nbytes, Handle stream) {
    return call(name, IN_CONTEXT, [&](Machine& m) { run(m, stream, {target, source, nbytes, -1, -1, name}); });
}

CUresult copy_now(const char* name, std::uint64_t target, std::uint64_t source, std::size_t nbytes) {
    return call(name, IN_CONTEXT, [&](Machine& m) {
        run(m, LEGACY_STREAM, {target, source, nbytes, -1, -1, name}, true);
    });
}

}  // namespace

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, std::size_t nbytes, Handle stream) {
    return copy("cuMemcpyHtoDAsync", target, reinterpret_cast<std::uint64_t>(source), nbytes, stream);
}

API CUresult cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, std::size_t nbytes, Handle stream) {
    return copy("cuMemcpyDtoHAsync", reinterpret_cast<std::uint64_t>(target), source, nbytes, stream);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, std::size_t nbytes, Handle stream) {
    return copy("cuMemcpyDtoDAsync", target, source, nbytes, stream);
}

API CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, std::size_t nbytes, Handle stream) {
    return copy("cuMemcpyAsync", target, source, nbytes, stream);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, std::size_t nbytes) {
    return copy_now("cuMemcpyHtoD", target, reinterpret_cast<std::uint64_t>(source), nbytes);
}

API CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, std::size_t nbytes) {
    return copy_now("cuMemcpyDtoH", reinterpret_cast<std::uint64_t>(target), source, nbytes);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, std::size_t nbytes) {
    return copy_now("cuMemcpyDtoD", target, source, nbytes);
}

API CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, std::size_t nbytes) {
    return copy_now("cuMemcpy", target, source, nbytes);
}

API CUresult cuMemcpyPeerAsync(CUdeviceptr target, Handle to, CUdeviceptr source, Handle from, std::size_t nbytes,
                               Handle stream) {
    return call("cuMemcpyPeerAsync", IN_CONTEXT, [&](Machine& m) {
        const auto writer = m.contexts.at(to, INVALID_CONTEXT)->device;
        const auto reader = m.contexts.at(from, INVALID_CONTEXT)->device;
        run(m, stream, {target, source, nbytes, writer, reader, "cuMemcpyPeerAsync"});
    });
}

API CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, std::size_t count, Handle stream) {
    return call("cuMemsetD8Async", IN_CONTEXT, [&](Machine& m) { fill(m, stream, address, value, 1, count); });
}

API CUresult cuMemsetD16Async(CUdeviceptr address, unsigned short value, std::size_t count, Handle stream) {
    return call("cuMemsetD16Async", IN_CONTEXT, [&](Machine& m) { fill(m, stream, address, value, 2, count); });
}

API CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, std::size_t count, Handle stream) {
    return call("cuMemsetD32Async", IN_CONTEXT, [&](Machine& m) { fill(m, stream, address, value, 4, count); });
}

API CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, std::size_t count) {
    return call("cuMemsetD8", IN_CONTEXT, [&](Machine& m) { fill(m, LEGACY_STREAM, address, value, 1, count); });
}

API CUresult cuMemsetD32_v2(CUdeviceptr address, unsigned value, std::size_t count) {
    return call("cuMemsetD32", IN_CONTEXT, [&](Machine& m) { fill(m, LEGACY_STREAM, address, value, 4, count); });
}

EXPORT(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2)
EXPORT(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2)
EXPORT(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2)
EXPORT(cuMemcpyAsync, 4000, cuMemcpyAsync)
EXPORT(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2)
EXPORT(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2)
EXPORT(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2)
EXPORT(cuMemcpy, 4000, cuMemcpy)
EXPORT(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync)
EXPORT(cuMemsetD8Async, 3020, cuMemsetD8Async)
EXPORT(cuMemsetD16Async, 3020, cuMemsetD16Async)
EXPORT(cuMemsetD32Async, 3020, cuMemsetD32Async)
EXPORT(cuMemsetD8, 3020, cuMemsetD8_v2)
EXPORT(cuMemsetD32, 3020, cuMemsetD32_v2)
