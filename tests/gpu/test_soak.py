"""A short soak with every run of the tests; `python tests/gpu/soak.py --seconds 600` is the long one."""

import random

import asyncmem

from .card import Card
from .soak import MIB, soak


def test_a_short_soak_leaves_nothing_behind(card: Card, kind: str, driver: object) -> None:
    """Seconds of tasks that share memory, wait and are cancelled: every word right, no byte live or kept."""
    seconds = 2.0 if driver else 10.0
    result = asyncmem.run(lambda: soak(card, kind, seconds, random.randrange(2**32), 192 * MIB, least=5))
    assert int(result["waits"]) >= 5
    assert int(result["cancelled"]) >= 5
