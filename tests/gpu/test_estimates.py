"""Estimates against what transformers with random weights take at their peak."""

import os
from typing import Any

import pytest

from .transformers import WORKS, Work, peaks


@pytest.mark.may_block
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_peaks_are_within_a_tenth_of_what_was_estimated(torch: Any, work: Work) -> None:
    """Served at two lengths, trained with all activations kept and with checkpoints."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("needs the card to itself: not beside other workers")
    if torch.cuda.get_device_properties(0).total_memory < 100 << 30:
        pytest.skip("needs 100 GiB")
    for peak in peaks(torch, work):
        assert 0.9 <= peak.ratio <= 1.1, str(peak)
