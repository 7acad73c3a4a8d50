"""Programs over torch and CuPy whose tensors live in a pool's buffers, the same for every pool to the last bit.

A program is made of its seed alone: sizes, streams, what is computed from what, and when memory is freed. All fresh
memory is filled with NaN first, in the order of its stream, so that whoever reads too early, too late or somebody
else's memory carries a NaN into the results. Nothing else makes one: all numbers are below
2, and all sums of them below 5,000, which every type can hold.

What each step computed is looked at on its own stream, right behind it and before the memory may be anybody else's; the
host waits for nothing until the end.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.arrays import dtype_size

POISON = 0xFF  # bytes of which every float is a NaN
ODD = (1, 3, 17, 33, 65, 127, 129, 255, 257, 511, 1023, 1025)
STREAMS = 4
MOST_LIVE = 24
WAIT = 30.0


@dataclass(eq=False)
class Matrix:
    """A tensor in a buffer, and the stream that wrote it."""

    buffer: Buffer
    tensor: Any
    stream: int
    shape: tuple[int, int]
    dtype: str


@dataclass(frozen=True)
class Outcome:
    """One result: the step that computed it, or "end", what it is, and its bits summed up."""

    when: str
    what: str
    digest: str
    finite: bool


@dataclass
class Program(ABC):
    """A program; subclasses compute with a library."""

    pool: AsyncMemoryPool
    seed: int
    library: Any
    live: list[Matrix] = field(default_factory=list)
    sums: list[Matrix] = field(default_factory=list)
    looks: list[tuple[str, str, Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choice = random.Random(self.seed)
        self.streams = [self.make_stream() for _ in range(STREAMS)]

    def run(self, steps: int) -> list[Outcome]:
        """Run so many steps, and return what came out: first of each step, then of what is live at the end."""
        for self.step in range(steps):
            step = self.choice.choices(
                (self.make, self.product, self.elementwise, self.reduce, self.free, self.linger), (2, 3, 3, 2, 3, 1)
            )[0]
            step()
            while len(self.live) > MOST_LIVE:
                self.free()
        self.finish()
        outcomes = [Outcome(when, what, str(int(digest)), bool(finite)) for when, what, digest, finite in self.looks]
        outcomes += [self.outcome(one) for one in (*self.live, *self.sums)]
        self.looks.clear()
        while self.live:
            self.free()
        for one in self.sums:
            self.drop(one)
        return outcomes

    # -- steps -------------------------------------------------------------------------------------------------------

    def make(self, shape: tuple[int, int] | None = None, stream: int | None = None, dtype: str | None = None) -> Matrix:
        """Make a matrix with numbers in it."""
        choice = self.choice
        shape = shape or (choice.choice(ODD), choice.choice((*ODD, 4097)))
        made = self.fresh(
            shape, choice.randrange(STREAMS) if stream is None else stream, dtype or choice.choice(self.dtypes)
        )
        with self.on(made.stream):
            self.write(made.tensor, choice.uniform(0.5, 3.0))
            self.look("make", made)
        self.live.append(made)
        return made

    def product(self) -> None:
        """Multiply a matrix by a new one of odd shape."""
        left = self.pick()
        stream = self.choice.randrange(STREAMS)
        right = self.make((left.shape[1], self.choice.choice(ODD)), stream, left.dtype)
        out = self.fresh((left.shape[0], right.shape[1]), stream, left.dtype)
        self.use(left, stream)
        with self.on(stream):
            self.multiply(left.tensor, right.tensor, out.tensor, 1 / left.shape[1])
            self.look("product", out)
        self.live.append(out)

    def elementwise(self) -> None:
        """Compute a function of each number."""
        source = self.pick()
        stream = self.choice.randrange(STREAMS)
        out = self.fresh(source.shape, stream, source.dtype)
        self.use(source, stream)
        with self.on(stream):
            self.apply(source.tensor, out.tensor)
            self.look("elementwise", out)
        self.live.append(out)

    def reduce(self) -> None:
        """Add the rows up; the sums are results."""
        source = self.pick()
        stream = self.choice.randrange(STREAMS)
        out = self.fresh((1, source.shape[1]), stream, source.dtype)
        self.use(source, stream)
        with self.on(stream):
            self.add_up(source.tensor, out.tensor)
            self.look("reduce", out)
        self.sums.append(out)

    def free(self) -> None:
        """Free a matrix, whatever still runs on it."""
        if self.live:
            self.drop(self.live.pop(self.choice.randrange(len(self.live))))

    def linger(self) -> None:
        """Keep a stream busy, so that what comes next is freed long before it runs."""
        with self.on(self.choice.randrange(STREAMS)):
            self.spin(self.choice.randrange(100_000, 4_000_000))

    # -- helpers -----------------------------------------------------------------------------------------------------

    def fresh(self, shape: tuple[int, int], stream: int, dtype: str) -> Matrix:
        """Allocate and poison."""
        nbytes = shape[0] * shape[1] * dtype_size(dtype)
        buffer = self.pool.allocate(nbytes, stream=self.streams[stream], timeout=WAIT)
        self.pool.device.fill(buffer.address, nbytes, POISON, buffer.stream)
        with self.on(stream):
            return Matrix(buffer, self.tensor(buffer, shape, dtype), stream, shape, dtype)

    def use(self, matrix: Matrix, stream: int) -> None:
        """Say that another stream reads a matrix, which makes it wait for who wrote it."""
        if matrix.stream != stream:
            matrix.buffer.use_on(self.streams[stream])

    def pick(self) -> Matrix:
        """Return some matrix."""
        return self.choice.choice(self.live) if self.live else self.make()

    def drop(self, matrix: Matrix) -> None:
        """Free a buffer; before its tensor dies as often as after."""
        if self.choice.random() < 0.5:
            matrix.buffer.free()
            matrix.tensor = None
        else:
            matrix.tensor = None
            matrix.buffer.free()

    def look(self, name: str, matrix: Matrix) -> None:
        """Have a step's result summed up, on the current stream."""
        what = f"{matrix.dtype} {matrix.shape} on stream {matrix.stream}"
        self.looks.append((f"step {self.step}: {name}", what, *self.summed_up(matrix.tensor)))

    def outcome(self, matrix: Matrix) -> Outcome:
        """Return a matrix as something to compare and to read."""
        data, finite = self.bits(matrix.tensor)
        return Outcome(
            "end", f"{matrix.dtype} {matrix.shape}", hashlib.blake2b(data, digest_size=8).hexdigest(), finite
        )

    # -- what a library does -----------------------------------------------------------------------------------------

    dtypes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def make_stream(self) -> Any: ...
    @abstractmethod
    def on(self, stream: int) -> Any: ...
    @abstractmethod
    def tensor(self, buffer: Buffer, shape: tuple[int, int], dtype: str) -> Any: ...
    @abstractmethod
    def write(self, out: Any, factor: float) -> None: ...
    @abstractmethod
    def multiply(self, left: Any, right: Any, out: Any, scale: float) -> None: ...
    @abstractmethod
    def apply(self, source: Any, out: Any) -> None: ...
    @abstractmethod
    def add_up(self, source: Any, out: Any) -> None: ...
    @abstractmethod
    def summed_up(self, tensor: Any) -> tuple[Any, Any]: ...
    @abstractmethod
    def spin(self, cycles: int) -> None: ...
    @abstractmethod
    def finish(self) -> None: ...
    @abstractmethod
    def bits(self, tensor: Any) -> tuple[bytes, bool]: ...


class TorchProgram(Program):
    """Over torch, by DLPack."""

    dtypes: ClassVar = ("float32", "float64", "float16", "bfloat16")

    def make_stream(self) -> Any:
        return self.library.cuda.Stream()

    def on(self, stream: int) -> Any:
        return self.library.cuda.stream(self.streams[stream])

    def tensor(self, buffer: Buffer, shape: tuple[int, int], dtype: str) -> Any:
        return self.library.from_dlpack(buffer.view(dtype, shape))

    def write(self, out: Any, factor: float) -> None:
        # Not in the type of `out`: torch counts the elements in it, and 65,520 of them are infinite in half precision.
        numbers = self.library.linspace(-1.0, 1.0, steps=out.numel(), dtype=self.library.float32, device=out.device)
        out.copy_(numbers.mul_(factor).sin_().view(out.shape))

    def multiply(self, left: Any, right: Any, out: Any, scale: float) -> None:
        self.library.mm(left, right, out=out)
        out.mul_(scale)

    def apply(self, source: Any, out: Any) -> None:
        self.library.tanh(source, out=out)
        out.add_(0.125)

    def add_up(self, source: Any, out: Any) -> None:
        self.library.sum(source, dim=0, keepdim=True, out=out)

    def summed_up(self, tensor: Any) -> tuple[Any, Any]:
        words = tensor.view(self.library.int16 if tensor.element_size() == 2 else self.library.int32)
        return words.sum(dtype=self.library.int64), self.library.isfinite(tensor).all()

    def spin(self, cycles: int) -> None:
        self.library.cuda._sleep(cycles)

    def finish(self) -> None:
        self.library.cuda.synchronize()

    def bits(self, tensor: Any) -> tuple[bytes, bool]:
        finite = bool(self.library.isfinite(tensor).all().item())
        return tensor.cpu().view(self.library.uint8).numpy().tobytes(), finite


class CupyProgram(Program):
    """Over CuPy, by DLPack and by bare addresses."""

    dtypes: ClassVar = ("float32", "float64", "float16")

    def make_stream(self) -> Any:
        return self.library.cuda.Stream(non_blocking=True)

    def on(self, stream: int) -> Any:
        return self.streams[stream]

    def tensor(self, buffer: Buffer, shape: tuple[int, int], dtype: str) -> Any:
        if self.choice.random() < 0.5:
            return self.library.from_dlpack(buffer.view(dtype, shape))
        memory = self.library.cuda.UnownedMemory(buffer.address, buffer.nbytes, buffer)
        return self.library.ndarray(shape, dtype, self.library.cuda.MemoryPointer(memory, 0))

    def write(self, out: Any, factor: float) -> None:
        numbers = self.library.linspace(-1.0, 1.0, out.size, dtype="float32").reshape(out.shape)
        out[...] = self.library.sin(numbers * factor)

    def multiply(self, left: Any, right: Any, out: Any, scale: float) -> None:
        self.library.matmul(left, right, out=out)
        out *= scale

    def apply(self, source: Any, out: Any) -> None:
        self.library.tanh(source, out=out)
        out += 0.125

    def add_up(self, source: Any, out: Any) -> None:
        self.library.sum(source, axis=0, keepdims=True, out=out)

    def summed_up(self, tensor: Any) -> tuple[Any, Any]:
        words = tensor.view("int16" if tensor.itemsize == 2 else "int32")
        return words.sum(dtype="int64"), self.library.isfinite(tensor).all()

    def spin(self, cycles: int) -> None:
        code = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }'
        self.library.RawKernel(code, "spin")((1,), (1,), (cycles,))

    def finish(self) -> None:
        self.library.cuda.Device().synchronize()

    def bits(self, tensor: Any) -> tuple[bytes, bool]:
        finite = bool(self.library.isfinite(tensor).all())
        return tensor.get().tobytes(), finite
