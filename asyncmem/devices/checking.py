"""What a device tells a memory checker, which knows of segments and has to hear of the blocks inside them."""

from typing import Protocol


class MemoryChecker(Protocol):
    """A tool that watches every access, such as compute-sanitizer. Called from any thread; never fails.

    A pool on a device that has one goes the slower way for every request, so that it can tell of each block.
    """

    def open_segment(self, address: int, nbytes: int) -> None:
        """Hear of a segment, of which nothing may be touched yet."""
        ...

    def close_segment(self, address: int) -> None:
        """Hear that a segment goes back to the driver; one that is unknown is no mistake."""
        ...

    def open_block(self, address: int, nbytes: int) -> None:
        """Hear that a block may be used from now on, to its last byte and no further."""
        ...

    def close_block(self, address: int) -> None:
        """Hear that a block has been freed."""
        ...
