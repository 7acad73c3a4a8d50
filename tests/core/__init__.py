"""The compiled core: the heap against its twin, and the handles that users hold."""
