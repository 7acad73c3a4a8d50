"""A device that only pretends, for tests without a GPU: `device` is the whole, the other files are its parts."""
