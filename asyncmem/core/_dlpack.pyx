# cython: language_level=3, binding=False
"""Make DLPack capsules: versioned ones, and the ones from before DLPack 1.0."""

from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from *:
    """
    #include <stdint.h>
    typedef struct { int32_t device_type; int32_t device_id; } DLDevice;
    typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
    typedef struct {
        void *data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t *shape; int64_t *strides; uint64_t byte_offset;
    } DLTensor;
    typedef struct DLManagedTensor {
        DLTensor dl_tensor; void *manager_ctx; void (*deleter)(struct DLManagedTensor *);
    } DLManagedTensor;
    typedef struct { uint32_t major; uint32_t minor; } DLPackVersion;
    typedef struct DLManagedTensorVersioned {
        DLPackVersion version; void *manager_ctx; void (*deleter)(struct DLManagedTensorVersioned *);
        uint64_t flags; DLTensor dl_tensor;
    } DLManagedTensorVersioned;
    """
    ctypedef struct DLDevice:
        int32_t device_type, device_id
    ctypedef struct DLDataType:
        uint8_t code, bits
        uint16_t lanes
    ctypedef struct DLTensor:
        void* data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    ctypedef struct DLManagedTensor:
        DLTensor dl_tensor
        void* manager_ctx
        void (*deleter)(DLManagedTensor*) noexcept
    ctypedef struct DLPackVersion:
        uint32_t major, minor
    ctypedef struct DLManagedTensorVersioned:
        DLPackVersion version
        void* manager_ctx
        void (*deleter)(DLManagedTensorVersioned*) noexcept
        uint64_t flags
        DLTensor dl_tensor


# Consumers call the deleters from any thread, with or without the GIL.
cdef void _delete(DLManagedTensor* managed) noexcept with gil:
    Py_XDECREF(<PyObject*>managed.manager_ctx)
    PyMem_RawFree(managed.dl_tensor.shape)
    PyMem_RawFree(managed)


cdef void _delete_versioned(DLManagedTensorVersioned* managed) noexcept with gil:
    Py_XDECREF(<PyObject*>managed.manager_ctx)
    PyMem_RawFree(managed.dl_tensor.shape)
    PyMem_RawFree(managed)


# A capsule that was consumed has another name, and its tensor another owner.
cdef void _drop(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor"):
        _delete(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor"))


cdef void _drop_versioned(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        _delete_versioned(<DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned"))


cdef int _fill(DLTensor* tensor, uint64_t address, tuple shape, tuple dtype, tuple device) except -1:
    cdef Py_ssize_t i, ndim = len(shape)
    cdef int64_t stride = 1
    tensor.data = <void*><size_t>address
    tensor.device.device_type, tensor.device.device_id = device
    tensor.ndim = ndim
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = dtype
    tensor.byte_offset = 0
    tensor.shape = <int64_t*>PyMem_RawMalloc(max(2 * ndim, 1) * sizeof(int64_t))
    if not tensor.shape:
        raise MemoryError
    # Since DLPack 1.2 strides may not be left out.
    tensor.strides = tensor.shape + ndim
    for i in reversed(range(ndim)):
        tensor.shape[i] = shape[i]
        tensor.strides[i] = stride
        stride *= max(<int64_t>shape[i], 1)
    return 0


def legacy_capsule(owner, address, tuple shape, tuple dtype, tuple device):
    """Answer a "dltensor" capsule over row-major memory; `owner` lives until the consumer is done with it."""
    cdef DLManagedTensor* managed = <DLManagedTensor*>PyMem_RawMalloc(sizeof(DLManagedTensor))
    if not managed:
        raise MemoryError
    try:
        _fill(&managed.dl_tensor, address, shape, dtype, device)
    except BaseException:
        PyMem_RawFree(managed)
        raise
    Py_INCREF(owner)
    managed.manager_ctx = <void*>owner
    managed.deleter = _delete
    return PyCapsule_New(managed, "dltensor", _drop)


def versioned_capsule(owner, address, tuple shape, tuple dtype, tuple device):
    """Answer a "dltensor_versioned" capsule (DLPack 1.0) over row-major, writable memory."""
    cdef DLManagedTensorVersioned* managed = (
        <DLManagedTensorVersioned*>PyMem_RawMalloc(sizeof(DLManagedTensorVersioned)))
    if not managed:
        raise MemoryError
    try:
        _fill(&managed.dl_tensor, address, shape, dtype, device)
    except BaseException:
        PyMem_RawFree(managed)
        raise
    managed.version.major, managed.version.minor = 1, 0
    managed.flags = 0
    Py_INCREF(owner)
    managed.manager_ctx = <void*>owner
    managed.deleter = _delete_versioned
    return PyCapsule_New(managed, "dltensor_versioned", _drop_versioned)
