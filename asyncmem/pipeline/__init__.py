"""Producers and consumers that share memory without stalling or deadlock."""

from asyncmem.pipeline.channel import Channel
from asyncmem.pipeline.ends import Receiver, Sender
from asyncmem.pipeline.pipeline import Pipeline
from asyncmem.pipeline.report import PipelineReport, StageReport
from asyncmem.pipeline.results import Results
from asyncmem.pipeline.share import StageShare
from asyncmem.pipeline.stage import Stage, stage

__all__ = [
    "Channel",
    "Pipeline",
    "PipelineReport",
    "Receiver",
    "Results",
    "Sender",
    "Stage",
    "StageReport",
    "StageShare",
    "stage",
]
