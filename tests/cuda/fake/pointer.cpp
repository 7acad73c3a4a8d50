// What the driver says about an address.
#include "call.hpp"

namespace {

constexpr int ON_HOST = 1, ON_DEVICE = 2;

template <class Value>
void put(void* where, Value value) {
    *static_cast<Value*>(where) = value;
}

void answer(Machine& m, void* where, int attribute, const Memory& memory, CUdeviceptr address) {
    const bool host = memory.kind == Kind::host, pooled = memory.kind == Kind::pooled;
    switch (attribute) {
        case 1: return put<Handle>(where, memory.kind == Kind::plain || host ? memory.owner : 0);
        case 2: return put<unsigned>(where, host ? ON_HOST : ON_DEVICE);
        case 3: return put<CUdeviceptr>(where, address);
        case 4:
            require(host);
            return put<CUdeviceptr>(where, address);
        case 6: return put<unsigned>(where, 0);
        case 7: case 20: return put<unsigned long long>(where, memory.block_id);
        case 8: return put<unsigned>(where, 0);
        case 9: return put<int>(where, memory.device);
        case 10: return put<unsigned>(where, memory.kind == Kind::plain);
        case 11: return put<CUdeviceptr>(where, memory.address);
        case 12: return put<std::size_t>(where, memory.nbytes);
        case 13: return put<unsigned>(where, 1);
        case 14:
            return put<unsigned long long>(
                where, memory.kind == Kind::mapped ? m.physicals.at(memory.owner)->properties.requestedHandleTypes : 0);
        case 15: return put<unsigned>(where, 0);
        case 17: return put<Handle>(where, pooled ? memory.owner : 0);
        case 18: return put<std::size_t>(where, memory.nbytes);
        case 19: return put<CUdeviceptr>(where, memory.address);
        default: refuse(INVALID_VALUE);
    }
}

}  // namespace

API CUresult cuPointerGetAttribute(void* value, int attribute, CUdeviceptr address) {
    return call("cuPointerGetAttribute", IN_CONTEXT, [&](Machine& m) {
        const Memory* memory = m.find(address);
        require(value && memory);
        answer(m, value, attribute, *memory, address);
    });
}

// Asked for several at once, the driver says nothing, by zeros, of memory that it does not know.
API CUresult cuPointerGetAttributes(unsigned count, int* attributes, void** values, CUdeviceptr address) {
    return call("cuPointerGetAttributes", IN_CONTEXT, [&](Machine& m) {
        require(attributes && values);
        const Memory* memory = m.find(address);
        for (unsigned i = 0; i < count; ++i) {
            const bool wide = attributes[i] == 1 || attributes[i] == 3 || attributes[i] == 4 || attributes[i] == 7 ||
                              attributes[i] == 11 || attributes[i] == 12 || attributes[i] == 14 || attributes[i] >= 17;
            if (wide) put<std::uint64_t>(values[i], 0);
            else put<std::uint32_t>(values[i], attributes[i] == 9 ? std::uint32_t(-2) : 0);
            if (memory && !(attributes[i] == 4 && memory->kind != Kind::host))
                answer(m, values[i], attributes[i], *memory, address);
        }
    });
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, std::size_t* nbytes, CUdeviceptr address) {
    return call("cuMemGetAddressRange", IN_CONTEXT, [&](Machine& m) {
        const Memory* memory = m.find(address);
        require(memory, NOT_FOUND);
        if (start) *start = memory->address;
        if (nbytes) *nbytes = memory->nbytes;
    });
}

EXPORT(cuPointerGetAttribute, 4000, cuPointerGetAttribute)
EXPORT(cuPointerGetAttributes, 7000, cuPointerGetAttributes)
EXPORT(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2)
