"""A layer and a model's ends of which each device along the mesh's axis `model` has a part (arXiv 1909.08053).

Such devices have the same rows of the residual stream. Each computes some heads, or some of the MLP, from whole rows;
what they make is summed, and every device goes on with the sum. So a whole array that enters a part has a gradient that
is the sum over devices, and the gradient of a sum is whole on each of them: `enter` and `leave`. All are used within
`jax.shard_map`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.models.decoder import Decoder, Layer, rms_norm

AXIS = "model"
"""Of the mesh."""

_INTO, _OUT_OF = ("qkv", "gate_up"), ("out", "down")
"""A layer's matrices by where a part begins and ends."""


@jax.custom_vjp
def enter(x: jax.Array) -> jax.Array:
    """The same array; its gradient is summed over the devices."""
    return x


enter.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, AXIS),))


@jax.custom_vjp
def leave(x: jax.Array) -> jax.Array:
    """The sum over the devices; each one's part has the gradient of the sum."""
    total: jax.Array = lax.psum(x, AXIS)
    return total


leave.defvjp(lambda x: (lax.psum(x, AXIS), None), lambda _, g: (g,))


@jax.custom_vjp
def collect(x_NP: jax.Array) -> jax.Array:
    """All devices' columns side by side, [N, P * devices]; each one's have their part of the gradient."""
    whole_NV: jax.Array = lax.all_gather(x_NP, AXIS, axis=1, tiled=True)
    return whole_NV


def _own_columns(width: int, g_NV: jax.Array) -> tuple[jax.Array]:
    return (lax.dynamic_slice_in_dim(g_NV, lax.axis_index(AXIS) * width, width, axis=1),)


collect.defvjp(lambda x: (collect(x), x.shape[1]), _own_columns)


class PartLayer(Layer):
    """A layer with some of the KV heads, each with its query heads, and some of the MLP."""

    def __init__(self, layer: Layer):
        take_over(self, layer)
        self._layer = layer
        for name in ("q_norm", "k_norm"):
            norm = getattr(layer, name)
            if norm is not None:
                setattr(self, name, norm.replace(enter(norm[...])))

    def multiply(
        self, name: str, x_TI: jax.Array, norm_I: jax.Array | None = None, live: jax.Array | None = None
    ) -> jax.Array:
        """The layer's product; outputs of parts are summed."""
        x_TI = x_TI if norm_I is None else rms_norm(x_TI, norm_I, self.eps)
        product = self._layer.multiply(name, enter(x_TI) if name in _INTO else x_TI, live=live)
        return leave(product) if name in _OUT_OF else product


class PartDecoder(Decoder):
    """The ends of a decoder with some tokens of the vocabulary: as many as each other device."""

    def __init__(self, decoder: Decoder):
        take_over(self, decoder)

    def _row(self, tokens_T: jax.Array) -> jax.Array:
        own = self.embedding.shape[0]
        place_T = tokens_T - lax.axis_index(AXIS) * own
        row_TE = super()._row(jnp.clip(place_T, 0, own - 1))
        return leave(jnp.where(((place_T >= 0) & (place_T < own))[:, None], row_TE, 0.0))

    def _normed(self, x_NE: jax.Array) -> jax.Array:
        return enter(super()._normed(x_NE))

    def _scores(self, x_NE: jax.Array) -> jax.Array:
        return collect(super()._scores(x_NE))


def take_over(part: Layer | Decoder, whole: Layer | Decoder) -> None:
    """Give a part what the whole has, as it is."""
    for name, value in vars(whole).items():
        if not name.startswith("_"):
            setattr(part, name, value)
