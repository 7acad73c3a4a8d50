"""One door for all kinds of files. What a file is, its contents say, and not its name."""

from os import PathLike
from pathlib import Path
from typing import Final

from asyncmem.errors import BadTrace, InvalidRequest
from asyncmem.replay.columns import naming
from asyncmem.replay.snapshot import from_snapshot, load_snapshot
from asyncmem.replay.trace import Trace

_ARCHIVES: Final = (b"PK\x03\x04", b"PK\x05\x06")
_SNAPSHOTS: Final = (b"\x80", b"{")
_RECORDS: Final = b"asyncmem"
"""How an .amem begins, which is read by others."""
_SPACE: Final = b" \t\r\n"


def read(path: str | PathLike[str], device: int | None = None) -> Trace:
    """Read a recording: one that `Trace.save` wrote, columns of the same form, or a snapshot of PyTorch's memory.

    A snapshot is a pickle of protocol 2 to 5, as `torch.cuda.memory._dump_snapshot` writes it, or JSON of the same
    shape. No class or function that a file names is ever loaded or called.

    Args:
        path: The file.
        device: The number of the device; None where the file has only one.

    Raises:
        BadTrace: The file is none of these, is cut off or damaged, or contradicts itself; it names the first wrong row.
        InvalidRequest: The file has nothing of that device, or has several and none was chosen.
        OSError: The file cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        head = file.read(64).lstrip(_SPACE)
        if head.startswith(_ARCHIVES):
            return _of_device(Trace.load(path), device)
        if head.startswith(_SNAPSHOTS):
            file.seek(0)
            with naming(path):
                return from_snapshot(load_snapshot(file.read()), device=device, name=path.stem)
    hint = "asyncmem export --to torch makes a snapshot of it" if head.startswith(_RECORDS) else ""
    expected = "columns in an .npz, or a snapshot as pickle or JSON"
    raise BadTrace("another kind of file", expected, file=str(path), hint=hint)


def _of_device(trace: Trace, device: int | None) -> Trace:
    if device is None or device == trace.device:
        return trace
    raise InvalidRequest("device", device, f"{trace.device}, the only one of this recording")
