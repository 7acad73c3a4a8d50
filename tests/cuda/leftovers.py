"""What a test leaves with the driver."""

import gc
import time

from .fake import FakeDriver


def check_nothing_left(driver: FakeDriver | None, before: dict[str, int]) -> None:
    """Fail where the driver still holds something of ours, or has seen memory used without order."""
    gc.collect()
    if driver is None:
        return
    driver.release()
    assert driver.violations() == []
    deadline = time.monotonic() + 60
    while _left(driver, before) and time.monotonic() < deadline:
        time.sleep(0.001)  # a thread that ends lets go of what it had in hand when it pleases
        gc.collect()
    assert not _left(driver, before), (driver.live(), before)


def _left(driver: FakeDriver, before: dict[str, int]) -> bool:
    # There may be less than before: what an earlier test let go of may go while a later one runs.
    return any(count > before.get(kind, 0) for kind, count in driver.live().items())
