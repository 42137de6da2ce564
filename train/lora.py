"""Low-rank adapters while they are trained (LoRA, arXiv 2106.09685): beside their matrices, sharded as these are.

`ragjax.models.trained` reads and merges them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ragjax.core import ConfigError
from ragjax.core.file import atomic_path
from ragjax.models.decoder import INPUTS
from ragjax.models.trained import LORA_FORMAT, Pair, pair_shapes


@dataclass(frozen=True)
class Lora:
    """The matrices that have an adapter, its rank, and its scale (alpha / rank)."""

    rank: int
    alpha: float
    matrices: tuple[str, ...] = tuple(INPUTS)

    def __post_init__(self) -> None:
        unknown = [name for name in self.matrices if name not in INPUTS]
        if unknown or not self.matrices:
            raise ConfigError(f"LoRA goes on {', '.join(INPUTS)}, not on {', '.join(unknown) or 'nothing'}")
        if self.rank < 1 or self.alpha <= 0:
            raise ConfigError(f"LoRA needs a rank of at least 1 and an alpha above 0, not {self.rank} and {self.alpha}")

    def init(self, layers: Mapping[str, Any], seed: int) -> dict[str, Pair]:
        """Adapters that change nothing yet, float32: A is random, B zero.

        layers: the layers' matrices, stacked: [L, *outputs, *inputs].
        """
        keys = jax.random.split(jax.random.key(seed), len(INPUTS))
        return {
            n: self._pair(n, layers[n].shape, key) for n, key in zip(INPUTS, keys, strict=True) if n in self.matrices
        }

    def _pair(self, name: str, shape: tuple[int, ...], key: jax.Array) -> Pair:
        shapes = pair_shapes(name, shape, self.rank)
        a = jax.random.normal(key, shapes["a"]) * jnp.float32(prod(shape[-INPUTS[name] :]) ** -0.5)
        return {"a": a, "b": jnp.zeros(shapes["b"])}

    def axes(self, name: str, axes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Logical names of an adapter's axes, from those of its matrix (without layers)."""
        cut = len(axes) - INPUTS[name]
        return {"a": ("rank", *axes[cut:]), "b": (*axes[:cut], "rank")}

    def change(self, x_TI: jax.Array, pair: Pair) -> jax.Array:
        """The adapter's part of one layer's product with x, float32 [T, O].

        The matrix itself is never made, nor its gradient: that would take half as many products again.
        """
        a_RI, b_OR = pair["a"].reshape(self.rank, -1), pair["b"].reshape(-1, self.rank)
        change: jax.Array = jnp.float32(self.alpha / self.rank) * (x_TI.astype(jnp.float32) @ a_RI.T @ b_OR.T)
        return change

    def save(self, adapter: Mapping[str, Pair], file: str | Path, about: Mapping[str, str]) -> None:
        """Write a safetensors file, bfloat16; about: what else its header is to say, such as the model's name."""
        from safetensors.flax import save_file

        tensors = {f"{n}.{k}": jnp.asarray(x, jnp.bfloat16) for n, pair in adapter.items() for k, x in pair.items()}
        with atomic_path(Path(file)) as part:
            save_file(tensors, part, {**about, "format": LORA_FORMAT, "lora": json.dumps(asdict(self))})
