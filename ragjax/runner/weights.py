"""A decoder's weights, by stage: each stage holds equally many layers, so one program serves them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ragjax.models.decoder import Decoder, Layer, Weight

Parameters = Any
"""Parameters of a layer or of the ends, an nnx state; of a stage, a tuple of them or one stacked state."""

STAGE_LAYERS = 8
"""Most layers of a stage."""


@dataclass(frozen=True)
class Weights:
    """Parameters on the mesh, each split along its axis "kv_heads" where it has one.

    ends: embeddings, last norm and head. stages: the layers, `depth` of them each. layer_def, ends_def: what
    `nnx.merge` makes modules with.
    """

    ends_def: nnx.GraphDef[Decoder]
    layer_def: nnx.GraphDef[Layer]
    ends: Parameters
    stages: tuple[Parameters, ...]
    depth: int

    @staticmethod
    def of(decoder: Decoder, mesh: Mesh, *, scanned: bool) -> Weights:
        """The decoder's arrays, taken over; a stage's layers are stacked if they are scanned."""
        depth = stage_depth(decoder.config.num_layers)
        layer_def, layers = split_layers(decoder)
        ends_def, ends = nnx.split(without_layers(decoder))
        stages = [layers[i : i + depth] for i in range(0, len(layers), depth)]
        placed = tuple(_place(_stack(stage) if scanned else tuple(stage), mesh) for stage in stages)
        return Weights(ends_def, layer_def, _place(ends, mesh), placed, depth)


def stage_depth(layers: int) -> int:
    """Layers of a stage: the largest divisor of the depth that is no more than `STAGE_LAYERS`."""
    return max(n for n in range(1, STAGE_LAYERS + 1) if layers % n == 0)


def split_layers(decoder: Decoder) -> tuple[nnx.GraphDef[Layer], list[Parameters]]:
    """The definition that all layers share, and the parameters of each."""
    pairs = [nnx.split(layer) for layer in decoder.layers]
    return pairs[0][0], [state for _, state in pairs]


def without_layers(decoder: Decoder) -> Decoder:
    """Embeddings, last norm and head alone."""
    ends = Decoder.abstract(decoder.config)
    ends.embedding, ends.soft, ends.norm, ends.head = decoder.embedding, decoder.soft, decoder.norm, decoder.head
    ends.layers = nnx.List([])
    return ends


def _stack(states: Sequence[Parameters]) -> Parameters:
    def stack(*weights: Weight) -> Weight:
        value = jnp.stack([w.get_value() for w in weights])
        return Weight(value, axes=("layers", *weights[0].axes))

    stacked: Parameters = jax.tree.map(stack, *states, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return stacked


def _place(tree: Any, mesh: Mesh) -> Any:
    def put(weight: Any) -> Any:
        axes = P(*("kv_heads" if axis == "kv_heads" else None for axis in weight.axes))
        return weight.replace(jax.device_put(weight.get_value(), NamedSharding(mesh, axes)))

    return jax.tree.map(put, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
