"""What a model will need, before it runs: estimates of its memory, and what a pool can have ready for it.

`model` is the shape of a transformer, `config` reads one from its `config.json`. `inference` and `training` say what is
alive at the peak, buffer by buffer; `estimate` has what both share, and makes of it what a pool takes.
"""

from asyncmem.planning.config import read_model
from asyncmem.planning.estimate import MemoryEstimate, transformer_warmup, warmup_from
from asyncmem.planning.inference import InferenceMemoryEstimate, estimate_inference_memory
from asyncmem.planning.model import ModelShape
from asyncmem.planning.training import TrainingMemoryEstimate, estimate_training_memory

__all__ = [
    "InferenceMemoryEstimate",
    "MemoryEstimate",
    "ModelShape",
    "TrainingMemoryEstimate",
    "estimate_inference_memory",
    "estimate_training_memory",
    "read_model",
    "transformer_warmup",
    "warmup_from",
]
