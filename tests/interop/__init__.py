"""Other libraries on a pool."""
