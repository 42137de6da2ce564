"""What selection methods measure of a layer: attention mass, KV deviation, similarity of keys.

Masses are summed blockwise from the LSE of an attention call: no rows x keys array is formed, and entries that a row
block does not see are skipped. Averages over heads are over the heads at hand: under `shard_map` over KV heads every
device returns the value for its own, and the docstrings say how they combine.

Sources: key mass and chunk mass, FusionRAG §3.2 (question-guided selection, with the softmax over all keys or over each
chunk's by itself, which the paper leaves open); segment mass, Cache-Craft §3.1 (eqs. 3, 4 and 14); KV
deviation, CacheBlend as FusionRAG §2.2 has it (eqs. 7, 8); neighbouring keys, GraphKV §4 (eqs. 1 and 3, arXiv
2509.00388). `reference.py` is the definition, this module holds the ops and their XLA form, and
`triton.py` the Pallas kernels of key and segment mass for GPUs. The others have none: the deviation is bound
by memory and fused by XLA, the neighbours are a matrix product, and chunk mass is asked for by a few rows only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ragjax.kernels.attention.xla import Lists, Tile, dot, fold_heads, gather_tile, lists, masked_logits
from ragjax.kernels.device import Device
from ragjax.kernels.pages import from_storage
from ragjax.kernels.reductions import reference as reductions_ref
from ragjax.kernels.reductions import triton as reductions_triton
from ragjax.kernels.rope import rotate
from ragjax.kernels.view import View, check

BACKENDS = ("reference", "xla", "triton")

KEY_TILE = 1024
"""Keys that `key_neighbours` compares with the sources at a time."""


class KeyScore(NamedTuple):
    """Mass of each key, plain and times the L2 norm of its value (of the KV head that the mass is of), [S, C] each."""

    plain_SC: jax.Array
    valued_SC: jax.Array


class KVDeviation(NamedTuple):
    """Squared distance of each token's key and value from the cached ones, float32 [T] each."""

    key_T: jax.Array
    value_T: jax.Array


class KeyNeighbours(NamedTuple):
    """Similarity, float32 [I, Y], and index, int32 [I, Y], of each source's most similar keys, best first."""

    cosine_IY: jax.Array
    index_IY: jax.Array


def key_score(
    q_THD: jax.Array, lse_TH: jax.Array, view: View, chosen_T: jax.Array | None = None, *, backend: str | None = None
) -> jax.Array:
    """Attention probability that each key receives, summed over the chosen rows and averaged over query heads.

    Under `shard_map` over KV heads: the mean over the device's heads; `lax.pmean` gives the mean over all.

    Args:
        q_THD: queries, as given to `attention.paged_interval_attention`.
        lse_TH: the LSE it returned, float32; or that of a larger context (`attention.merge_states`), of which the
            masses are then shares.
        view: as given to it.
        chosen_T: bool, the rows that count; None for all.
        backend: "reference", "xla" or "triton"; None for Triton where it serves on the default device, else XLA.

    Returns:
        float32 [S, C]; zero for a key that no chosen row sees.

    Raises:
        ValueError: naming the argument that does not fit, or saying why the backend cannot serve the call.
    """
    return _key_scores(q_THD, lse_TH, view, chosen_T, backend, valued=False)[0]


def key_scores(
    q_THD: jax.Array, lse_TH: jax.Array, view: View, chosen_T: jax.Array | None = None, *, backend: str | None = None
) -> KeyScore:
    """`key_score`, and the same weighted by |value|, in one sweep; arguments, errors and sharding are the same.

    The norm is of the value of that key and KV head: mean over query heads of p * |v|.
    """
    return KeyScore(*_key_scores(q_THD, lse_TH, view, chosen_T, backend, valued=True))


def chunk_score(
    q_THD: jax.Array,
    view: View,
    key_segment_SC: jax.Array,
    segments: int,
    chosen_T: jax.Array | None = None,
    *,
    backend: str = "xla",
) -> jax.Array:
    """`key_score` with the softmax over each segment's keys by themselves, instead of all that the row sees.

    So a segment of which a row sees anything receives 1 from it in all, however little attention it gets beside the
    others. Two sweeps: the first finds the LSE of each segment, so that nothing is divided by a mass that underflows.
    Memory is O(rows x segments) beside a tile. Under `shard_map` over KV heads: as `key_score`.

    Args:
        q_THD: as for `key_score`.
        view: as for `key_score`.
        key_segment_SC: int32, the segment of each entry's slots; a number outside of [0, segments) says none.
        segments: how many there are (Z).
        chosen_T: as for `key_score`.
        backend: "reference" or "xla".

    Returns:
        float32 [S, C]; zero for a key that no chosen row sees, or of no segment.

    Raises:
        ValueError: as `key_score`.
    """
    check(q_THD, view)
    _expect("key_segment_SC", key_segment_SC, view.entries.index_ASC.shape[1:], jnp.int32)
    if chosen_T is not None:
        _expect("chosen_T", chosen_T, q_THD.shape[:1], jnp.bool_)
    if segments < 1:
        raise ValueError(f"segments is {segments}, not positive")
    _has_no_kernel(backend)
    if backend == "reference":
        return reductions_ref.chunk_score(q_THD, view, key_segment_SC, segments, chosen_T)
    unknown_TH, view = restrict(jnp.zeros(q_THD.shape[:2]), view, chosen_T)
    return _chunk_score(q_THD, unknown_TH, view, key_segment_SC, segments)


def row_segment_score(
    q_THD: jax.Array,
    lse_TH: jax.Array,
    view: View,
    row_segment_T: jax.Array,
    key_segment_SC: jax.Array,
    segments: int,
    *,
    backend: str | None = None,
) -> jax.Array:
    """Attention probability that each row gives to the keys of each segment, averaged over query heads.

    A token's mass on itself (equal order) is left out of the row's own segment: Cache-Craft's intra attention is from
    each token to previous tokens of its chunk (eq. 4), strictly below the diagonal. Tokens are ranked by eq. 14, a sum
    of columns of this.

    Under `shard_map` over KV heads: as `key_score`.

    Args:
        q_THD: as for `key_score`.
        lse_TH: as for `key_score`.
        view: as for `key_score`.
        row_segment_T: int32, the segment of each row; a number outside of [0, segments) says none.
        key_segment_SC: int32, the segment of each entry's slots; likewise.
        segments: how many there are (Z).
        backend: as for `key_score`.

    Returns:
        float32 [T, Z]; zeros for a row of no segment.

    Raises:
        ValueError: as `key_score`.
    """
    _check_attention(q_THD, lse_TH, view)
    _expect("row_segment_T", row_segment_T, q_THD.shape[:1], jnp.int32)
    _expect("key_segment_SC", key_segment_SC, view.entries.index_ASC.shape[1:], jnp.int32)
    if segments < 1:
        raise ValueError(f"segments is {segments}, not positive")
    backend = _serving(backend, q_THD, view, segments)
    if backend == "reference":
        return reductions_ref.row_segment_score(q_THD, lse_TH, view, row_segment_T, key_segment_SC, segments)
    lse_TH, view = restrict(lse_TH, view, (row_segment_T >= 0) & (row_segment_T < segments))
    compute = _row_segment_score if backend == "xla" else reductions_triton.row_segment_score
    return compute(q_THD, lse_TH, view, row_segment_T, key_segment_SC, segments)


def segment_score(
    q_THD: jax.Array,
    lse_TH: jax.Array,
    view: View,
    row_segment_T: jax.Array,
    key_segment_SC: jax.Array,
    segments: int,
    *,
    backend: str | None = None,
) -> jax.Array:
    """Attention probability that each segment's rows give to each segment's keys: `row_segment_score` summed by
    segment.

    Item [a, b] with a != b is Cache-Craft's inter attention of a on the earlier chunk b (eq. 3), item [a, a] its
    intra attention (eq. 4), where mass on the own token is left out. Arguments, errors and sharding as there.

    Returns:
        float32 [Z, Z], rows first.
    """
    score_TZ = row_segment_score(q_THD, lse_TH, view, row_segment_T, key_segment_SC, segments, backend=backend)
    return dot(jax.nn.one_hot(row_segment_T, segments), score_TZ, ((0,), (0,)), batch=())


def kv_deviation(
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    view: View,
    slot_T: jax.Array,
    offset_T: jax.Array,
    *,
    backend: str = "xla",
) -> KVDeviation:
    """Squared difference of newly computed keys and values from cached ones, summed over heads and components.

    A cached key is first rotated by its offset, so that keys are compared at equal rotation. Under `shard_map` over KV
    heads: the sum over the device's heads; `lax.psum` gives the sum over all.

    Args:
        k_TKD: new keys, rotated at `view.rows.position_T`; float32, bfloat16 or float16.
        v_TKD: new values, likewise.
        view: its rows, pages, layer and rotation are used.
        slot_T: int32, where the token's cached KV lies (page * C + slot); negative for a row that has none.
        offset_T: int32, RoPE offset of the entry by which that slot takes part.
        backend: "reference" or "xla".

    Returns:
        float32 [T] for keys and for values. Rows without cached KV and padding rows get zero, whatever their slots and
        new values hold.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    shape = (view.rows.index_T.shape[0], view.pages.k_LPKCD.shape[2], view.pages.k_LPKCD.shape[4])
    for name, x in (("k_TKD", k_TKD), ("v_TKD", v_TKD)):
        _expect(name, x, shape, jnp.float32, jnp.bfloat16, jnp.float16)
    for name, x in (("slot_T", slot_T), ("offset_T", offset_T)):
        _expect(name, x, shape[:1], jnp.int32)
    _has_no_kernel(backend)
    _below("slot_T", slot_T, view.pages.k_LPKCD.shape[1] * view.pages.page_size, "slots of the pool")
    compute = _kv_deviation if backend == "xla" else reductions_ref.kv_deviation
    return KVDeviation(*compute(k_TKD, v_TKD, view, slot_T, offset_T))


def key_neighbours(
    k_NKD: jax.Array, valid_N: jax.Array, source_I: jax.Array, count: int, *, backend: str = "xla"
) -> KeyNeighbours:
    """The `count` keys most similar to each source key: GraphKV's edges (eq. 1) and neighbourhoods (eq. 3).

    A token is one node and its key one vector, that of all KV heads (§4.1: K is n x d, d the hidden size), so the
    cosine is that of the heads side by side. A graph per head is this op mapped over heads, one head at a time. Under
    `shard_map` over KV heads the keys must be gathered before: the best keys of a device's heads do not combine.
    Similarity is as the keys are rotated: give those of one prompt, at their places in it.

    Memory is O(sources x (count + tile)) beside the keys. XLA on CPU widens bfloat16 keys, but not their bits.

    Args:
        k_NKD: keys of one layer; float32, bfloat16, float16 or uint16 (bfloat16 bits, as in `pages.Pages`).
        valid_N: bool, keys that take part; others may hold anything.
        source_I: int32, indices of the source keys; negative for padding.
        count: how many keys to find for each (J).
        backend: "reference" or "xla".

    Returns:
        Cosines and indices, best first, the lower index first among equals; the source itself is left out. Neighbours
        are chosen by the cosine as it is; negative ones are returned as 0, so that a decay 1 - cosine (eq. 5) never
        enhances. Where fewer than `count` others are valid, or the source is not, similarity 0 and index -1. A key of
        zeros has cosine 0 with all.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    if k_NKD.ndim != 3:
        raise ValueError(f"k_NKD has {k_NKD.ndim} axes, not 3")
    _expect("k_NKD", k_NKD, k_NKD.shape, jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint16)
    _expect("valid_N", valid_N, k_NKD.shape[:1], jnp.bool_)
    _expect("source_I", source_I, source_I.shape[:1], jnp.int32)
    if count < 1:
        raise ValueError(f"count is {count}, not positive")
    _has_no_kernel(backend)
    _below("source_I", source_I, k_NKD.shape[0], "keys")
    compute = _key_neighbours if backend == "xla" else reductions_ref.key_neighbours
    return KeyNeighbours(*compute(k_NKD, valid_N, source_I, count))


def restrict(lse_TH: jax.Array, view: View, chosen_T: jax.Array | None) -> tuple[jax.Array, View]:
    """An LSE of +inf, where all probabilities are zero, for rows that do not count or see nothing; and a view in which
    row blocks without a row that counts visit no entry.
    """
    if chosen_T is None:
        chosen_T = view.rows.index_T >= 0
    lse_TH = jnp.where(chosen_T[:, None] & ~jnp.isneginf(lse_TH), lse_TH, jnp.inf)
    blocks = view.blocks
    visits_N = chosen_T.reshape(-1, view.block_rows).any(1)
    count_N, runs_N = (jnp.where(visits_N, x, 0) for x in (blocks.count_N, blocks.runs_N))
    return lse_TH, replace(view, blocks=replace(blocks, count_N=count_N, runs_N=runs_N))


def _key_scores(
    q_THD: jax.Array, lse_TH: jax.Array, view: View, chosen_T: jax.Array | None, backend: str | None, *, valued: bool
) -> tuple[jax.Array, ...]:
    _check_attention(q_THD, lse_TH, view)
    if chosen_T is not None:
        _expect("chosen_T", chosen_T, q_THD.shape[:1], jnp.bool_)
    backend = _serving(backend, q_THD, view)
    if backend == "reference":
        return reductions_ref.key_scores(q_THD, lse_TH, view, chosen_T)
    lse_TH, view = restrict(lse_TH, view, chosen_T)
    compute = _swept_key_scores if backend == "xla" else reductions_triton.key_scores
    return compute(q_THD, lse_TH, view, valued=valued)


# ---------------------------------------------------------------------------------------------- checks


def _expect(name: str, x: jax.Array, shape: tuple[int, ...], *dtypes: jax.typing.DTypeLike) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, not {tuple(shape)}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} is {x.dtype}, not {' or '.join(jnp.dtype(d).name for d in dtypes)}")


def _check_attention(q_THD: jax.Array, lse_TH: jax.Array, view: View) -> None:
    check(q_THD, view)
    _expect("lse_TH", lse_TH, q_THD.shape[:2], jnp.float32)


def _known(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")


def _serving(backend: str | None, q_THD: jax.Array, view: View, segments: int = 1) -> str:
    """The backend that serves the call; ValueError if it is named and cannot."""
    if backend not in (None, "triton"):
        _known(str(backend))
        return str(backend)
    reason = reductions_triton.refusal(q_THD, view, Device.of(jax.devices()[0]), segments)
    if reason is None:
        return "triton"
    if backend is None:
        return "xla"
    raise ValueError(f"backend {backend!r} cannot serve this call: {reason}")


def _has_no_kernel(backend: str) -> None:
    _known(backend)
    if backend == "triton":
        raise ValueError("backend 'triton' cannot serve this call: there is no kernel, XLA does it")


def _below(name: str, x: jax.Array, end: int, of: str) -> None:
    """Outside of jit alone, where there are values."""
    if isinstance(x, jax.core.Tracer):
        return
    highest = int(np.asarray(x).max(initial=-1))
    if highest >= end:
        raise ValueError(f"{name} holds {highest}, outside of the {end} {of}")


# --------------------------------------------------------------------------------- blockwise form in XLA


@dataclass(frozen=True)
class _Block:
    """What one row block brings: rotated and scaled queries, LSE, orders and its list of keys."""

    q_KMD: jax.Array
    lse_KM1: jax.Array
    index_B: jax.Array
    visited: Lists

    def tile(self, view: View, place_W: jax.Array) -> Tile:
        """The keys at some places of the list."""
        return gather_tile(self.q_KMD, self.index_B, view, self.visited, place_W)

    def probabilities(self, view: View, place_W: jax.Array) -> tuple[jax.Array, Tile]:
        """Probabilities of the block's rows over a tile, float32 [K, M, N], and the tile."""
        tile = self.tile(view, place_W)
        return jnp.exp(masked_logits(tile) - self.lse_KM1), tile


def _block(arrays: Sequence[Any], view: View) -> _Block:
    """A row block of `_blocked` arrays."""
    q_BHD, lse_BH, index_B, visited = arrays
    kv_heads = view.pages.k_LPKCD.shape[2]
    q_KMD = fold_heads(q_BHD.astype(jnp.float32) * view.scale, kv_heads)
    return _Block(q_KMD, fold_heads(lse_BH[..., None], kv_heads), index_B, visited)


def _blocked(q_THD: jax.Array, lse_TH: jax.Array, view: View) -> tuple[Any, ...]:
    """q, LSE, orders and lists with a leading axis of row blocks."""
    by_rows = (x.reshape(-1, view.block_rows, *x.shape[1:]) for x in (q_THD, lse_TH, view.rows.index_T))
    return (*by_rows, lists(view))


def _swept_key_scores(q_THD: jax.Array, lse_TH: jax.Array, view: View, *, valued: bool) -> tuple[jax.Array, ...]:
    """One or two masses [S, C], summed block after block."""
    shape, heads = view.entries.index_ASC.shape[1:], q_THD.shape[1]

    def one_block(scores: tuple[jax.Array, ...], arrays: tuple[Any, ...]) -> tuple[tuple[jax.Array, ...], None]:
        block = _block(arrays, view)

        def step(place_W: jax.Array, scores: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            prob_KMN, tile = block.probabilities(view, place_W)
            sums_KN = prob_KMN.sum(1)
            kinds = (sums_KN, sums_KN * _norm(tile)) if valued else (sums_KN,)
            return tuple(
                score_E.at[tile.slot_N].add(kind_KN.sum(0) / heads)
                for score_E, kind_KN in zip(scores, kinds, strict=True)
            )

        return block.visited.sweep(step, scores), None

    start = tuple(jnp.zeros(math.prod(shape)) for _ in range(2 if valued else 1))
    scores, _ = lax.scan(one_block, start, _blocked(q_THD, lse_TH, view))
    return tuple(score_E.reshape(shape) for score_E in scores)


def _norm(tile: Tile) -> jax.Array:
    """L2 norm of a tile's values, float32 [K, N]; keys that nobody sees have values of zero there."""
    return jnp.sqrt(jnp.square(tile.v_KND.astype(jnp.float32)).sum(-1))


def _chunk_score(
    q_THD: jax.Array, known_TH: jax.Array, view: View, key_segment_SC: jax.Array, segments: int
) -> jax.Array:
    """`known_TH` is +inf for rows that do not count, else 0. Keys of no segment go to one behind the last, and out."""
    shape, heads = view.entries.index_ASC.shape[1:], q_THD.shape[1]
    segment_E = _segment_of(key_segment_SC, segments)

    def one_block(score_E: jax.Array, arrays: tuple[Any, ...]) -> tuple[jax.Array, None]:
        block = _block(arrays, view)

        def logits_of(place_W: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Logits, keys first, [N, K, M], which keys they are, and of which segments."""
            tile = block.tile(view, place_W)
            return jnp.moveaxis(masked_logits(tile), 2, 0), tile.slot_N, segment_E[tile.slot_N]

        def find(place_W: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            max_ZKM, sum_ZKM = found
            logits_NKM, _, segment_N = logits_of(place_W)
            new_ZKM = max_ZKM.at[segment_N].max(logits_NKM)
            safe_ZKM = jnp.where(jnp.isneginf(new_ZKM), 0.0, new_ZKM)
            sum_ZKM = sum_ZKM * jnp.exp(max_ZKM - safe_ZKM)
            return new_ZKM, sum_ZKM.at[segment_N].add(jnp.exp(logits_NKM - safe_ZKM[segment_N]))

        size = (segments + 1, *block.q_KMD.shape[:2])
        max_ZKM, sum_ZKM = block.visited.sweep(find, (jnp.full(size, -jnp.inf), jnp.zeros(size)))
        lse_ZKM = jnp.where(sum_ZKM > 0, max_ZKM + jnp.log(sum_ZKM), jnp.inf) + block.lse_KM1[..., 0]
        lse_ZKM = lse_ZKM.at[segments].set(jnp.inf)

        def share(place_W: jax.Array, score_E: jax.Array) -> jax.Array:
            logits_NKM, slot_N, segment_N = logits_of(place_W)
            prob_NKM = jnp.exp(logits_NKM - lse_ZKM[segment_N])
            return score_E.at[slot_N].add(prob_NKM.sum((1, 2)) / heads)

        return block.visited.sweep(share, score_E), None

    score_E, _ = lax.scan(one_block, jnp.zeros(math.prod(shape)), _blocked(q_THD, known_TH, view))
    return score_E.reshape(shape)


def _segment_of(key_segment_SC: jax.Array, segments: int) -> jax.Array:
    """Segments of slots s * C + c; `segments` for none."""
    in_segment_SC = (key_segment_SC >= 0) & (key_segment_SC < segments)
    return jnp.where(in_segment_SC, key_segment_SC, segments).reshape(-1)


def _row_segment_score(
    q_THD: jax.Array,
    lse_TH: jax.Array,
    view: View,
    row_segment_T: jax.Array,
    key_segment_SC: jax.Array,
    segments: int,
) -> jax.Array:
    heads, b = q_THD.shape[1], view.block_rows
    index_E, segment_E = view.entries.index_ASC[0].reshape(-1), _segment_of(key_segment_SC, segments)

    def one_block(arrays: tuple[Any, ...]) -> jax.Array:
        segment_B, block = arrays[0], _block(arrays[1:], view)

        def step(place_W: jax.Array, score_BZ: jax.Array) -> jax.Array:
            prob_KMN, tile = block.probabilities(view, place_W)
            prob_BN = prob_KMN.reshape(-1, b, prob_KMN.shape[-1]).sum(0) / heads
            index_N, segment_N = index_E[tile.slot_N], segment_E[tile.slot_N]
            own_BN = (segment_B[:, None] == segment_N) & (block.index_B[:, None] == index_N)
            prob_BN = jnp.where(own_BN, 0.0, prob_BN)
            return score_BZ + dot(prob_BN, jax.nn.one_hot(segment_N, segments), ((1,), (0,)), batch=())

        return block.visited.sweep(step, jnp.zeros((b, segments)))

    blocked = (row_segment_T.reshape(-1, b), *_blocked(q_THD, lse_TH, view))
    score_NBZ: jax.Array = lax.map(one_block, blocked)
    return score_NBZ.reshape(-1, segments)


# --------------------------------------------------------------------------- deviation and neighbours in XLA


def _kv_deviation(
    k_TKD: jax.Array, v_TKD: jax.Array, view: View, slot_T: jax.Array, offset_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    compared_T = (slot_T >= 0) & (view.rows.index_T >= 0)
    slot_T = jnp.where(compared_T, slot_T, 0)
    page_T, slot_T = slot_T // view.pages.page_size, slot_T % view.pages.page_size
    cos_TR, sin_TR = view.rotation.at(offset_T)

    def kept(pool: jax.Array) -> jax.Array:
        return from_storage(pool[view.layer, page_T, :, slot_T]).astype(jnp.float32)

    def distance(new_TKD: jax.Array, kept_TKD: jax.Array) -> jax.Array:
        return jnp.where(compared_T, jnp.square(new_TKD.astype(jnp.float32) - kept_TKD).sum((1, 2)), 0.0)

    moved_TKD = rotate(kept(view.pages.k_LPKCD), cos_TR[:, None], sin_TR[:, None])
    return distance(k_TKD, moved_TKD), distance(v_TKD, kept(view.pages.v_LPKCD))


def _key_neighbours(
    k_NKD: jax.Array, valid_N: jax.Array, source_I: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """A running best of `count`, tile after tile. Ties go to what was found first: `lax.top_k` is stable."""
    n = k_NKD.shape[0]
    tile = min(KEY_TILE, n)
    real_I = (source_I >= 0) & valid_N[source_I]
    source_IE, source_length_I = _flat(k_NKD[source_I], real_I)

    def step(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin = jnp.minimum(i * tile, n - tile)  # the last tile may overlap the one before
        index_N = begin + jnp.arange(tile, dtype=jnp.int32)
        fresh_N = lax.dynamic_slice_in_dim(valid_N, begin, tile) & (index_N >= i * tile)
        key_NE, length_N = _flat(lax.dynamic_slice_in_dim(k_NKD, begin, tile), fresh_N)
        cosine_IN = dot(source_IE, key_NE, ((1,), (1,)), batch=()) / (source_length_I[:, None] * length_N)
        compared_IN = fresh_N & real_I[:, None] & (source_I[:, None] != index_N)
        joined_IN = jnp.concatenate([best[0], jnp.where(compared_IN, cosine_IN, -jnp.inf)], axis=1)
        named_IN = jnp.concatenate([best[1], jnp.broadcast_to(index_N, cosine_IN.shape)], axis=1)
        cosine_IY, place_IY = lax.top_k(joined_IN, count)
        return cosine_IY, jnp.take_along_axis(named_IN, place_IY, 1)

    shape = source_I.shape[0], count
    start = jnp.full(shape, -jnp.inf), jnp.full(shape, -1, jnp.int32)
    cosine_IY, index_IY = lax.fori_loop(0, -(-n // tile), step, start)
    return jnp.maximum(jnp.where(jnp.isneginf(cosine_IY), 0.0, cosine_IY), 0.0), index_IY


def _flat(k_NKD: jax.Array, valid_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys with their heads side by side, zero where not valid, and their lengths, infinite for keys of zeros."""
    k_NKD = from_storage(jnp.where(valid_N[:, None, None], k_NKD, jnp.zeros((), k_NKD.dtype)))
    flat_NE = k_NKD.reshape(k_NKD.shape[0], -1)
    length_N = jnp.sqrt(jnp.square(flat_NE.astype(jnp.float32)).sum(-1))
    return flat_NE, jnp.where(length_N > 0, length_N, jnp.inf)
