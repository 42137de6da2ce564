"""Hyperparameters of a run, and their presets (DepCache, section 6.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from ragjax.core import ConfigError
from ragjax.core.depprompt import Positions
from ragjax.models.decoder import INPUTS
from train.example import Attention

Target = Literal["answer", "teacher"]
"""What is learned: the tokens of the answer, or what the untrained model says of each under full attention."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"lr": 2e-5, "batch": 64, "epochs": 1, "plain": 0.0, "lora": 0},
    "small": {"lr": 5e-4, "batch": 16, "epochs": 3, "plain": 0.1, "lora": 16},
}
"""`paper` is section 6.5's, for 7B and more; `small` is for models that a laptop trains. Flags go before presets."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a run.

    lr: the highest, reached after `warmup` (share of all steps), from where it falls to 0 by a cosine. batch: samples a
    step. target: what is learned. plain: share of plain causal samples. clip: largest norm of the gradient. row: tokens
    of the longest row of packed samples; what is longer is left out.
    """

    lr: float
    batch: int
    epochs: int
    attention: Attention = "dependency"
    positions: Positions = "path"
    target: Target = "answer"
    plain: float = 0.1
    warmup: float = 0.03
    clip: float = 1.0
    weight_decay: float = 0.0
    row: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.plain < 1:
            raise ConfigError(f"the share of plain samples must be below 1, not {self.plain}")

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """AdamW behind a clip; weight decay is for the layers' matrices and their adapters."""

        def decayed(trained: Any) -> Any:
            return jax.tree_util.tree_map_with_path(lambda path, _: any(k.key in INPUTS for k in path), trained)

        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(self.schedule(steps), weight_decay=self.weight_decay, mask=decayed),
        )

    def schedule(self, steps: int) -> optax.Schedule:
        """Learning rate by step; the first is not zero, or it would be lost."""
        warm = min(steps - 1, round(self.warmup * steps))
        return optax.warmup_cosine_decay_schedule(self.lr / (warm + 1), self.lr, warm, steps)
