"""What a layer of a step measures for selection methods (`core.Probe`): the reductions, called from within a stage.

Each want has the arrays it takes from the host, the shape it has per layer, and how its values combine over KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.core import Want
from ragjax.kernels.reductions.op import chunk_mass, key_mass, key_masses, kv_deviation, row_segment_mass
from ragjax.kernels.view import View

ARRAYS: Mapping[Want, tuple[str, ...]] = {
    Want.KEY_MASS: ("asking_T",),
    Want.VALUED_MASS: ("asking_T",),
    Want.CHUNK_MASS: ("asking_T", "segment_SC"),
    Want.SEGMENT_MASS: ("segment_T", "segment_SC"),
    Want.DEVIATION: ("stale_T", "turn_T"),
}
"""The arrays of `core.Probe` by want."""

SEGMENTED = frozenset({Want.CHUNK_MASS, Want.SEGMENT_MASS})
"""Wants whose programs are compiled for a number of segments."""


SILENT: Mapping[str, int] = {"asking_T": 0, "segment_T": -1, "stale_T": -1}
"""What says of a row that nothing of it is measured."""


def measure(
    want: Want,
    segments: int,
    q_THD: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    lse_TH: jax.Array,
    view: View,
    arrays: Mapping[str, jax.Array],
    chosen: jax.Array,
) -> jax.Array:
    """What one device measures on its KV heads, float32; `combine` makes it that of all heads.

    [S, C] of masses by key, [2, S, C] of VALUED_MASS (plain and valued), [T, Z] of SEGMENT_MASS, [2, T] of DEVIATION
    (key and value).

    A layer that is not chosen has no rows that count, so its sweeps visit nothing.

    Args:
        want: any but LOGITS.
        segments: how many there are (Z).
        q_THD: queries of the rows, rotated.
        k_TKD: keys of the rows, rotated.
        v_TKD: values of the rows.
        lse_TH: the LSE of their attention.
        view: what they looked at.
        arrays: those that `ARRAYS` names, int32.
        chosen: bool, whether this layer is measured; zeros otherwise.
    """
    arrays = {name: jnp.where(chosen, x, SILENT[name]) if name in SILENT else x for name, x in arrays.items()}
    if want is Want.DEVIATION:
        return jnp.stack(kv_deviation(k_TKD, v_TKD, view, arrays["stale_T"], arrays["turn_T"]))
    if want is Want.SEGMENT_MASS:
        return row_segment_mass(q_THD, lse_TH, view, arrays["segment_T"], arrays["segment_SC"], segments)
    asking_T = arrays["asking_T"] != 0
    if want is Want.CHUNK_MASS:
        return chunk_mass(q_THD, view, arrays["segment_SC"], segments, asking_T)
    # by themselves these take Triton wherever a GPU backend of attention serves: they ask for no less
    if want is Want.VALUED_MASS:
        return jnp.stack(key_masses(q_THD, lse_TH, view, asking_T))
    return key_mass(q_THD, lse_TH, view, asking_T)


def combine(want: Want, measured: jax.Array, axis: str) -> jax.Array:
    """Over the devices of a mesh axis: distances add up, masses are averages over heads."""
    combined: jax.Array = lax.psum(measured, axis) if want is Want.DEVIATION else lax.pmean(measured, axis)
    return combined
