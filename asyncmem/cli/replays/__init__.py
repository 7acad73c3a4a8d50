"""What `asyncmem replay` does and shows: on the model, and on a device."""
