"""asyncmem beside the allocators of PyTorch, CuPy, RMM, cuda.core and the driver, at the same work on one GPU.

`python -m benchmarks --device cuda:0` in a checkout runs it; `docs/benchmarks.md` has the method and figures.
"""
