"""The GPUs of every vendor that has CUDA's driver interface."""

from asyncmem.devices import Cuda, Rocm

Kinds = type[Cuda] | type[Rocm]
