"""What the devices of CUDA and ROCm are made of: one driver interface, under two sets of names.

`device` is the whole, `driver` is what the vendors fill in, `_calls` the calls that are made without the interpreter's
lock; the other files are parts.
"""
