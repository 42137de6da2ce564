"""Paged interval attention in float64 NumPy, from the words of its contract, and a builder of its inputs.

`attend` takes keys token by token: un-rotated, at absolute positions, each with its request, index and hide interval.
It knows no pages, entries, offsets or blocks, and rotates by multiplying complex numbers; it shares no code with the
kernels. `lay_out` turns the same keys into pages: every piece rotated at a stored position of its own, pieces side
by side on scattered pages, slots nobody owns filled with garbage.

Sizes: N keys (tokens), T rows, H query heads, K KV heads, D head dim, R = D / 2, S entries, P pages, C slots of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ragjax.kernels.pages import Pages
from ragjax.kernels.table import PageTable, Rows

Float = NDArray[np.float64]
Int = NDArray[np.int64]

NEVER = 2**30
EMPTY = (0, 0)


# ------------------------------------------------------------------------------------------ definition


@dataclass(frozen=True)
class Keys:
    """Token-level keys: request, index, absolute position and hide interval, int [N]; k (un-rotated), v [N, K, D]."""

    request_N: Int
    index_N: Int
    position_N: Int
    hide_from_N: Int
    hide_until_N: Int
    k_NKD: Float
    v_NKD: Float


@dataclass(frozen=True)
class Queries:
    """Token-level rows: request, index and absolute position, int [T]; q (un-rotated) [T, H, D]."""

    request_T: Int
    index_T: Int
    position_T: Int
    q_THD: Float


def rotate(x: Float, position: Int, inv_freq_R: Float) -> Float:
    """RoPE: components i and i + R of a head are one complex number, rotated by position times frequency i."""
    half = x.shape[-1] // 2
    angle = position.reshape(position.shape + (1,) * (x.ndim - position.ndim)) * inv_freq_R
    rotated = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([rotated.real, rotated.imag], axis=-1)


def is_visible(queries: Queries, keys: Keys, t: int, n: int) -> bool:
    """The rule, for one row and one key."""
    row, key = int(queries.index_T[t]), int(keys.index_N[n])
    if row < 0 or queries.request_T[t] != keys.request_N[n]:
        return False
    hidden = keys.hide_from_N[n] <= row < keys.hide_until_N[n]
    return key <= row and not hidden


def attend(
    queries: Queries, keys: Keys, inv_freq_R: Float, scale: float, cap: float | None = None
) -> tuple[Float, Float, Float]:
    """Attention output [T, H, D], natural-log LSE [T, H] and probabilities [T, H, N], float64."""
    t_count, heads, _ = queries.q_THD.shape
    n_count, kv_heads, _ = keys.k_NKD.shape
    q_THD = rotate(queries.q_THD, queries.position_T, inv_freq_R)
    k_NKD = rotate(keys.k_NKD, keys.position_N, inv_freq_R)
    out_THD = np.zeros_like(q_THD)
    lse_TH = np.full((t_count, heads), -np.inf)
    prob_THN = np.zeros((t_count, heads, n_count))
    for t in range(t_count):
        seen = [n for n in range(n_count) if is_visible(queries, keys, t, n)]
        if not seen:
            continue
        for h in range(heads):
            kv_head = h // (heads // kv_heads)
            logits = scale * (k_NKD[seen, kv_head] @ q_THD[t, h])
            if cap is not None:
                logits = cap * np.tanh(logits / cap)
            lse_TH[t, h] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            prob_THN[t, h, seen] = np.exp(logits - lse_TH[t, h])
            out_THD[t, h] = prob_THN[t, h, seen] @ keys.v_NKD[seen, kv_head]
    return out_THD, lse_TH, prob_THN


def worst_error(out_THD: NDArray[np.floating], want_THD: Float) -> float:
    """Largest error of any row and head, relative to the root mean square length over those that see something."""
    difference = np.linalg.norm(np.asarray(out_THD, np.float64) - want_THD, axis=-1)
    length = np.linalg.norm(want_THD, axis=-1)
    live = length > 0
    typical = np.sqrt((length[live] ** 2).mean()) if live.any() else 1.0
    return float(np.where(np.isnan(difference), np.inf, difference).max() / typical)


def lse_error(lse_TH: NDArray[np.floating], want_TH: Float) -> float:
    """Largest absolute error of the LSE; infinite where one side is -inf and the other is not."""
    got_TH = np.asarray(lse_TH, np.float64)
    if not np.array_equal(np.isneginf(got_TH), np.isneginf(want_TH)):
        return float("inf")
    live = ~np.isneginf(want_TH)
    error = np.abs(got_TH[live] - want_TH[live])
    return float(np.where(np.isnan(error), np.inf, error).max(initial=0.0))


# --------------------------------------------------------------------------------------------- pieces


@dataclass(frozen=True)
class Piece:
    """A run of tokens of one request at consecutive positions, as it is kept in the pool.

    indices: of its tokens, `NEVER` for one that takes no part. content: pieces of equal content hold equal k and v and
    share their slots, though at other positions, indices and intervals.
    """

    request: int
    indices: tuple[int, ...]
    position: int
    hidden: tuple[int, int]
    content: int

    def __len__(self) -> int:
        return len(self.indices)


def keys_of(pieces: Sequence[Piece], kv_heads: int, dim: int, seed: int) -> Keys:
    """Random keys and values for pieces; a content's are drawn from its number."""
    drawn = [np.random.default_rng([seed, p.content]).standard_normal((2, len(p), kv_heads, dim)) for p in pieces]

    def per_token(values: Sequence[int]) -> Int:
        return np.repeat(np.asarray(values, np.int64), [len(p) for p in pieces])

    return Keys(
        request_N=per_token([p.request for p in pieces]),
        index_N=np.concatenate([np.asarray(p.indices, np.int64) for p in pieces]),
        position_N=np.concatenate([p.position + np.arange(len(p)) for p in pieces]),
        hide_from_N=per_token([p.hidden[0] for p in pieces]),
        hide_until_N=per_token([p.hidden[1] for p in pieces]),
        k_NKD=np.concatenate([kv[0] for kv in drawn]),
        v_NKD=np.concatenate([kv[1] for kv in drawn]),
    )


# --------------------------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class Sizes:
    """Fixed sizes of a layout, so that one compiled program serves many cases."""

    page_size: int
    pages: int
    entries: int
    layers: int = 2


@dataclass(frozen=True)
class Layout:
    """Kernel inputs, and where each token-level key went (entry and slot, int [N])."""

    pages: Pages
    entries: PageTable
    layer: int
    entry_N: Int
    slot_N: Int


def lay_out(
    pieces: Sequence[Piece],
    keys: Keys,
    inv_freq_R: Float,
    sizes: Sizes,
    *,
    dtype: str = "float32",
    seed: int = 0,
    garbage: float = np.nan,
    max_offset: int = 0,
) -> Layout:
    """Put pieces into a pool of `sizes` at random stored positions, at most `max_offset` from where they take part.

    dtype: of the pool; "uint16" holds bfloat16 bits. garbage: what every unowned slot and every other layer holds.
    Unused entries name pages, indices and offsets that would show if they were read.
    """
    rng = np.random.default_rng(seed)
    kv_heads, dim = keys.k_NKD.shape[1:]
    shape = (sizes.layers, sizes.pages, kv_heads, sizes.page_size, dim)
    pools = np.full(shape, garbage), np.full(shape, garbage)
    layer = int(rng.integers(sizes.layers))
    physical = rng.permutation(sizes.pages)

    entry = _Entries.unused(sizes, rng, max_offset)
    names = rng.permutation(sizes.entries)
    entry_N, slot_N = np.zeros(len(keys.index_N), np.int64), np.zeros(len(keys.index_N), np.int64)
    placed: dict[int, tuple[int, int]] = {}
    frontier, used, begin = 0, 0, 0
    for piece in pieces:
        n = np.arange(begin, begin + len(piece))
        begin += len(piece)
        if piece.content not in placed:
            if rng.random() < 0.4:  # start on a page of its own; otherwise share the last page with what came before
                frontier = -(-frontier // sizes.page_size) * sizes.page_size
            placed[piece.content] = frontier, _stored_position(rng, piece, max_offset)
            frontier += len(piece)
        start, stored = placed[piece.content]
        flat = start + np.arange(len(piece))
        page, slot = physical[flat // sizes.page_size], flat % sizes.page_size
        stored_n = stored + np.arange(len(piece))
        pools[0][layer, page, :, slot] = rotate(keys.k_NKD[n], stored_n, inv_freq_R)
        pools[1][layer, page, :, slot] = keys.v_NKD[n]
        for number in dict.fromkeys(flat // sizes.page_size):
            here = flat // sizes.page_size == number
            s = names[used]
            used += 1
            entry.open(s, int(physical[number]), piece.position - stored, piece.request)
            entry.index_SC[s, slot[here]] = np.minimum(keys.index_N[n[here]], NEVER)
            entry.hide_from_SC[s, slot[here]], entry.hide_until_SC[s, slot[here]] = piece.hidden
            entry_N[n[here]], slot_N[n[here]] = s, slot[here]
    pages = Pages(*(store(pool, dtype) for pool in pools))
    return Layout(pages, entry.to_kernel(), layer, entry_N, slot_N)


def _stored_position(rng: np.random.Generator, piece: Piece, max_offset: int) -> int:
    if rng.random() < 0.2:
        return piece.position  # in place: offset 0
    low = max(0, piece.position - max_offset)
    return int(rng.integers(low, piece.position + max_offset + 1))


def store(pool: NDArray[np.floating], dtype: str) -> jnp.ndarray:
    """The pool as the kernels keep it."""
    if dtype == "uint16":
        return jnp.asarray(pool.astype(ml_dtypes.bfloat16).view(np.uint16))
    return jnp.asarray(pool.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


@dataclass
class _Entries:
    page_S: NDArray[np.int32]
    offset_S: NDArray[np.int32]
    request_S: NDArray[np.int32]
    index_SC: NDArray[np.int32]
    hide_from_SC: NDArray[np.int32]
    hide_until_SC: NDArray[np.int32]

    @staticmethod
    def unused(sizes: Sizes, rng: np.random.Generator, max_offset: int) -> _Entries:
        slots = (sizes.entries, sizes.page_size)
        return _Entries(
            page_S=rng.integers(0, sizes.pages, sizes.entries).astype(np.int32),
            offset_S=rng.integers(-max_offset, max_offset + 1, sizes.entries).astype(np.int32),
            request_S=np.full(sizes.entries, -1, np.int32),
            index_SC=np.zeros(slots, np.int32),
            hide_from_SC=np.zeros(slots, np.int32),
            hide_until_SC=np.zeros(slots, np.int32),
        )

    def open(self, s: int, page: int, offset: int, request: int) -> None:
        self.page_S[s], self.offset_S[s], self.request_S[s] = page, offset, request
        self.index_SC[s] = NEVER

    def to_kernel(self) -> PageTable:
        return PageTable(
            jnp.asarray(self.page_S),
            jnp.asarray(self.offset_S),
            jnp.asarray(self.request_S),
            jnp.asarray(self.index_SC),
            jnp.asarray(self.hide_from_SC),
            jnp.asarray(self.hide_until_SC),
        )


def lay_rows(
    queries: Queries, inv_freq_R: Float, block_rows: int, total: int, seed: int = 0
) -> tuple[jnp.ndarray, Rows, Int]:
    """Rows in blocks of one request each, blocks in random order, padded to `total` with rows of index -1.

    Returns q [total, H, D] float32 rotated at its position, the rows, and the place of each query, int [T].
    """
    rng = np.random.default_rng(seed)
    blocks = []
    for request in np.unique(queries.request_T):
        own = np.flatnonzero(queries.request_T == request)
        blocks += [own[i : i + block_rows] for i in range(0, len(own), block_rows)]
    places = rng.permutation(total // block_rows)[: len(blocks)]
    place_T = np.zeros(len(queries.index_T), np.int64)
    for place, block in zip(places, blocks, strict=True):
        place_T[block] = place * block_rows + np.arange(len(block))
    q = np.full((total, *queries.q_THD.shape[1:]), 3.0, np.float32)
    q[place_T] = rotate(queries.q_THD, queries.position_T, inv_freq_R)
    index, position, request = np.full(total, -1), np.zeros(total, np.int64), rng.integers(-1, 2, total)
    index[place_T], position[place_T], request[place_T] = queries.index_T, queries.position_T, queries.request_T
    return jnp.asarray(q), Rows(*(jnp.asarray(x, jnp.int32) for x in (index, position, request))), place_T
