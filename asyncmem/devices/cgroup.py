"""What a container may have of the machine's memory: the limits of the process's control groups (Linux)."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


class Container:
    """The control groups that limit this process, versions 2 and 1.

    Attributes:
        limit: The bytes that it may have, the least of all limits.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        """Read the limits: once, as an event loop must not wait for files."""
        self._groups: list[tuple[int, Path, str, str]] = []
        if sys.platform == "linux":
            with suppress(OSError):
                self._groups += _find(root)
        self.limit = min((limit for limit, *_ in self._groups), default=sys.maxsize)

    def left(self) -> int:
        """Return the bytes that it may still have (reads files).

        The kernel takes back cached pages of files before it ends a process, so those that are not in use are left.
        """
        found = self.limit
        for limit, folder, use, cache in self._groups:
            with suppress(OSError, LookupError, ValueError):  # the process has another group by now
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                found = min(found, limit - int((folder / use).read_text()) + int(stat[cache]))
        return max(0, found)


def _find(root: Path) -> Iterator[tuple[int, Path, str, str]]:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        if kinds:
            mount /= "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if kinds and "memory" not in kinds.split(","):
            continue
        # A container may see the host's path, of which only the end is mounted: then the mount itself is its own.
        parts = PurePosixPath(path).parts[1:]
        for depth in range(len(parts) + 1):
            folder = mount.joinpath(*parts[:depth])
            with suppress(OSError, ValueError):  # no such file, or "max" in it
                limit = int((folder / names[0]).read_text())
                if limit < _UNLIMITED:
                    yield limit, folder, *names[1:]


_UNLIMITED = 1 << 62  # version 1 has a number for it, too
