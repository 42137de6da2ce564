"""A decoder's weights, by stage: each stage holds equally many layers, so one program serves them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ragjax.core import ConfigError
from ragjax.core.passes import SECTION_LAYERS, sections
from ragjax.kernels.cpu.op import PackedMatrix
from ragjax.models.decoder import Decoder, Layer, Weight
from ragjax.runner.mesh import spec_of

Parameters = Any
"""Parameters of a layer or of the ends, an nnx state; of a stage, a tuple of them or one stacked state."""

Leaves = tuple[jax.Array, ...]
"""The arrays of a stage's parameters: to take an nnx state apart at every step takes half a millisecond."""

STAGE_LAYERS = SECTION_LAYERS
"""Most layers of a stage, if nobody says otherwise."""


@dataclass(frozen=True)
class Weights:
    """Parameters on the mesh, each split along the axes that `mesh.RULES` names.

    ends: embeddings, last norm and head. stages: the layers, `depth` of them each; `stage_def` puts one together.
    layer_def, ends_def: what `nnx.merge` makes modules with.
    """

    ends_def: nnx.GraphDef[Decoder]
    layer_def: nnx.GraphDef[Layer]
    stage_def: jax.tree_util.PyTreeDef
    ends: Parameters
    stages: tuple[Leaves, ...]
    depth: int

    @staticmethod
    def of(decoder: Decoder, mesh: Mesh, *, scanned: bool, most: int | None = None) -> Weights:
        """The decoder's arrays, taken over; a stage's layers, at `most` so many, are stacked if they are scanned."""
        depth = sections(decoder.config.num_layers, STAGE_LAYERS if most is None else most)[1]
        with jax.default_device(next(iter(decoder.norm[...].devices()))):  # the others may have no room
            if mesh.size > 1:
                _divide(decoder, mesh)
            layer_def, layers = split_layers(decoder)
            ends_def, ends = split_ends(decoder)
            stages = [layers[i : i + depth] for i in range(0, len(layers), depth)]
            placed = [_place(_stack(stage) if scanned else tuple(stage), mesh) for stage in stages]
            leaves = tuple(tuple(jax.tree.leaves(stage)) for stage in placed)
            return Weights(ends_def, layer_def, jax.tree.structure(placed[0]), _place(ends, mesh), leaves, depth)


def split_layers(decoder: Decoder) -> tuple[nnx.GraphDef[Layer], list[Parameters]]:
    pairs = [nnx.split(layer) for layer in decoder.layers]
    return pairs[0][0], [state for _, state in pairs]


def split_ends(decoder: Decoder) -> tuple[nnx.GraphDef[Decoder], Parameters]:
    """The decoder without its layers."""
    layers, decoder.layers = decoder.layers, nnx.List([])
    ends = nnx.split(decoder)
    decoder.layers = layers
    return ends


def _stack(states: Sequence[Parameters]) -> Parameters:
    def stack(*weights: Weight) -> Weight:
        value: Any = weights[0].get_value()
        if not isinstance(value, PackedMatrix) or value.layer is None:  # else it is in a stack of all layers
            value = jax.tree.map(lambda *parts: np.stack(parts), *(w.get_value() for w in weights))
        return Weight(value, axes=("layers", *weights[0].axes))

    stacked: Parameters = jax.tree.map(stack, *states, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return stacked


def _divide(decoder: Decoder, mesh: Mesh) -> None:
    """Lay out a decoder's arrays, in place, so that each device's part of an axis is as large as any other's.

    Where KV heads have copies, each copy stands beside its query heads. What the devices do not divide is padded by
    zeros: inputs of the MLP's second product that are 0 add nothing, and the logits of rows that are no tokens are cut
    off (`Decoder.unembed`).
    """
    if decoder.config.num_experts:
        raise ConfigError("a mixture of experts is not shared out: leave --tensor-parallel out, or name another model")
    devices, copies = mesh.size, mesh.shape["groups"]
    for layer in decoder.layers:
        layer.qkv = Weight(_copied(layer.qkv[...], copies), axes=("copied_kv_heads", "heads", "head", "embed"))
        if layer.qkv_bias is not None:
            layer.qkv_bias = Weight(_copied(layer.qkv_bias[...], copies), axes=("copied_kv_heads", "heads", "head"))
        gate_up_2FE = _padded(layer.gate_up[...], 1, devices)
        gate_up_2NFE = gate_up_2FE.reshape(2, devices, -1, gate_up_2FE.shape[2])
        layer.gate_up = Weight(gate_up_2NFE.swapaxes(0, 1), axes=("shares", "gate", "part", "embed"))
        layer.down = Weight(_padded(layer.down[...], 1, devices), axes=layer.down.axes)
    for name in ("embedding", "head"):
        table = getattr(decoder, name)
        if table is not None:
            setattr(decoder, name, Weight(_padded(table[...], 0, devices), axes=table.axes))


def _copied(weight: jax.Array, copies: int) -> jax.Array:
    """[K, G + 2, ...] as [K * copies, G / copies + 2, ...]: the query heads shared out, key and value in each."""
    heads, groups = weight.shape[0], weight.shape[1] - 2
    rest = weight.shape[2:]
    query = weight[:, :groups].reshape(heads, copies, groups // copies, *rest)
    key_value = jnp.broadcast_to(weight[:, None, groups:], (heads, copies, 2, *rest))
    return jnp.concatenate([query, key_value], axis=2).reshape(heads * copies, -1, *rest)


def _padded(weight: jax.Array, axis: int, devices: int) -> jax.Array:
    padding = [(0, -n % devices if i == axis else 0) for i, n in enumerate(weight.shape)]
    return jnp.pad(weight, padding)


def _place(tree: Any, mesh: Mesh) -> Any:
    def put(weight: Any) -> Any:
        value = weight.get_value()
        spec = P() if isinstance(value, PackedMatrix) else spec_of(weight.axes)  # packed ones are for one device
        return weight.replace(jax.device_put(value, NamedSharding(mesh, spec)))

    return jax.tree.map(put, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
