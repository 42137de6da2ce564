"""Low-rank adapters on a decoder's fused matrices (LoRA, arXiv 2106.09685): W + (alpha / rank) B A.

A fused matrix has one adapter: query, key and value share its A, as do gate and up. A keeps the matrix's inputs, B its
outputs, in the matrix's own axes, so that both are sharded as it is.
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
import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.models.hub import atomic_path

INPUTS: Mapping[str, int] = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}
"""The matrices of a layer, and how many of each one's last axes are inputs."""

Pair = dict[str, Any]
"""a: [L, rank, *inputs]; b: [L, *outputs, rank]."""

_FORMAT = "ragjax-lora-1"


@dataclass(frozen=True)
class Lora:
    """Which matrices have an adapter, of what rank, and by how much it counts (alpha / rank)."""

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
        depth, outputs, inputs = shape[0], shape[1 : -INPUTS[name]], shape[-INPUTS[name] :]
        a = jax.random.normal(key, (depth, self.rank, *inputs)) * jnp.float32(prod(inputs) ** -0.5)
        return {"a": a, "b": jnp.zeros((depth, *outputs, self.rank))}

    def axes(self, name: str, axes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Logical names of an adapter's axes, from those of its matrix (without layers)."""
        cut = len(axes) - INPUTS[name]
        return {"a": ("rank", *axes[cut:]), "b": (*axes[:cut], "rank")}

    @property
    def scale(self) -> jax.Array:
        """By how much an adapter counts, a float32 scalar."""
        return jnp.asarray(self.alpha / self.rank, jnp.float32)

    def change(self, x_TI: jax.Array, pair: Pair) -> jax.Array:
        """What one layer's adapter adds to its matrix's product with x, float32 [T, O].

        The matrix itself is never made, nor its gradient: that would take half as many products again.
        """
        a_RI, b_OR = pair["a"].reshape(self.rank, -1), pair["b"].reshape(-1, self.rank)
        change: jax.Array = self.scale * (x_TI.astype(jnp.float32) @ a_RI.T @ b_OR.T)
        return change

    def merged(self, weight: jax.Array, pair: Pair) -> jax.Array:
        """One layer's matrix with its adapter, float32."""
        change = jnp.tensordot(pair["b"], pair["a"], axes=1, precision="highest")
        merged: jax.Array = weight.astype(jnp.float32) + self.scale * change
        return merged

    # --------------------------------------------------------------------------------------- files

    def save(self, adapter: Mapping[str, Pair], file: str | Path, about: Mapping[str, str]) -> None:
        """Write a safetensors file, bfloat16; about: what else its header is to say, such as the model's name."""
        from safetensors.flax import save_file

        tensors = {f"{n}.{k}": jnp.asarray(x, jnp.bfloat16) for n, pair in adapter.items() for k, x in pair.items()}
        with atomic_path(Path(file)) as part:
            save_file(tensors, part, {**about, "format": _FORMAT, "lora": json.dumps(asdict(self))})

    @staticmethod
    def load(file: str | Path) -> tuple[Lora, dict[str, dict[str, NDArray[np.float32]]], dict[str, str]]:
        """What `save` wrote: the adapters in float32, and what the header says.

        Raises:
            ConfigError: if it is no such file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            handle: Any = safe_open(file, framework="np")
            about = dict(handle.metadata() or {})
            if about.pop("format", None) != _FORMAT:
                raise ConfigError(f"{file}: not a LoRA adapter of ragjax")
            adapter: dict[str, dict[str, NDArray[np.float32]]] = {}
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                matrix, part = name.split(".")
                adapter.setdefault(matrix, {})[part] = handle.get_tensor(name).astype(np.float32)
            values = json.loads(about.pop("lora"))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ConfigError(f"{file}: cannot be read as a LoRA adapter: {error}") from error
        return Lora(values["rank"], values["alpha"], tuple(values["matrices"])), adapter, about
