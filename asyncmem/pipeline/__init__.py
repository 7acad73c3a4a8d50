"""Producers and consumers that share memory, what feeds a device, and, in `parallel`, models trained in stages."""

from asyncmem.pipeline.channel import Channel
from asyncmem.pipeline.double_buffer import DoubleBuffer
from asyncmem.pipeline.ends import Receiver, Sender
from asyncmem.pipeline.passes import AsyncBatches, Batches
from asyncmem.pipeline.pipeline import Pipeline
from asyncmem.pipeline.prefetch import Prefetched, Prefetcher
from asyncmem.pipeline.report import ChannelStats, PipelineReport, StageReport
from asyncmem.pipeline.results import Results
from asyncmem.pipeline.share import StageShare
from asyncmem.pipeline.stage import Stage, stage
from asyncmem.pipeline.transfer import Transfer

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
