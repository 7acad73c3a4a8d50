"""Two processes on one host: one makes frames, the other looks at them. No frame is copied, and memory is bounded.

Descriptors go through a pipe, one line each. The maker frees each frame at once; its memory is used again when the
viewer has let go of it, so the maker is held back by the viewer and not by the length of the pipe.
"""

import asyncio
import sys

import numpy as np

import asyncmem
from asyncmem import share

FRAMES, SHAPE = 64, (1080, 1920)
LIMIT = "16 MiB"  # eight frames


async def view() -> None:
    """Look at each frame: the other process, started by this very file."""
    for line in sys.stdin:
        async with share.attach_async(bytes.fromhex(line)) as frame:
            print(int(frame.numpy(np.uint8).max()), flush=True)


async def make(viewer: asyncio.subprocess.Process) -> int:
    """Send the frames, and return the most bytes that they took."""
    assert viewer.stdin is not None
    async with asyncmem.AsyncMemoryPool("host", share_limit=LIMIT) as pool:
        for number in range(FRAMES):
            frame = await pool.shared.empty(SHAPE, "uint8", tag="frame")
            frame.numpy(np.uint8)[:] = number
            viewer.stdin.write(share.export(frame, pid=viewer.pid).descriptor.hex().encode() + b"\n")
            frame.free()
        viewer.stdin.close()
        await viewer.wait()
        return pool.shared.stats().peak_reserved


async def main() -> None:
    """Run both, and check what the viewer has seen."""
    pipe = asyncio.subprocess.PIPE
    viewer = await asyncio.create_subprocess_exec(sys.executable, __file__, "view", stdin=pipe, stdout=pipe)
    assert viewer.stdout is not None
    peak, seen = await asyncio.gather(make(viewer), viewer.stdout.read())
    assert [int(line) for line in seen.split()] == list(range(FRAMES))
    assert peak <= 16 << 20
    print(f"{FRAMES} frames of 2 MiB seen by another process, in {peak >> 20} MiB")


if __name__ == "__main__":
    asyncmem.run(view if sys.argv[1:] == ["view"] else main)
