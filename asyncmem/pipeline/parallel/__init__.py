"""Pipeline parallelism: micro-batches go forward and backward through stages on one or several devices."""

from asyncmem.pipeline.parallel.schedule import SCHEDULES, Schedule, Step

__all__ = ["SCHEDULES", "Schedule", "Step"]
