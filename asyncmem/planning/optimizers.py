"""What optimizers keep for each parameter."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What one keeps beside the parameters."""

    states: int
    """Values it keeps for each parameter."""
    state_bytes: float | None = None
    """Bytes of each of them; None: as many as the parameter it updates has."""
    temporaries: int = 0
    """Values for each parameter that a step needs for a moment, unless it is fused into one kernel."""


_BLOCKWISE: Final = 1 + 4 / 256
"""A byte, and for each 256 of them a scale in float32."""

OPTIMIZERS: Final[dict[str, Optimizer]] = {
    "sgd": Optimizer(0),
    "sgd_momentum": Optimizer(1),
    "adagrad": Optimizer(1, temporaries=1),
    "rmsprop": Optimizer(1, temporaries=1),
    "adam": Optimizer(2, temporaries=1),
    "adamw": Optimizer(2, temporaries=1),
    "adam_8bit": Optimizer(2, _BLOCKWISE),
    "adamw_8bit": Optimizer(2, _BLOCKWISE),
}
"""Optimizers by name."""
