# cython: language_level=3, binding=False
"""Make and consume DLPack capsules: versioned ones, and the ones from before DLPack 1.0."""

cimport cython
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New, PyCapsule_SetName
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


cdef extern from "Python.h":
    bint Py_IsInitialized() nogil


# The flags of a versioned tensor.
READ_ONLY = 1
COPIED = 2


ctypedef fused Managed:
    DLManagedTensor
    DLManagedTensorVersioned


# Consumers call the deleters once, from any thread, with or without the GIL, and perhaps when there is no interpreter left
# to give anything back to.
cdef void _delete(Managed* managed) noexcept nogil:
    if Py_IsInitialized():
        with gil:
            Py_XDECREF(<PyObject*>managed.manager_ctx)
            PyMem_RawFree(managed)


# A capsule that was consumed has another name, and its tensor another owner.
cdef void _drop(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor"):
        _delete(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor"))
    elif PyCapsule_IsValid(capsule, "dltensor_versioned"):
        _delete(<DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned"))


cdef Managed* _made(Managed* kind, owner, uint64_t address, tuple shape, tuple dtype, tuple device) except NULL:
    """Return what a capsule of this kind holds: the structure, and behind it lengths and strides."""
    cdef Py_ssize_t i, ndim = len(shape)
    cdef int64_t stride = 1
    cdef DLTensor tensor
    cdef Managed* managed
    tensor.data = <void*><size_t>address
    tensor.device.device_type, tensor.device.device_id = device
    tensor.ndim = ndim
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = dtype
    tensor.byte_offset = 0
    managed = <Managed*>PyMem_RawMalloc(sizeof(Managed) + 2 * ndim * sizeof(int64_t))
    if not managed:
        raise MemoryError
    tensor.shape = <int64_t*>(managed + 1)
    # Since DLPack 1.2 strides may not be left out.
    tensor.strides = tensor.shape + ndim
    try:
        for i in reversed(range(ndim)):
            tensor.shape[i] = shape[i]
            tensor.strides[i] = stride
            stride *= max(tensor.shape[i], 1)
    except OverflowError:
        PyMem_RawFree(managed)
        raise
    managed.dl_tensor = tensor
    managed.deleter = _delete[Managed]
    Py_INCREF(owner)
    managed.manager_ctx = <void*>owner
    return managed


def legacy_capsule(owner, address, tuple shape, tuple dtype, tuple device):
    """Return a "dltensor" capsule over row-major memory; `owner` lives until the consumer is done with it."""
    return PyCapsule_New(_made[DLManagedTensor](NULL, owner, address, shape, dtype, device), "dltensor", _drop)


def versioned_capsule(owner, address, tuple shape, tuple dtype, tuple device, uint64_t flags=0):
    """Return a "dltensor_versioned" capsule (DLPack 1.0) over row-major memory; `flags` add READ_ONLY and COPIED."""
    cdef DLManagedTensorVersioned* managed
    managed = _made[DLManagedTensorVersioned](NULL, owner, address, shape, dtype, device)
    managed.version.major, managed.version.minor = 1, 0
    managed.flags = flags
    return PyCapsule_New(managed, "dltensor_versioned", _drop)


@cython.final
@cython.no_gc
cdef class Loan:
    """Memory received by DLPack; it is released when this dies, on any thread.

    Attributes:
        address: Of the first element; 0 where there is none.
        device: DLPack's (device type, number).
        dtype: DLPack's (code, bits, lanes).
        shape: The length of each dimension.
        strides: In elements; None for row-major order.
        readonly: Whether the lender forbids writing.
    """

    cdef DLManagedTensor* legacy
    cdef DLManagedTensorVersioned* versioned
    cdef readonly object address
    cdef readonly tuple device, dtype, shape, strides
    cdef readonly bint readonly

    def __dealloc__(self):
        if self.legacy and self.legacy.deleter:
            self.legacy.deleter(self.legacy)
        if self.versioned and self.versioned.deleter:
            self.versioned.deleter(self.versioned)

    cdef int read(self, DLTensor* tensor) except -1:
        cdef int32_t i
        self.device = (tensor.device.device_type, tensor.device.device_id)
        self.dtype = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
        self.shape = tuple([tensor.shape[i] for i in range(tensor.ndim)])
        if tensor.strides:
            self.strides = tuple([tensor.strides[i] for i in range(tensor.ndim)])
        self.address = <uint64_t><size_t>tensor.data + tensor.byte_offset if tensor.data else 0
        return 0


def receive(capsule):
    """Consume a capsule, which gets the name that marks it as used, and return the loan of its memory.

    Raises:
        BufferError: It is no DLPack capsule, one that was consumed before, or of a DLPack to come; it stays as it is.
    """
    cdef Loan loan = Loan.__new__(Loan)
    cdef DLManagedTensor* legacy
    cdef DLManagedTensorVersioned* versioned
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        versioned = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        # The rest of the struct is another one under another major version.
        if versioned.version.major != 1:
            raise BufferError(f"the memory comes by DLPack {versioned.version.major}, and this knows version 1")
        loan.read(&versioned.dl_tensor)
        loan.readonly = versioned.flags & READ_ONLY != 0
        PyCapsule_SetName(capsule, "used_dltensor_versioned")
        loan.versioned = versioned
    elif PyCapsule_IsValid(capsule, "dltensor"):
        legacy = <DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor")
        loan.read(&legacy.dl_tensor)
        PyCapsule_SetName(capsule, "used_dltensor")
        loan.legacy = legacy
    else:
        raise BufferError(f"expected an unconsumed DLPack capsule, got {capsule!r}")
    return loan
