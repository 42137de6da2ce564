"""The traced functions of a step: `begin`, `stage` for some layers, `end` and `sample`; each is compiled per bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ragjax.core import Measure, RowShape
from ragjax.kernels import sampling
from ragjax.kernels.attention.op import paged_interval_attention
from ragjax.kernels.attention.split import merge_states
from ragjax.kernels.blocks import Blocks, visible_blocks
from ragjax.kernels.cpu.op import PackedMatrix
from ragjax.kernels.pages import Pages, write_pages
from ragjax.kernels.reductions import measure as reductions
from ragjax.kernels.rope import Rotation
from ragjax.kernels.table import PageTable, Rows
from ragjax.kernels.view import View
from ragjax.models.decoder import Decoder, Layer
from ragjax.runner.mesh import AXES, HEADS, POOL
from ragjax.runner.weights import Leaves, Parameters

OUTSIDE = 2**30  # a slot beyond any pool

Measured = tuple[Measure, int]
"""What a stage measures, and how many segments its program serves."""


@dataclass(frozen=True)
class Spec:
    """Static parameters of a program, besides shapes.

    stage: puts a stage's weights together. scanned: its layers run by `lax.scan`. scale: what attention logits are
    multiplied by. widen: products of many rows read bfloat16 weights and KV as float32. cap: of attention logits, as of
    `View`.
    """

    layer: nnx.GraphDef[Layer]
    stage: jax.tree_util.PyTreeDef
    ends: nnx.GraphDef[Decoder]
    mesh: Mesh
    scanned: bool
    scale: float
    widen: bool = False
    cap: float | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedRows:
    """Rows in blocks of one that look at keys which they share, once more and together.

    sharer: which row stands at each place, int32 [O]; -1 for none. rows: of the places; their request is that of the
    entries that the block shares. blocks: what blocks of places visit.
    """

    sharer_O: jax.Array
    rows: Rows
    blocks: Blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageInputs:
    """Output of `begin` for every stage: RoPE angles [T, R], the slot [T] of each row, and its keys.

    live: how many rows are not padding at the end. blocks: lists of each part of the step. sharing: of a step that has
    rows in blocks of one.
    """

    cos_TR: jax.Array
    sin_TR: jax.Array
    slot_T: jax.Array
    rows: Rows
    live: jax.Array
    entries: PageTable
    blocks: tuple[Blocks, ...]
    sharing: SharedRows | None


def begin(
    spec: Spec, shape: RowShape, ends: Parameters, rotation: Rotation, step: dict[str, jax.Array]
) -> tuple[jax.Array, StageInputs]:
    """Residual rows before the first layer, float32 [T, E], and what all stages need. step: `STEP_ARRAYS`, int32."""
    rows = Rows(step["index_T"], step["position_T"], step["request_T"])
    names = ("page_S", "offset_S", "request_S", "index_SC", "hide_from_SC", "hide_until_SC")
    entries = PageTable(*(step[name] for name in names))
    cos_TR, sin_TR = rotation.at(rows.position_T)
    x_TE = nnx.merge(spec.ends, ends).embed(step["token_T"])
    # padding rows write nowhere: each gets a slot of its own beyond the pool
    nowhere_T = OUTSIDE + jnp.arange(len(rows.index_T), dtype=jnp.int32)
    slot_T = jnp.where(rows.index_T >= 0, step["slot_T"], nowhere_T)
    blocks = tuple(visible_blocks(_part(rows, at), entries, block) for at, block in _places(shape))
    sharing = _sharing(shape, rows, entries, step["sharer_O"]) if shape.sharing[0] else None
    live = jnp.where(rows.index_T >= 0, jnp.arange(1, 1 + len(rows.index_T), dtype=jnp.int32), 0).max()
    return x_TE, StageInputs(cos_TR, sin_TR, slot_T, rows, live, entries, blocks, sharing)


def _sharing(shape: RowShape, rows: Rows, entries: PageTable, sharer_O: jax.Array) -> SharedRows:
    places, block = shape.sharing
    index_O = jnp.where(sharer_O >= 0, rows.index_T[sharer_O], -1)
    request_O = shape.rows + jnp.arange(places, dtype=jnp.int32) // block
    together = Rows(index_O, rows.position_T[sharer_O], request_O)
    return SharedRows(sharer_O, together, visible_blocks(together, entries, block))


def stage(
    spec: Spec,
    shape: RowShape,
    backends: tuple[str, ...],
    layers: int,
    measure: Measured | None,
    leaves: Leaves,
    pool: Pages,
    x_TE: jax.Array,
    inputs: StageInputs,
    rotation: Rotation,
    chosen_L: jax.Array,
    arrays: Mapping[str, jax.Array],
) -> tuple[jax.Array, Pages, jax.Array]:
    """Run the first `layers` layers of a stage on residual rows, float32 [T, E].

    backends: of attention, of each part, and of shared keys if the step has places for them. measure: what the layers
    of `chosen_L` (bool [layers]) measure of the rows of the last part. pool: donated, the rows' KV is written into it.
    arrays: what the measure takes, int32 (`reductions.measure.ARRAYS`).

    Returns:
        Residual rows behind these layers, the pool, and per layer what is measured (zeros of those not chosen).
    """
    attend = _sharded_attention(spec, shape, backends, measure)
    weights = jax.tree.unflatten(spec.stage, leaves)

    def layer(x_TE: jax.Array, pool: Pages, state: Parameters, index: Any) -> tuple[jax.Array, Pages, jax.Array]:
        block = nnx.merge(spec.layer, state)
        block.widen = spec.widen
        q_THD, k_TKD, v_TKD = block.project(x_TE, inputs.cos_TR, inputs.sin_TR, inputs.live)
        index = jnp.asarray(index, jnp.int32)
        chosen = chosen_L[index] if measure else jnp.zeros((), jnp.bool_)
        out_THD, pool, found = attend(q_THD, k_TKD, v_TKD, pool, index, inputs, rotation, chosen, arrays)
        return block.finish(x_TE, out_THD, inputs.live), pool, found

    if spec.scanned:
        # a packed matrix is read in its stack: XLA would copy it out
        stacked, definition = jax.tree.flatten(weights, is_leaf=lambda x: isinstance(x, PackedMatrix))
        sliced = [None if isinstance(x, PackedMatrix) else x[:layers] for x in stacked]

        def body(carry: tuple[jax.Array, Pages], xs: tuple[Any, jax.Array]) -> Any:
            parts, index = xs
            # a layer's matrix, of a stack of the stage's or of all layers
            own = [
                replace(x, layer=index if x.layer is None else x.layer + index) if part is None else part
                for x, part in zip(stacked, parts, strict=True)
            ]
            x_TE, pool, found = layer(*carry, jax.tree.unflatten(definition, own), index)
            return (x_TE, pool), found

        (x_TE, pool), found_L = lax.scan(body, (x_TE, pool), (sliced, jnp.arange(layers, dtype=jnp.int32)))
        return x_TE, pool, found_L if measure else jnp.zeros(0)
    found = []
    for index, state in enumerate(weights[:layers]):
        x_TE, pool, of_layer = layer(x_TE, pool, state, index)
        found.append(of_layer)
    return x_TE, pool, jnp.stack(found) if measure else jnp.zeros(0)


def _sharded_attention(
    spec: Spec, shape: RowShape, backends: tuple[str, ...], measure: Measured | None
) -> Callable[..., tuple[jax.Array, Pages, jax.Array]]:
    """Write the rows' KV, attend, and measure, each device on its own heads."""

    def attend(
        q_THD: jax.Array,
        k_TKD: jax.Array,
        v_TKD: jax.Array,
        pool: Pages,
        layer: jax.Array,
        inputs: StageInputs,
        rotation: Rotation,
        chosen: jax.Array,
        arrays: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, Pages, jax.Array]:
        pool = write_pages(pool, layer, inputs.slot_T, k_TKD, v_TKD)
        found_parts = []

        def look(rows: Rows, blocks: Blocks, block_rows: int) -> View:
            settings = (spec.scale, block_rows, spec.widen, spec.cap)
            return View(rows, pool, layer, inputs.entries, rotation, blocks, *settings)

        for (at, block_rows), blocks, backend in zip(_places(shape), inputs.blocks, backends, strict=False):
            view = look(_part(inputs.rows, at), blocks, block_rows)
            found_parts.append(paged_interval_attention(q_THD[at], view, backend=backend))
        if inputs.sharing is not None:
            shared = inputs.sharing
            together = look(shared.rows, shared.blocks, shape.sharing[1])
            q_OHD = q_THD[shared.sharer_O]
            out_OHD, lse_OH = paged_interval_attention(q_OHD, together, backend=backends[-1])
            found_parts[0] = _merge(*found_parts[0], shared.sharer_O, out_OHD, lse_OH)
        out_THD = found_parts[0][0] if len(found_parts) == 1 else jnp.concatenate([out for out, _ in found_parts])
        if measure is None:
            return out_THD, pool, jnp.zeros(0)
        what, segments = measure
        # decoding tokens measure nothing: what is measured is that of the last part, `at` and `view` of the loop
        of_rows = {name: x[at] if name.endswith("_T") else x for name, x in arrays.items()}
        lse_TH = found_parts[-1][1]
        found = reductions.measure(what, segments, q_THD[at], k_TKD[at], lse_TH, view, of_rows, chosen)
        found = reductions.behind(what, found, at.start)
        # adds 0: the next layer has to wait for this before it writes the pool, or XLA would copy the pool
        out_THD = out_THD + jnp.minimum(jnp.abs(found).min(), 0.0)
        return out_THD, pool, reductions.combine(what, found, *AXES)

    sharded = jax.shard_map(
        attend,
        mesh=spec.mesh,
        in_specs=(HEADS, HEADS, HEADS, POOL, P(), P(), P(), P(), P()),
        out_specs=(HEADS, POOL, P()),
        check_vma=False,
    )
    return jax.jit(sharded, inline=True)  # traced once for all layers of a stage


def _merge(
    out_THD: jax.Array, lse_TH: jax.Array, sharer_O: jax.Array, out_OHD: jax.Array, lse_OH: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over keys of their own and over shared ones, as one exact softmax (Hydragen, arXiv 2402.05099, 3.2)."""
    to_O = jnp.where(sharer_O >= 0, sharer_O, len(out_THD))
    shared_THD = jnp.zeros_like(out_THD).at[to_O].set(out_OHD, mode="drop")
    shared_TH = jnp.full_like(lse_TH, -jnp.inf).at[to_O].set(lse_OH, mode="drop")
    return merge_states(out_THD, lse_TH, shared_THD, shared_TH)


def end(spec: Spec, ends: Parameters, x_TE: jax.Array, index_N: jax.Array) -> jax.Array:
    return nnx.merge(spec.ends, ends).unembed(x_TE[index_N])


def sample(
    logits_NV: jax.Array,
    temperature_N: jax.Array,
    top_k_N: jax.Array,
    top_p_N: jax.Array,
    key_N2: jax.Array,
    token_NA: jax.Array,
    factor_NA: jax.Array,
    add_NA: jax.Array,
) -> jax.Array:
    """The next token of each row, int32 [N] (`kernels.sampling`); A may be 0."""
    if token_NA.shape[1]:
        logits_NV = sampling.adjust(logits_NV, token_NA, factor_NA, add_NA)
    return sampling.choose(logits_NV, temperature_N, top_k_N, top_p_N, key_N2)


def sample_shapes(n: int, vocabulary: int, adjusted: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    def shape(dtype: Any, *size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n, *size), dtype)

    number, index = jnp.float32, jnp.int32
    by_row = (shape(number), shape(index), shape(number), shape(jnp.uint32, 2))
    return shape(number, vocabulary), *by_row, *(shape(dtype, adjusted) for dtype in (index, number, number))


def _places(shape: RowShape) -> list[tuple[slice, int]]:
    ends = list(itertools.accumulate(rows for rows, _ in shape.parts))
    return [(slice(end - rows, end), block) for end, (rows, block) in zip(ends, shape.parts, strict=True)]


def _part(rows: Rows, at: slice) -> Rows:
    return Rows(rows.index_T[at], rows.position_T[at], rows.request_T[at])
