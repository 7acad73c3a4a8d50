"""Typed views over buffers, and DLPack."""
