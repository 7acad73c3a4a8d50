"""The part of Metal that is used here, as PyObjC has it: a colon of a method's name becomes an underscore.

PyObjC has no types. What stands here was compared with its metadata (`Metal/_metadata.py`, versions 11.0 to 12.2.2) and
with Apple's documentation.
"""

from typing import Protocol, TypeAlias

Range: TypeAlias = tuple[int, int]
"""An `NSRange`, which PyObjC makes of a tuple: where it begins, and how long it is."""


class Contents(Protocol):
    """A pointer to memory whose length it does not know: `objc.varlist`."""

    def as_buffer(self, count: int, /) -> memoryview:
        """View the first so many bytes, writable."""


class MTLBuffer(Protocol):
    """Memory of a device."""

    def contents(self) -> Contents:
        """Return where the host finds it."""

    def length(self) -> int:
        """Return its bytes."""


class MTLSharedEvent(Protocol):
    """A number that only grows, set and waited for by devices and by the host."""

    def signaledValue(self) -> int:
        """Return the number."""

    def setSignaledValue_(self, value: int, /) -> None:
        """Raise it; what waits for this much goes on."""


class MTLBlitCommandEncoder(Protocol):
    """Writes copies into a command buffer. On macOS, each place and length must be a multiple of 4."""

    def fillBuffer_range_value_(self, buffer: MTLBuffer, where: Range, value: int, /) -> None:
        """Fill with a byte, which PyObjC takes as a signed one: -128 to 127."""

    def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
        self, source: MTLBuffer, source_offset: int, target: MTLBuffer, target_offset: int, nbytes: int, /
    ) -> None:
        """Copy bytes."""

    def endEncoding(self) -> None:
        """Finish; before that, nothing else can be written into the command buffer."""


class NSError(Protocol):
    """What went wrong."""

    def code(self) -> int:
        """Return a number."""

    def localizedDescription(self) -> str:
        """Return it in words."""


class MTLCommandBuffer(Protocol):
    """A piece of work, which keeps alive what it uses until it has run."""

    def blitCommandEncoder(self) -> MTLBlitCommandEncoder | None:
        """Begin with copies."""

    def encodeSignalEvent_value_(self, event: MTLSharedEvent, value: int, /) -> None:
        """Set the event once all before has run, also what earlier command buffers of the queue hold."""

    def encodeWaitForEvent_value_(self, event: MTLSharedEvent, value: int, /) -> None:
        """Run nothing that comes later, also in later command buffers of the queue, before the event is signalled."""

    def commit(self) -> None:
        """Hand it in."""

    def status(self) -> int:
        """Return how far it is."""

    def error(self) -> NSError | None:
        """Return what went wrong, once it has failed."""


class MTLDevice(Protocol):
    """A GPU."""

    def name(self) -> str:
        """Return what it is called."""

    def registryID(self) -> int:
        """Return the number that it has in all processes."""

    def hasUnifiedMemory(self) -> bool:
        """Return whether its memory is the host's."""

    def recommendedMaxWorkingSetSize(self) -> int:
        """Return the bytes that it uses without becoming slow."""

    def currentAllocatedSize(self) -> int:
        """Return the bytes that this process has of it."""

    def maxBufferLength(self) -> int:
        """Return the bytes of the largest buffer."""

    def newBufferWithLength_options_(self, nbytes: int, options: int, /) -> MTLBuffer | None:
        """Get memory; None where there is too little."""

    def newCommandQueueWithMaxCommandBufferCount_(self, count: int, /) -> "MTLCommandQueue | None":
        """Make a queue that takes so many command buffers that have not run."""

    def newSharedEvent(self) -> MTLSharedEvent | None:
        """Make an event with the number 0."""


class MTLCommandQueue(Protocol):
    """Runs command buffers in the order in which they were submitted."""

    def commandBuffer(self) -> MTLCommandBuffer | None:
        """Begin with one. This **blocks** while as many have not run as the queue takes."""

    def device(self) -> MTLDevice:
        """Return whose it is."""
