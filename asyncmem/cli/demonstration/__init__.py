"""The pipeline behind `asyncmem demo`: three stages, far more work in flight than memory, and a watch on the loop."""
