"""Low-rank adapters on a decoder's fused matrices (LoRA, arXiv 2106.09685): W + s B A.

`python -m train.depft` writes them. A fused matrix has one adapter: query, key and value share its A, as do gate and
up. A keeps the matrix's inputs, B its outputs, in the matrix's own axes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.models.decoder import Decoder

INPUTS: Mapping[str, int] = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}
"""The matrices of a layer, and how many of each one's last axes are inputs."""

FORMAT = "ragjax-lora-1"

BLOCK = "block"
"""The attention that an adapter says it was trained for, if that is block attention (arXiv 2409.15355)."""

Pair = dict[str, Any]
"""a: [L, rank, *inputs]; b: [L, *outputs, rank]. Of one layer, without L."""


@dataclass(frozen=True)
class Adapter:
    """Adapters of all layers, by the name of their matrix, float32. scale: by how much they count (alpha / rank).

    about: what else the file says: the model's name, and the digest of the weights they were trained on.
    """

    pairs: Mapping[str, Mapping[str, NDArray[np.float32]]]
    rank: int
    alpha: float
    about: Mapping[str, str]

    @staticmethod
    def load(file: str | Path) -> Adapter:
        """Read a file of `train.lora.Lora.save`.

        Raises:
            ConfigError: if it is no such file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            handle: Any = safe_open(file, framework="np")
            about = dict(handle.metadata() or {})
            if about.pop("format", None) != FORMAT:
                raise ConfigError(f"{file}: not a LoRA adapter of ragjax")
            pairs: dict[str, dict[str, NDArray[np.float32]]] = {}
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                matrix, part = name.split(".")
                pairs.setdefault(matrix, {})[part] = handle.get_tensor(name).astype(np.float32)
            values = json.loads(about.pop("lora"))
            rank = int(values["rank"])
            if rank < 1 or not set(pairs) <= set(INPUTS):
                raise ValueError(f"rank {rank}, on {', '.join(pairs)}")
            return Adapter(pairs, rank, float(values["alpha"]), about)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{file}: cannot be read as a LoRA adapter: {error}") from error

    def merged(self, name: str, weight_LOI: jax.Array) -> jax.Array:
        """All layers' matrices of this name, stacked, with their adapters, float32; as they are if they have none.

        Raises:
            ConfigError: if they are of another shape than those it was trained on.
        """
        if name not in self.pairs:
            return weight_LOI
        found = {part: tuple(value.shape) for part, value in self.pairs[name].items()}
        wanted = pair_shapes(name, weight_LOI.shape, self.rank)
        if found != wanted:
            raise ConfigError(f"the adapter's {name} has shapes {found}, and the model asks for {wanted}")
        pairs = [{part: value[i] for part, value in self.pairs[name].items()} for i in range(len(weight_LOI))]
        return jnp.stack([self._merged(w, p) for w, p in zip(weight_LOI, pairs, strict=True)])

    def _merged(self, weight: jax.Array, pair: Pair) -> jax.Array:
        change = jnp.tensordot(jnp.asarray(pair["b"]), jnp.asarray(pair["a"]), axes=1, precision="highest")
        merged: jax.Array = weight.astype(jnp.float32) + jnp.float32(self.alpha / self.rank) * change
        return merged

    def apply(self, decoder: Decoder) -> None:
        """Change a decoder's matrices in place, in their dtype.

        Raises:
            ConfigError: as `merged`.
        """
        for name in self.pairs:
            weights = [getattr(layer, name) for layer in decoder.layers]
            merged_LOI = self.merged(name, jnp.stack([weight[...] for weight in weights]))
            for weight, value in zip(weights, merged_LOI, strict=True):
                weight.set_value(value.astype(weight.dtype))


def pair_shapes(name: str, shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the adapters of a matrix of this stacked shape, [L, *outputs, *inputs]."""
    layers, outputs, inputs = shape[:1], shape[1 : -INPUTS[name]], shape[-INPUTS[name] :]
    return {"a": (*layers, rank, *inputs), "b": (*layers, *outputs, rank)}
