"""Tell by an address alone whose memory it is: some protocols give away no more."""

from asyncmem.errors import BackendUnavailable, DeviceError


def cuda_index(address: int) -> int:
    """Return the index of the CUDA device that owns the memory at `address`.

    Raises:
        BackendUnavailable: CUDA cannot be used here.
        DeviceError: The driver knows of no such memory.
    """
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped]  # it has no types

        code, index = driver.cuPointerGetAttribute(
            driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address
        )
    except (ImportError, RuntimeError) as error:  # no package; no driver, or one that lacks the call
        install = "Install cuda-python and the NVIDIA driver"
        raise BackendUnavailable("cuda", tried=(f"cuda.bindings: {error}",), install=install) from error
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError("cuPointerGetAttribute", code=int(code), code_name=code.name)
    return int(index)
