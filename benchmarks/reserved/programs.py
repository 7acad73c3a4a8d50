"""Programs that no policy was tuned to: families made from a seed, and real recordings cut in time or changed."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from asyncmem.replay import Op, Trace

MIB: Final = 1 << 20
MS: Final = 1000
HALF: Final = 2
"""Bytes of a number in bf16."""


class Tape:
    """Writes down what a program allocates and frees; its clock is the host's, which runs ahead of the GPU.

    Args:
        seed: Of `draw`, from which a program takes all that varies.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)  # noqa: S311  # the same each time
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._live: dict[int, tuple[int, int]] = {}
        self._taken = 0
        self._now = 0.0

    def take(self, nbytes: float, stream: int = 0) -> int:
        """Allocate, and return the allocation's number."""
        number, size = self._taken, max(1, int(nbytes))
        self._taken += 1
        self._live[number] = size, stream
        self._rows.append((Op.ALLOCATE, stream, number, size, int(self._now)))
        self.rest(self.draw.uniform(5, 15))
        return number

    def free(self, *numbers: int, stream: int | None = None) -> None:
        """Free allocations, used last on this stream instead of their own."""
        for number in numbers:
            size, home = self._live.pop(number)
            self._rows.append((Op.FREE, home if stream is None else stream, number, size, int(self._now)))
            self._now += 1

    def step(self, nbytes: float, *scratch: float) -> int:
        """Allocate a result, with scratch memory that lives as long as the operation is submitted."""
        used = [self.take(one) for one in scratch]
        found = self.take(nbytes)
        self.free(*used)
        return found

    def replace(self, number: int, nbytes: float, *scratch: float) -> int:
        """Compute a result from another one, which is freed."""
        found = self.step(nbytes, *scratch)
        self.free(number)
        return found

    def size_of(self, number: int) -> int:
        """Return the bytes of an allocation that is live."""
        return self._live[number][0]

    def rest(self, us: float) -> None:
        """Let time pass."""
        self._now += us

    def weights(self, *sizes: float) -> list[int]:
        """Allocate what lives as long as the program."""
        return [self.take(one) for one in sizes]

    def trace(self, name: str) -> Trace:
        """Return the recording; what is live stays so."""
        return Trace(*np.array(self._rows, np.int64).T, name=name)


def diffusion(seed: int) -> Trace:
    """Sample images of many sides and batches: a U-Net keeps what its way down made, a decoder ends each image."""
    tape = Tape(seed)
    draw = tape.draw
    widths = [320, 640, 1280, 1280]
    tape.weights(*(w * w * 9 * HALF * k for w in widths for k in (1, 1, 2, 1)))
    for _ in range(10):
        batch, side = 2 * draw.randint(1, 6), 8 * draw.randint(6, 16)
        latent = tape.take(batch * 4 * side * side * 4)
        prompt = tape.take(batch * 77 * 1024 * HALF)
        for _ in range(draw.randint(12, 24)):
            x, kept = tape.step(batch * 320 * side * side * HALF), []
            for level, width in enumerate(widths):
                pixels = batch * max(1, side >> level) ** 2
                for _ in range(2):
                    x2 = tape.step(pixels * width * HALF, pixels * width * HALF, pixels * width * 4)
                    rows = min(pixels // batch, 4096) ** 2 * batch * HALF if level else 0
                    x2 = tape.replace(x2, pixels * width * HALF, pixels * width * 3 * HALF, *([rows] if rows else []))
                    kept.append(x2)
                if level == 0:
                    tape.free(x)
                    x = -1
            x = tape.step(batch * widths[-1] * max(1, side >> 3) ** 2 * HALF)
            for level, width in reversed(list(enumerate(widths))):
                pixels = batch * max(1, side >> level) ** 2
                for _ in range(2):
                    both = tape.step(pixels * 2 * width * HALF)
                    tape.free(x, kept.pop())
                    x = tape.replace(both, pixels * width * HALF, pixels * width * HALF, pixels * width * 4)
            noise = tape.replace(x, batch * 4 * side * side * 4)
            latent = tape.replace(latent, batch * 4 * side * side * 4)
            tape.free(noise)
            tape.rest(draw.uniform(5, 20) * MS)
        tape.free(prompt)
        for level, width in enumerate((512, 512, 256, 128)):
            grown = batch // 2 * (side << level) ** 2 * width
            latent = tape.replace(latent, grown * HALF, grown * HALF, grown * 4)
        image = tape.replace(latent, batch // 2 * 3 * (side * 8) ** 2 * 4)
        tape.rest(draw.uniform(20, 60) * MS)
        tape.free(image)
    return tape.trace(f"diffusion_{seed}")


def serving(seed: int) -> Trace:
    """Serve prompts of many lengths: their KV cache is blocks, some shared by prefix, and freed by the last reader."""
    tape = Tape(seed)
    draw = tape.draw
    hidden, layers = draw.choice([(4096, 8), (2048, 16), (5120, 6)])
    tape.weights(*(12 * hidden * hidden * HALF for _ in range(layers)))
    block = 64 * 2 * hidden * HALF * layers // 4
    prefixes: dict[int, tuple[list[int], int]] = {}
    running: list[tuple[int, list[int], int]] = []
    for _ in range(700):
        while len(running) < 24 and draw.random() < 0.35:
            which = draw.randrange(6)
            if which not in prefixes:
                prefixes[which] = [tape.take(block) for _ in range(draw.randint(1, 12))], 0
            shared, readers = prefixes[which]
            prefixes[which] = shared, readers + 1
            tokens = int(draw.lognormvariate(6, 1)) % 8000 + 16
            own = [tape.take(block) for _ in range(-(-tokens // 64))]
            x = tape.take(tokens * hidden * HALF)
            for _ in range(layers):
                x = tape.replace(
                    x, tokens * hidden * HALF, tokens * 3 * hidden * HALF, tokens * hidden * 4, tokens * hidden * 8
                )
            tape.free(tape.replace(x, 128_256 * 4))
            tape.rest(draw.uniform(2, 20) * MS)
            running.append((which, own, draw.randint(8, 250)))
        tokens = max(1, len(running))
        x = tape.take(tokens * hidden * HALF)
        for _ in range(layers):
            x = tape.replace(x, tokens * hidden * HALF, tokens * 3 * hidden * HALF, tokens * hidden * 8)
        tape.free(tape.replace(x, tokens * 128_256 * 4, tokens * 128_256 * HALF))
        tape.rest(draw.uniform(3, 8) * MS)
        left = []
        for which, own, more in running:
            if more % 64 == 0:
                own.append(tape.take(block))
            if more > 1:
                left.append((which, own, more - 1))
                continue
            tape.free(*own)
            shared, readers = prefixes[which]
            prefixes[which] = shared, readers - 1
            if readers == 1 and draw.random() < 0.5:
                tape.free(*prefixes.pop(which)[0])
        running = left
    return tape.trace(f"serving_{seed}")


def recompute(seed: int) -> Trace:
    """Train a transformer that keeps each layer's input alone and computes the rest again in the backward pass."""
    tape = Tape(seed)
    draw = tape.draw
    hidden, layers = draw.choice([(1024, 24), (1536, 16), (2048, 12)])
    every = draw.choice([1, 1, 2])
    size = 12 * hidden * hidden
    tape.weights(*(size * 4 for _ in range(layers)), 50_257 * hidden * 4)
    states: list[int] = []
    for _ in range(24):
        tokens = draw.randint(2, 12) * draw.randint(128, 2048)
        wide = tokens * hidden * HALF
        forward = (3 * wide, wide, wide, 4 * wide, 4 * wide, wide)
        x = tape.take(wide)
        kept = [x]
        for layer in range(layers):
            inside = [tape.take(one) for one in forward]
            x = tape.take(wide)
            tape.free(*inside)
            kept.append(x)
            if layer % every:
                tape.free(kept.pop(-2))
            tape.rest(300)
        logits = tape.take(tokens * 50_257 * HALF)
        loss = tape.step(tokens * 50_257 * 4)
        tape.free(logits)
        grad = tape.replace(loss, wide, tokens * 50_257 * HALF)
        grads = [tape.take(50_257 * hidden * 4)]
        tape.free(kept.pop())
        for _ in range(layers // every):
            stack = [[tape.take(one) for one in (*forward, wide)] for _ in range(every)]
            for inside in reversed(stack):
                for nbytes, done in zip(reversed((*forward, wide)), reversed(inside), strict=True):
                    grad = tape.replace(grad, nbytes if nbytes == wide else wide, nbytes)
                    tape.free(done)
                grads.append(tape.take(size * 4))
            tape.free(kept.pop())
            tape.rest(700)
        tape.free(grad, *kept)
        if not states:
            states = tape.weights(*(size * 4 for _ in range(2 * layers)), *(50_257 * hidden * 4 for _ in range(2)))
        tape.rest(draw.uniform(20, 60) * MS)
        tape.free(*grads)
    return tape.trace(f"recompute_{seed}")


def lstm(seed: int) -> Trace:
    """Train an LSTM on sentences of many lengths: gates and states of each moment wait for the backward pass."""
    tape = Tape(seed)
    draw = tape.draw
    hidden = draw.choice([1024, 1536, 2048])
    words = draw.choice([8_000, 20_000, 32_000])
    tape.weights(words * hidden * 4, *(8 * hidden * hidden * 4 for _ in range(6)))
    for _ in range(16):
        batch, length = draw.choice([32, 64, 128, 256]), draw.randint(10, 120)
        cell = batch * hidden * 4
        x = tape.take(length * cell)
        layers = []
        for _ in range(2):
            gates = [[tape.take(4 * cell), tape.take(cell), tape.take(cell)] for _ in range(length)]
            out = tape.take(length * cell)
            layers.append((gates, out, x))
            x = out
        logits = tape.take(length * batch * words * 4)
        chances = tape.take(length * batch * words * 4)
        grad = tape.replace(chances, length * batch * words * 4)
        tape.free(logits)
        grad = tape.replace(grad, length * cell)
        grads = [tape.take(words * hidden * 4)]
        for gates, out, _ in reversed(layers):
            below = tape.take(length * cell)
            for moment in reversed(gates):
                tape.free(tape.step(4 * cell, cell))
                tape.free(*moment)
            grads += [tape.take(8 * hidden * hidden * 4) for _ in range(3)]
            tape.free(grad, out)
            grad = below
        tape.free(grad, layers[0][2])
        tape.rest(draw.uniform(40, 120) * MS)
        tape.free(*grads)
    return tape.trace(f"lstm_{seed}")


def two_models(seed: int) -> Trace:
    """Reinforcement learning: one model writes answers with a cache that grows by copies, two judge, one trains."""
    tape = Tape(seed)
    draw = tape.draw
    hidden, layers = draw.choice([(1024, 12), (1536, 10), (2048, 8)])
    size = 12 * hidden * hidden
    tape.weights(*(size * HALF for _ in range(2 * layers)), *(size * 8 for _ in range(layers)))
    for _ in range(8):
        batch, prompt = draw.choice([8, 16, 24, 32]), draw.randint(32, 512)
        length = prompt
        caches = [tape.take(2 * batch * length * hidden * HALF) for _ in range(layers)]
        for _ in range(draw.randint(20, 70)):
            length += 4
            x = tape.take(batch * hidden * HALF)
            for layer in range(layers):
                caches[layer] = tape.replace(caches[layer], 2 * batch * length * hidden * HALF)
                x = tape.replace(x, batch * hidden * HALF, batch * 4 * hidden * HALF)
            tape.free(tape.replace(x, batch * 32_000 * 4))
            tape.rest(draw.uniform(1, 3) * MS)
        tape.free(*caches)
        wide = batch * length * hidden * HALF
        for _ in range(2):
            x = tape.take(wide)
            for _ in range(layers):
                x = tape.replace(x, wide, 3 * wide, 4 * wide)
            chances = tape.replace(x, batch * length * 32_000 * HALF)
            tape.free(tape.replace(chances, batch * length * 4, batch * length * 32_000 * 4))
            tape.rest(5 * MS)
        for part in range(4):
            some = wide // 4 if part else wide // 4 + draw.randrange(wide // 8)
            kept = [[tape.take(one * some) for one in (1, 3, 1, 4, 1)] for _ in range(layers)]
            grad = tape.step(some, some // hidden * 32_000, 2 * some // hidden * 32_000)
            grads = []
            for inside in reversed(kept):
                for done in reversed(inside):
                    grad = tape.replace(grad, some, 4 * some)
                    tape.free(done)
                grads.append(tape.take(size * HALF))
            tape.free(grad)
            tape.rest(draw.uniform(5, 15) * MS)
            tape.free(*grads)
    return tape.trace(f"two_models_{seed}")


def evaluation(seed: int) -> Trace:
    """Train a conv net, and between epochs evaluate it on larger batches whose outputs are kept and joined."""
    tape = Tape(seed)
    draw = tape.draw
    widths = [draw.choice([64, 96]) << min(i // 3, 3) for i in range(14)]
    tape.weights(*(9 * w * w * 4 for w in widths for _ in range(2)))
    side = draw.choice([96, 128, 160, 224])

    def sizes(batch: int) -> list[int]:
        return [batch * w * (side >> (1 + min(i // 3, 4))) ** 2 * 4 for i, w in enumerate(widths)]

    for _ in range(4):
        for _ in range(30):
            batch = draw.choice([64, 64, 64, 48, 17])
            kept = [tape.take(batch * 3 * side * side * 4)]
            for nbytes in sizes(batch):
                kept += [tape.step(nbytes, draw.choice([8, 32, 64]) * MIB), tape.take(nbytes)]
            grad = tape.take(batch * 4000)
            grads = []
            for nbytes in reversed(sizes(batch)):
                grad = tape.replace(grad, nbytes, nbytes, draw.choice([8, 32, 64]) * MIB)
                tape.free(kept.pop(), kept.pop())
                grads.append(tape.take(nbytes // 64))
            tape.free(grad, *kept)
            tape.rest(draw.uniform(5, 30) * MS)
            tape.free(*grads)
        outputs = []
        for _ in range(draw.randint(10, 25)):
            batch = draw.choice([256, 256, 200, 96])
            x = tape.take(batch * 3 * side * side * 4)
            for nbytes in sizes(batch):
                x = tape.replace(x, nbytes, draw.choice([8, 32, 64]) * MIB)
            outputs.append(tape.replace(x, batch * draw.choice([1000, 4000, 21_000]) * 4))
            tape.rest(draw.uniform(5, 20) * MS)
        joined = tape.take(sum(map(tape.size_of, outputs)))
        tape.free(*outputs)
        tape.rest(50 * MS)
        tape.free(joined)
    return tape.trace(f"evaluation_{seed}")


def prefetch(seed: int) -> Trace:
    """Train on batches that a side stream copies ahead, one to four of them at a time."""
    tape = Tape(seed)
    draw = tape.draw
    widths = [64, 128, 256, 512]
    tape.weights(*(9 * w * w * 40 for w in widths for _ in range(3)))
    ahead = draw.randint(1, 4)
    ready: list[tuple[list[int], int, int]] = []
    for _ in range(150):
        while len(ready) <= ahead:
            batch, side = draw.randint(8, 64), 16 * draw.randint(4, 14)
            raw = tape.take(batch * 3 * side * side, 1)
            ready.append(([tape.take(batch * 3 * side * side * 4, 1), tape.take(batch * 8, 1)], batch, side))
            tape.free(raw)
        inputs, batch, side = ready.pop(0)
        kept = []
        for level, width in enumerate(widths):
            nbytes = batch * width * (side >> (level + 1)) ** 2 * 4
            for _ in range(2):
                kept += [tape.step(nbytes, draw.choice([1, 4, 16]) * MIB), tape.take(nbytes // 4)]
        grad = tape.take(batch * 4000)
        for level, width in reversed(list(enumerate(widths))):
            nbytes = batch * width * (side >> (level + 1)) ** 2 * 4
            for _ in range(2):
                grad = tape.replace(grad, nbytes, nbytes)
                tape.free(kept.pop(), kept.pop())
        tape.free(grad)
        tape.free(*inputs, stream=0)
        tape.rest(draw.uniform(2, 15) * MS)
    return tape.trace(f"prefetch_{seed}")


FAMILIES: Final[Sequence[Callable[[int], Trace]]] = (
    diffusion, serving, recompute, lstm, two_models, evaluation, prefetch,
)  # fmt: skip


def part(trace: Trace, first: float, last: float) -> Trace:
    """Cut a recording in time; what is live at the cut is allocated first."""
    kept = np.flatnonzero(trace.op <= Op.FREE)
    kept = kept[int(first * kept.size) : int(last * kept.size)]
    begin = kept[0]
    taken = np.flatnonzero(trace.op[:begin] == Op.ALLOCATE)
    gone = trace.id[:begin][trace.op[:begin] == Op.FREE]
    rows = np.concatenate((taken[~np.isin(trace.id[taken], gone)], kept))
    _, first_row, place = np.unique(trace.id[rows], return_index=True, return_inverse=True)
    numbers = np.argsort(np.argsort(first_row))[place].astype(np.int32)
    time = np.maximum(trace.time_us[rows] - trace.time_us[begin], 0)
    name = f"{trace.name}[{first:g}:{last:g}]"
    return Trace(trace.op[rows], trace.stream[rows], numbers, trace.nbytes[rows], time, name=name)


def mutated(trace: Trace, seed: int, stretch: float = 0.35, late: float = 0.05) -> Trace:
    """Scale each distinct size by a factor of its own, and let some blocks live longer."""
    draw = np.random.default_rng(seed)
    sizes, place = np.unique(trace.nbytes, return_inverse=True)
    scaled = np.maximum(1, sizes * np.exp(draw.uniform(-stretch, stretch, sizes.size))).astype(np.int64)
    kept = trace.op <= Op.FREE
    key = np.arange(len(trace), dtype=float)
    delayed = (trace.op == Op.FREE) & (draw.random(len(trace)) < late)
    key[delayed] += draw.exponential(400, int(delayed.sum()))
    rows = np.argsort(key, kind="stable")
    rows = rows[kept[rows]]
    time = np.maximum.accumulate(trace.time_us[rows])
    return Trace(
        trace.op[rows], trace.stream[rows], trace.id[rows], scaled[place][rows], time, name=f"{trace.name}~{seed}"
    )


def unseen(recordings: Sequence[Trace], half: int) -> Iterator[Trace]:
    """Make the programs of one half: 0 is for tuning, 1 for reports.

    Args:
        recordings: What is cut and changed; the families need none.
        half: Which.
    """
    for family in FAMILIES:
        for seed in (int(half), half + 2):
            yield family(seed)
    for trace in recordings:
        yield part(mutated(trace, half), 0.0, 0.5) if half else part(trace, 0.35, 0.7)
        yield mutated(trace, 10 + half)
