"""Other libraries on a pool: their memory comes from it, and what they free goes back. One module for each library.

Nothing is imported here: `import asyncmem.interop.torch` by who uses it.
"""
