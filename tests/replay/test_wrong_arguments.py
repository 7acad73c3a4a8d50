"""What is no trace is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncmem import InvalidRequest
from asyncmem.replay import advise, fit, replay


@pytest.mark.parametrize("call", [replay, fit, advise])
@pytest.mark.parametrize("wrong", [5, None, "program.amem", b"", object()])
def test_what_is_no_trace(call: Callable[[Any], object], wrong: object) -> None:
    """A path has to be read first, which the error says."""
    with pytest.raises(InvalidRequest, match="read"):
        call(wrong)
