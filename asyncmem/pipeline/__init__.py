"""Producers and consumers that share memory, what feeds a device, and, in `parallel`, models trained in stages."""

from asyncmem.pipeline.channel import Channel, Receiver, Sender
from asyncmem.pipeline.double_buffer import DoubleBuffer, Transfer
from asyncmem.pipeline.pipeline import Pipeline
from asyncmem.pipeline.prefetch import AsyncBatches, Batches, Prefetched, Prefetcher
from asyncmem.pipeline.report import ChannelStats, PipelineReport, StageReport
from asyncmem.pipeline.run import Results
from asyncmem.pipeline.stage import Stage, StageShare, stage

__all__ = [
    "AsyncBatches",
    "Batches",
    "Channel",
    "ChannelStats",
    "DoubleBuffer",
    "Pipeline",
    "PipelineReport",
    "Prefetched",
    "Prefetcher",
    "Receiver",
    "Results",
    "Sender",
    "Stage",
    "StageReport",
    "StageShare",
    "Transfer",
    "stage",
]
