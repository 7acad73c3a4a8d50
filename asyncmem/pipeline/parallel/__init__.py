"""Pipeline parallelism: micro-batches go forward and backward through stages on one or several devices."""

from asyncmem.pipeline.parallel.run import PipelineParallel
from asyncmem.pipeline.parallel.schedule import Schedule, Step, eager, gpipe, one_forward_one_backward
from asyncmem.pipeline.parallel.stage import ParallelStage, StepContext, Use
from asyncmem.pipeline.report import ParallelReport, ParallelStageReport

__all__ = [
    "ParallelReport",
    "ParallelStage",
    "ParallelStageReport",
    "PipelineParallel",
    "Schedule",
    "Step",
    "StepContext",
    "Use",
    "eager",
    "gpipe",
    "one_forward_one_backward",
]
