// One device's memory for another's work. The fake's devices can reach each other, where a test says nothing else.
#include "call.hpp"

API CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    return call("cuDeviceCanAccessPeer", ANYWHERE, [&](Machine& m) {
        require(can);
        m.device(peer);
        const auto& said = m.device(device).attributes;
        *can = device != peer && !said.count(-1 - peer);
    });
}

API CUresult cuDeviceGetP2PAttribute(int* value, int attribute, CUdevice device, CUdevice peer) {
    return call("cuDeviceGetP2PAttribute", ANYWHERE, [&](Machine& m) {
        require(value && attribute >= 1 && attribute <= 5);
        m.device(device), m.device(peer);
        require(device != peer, INVALID_DEVICE);
        *value = 1;
    });
}

API CUresult cuCtxEnablePeerAccess(Handle peer, unsigned flags) {
    return call("cuCtxEnablePeerAccess", IN_CONTEXT, [&](Machine& m) {
        require(flags == 0);
        auto owner = m.contexts.at(peer, INVALID_CONTEXT);
        require(owner->device != m.current().device, INVALID_DEVICE);
        require(m.current().peers.insert(owner->device).second, PEER_ACCESS_ALREADY_ENABLED);
    });
}

API CUresult cuCtxDisablePeerAccess(Handle peer) {
    return call("cuCtxDisablePeerAccess", IN_CONTEXT, [&](Machine& m) {
        auto owner = m.contexts.at(peer, INVALID_CONTEXT);
        require(m.current().peers.erase(owner->device), PEER_ACCESS_NOT_ENABLED);
    });
}

EXPORT(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer)
EXPORT(cuDeviceGetP2PAttribute, 8000, cuDeviceGetP2PAttribute)
EXPORT(cuCtxEnablePeerAccess, 4000, cuCtxEnablePeerAccess)
EXPORT(cuCtxDisablePeerAccess, 4000, cuCtxDisablePeerAccess)
