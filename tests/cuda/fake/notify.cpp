// The driver's word that the process uses more than its share of the memory.
#include "call.hpp"

API CUresult cuDeviceRegisterAsyncNotification(CUdevice device, CUasyncCallback callback, void* argument,
                                               Handle* registered) {
    return call("cuDeviceRegisterAsyncNotification", ANYWHERE, [&](Machine& m) {
        require(callback && registered);
        m.device(device);
        auto made = std::make_shared<Notification>();
        made->device = device;
        made->callback = callback;
        made->argument = argument;
        *registered = m.notifications.add(made);
    });
}

API CUresult cuDeviceUnregisterAsyncNotification(CUdevice device, Handle registered) {
    return call("cuDeviceUnregisterAsyncNotification", ANYWHERE, [&](Machine& m) {
        require(m.notifications.at(registered, INVALID_VALUE)->device == device);
        m.notifications.remove(registered);
    });
}

EXPORT(cuDeviceRegisterAsyncNotification, 12040, cuDeviceRegisterAsyncNotification)
EXPORT(cuDeviceUnregisterAsyncNotification, 12040, cuDeviceUnregisterAsyncNotification)
