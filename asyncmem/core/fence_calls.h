/* The driver calls of stream order, as a device offers them to compiled code: a fence, once made, is a pointer of its own.
 *
 * Every call may come from any thread, at any time, without the interpreter's lock and with no context current. It returns
 * 0 for success and the driver's error code, above 0, for failure; what it could not make needs no release. None but
 * `block` may block, and `wait` for a fence behind every stream where no stream can wait for such a one. The struct, at
 * the address `Device.fence_calls`, outlives its device and every fence: the garbage collector may take the device apart
 * before the last caller that has fences of it. Only streams whose `native` is true are named to it, by their `handle`. */
#pragma once

#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* What a call returns that does nothing because it would become a part of a graph: its stream is being captured. */
#define ASYNCMEM_CAPTURED (-0x7FFFFFFE)

typedef struct AsyncmemFenceCalls {
    void *context; /* the device's own; the first argument of every call */

    /* A fence behind all that was submitted to the stream so far. The caller owns it until `release`. Nothing, and
     * ASYNCMEM_CAPTURED, where the stream is being captured, or minus the driver's code where it could not be asked. */
    int (*record)(void *context, uint64_t stream, void **fence);
    /* The same, and later work of `later` runs behind it: `record` and `wait` in one, but nothing where either stream
     * is being captured. With a fence made, `*refused` is what `wait` would have answered. */
    int (*order)(void *context, uint64_t earlier, uint64_t later, void **fence, int *refused);
    /* A fence behind all that was submitted to every stream. */
    int (*record_all)(void *context, void **fence);
    /* 0 when the device has reached the fence, -1 when it has not, else the driver's code. */
    int (*query)(void *context, void *fence);
    /* Runs later work of the stream behind the fence, which may be released as soon as this has returned. */
    int (*wait)(void *context, uint64_t stream, void *fence);
    /* Blocks this thread until the device has reached the fence. */
    int (*block)(void *context, void *fence);
    /* 1 while work submitted to the stream is captured into a graph, 0 while it is run, else minus the driver's code.
     * Waits for no lock of the driver's, so it is asked with the interpreter's lock held. */
    int (*capturing)(void *context, uint64_t stream);
    /* The fence is not needed any more. Exactly one call a fence; it cannot fail. */
    void (*release)(void *context, void *fence);
} AsyncmemFenceCalls;

#ifdef __cplusplus
}
#endif
