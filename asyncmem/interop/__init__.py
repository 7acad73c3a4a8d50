"""Other libraries on a pool: their memory comes from it, and what they free goes back. One module for each library.

Nothing is imported here: import `asyncmem.interop.torch` yourself. `use(share, *, tag, timeout)` is the same for
torch, CuPy and Numba: inside of the block it allocates all memory of this thread on the share's device from there.

Args:
    share: A lease or a part of one serves without waiting. A pool or a budget grows, or waits, on this thread.
    tag: A name under which statistics and errors count it; the library's if not told.
    timeout: Seconds to wait for memory of a pool or a budget at most; None does not wait.

Raises:
    InvalidRequest: No pool of CUDA memory; or, on an event loop's thread, no lease, or a block that awaits inside.
    BackendUnavailable: The library cannot take memory from elsewhere here, with what to do.
    OutOfMemoryError: Inside of the block; a `MemoryError`. torch raises `torch.OutOfMemoryError` from it, in its words.
"""
