"""Address space without memory behind it: which part of the reserved ranges is taken. It calls nobody."""

import bisect


class Space:
    """Holes in address order, taken first fit: low addresses stay dense, and large holes stay large."""

    def __init__(self) -> None:
        """Begin with no range."""
        self._holes: list[tuple[int, int]] = []
        """Address and bytes, in address order; no two touch."""

    def add(self, address: int, nbytes: int) -> None:
        """Give a range to it, or a part of one back."""
        at = bisect.bisect(self._holes, (address, 0))
        after = self._holes[at] if at < len(self._holes) else None
        before = self._holes[at - 1] if at else None
        if after is not None and address + nbytes == after[0]:
            nbytes += after[1]
            del self._holes[at]
        if before is not None and before[0] + before[1] == address:
            self._holes[at - 1] = (before[0], before[1] + nbytes)
        else:
            self._holes.insert(at, (address, nbytes))

    def take(self, nbytes: int) -> int | None:
        """Take the lowest hole that is large enough and return its address; None where there is none."""
        for at, (address, length) in enumerate(self._holes):
            if length >= nbytes:
                if length == nbytes:
                    del self._holes[at]
                else:
                    self._holes[at] = (address + nbytes, length - nbytes)
                return address
        return None
