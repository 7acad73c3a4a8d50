"""Pipeline parallelism: a model of four transformer-like blocks, cut into two stages and into four.

Each stage has a device, a pool and streams of its own. Micro-batches go forward and backward through them by the 1F1B
schedule: a stage keeps the activations of as many micro-batches as there are stages from there on, and no task waits
for a device except to stay close to it. The gradients are those of the model in one piece, bit for bit.
"""

import contextlib
from typing import Any

import numpy as np

import asyncmem
from asyncmem.devices import Host
from asyncmem.pipeline.parallel import ParallelStage, PipelineParallel, StepContext, Use

MICRO_BATCHES = 12
BLOCKS, ROWS, WIDTH, HIDDEN = 4, 32, 64, 128
NBYTES, HIDDEN_NBYTES = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Block:
    """Two matrix products with a ReLU between them, added to what came in; and the sums of its gradients."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.up = random.standard_normal((WIDTH, HIDDEN), np.float32) / np.float32(WIDTH)
        self.down = random.standard_normal((HIDDEN, WIDTH), np.float32) / np.float32(HIDDEN)
        self.gradients = np.zeros_like(self.up), np.zeros_like(self.down)

    def forward(self, inputs: Floats, hidden: Floats, outputs: Floats) -> None:
        """Fill `hidden` and `outputs`."""
        np.matmul(inputs, self.up, out=hidden)
        np.maximum(hidden, 0, out=hidden)
        np.matmul(hidden, self.down, out=outputs)
        np.add(inputs, outputs, out=outputs)

    def backward(self, inputs: Floats, hidden: Floats, gradient: Floats, slope: Floats, answer: Floats) -> None:
        """Add to the block's gradients, and fill `answer` with that of its inputs; `slope` is room to work in."""
        np.matmul(gradient, self.down.T, out=slope)
        np.multiply(slope, hidden > 0, out=slope)
        np.matmul(slope, self.up.T, out=answer)
        np.add(gradient, answer, out=answer)
        self.gradients[0][:] += inputs.T @ slope
        self.gradients[1][:] += hidden.T @ gradient


def load(number: int, inputs: Floats) -> None:
    """Make up the micro-batch of that number."""
    inputs[:] = np.random.default_rng(number).standard_normal(inputs.shape, np.float32)


def compare(number: int, outputs: Floats, gradient: Floats, loss: Floats) -> None:
    """Fill in how far the outputs are from what the micro-batch should give, and the gradient of that."""
    wanted = np.random.default_rng((1, number)).standard_normal(outputs.shape, np.float32)
    np.subtract(outputs, wanted, out=gradient)
    loss[0] = np.square(gradient).mean()


class ModelPart:
    """Some blocks of the model, as a stage: each step queues numpy's work on the stage's stream."""

    def __init__(self, blocks: list[Block], *, first: bool, last: bool) -> None:
        self.blocks = blocks
        self.first = first
        self.last = last

    async def forward(self, item: asyncmem.Array | int, context: StepContext) -> asyncmem.Array:
        """Go through the blocks, and save what they need for the backward pass."""
        if isinstance(item, int):
            x = await context.empty((ROWS, WIDTH), use="saved")
            context.run(load, item, np.asarray(x))
        else:
            x = item
        saved = []
        for block in self.blocks:
            # The last block's outputs are the stage's answer, which the last stage only compares.
            use: Use = "saved" if block is not self.blocks[-1] else "working" if self.last else "output"
            hidden = await context.empty((ROWS, HIDDEN), use="saved")
            y = await context.empty((ROWS, WIDTH), use=use)
            context.run(block.forward, np.asarray(x), np.asarray(hidden), np.asarray(y))
            saved += [x, hidden]
            x = y
        if self.last:
            gradient, loss = await context.empty((ROWS, WIDTH), use="saved"), await context.empty(1, use="output")
            context.run(compare, context.micro_batch, np.asarray(x), np.asarray(gradient), np.asarray(loss))
            saved.append(gradient)
            x.buffer.free()
            x = loss
        context.save(*saved)
        return x

    async def backward(
        self, gradient: asyncmem.Array | None, saved: tuple[asyncmem.Array, ...], context: StepContext
    ) -> asyncmem.Array:
        """Go back through the blocks."""
        given = saved[-1] if gradient is None else gradient
        current = given
        for at in reversed(range(len(self.blocks))):
            x, hidden = saved[2 * at : 2 * at + 2]
            slope = await context.empty((ROWS, HIDDEN))
            answer = await context.empty((ROWS, WIDTH), use="working" if at else "output")
            arrays = (np.asarray(array) for array in (x, hidden, current, slope, answer))
            context.run(self.blocks[at].backward, *arrays)
            slope.buffer.free()
            if current is not given:
                current.buffer.free()
            current = answer
        return current

    def stage(self) -> ParallelStage:
        """State what a micro-batch takes here."""
        count = len(self.blocks)
        saved = count * HIDDEN_NBYTES + (count - 1 + self.first + self.last) * NBYTES
        output = 512 if self.last else NBYTES
        return ParallelStage(
            self.forward, self.backward, saved=saved, output=output, working=HIDDEN_NBYTES + 2 * NBYTES
        )


def in_one_piece() -> tuple[list[float], list[Block]]:
    """Compute the same without stages, streams and pools: the losses, and the blocks with their gradients."""
    blocks = [Block(seed) for seed in range(BLOCKS)]
    losses = np.empty((MICRO_BATCHES, 1), np.float32)
    for number in range(MICRO_BATCHES):
        x, kept = np.empty((ROWS, WIDTH), np.float32), []
        load(number, x)
        for block in blocks:
            hidden, y = np.empty((ROWS, HIDDEN), np.float32), np.empty((ROWS, WIDTH), np.float32)
            block.forward(x, hidden, y)
            kept.append((x, hidden))
            x = y
        gradient = np.empty_like(x)
        compare(number, x, gradient, losses[number])
        for block, (x, hidden) in zip(reversed(blocks), reversed(kept), strict=True):
            slope, answer = np.empty_like(hidden), np.empty_like(x)
            block.backward(x, hidden, gradient, slope, answer)
            gradient = answer
    return losses[:, 0].tolist(), blocks


async def in_stages(count: int) -> tuple[list[float], list[Block]]:
    """Compute it in so many stages."""
    blocks = [Block(seed) for seed in range(BLOCKS)]
    each = BLOCKS // count
    parts = [
        ModelPart(blocks[at * each : (at + 1) * each], first=at == 0, last=at == count - 1).stage()
        for at in range(count)
    ]
    async with contextlib.AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(asyncmem.AsyncMemoryPool(Host(), limit="16 MiB")) for _ in parts]
        model = PipelineParallel(parts, pools)
        results = await model.run(range(MICRO_BATCHES))
        losses = [float(np.asarray(loss)[0]) for loss in results]
        del results
        print(model.report())
        assert all(stage.peak_bytes <= stage.bound_bytes for stage in model.report().stages)
        assert all(pool.stats().allocated_bytes == 0 for pool in pools)
    return losses, blocks


async def main() -> None:
    """Compare both cuts with the model in one piece."""
    losses, blocks = in_one_piece()
    for count in (2, 4):
        found, made = await in_stages(count)
        assert found == losses
        for block, other in zip(blocks, made, strict=True):
            assert all(map(np.array_equal, block.gradients, other.gradients))
    print("losses and gradients are those of the model in one piece, bit for bit")


if __name__ == "__main__":
    asyncmem.run(main)
