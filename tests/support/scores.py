"""Attention scores by the public ops and by the float64 oracle, for the cases of tests.support.cases."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ragjax.kernels.attention.op import paged_interval_attention
from ragjax.kernels.pages import Pages, from_storage
from ragjax.kernels.reductions.op import key_scores, row_segment_score
from ragjax.kernels.table import Rows
from tests.support.cases import Case
from tests.support.oracle import rotate

SEGMENTS = 5


class Labels(NamedTuple):
    """Which rows count, and the segment of each row and slot; some are of none."""

    chosen_T: np.ndarray
    row_segment_T: np.ndarray
    key_segment_SC: np.ndarray


class Scores(NamedTuple):
    """Scores of keys, of all rows; of chosen rows, plain and times the value norm; by row and segment; by segments."""

    all_SC: np.ndarray
    plain_SC: np.ndarray
    valued_SC: np.ndarray
    row_TZ: np.ndarray
    segment_ZZ: np.ndarray


def labels_of(case: Case, seed: int) -> Labels:
    """Random labels; half of the time segments are runs of indices, as in service, else they are mixed at will."""
    rng = np.random.default_rng(seed)
    t, s, c = case.shape.rows, case.shape.sizes.entries, case.shape.page_size
    blocks = np.repeat(rng.random(t // case.shape.block_rows) < 0.7, case.shape.block_rows)
    chosen_T = blocks & (rng.random(t) < 0.6)
    if rng.random() < 0.5:
        row_T, key_SC = (np.asarray(x) // 6 - 1 for x in (case.rows.index_T, case.layout.entries.index_SC))
    else:
        row_T, key_SC = rng.integers(-1, SEGMENTS + 1, t), rng.integers(-1, SEGMENTS + 1, (s, c))
    return Labels(chosen_T, row_T.astype(np.int32), key_SC.astype(np.int32))


def by_segment(row_TZ, row_segment_T):  # type: ignore[no-untyped-def]
    """Scores of rows summed by segment: Cache-Craft's inter and intra attention (eqs. 3 and 4)."""
    return jnp.einsum("ta,tb->ab", jax.nn.one_hot(row_segment_T, SEGMENTS), row_TZ, precision="highest")


def measure(q, lse, view, labels, backend):  # type: ignore[no-untyped-def]
    """All scores by the public ops. Those by segment have no kernel for CPUs."""
    chosen_T, *segments = labels
    row_TZ = row_segment_score(q, lse, view, *segments, SEGMENTS, backend="xla" if backend == "cpu" else backend)
    return Scores(
        *key_scores(q, lse, view, valued=False, backend=backend),
        *key_scores(q, lse, view, chosen_T, backend=backend),
        row_TZ,
        by_segment(row_TZ, labels.row_segment_T),
    )


@functools.partial(jax.jit, static_argnames="backend")
def compiled(q, view, labels, *, backend):  # type: ignore[no-untyped-def]
    return measure(q, paged_interval_attention(q, view)[1], view, labels, backend)


def scores_of(case: Case, labels: Labels, backend: str = "xla") -> Scores:
    found = compiled(case.q, case.view(), labels, backend=backend)
    return Scores(*(np.asarray(x) for x in found))


def wanted(case: Case, labels: Labels) -> Scores:
    """The scores from the oracle's probabilities, by loops over words of the definition."""
    _, _, prob_THN = case.what()
    entry_N, slot_N = case.layout.entry_N, case.layout.slot_N
    norm_HN = np.repeat(np.linalg.norm(case.keys.v_NKD, axis=-1), case.shape.groups, axis=1).T
    chosen_T = labels.chosen_T[case.place_T]

    def scatter(score_N: np.ndarray) -> np.ndarray:
        score_SC = np.zeros((case.shape.sizes.entries, case.shape.page_size))
        np.add.at(score_SC, (entry_N, slot_N), score_N)
        return score_SC

    row_TZ, segment_ZZ = np.zeros((case.shape.rows, SEGMENTS)), np.zeros((SEGMENTS, SEGMENTS))
    prob_TN, key_segment_N = prob_THN.mean(1), labels.key_segment_SC[entry_N, slot_N]
    for t, place in enumerate(case.place_T):
        of_row = labels.row_segment_T[place]
        if not 0 <= of_row < SEGMENTS:
            continue
        for n, of_key in enumerate(key_segment_N):
            itself = case.queries.index_T[t] == case.keys.index_N[n]
            if 0 <= of_key < SEGMENTS and not (itself and of_row == of_key):
                row_TZ[place, of_key] += prob_TN[t, n]
                segment_ZZ[of_row, of_key] += prob_TN[t, n]
    return Scores(
        scatter(prob_TN.sum(0)),
        scatter(prob_TN[chosen_T].sum(0)),
        scatter((prob_THN[chosen_T] * norm_HN).mean(1).sum(0)),
        row_TZ,
        segment_ZZ,
    )


def assert_near(found: Scores, what: Scores, dtype: str) -> None:
    # in bfloat16 the LSE was formed from queries rotated otherwise (narrow blocks), so bits agree to its rounding alone
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    for name in Scores._fields:
        got, right = getattr(found, name), getattr(what, name)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance, err_msg=name)
        assert not got[right == 0].any(), name


def far_apart(found: np.ndarray, what: np.ndarray) -> bool:
    return not np.allclose(found, what, rtol=1e-2, atol=1e-2)


def rolled_values(case: Case) -> Case:
    """Values under the wrong KV head."""
    pages = case.layout.pages
    return replace(case, layout=replace(case.layout, pages=Pages(pages.k_LPKCD, jnp.roll(pages.v_LPKCD, 1, axis=2))))


def rotated(case: Case) -> Case:
    """Offsets of the wrong sign."""
    entries = case.layout.entries
    return replace(case, layout=replace(case.layout, entries=replace(entries, offset_S=-entries.offset_S)))


def everybody(labels: Labels) -> Labels:
    return labels._replace(chosen_T=np.ones_like(labels.chosen_T))


@dataclass(frozen=True)
class Recomputed:
    """New keys of tokens of a case, and where the cached KV lies; what the squared distances are."""

    arguments: tuple[jax.Array, ...]
    rows: Rows
    want_T: np.ndarray


def recomputed(case: Case, seed: int) -> Recomputed:
    """Tokens drawn from the keys. Some rows are padding, of NaN or at a slot of NaN; some have no cached KV."""
    rng = np.random.default_rng(seed)
    shape, layout, keys = case.shape, case.layout, case.keys
    t = shape.rows
    drawn = rng.integers(0, len(keys.index_N), t)
    page_S, offset_S = (np.asarray(x) for x in (layout.entries.page_S, layout.entries.offset_S))
    entry_T, slot_T = layout.entry_N[drawn], layout.slot_N[drawn]
    kept = np.asarray(from_storage(layout.pages.k_LPKCD), np.float64)[layout.layer]
    size = rng.exponential(size=(t, 1, 1)) * (rng.random((t, 1, 1)) < 0.8)
    change = size * rng.standard_normal((t, shape.kv_heads, shape.dim))
    new_k = rotate(keys.k_NKD[drawn], keys.position_N[drawn], case.inv_freq_R) + change
    kept_TKD = rotate(kept[page_S[entry_T], :, slot_T], offset_S[entry_T], case.inv_freq_R)
    want_T = ((new_k - kept_TKD) ** 2).sum((1, 2))
    padding_T, alone_T = rng.random(t) < 0.2, rng.random(t) < 0.2
    new_k[padding_T] = np.nan
    slots = page_S[entry_T] * shape.page_size + slot_T
    unowned = np.argwhere(np.isnan(kept).any((1, 3))) @ [shape.page_size, 1]  # [P, C] of NaN
    slots = np.where(padding_T & (rng.random(t) < 0.5), rng.choice(unowned, t), slots)
    slots = np.where(alone_T, -rng.integers(1, 99, t), slots)
    index_T = np.where(padding_T, -1, np.arange(t))
    rows = Rows(*(jnp.asarray(x, jnp.int32) for x in (index_T, np.zeros(t), np.zeros(t))))
    arguments = (
        jnp.asarray(new_k, jnp.float32), jnp.asarray(slots, jnp.int32), jnp.asarray(offset_S[entry_T], jnp.int32),
    )  # fmt: skip
    return Recomputed(arguments, rows, np.where(~padding_T & ~alone_T, want_T, 0))
