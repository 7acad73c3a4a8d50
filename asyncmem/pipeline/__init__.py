"""Producers and consumers that share memory without stalling or deadlock."""

from asyncmem.pipeline.channel import Channel
from asyncmem.pipeline.ends import Receiver, Sender

__all__ = ["Channel", "Receiver", "Sender"]
