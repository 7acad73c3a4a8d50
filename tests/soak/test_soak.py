"""Short runs of what `tox -e soak` runs for minutes; those begin with other seeds each time, these with the same."""

import pytest

from .onlookers import Crowd
from .service import Service, run


@pytest.mark.may_block  # threads of virtual time stand for others
@pytest.mark.parametrize("segments", ["auto", "paged"])
def test_a_few_minutes_of_a_service_leave_nothing_behind(segments: str) -> None:
    """Whatever call of the device fails, all requests end, and every byte goes back."""
    service = Service(1, burst=500, rate=10_000.0, segments=segments)
    run(service, lambda minute: minute >= 6)
    assert service.counts["served"]
    assert service.failed["DeviceError"]


@pytest.mark.may_block  # threads do
def test_answers_agree_while_others_use_the_pool() -> None:
    """Eight threads allocate, free, queue, open and close, and nobody who asks how things are is told nonsense."""
    counts = Crowd(1, seconds=60.0).run()
    assert counts["_look_at_pool"]
    assert counts["_ask"]
