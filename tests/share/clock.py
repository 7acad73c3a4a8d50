"""A clock for what has to be done soon, also by other processes, on a machine that is busy with other things."""

import threading
import time
from typing import Self


class Clock:
    """Takes the time of a block, less what a thread that only sleeps is late by meanwhile: nobody could go on then.

    Attributes:
        seconds: What the block took, once it is over.
    """

    TICK = 0.01  # seconds

    def __enter__(self) -> Self:
        self.seconds, self._late, self._over = 0.0, 0.0, False
        self._thread = threading.Thread(target=self._tick)
        self._thread.start()
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        taken, self._over = time.monotonic() - self._began, True
        self._thread.join()
        self.seconds = taken - self._late

    def _tick(self) -> None:
        while not self._over:
            began = time.monotonic()
            time.sleep(self.TICK)
            self._late += time.monotonic() - began - self.TICK
