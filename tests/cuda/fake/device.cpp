// What devices there are, and what they say about themselves.
#include <cstring>

#include "call.hpp"

namespace {

// What is not here is 0, as on a device that lacks it.
const auto& ATTRIBUTES = *new std::map<int, int>{
    {1, 1024},   // threads in a block
    {10, 32},    // warp size
    {16, 132},   // multiprocessors
    {19, 1},     // can map host memory
    {31, 1},     // concurrent kernels
    {40, 3},     // asynchronous engines
    {41, 1},     // unified addressing
    {75, 9},     // compute capability, major
    {76, 0},     // and minor
    {78, 1},     // stream priorities
    {102, 1},    // virtual memory management
    {103, 1},    // its handles as file descriptors
    {110, 1},    // remote access to it
    {115, 1},    // memory pools
    {116, 1},    // remote access
};

}  // namespace

Device& Machine::device(CUdevice ordinal, CUresult otherwise) {
    require(ordinal >= 0 && ordinal < visible, otherwise);
    return devices[ordinal];
}

API CUresult cuDeviceGetCount(int* count) {
    return call("cuDeviceGetCount", ANYWHERE, [&](Machine& m) {
        require(count);
        *count = m.visible;
    });
}

API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    return call("cuDeviceGet", ANYWHERE, [&](Machine& m) {
        require(device);
        m.device(ordinal);
        *device = ordinal;
    });
}

API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    return call("cuDeviceGetName", ANYWHERE, [&](Machine& m) {
        require(name && length > 0);
        m.device(device);
        std::strncpy(name, "Fake GPU", length);
        name[length - 1] = 0;
    });
}

API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    return call("cuDeviceGetUuid", ANYWHERE, [&](Machine& m) {
        require(uuid);
        std::memset(uuid, 0xfa, sizeof *uuid);
        uuid->bytes[15] = static_cast<unsigned char>(m.device(device).number);
    });
}

API CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
    return call("cuDeviceGetPCIBusId", ANYWHERE, [&](Machine& m) {
        require(id && length >= 13);
        std::snprintf(id, length, "0000:%02x:00.0", m.device(device).number + 1);
    });
}

API CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice device) {
    return call("cuDeviceTotalMem", ANYWHERE, [&](Machine& m) {
        require(bytes);
        *bytes = m.device(device).total;
    });
}

API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    return call("cuDeviceGetAttribute", ANYWHERE, [&](Machine& m) {
        require(value && attribute > 0 && attribute < 200);
        const auto& said = m.device(device).attributes;
        if (auto found = said.find(attribute); found != said.end()) *value = found->second;
        else if (attribute == 33) *value = m.device(device).number + 1;  // where on the bus
        else *value = ATTRIBUTES.contains(attribute) ? ATTRIBUTES.at(attribute) : 0;
    });
}

EXPORT(cuDeviceGetCount, 2000, cuDeviceGetCount)
EXPORT(cuDeviceGet, 2000, cuDeviceGet)
EXPORT(cuDeviceGetName, 2000, cuDeviceGetName)
EXPORT(cuDeviceGetUuid, 9020, cuDeviceGetUuid_v2)
EXPORT(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId)
EXPORT(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)
EXPORT(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)
