"""Frames on a link: what others send is refused before memory is taken."""

from hypothesis import given
from hypothesis import strategies as some

from asyncmem.distributed import frames
from asyncmem.share.items import MOST_TEXT, ProtocolError


@given(some.binary(max_size=frames.HEADER.size) | some.binary(min_size=frames.HEADER.size, max_size=frames.HEADER.size))
def test_any_bytes_for_a_header_are_read_or_refused(header: bytes) -> None:
    """And what is read is within bounds."""
    try:
        frame = frames.unpack(header)
    except ProtocolError:
        return
    assert frame.kind in frames.KINDS
    assert frame.meta <= MOST_TEXT
