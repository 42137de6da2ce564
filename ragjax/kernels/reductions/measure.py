"""Measurements of a layer for selection methods (`core.StepMeasure`), by the reductions of this folder.

Each measure says which arrays it takes from the host, its shape per layer, and how its values combine over KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.core import Measure
from ragjax.kernels.reductions.op import key_deviation, key_scores, row_segment_score
from ragjax.kernels.view import View

ARRAYS: Mapping[Measure, tuple[str, ...]] = {
    Measure.KEY_SCORE: ("asking_T",),
    Measure.VALUED_SCORE: ("asking_T",),
    Measure.SEGMENT_SCORE: ("segment_T", "segment_SC"),
    Measure.DEVIATION: ("stale_T", "offset_T"),
    Measure.QUERY: (),
}
"""The arrays of `core.StepMeasure` by measure."""

BY_ROW = frozenset({Measure.SEGMENT_SCORE, Measure.DEVIATION, Measure.QUERY})
"""Measures whose first axis is that of rows; the others have none."""

SILENT: Mapping[str, int] = {"asking_T": 0, "segment_T": -1, "stale_T": -1}
"""What says of a row that nothing of it is measured."""


def measure(
    what: Measure,
    segments: int,
    q_THD: jax.Array,
    k_TKD: jax.Array,
    lse_TH: jax.Array,
    view: View,
    arrays: Mapping[str, jax.Array],
    chosen: jax.Array,
) -> jax.Array:
    """Measure on the KV heads of one device, float32; `combine` joins devices.

    [S, C] of scores by key, [2, S, C] of VALUED_SCORE (plain and valued), [T, Z] of SEGMENT_SCORE, [T] of DEVIATION,
    [T, H, D] of QUERY. A layer that is not `chosen` has no rows that count, so its sweeps visit
    nothing. what: any but LOGITS. segments: how many there are (Z). arrays: those that `ARRAYS` names, int32.
    """
    if what is Measure.QUERY:
        return jnp.where(chosen, q_THD, 0.0)
    arrays = {name: jnp.where(chosen, x, SILENT[name]) if name in SILENT else x for name, x in arrays.items()}
    if what is Measure.DEVIATION:
        return key_deviation(k_TKD, view, arrays["stale_T"], arrays["offset_T"])
    if what is Measure.SEGMENT_SCORE:
        return row_segment_score(q_THD, lse_TH, view, arrays["segment_T"], arrays["segment_SC"], segments)
    # by themselves these take Triton wherever a GPU backend of attention serves: they ask for no less
    valued = what is Measure.VALUED_SCORE
    scores = key_scores(q_THD, lse_TH, view, arrays["asking_T"] != 0, valued=valued)
    return jnp.stack(scores) if valued else scores[0]


def behind(what: Measure, measured: jax.Array, rows: int) -> jax.Array:
    """The same with so many rows in front, of which nothing was measured; scores by key have no rows."""
    if what not in BY_ROW or not rows:
        return measured
    return jnp.pad(measured, [(rows, 0), *[(0, 0)] * (measured.ndim - 1)])


def combine(what: Measure, measured: jax.Array, kv_heads: str, groups: str) -> jax.Array:
    """Over the devices of a mesh: distances add up, scores are averages over heads, queries stand side by side.

    kv_heads, groups: axes of the mesh. Along the second KV heads are the same, and query heads are others.
    """
    if what is Measure.QUERY:
        gathered: jax.Array = lax.all_gather(measured, (kv_heads, groups), axis=1, tiled=True)
        return gathered
    if what is Measure.DEVIATION:
        summed: jax.Array = lax.psum(measured, kv_heads)
        return summed
    mean: jax.Array = lax.pmean(measured, (kv_heads, groups))
    return mean
