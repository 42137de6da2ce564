"""`paged_interval_attention` in XLA: blockwise online softmax over visible keys, for CPU and as the fallback.

Source: online softmax as in FlashAttention (arXiv 2205.14135). Memory is O(rows x tile), and a list of the visible keys
of each block of rows; hidden keys are skipped. A tile is gathered from the pages key by key, so that pages which are
filled in part, or most of whose tokens are hidden, cost no more than what is seen of them, and its keys are rotated.
Few rows take whole entries, and rotate their queries once an entry. Products take the pool's dtype, or float32 for
many rows of a view that says `widen`, and accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.core import NEVER
from ragjax.kernels.blocks import visible_slots
from ragjax.kernels.pages import from_storage, to_storage
from ragjax.kernels.rope import rotate
from ragjax.kernels.table import sees
from ragjax.kernels.view import View

FEW = 8
"""Row blocks smaller than this take entries and rotate queries, larger ones take slots and rotate keys."""

SLOTS = 8
"""Entries of a tile."""

PAIRS = 2**16
"""Rows times slots of a tile: 2.3 MB of logits with nine heads. Measured on two cores, 2K keys: 32 rows 1.5 ms with
tiles of 2,048 slots and 2.1 ms with 512; 128 rows are as fast with 256 and 1,024 as with 512."""

PARTS = 4
"""Of a tile, in which the end of a list is taken, where fewer are left."""


Arrays = tuple[jax.Array, ...]
Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lists:
    """Lists of the keys that blocks of rows visit, with a leading axis of blocks, or the list of one block."""

    item_E: (
        jax.Array
    )  # int32; the first `count` are entries, if `slots` is C, or slots s * C + c of entries, if it is 1
    count: jax.Array  # int32 scalar
    slots: int = field(metadata={"static": True})  # keys of an item
    width: int = field(metadata={"static": True})  # items of a tile

    def items(self, place_W: jax.Array) -> jax.Array:
        """The items at some places; beyond the list's end they are any."""
        return self.item_E[jnp.minimum(place_W, self.item_E.shape[0] - 1)]

    def sweep(self, step: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
        """Run `step(places, carry)` over a list in tiles; the last may reach beyond its end."""

        def tiles(begin: jax.Array | int, number: jax.Array, width: int, carry: Carry) -> Carry:
            def tile(i: jax.Array, carry: Carry) -> Carry:
                return step(begin + i * width + jnp.arange(width, dtype=jnp.int32), carry)

            swept: Carry = lax.fori_loop(0, number, tile, carry)
            return swept

        part = max(1, self.width // PARTS)
        whole = self.count // self.width
        carry = tiles(0, whole, self.width, carry)
        return tiles(whole * self.width, -(-(self.count - whole * self.width) // part), part, carry)


class Tile(NamedTuple):
    q: jax.Array  # queries that fit the keys, [K, M, D] for all alike, or rotated for each entry, [K, W, M, D]
    k_KND: jax.Array  # in compute dtype, like the values
    v_KND: jax.Array
    slot_N: jax.Array  # which slots they are, s * C + c, int32
    seen_BN: jax.Array  # which row sees which key, bool; no row sees what is beyond a list's end


def attend(q_THD: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    t, heads, dim = q_THD.shape
    kv_heads, block_rows = view.pages.k_LPKCD.shape[2], view.block_rows

    def one_block(block: tuple[jax.Array, jax.Array, Lists]) -> tuple[jax.Array, jax.Array]:
        q_BHD, index_B, visited = block
        q_KMD = fold_heads(q_BHD.astype(jnp.float32) * view.scale, kv_heads)

        def step(place_W: jax.Array, carry: Arrays) -> Arrays:
            tile = gather_tile(q_KMD, index_B, view, visited, place_W)
            return accumulate(masked_logits(tile, view), tile.v_KND, carry)

        out_KMD, lse_KM = finish(visited.sweep(step, empty(q_KMD.shape)))
        return unfold_heads(out_KMD, block_rows), unfold_heads(lse_KM, block_rows)

    n = t // block_rows
    blocks = q_THD.reshape(n, block_rows, heads, dim), view.rows.index_T.reshape(n, block_rows), lists(view)
    if n > 1:
        out_NBHD, lse_NBH = lax.map(one_block, blocks)
    else:  # XLA fuses a plain call better
        out_NBHD, lse_NBH = (x[None] for x in one_block(jax.tree.map(lambda x: x[0], blocks)))
    return out_NBHD.reshape(t, heads, dim).astype(q_THD.dtype), lse_NBH.reshape(t, heads)


def empty(shape: tuple[int, ...]) -> Arrays:
    """The state of an online softmax that has seen no key: sum of values, greatest logit and sum of weights."""
    return jnp.zeros(shape), jnp.full(shape[:-1], -jnp.inf), jnp.zeros(shape[:-1])


def accumulate(logits_KMN: jax.Array, v_KND: jax.Array, state: Arrays) -> Arrays:
    """The state after some more keys; a hidden key has logit -inf."""
    acc_KMD, max_KM, sum_KM = state
    new_KM = jnp.maximum(max_KM, logits_KMN.max(-1))
    safe_KM = jnp.where(jnp.isneginf(new_KM), 0.0, new_KM)
    prob_KMN = jnp.exp(logits_KMN - safe_KM[..., None])
    decay_KM = jnp.exp(max_KM - safe_KM)
    gain_KMD = weighted(prob_KMN, v_KND)
    return acc_KMD * decay_KM[..., None] + gain_KMD, new_KM, sum_KM * decay_KM + prob_KMN.sum(-1)


def weighted(prob_KMN: jax.Array, v_KND: jax.Array) -> jax.Array:
    """Sums of values, [K, M, D].

    XLA for GPUs makes a reduction of the product of one row, and for it a copy of the whole pool in another layout:
    there the row is taken twice.
    """

    def plain(prob_KMN: jax.Array, v_KND: jax.Array) -> jax.Array:
        return dot(prob_KMN, v_KND, ((2,), (1,)))

    def twice(prob_KMN: jax.Array, v_KND: jax.Array) -> jax.Array:
        return plain(jnp.concatenate([prob_KMN, prob_KMN], axis=1), v_KND)[:, :1]

    if prob_KMN.shape[1] > 1:
        return plain(prob_KMN, v_KND)
    product_KMD: jax.Array = lax.platform_dependent(prob_KMN, v_KND, cuda=twice, default=plain)
    return product_KMD


def finish(state: Arrays) -> tuple[jax.Array, jax.Array]:
    """Output [K, M, D] and log-sum-exp [K, M] of a state, float32; zeros and -inf where no key was seen."""
    acc_KMD, max_KM, sum_KM = state
    dead_KM = sum_KM == 0.0
    safe_KM = jnp.where(dead_KM, 1.0, sum_KM)
    return acc_KMD / safe_KM[..., None], jnp.where(dead_KM, -jnp.inf, max_KM + jnp.log(safe_KM))


def lists(view: View) -> Lists:
    """Build the lists of all blocks of rows. XLA builds equal lists of several layers once per program."""
    blocks, slots = view.blocks, view.pages.page_size
    if view.block_rows < FEW:
        return Lists(blocks.entry_NS, blocks.count_N, slots, SLOTS)
    seen_NSC = visible_slots(view.rows, view.entries, view.block_rows) & (blocks.count_N > 0)[:, None, None]
    seen_NE = seen_NSC.reshape(seen_NSC.shape[0], -1)
    total = seen_NE.shape[1]
    place_NE = jnp.where(seen_NE, jnp.cumsum(seen_NE, axis=1, dtype=jnp.int32) - 1, jnp.int32(total))

    def listed(place_E: jax.Array) -> jax.Array:
        return jnp.zeros(total, jnp.int32).at[place_E].set(jnp.arange(total, dtype=jnp.int32), mode="drop")

    count_N = seen_NE.sum(1, dtype=jnp.int32)
    return Lists(jax.vmap(listed)(place_NE), count_N, 1, min(total, max(1, PAIRS // view.block_rows)))


def gather_tile(q_KMD: jax.Array, index_B: jax.Array, view: View, visited: Lists, place_W: jax.Array) -> Tile:
    """A tile of a row block: the keys at these places of its list, and who sees what."""
    entries = view.entries
    item_W = visited.items(place_W)
    slot_N = (item_W[:, None] * visited.slots + jnp.arange(visited.slots, dtype=jnp.int32)).reshape(-1)
    listed_N = jnp.repeat(place_W < visited.count, visited.slots)
    index_N, hide_from_N, hide_until_N = (
        x_SC.reshape(-1)[slot_N] for x_SC in (entries.index_SC, entries.hide_from_SC, entries.hide_until_SC)
    )
    index_N = jnp.where(listed_N, index_N, jnp.int32(NEVER))
    seen_BN = sees(index_B[:, None], index_N, hide_from_N, hide_until_N)
    if view.block_rows < FEW:
        q, k_KND, v_KND = _entries(view, item_W, q_KMD)
    else:
        q, k_KND, v_KND = q_KMD, *_slots(view, slot_N)
    # slots nobody sees may hold NaN, and 0 * NaN is NaN
    v_KND = jnp.where(seen_BN.any(0)[:, None], v_KND, jnp.zeros((), v_KND.dtype))
    # bits, not bfloat16, until the product: XLA on CPU would widen and narrow again around every operation
    k_KND, v_KND = from_storage(k_KND), from_storage(v_KND)
    if view.widen and view.block_rows >= FEW:
        k_KND, v_KND = k_KND.astype(jnp.float32), v_KND.astype(jnp.float32)
    return Tile(q, k_KND, v_KND, slot_N, seen_BN)


def _entries(view: View, entry_W: jax.Array, q_KMD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries rotated for each entry, [K, W, M, D], and the entries' keys and values as they are stored, [K, N, D]."""
    page_W = view.entries.page_S[entry_W]

    def load(pool: jax.Array) -> jax.Array:
        _, _, kv_heads, slots, dim = pool.shape
        shape = (1, 1, kv_heads, slots, dim)
        return jnp.concatenate([lax.dynamic_slice(pool, (view.layer, p, 0, 0, 0), shape)[0, 0] for p in page_W], axis=1)

    cos_WR, sin_WR = view.rotation.at(-view.entries.offset_S[entry_W])
    q_KWMD = rotate(q_KMD[:, None], cos_WR[:, None], sin_WR[:, None])
    return q_KWMD, load(view.pages.k_LPKCD), load(view.pages.v_LPKCD)


def _slots(view: View, slot_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rotated keys, and values, of slots s * C + c, [K, N, D] as they are stored."""
    entry_N, place_N = slot_N // view.pages.page_size, slot_N % view.pages.page_size
    page_N, offset_N = view.entries.page_S[entry_N], view.entries.offset_S[entry_N]

    def load(pool: jax.Array) -> jax.Array:
        return pool[view.layer, page_N, :, place_N].swapaxes(0, 1)

    def rotated(k_KND: jax.Array) -> jax.Array:
        cos_NR, sin_NR = view.rotation.at(offset_N)
        return to_storage(rotate(from_storage(k_KND).astype(jnp.float32), cos_NR, sin_NR), k_KND.dtype)

    k_KND = lax.cond((offset_N != 0).any(), rotated, lambda k_KND: k_KND, load(view.pages.k_LPKCD))
    return k_KND, load(view.pages.v_LPKCD)


def masked_logits(tile: Tile, view: View) -> jax.Array:
    """Scaled logits as the softmax takes them, -inf where hidden, float32 [K, M, N]."""
    b, n = tile.seen_BN.shape
    kv_heads, m = tile.q.shape[0], tile.q.shape[-2]
    if tile.q.ndim == 3:
        logits = dot(tile.q, tile.k_KND, ((2,), (2,)))
    else:
        k_KWCD = tile.k_KND.reshape(*tile.q.shape[:2], -1, tile.k_KND.shape[-1])
        logits = dot(tile.q, k_KWCD, ((3,), (3,)), batch=(0, 1)).swapaxes(1, 2)
    logits = view.capped(logits)
    return jnp.where(tile.seen_BN, logits.reshape(kv_heads, m // b, b, n), -jnp.inf).reshape(kv_heads, m, n)


def dot(
    x: jax.Array, y: jax.Array, contract: tuple[tuple[int, ...], tuple[int, ...]], batch: tuple[int, ...] = (0,)
) -> jax.Array:
    """Product batched over leading axes (KV heads first) in y's dtype, accumulated in float32."""
    return lax.dot_general(
        x.astype(y.dtype),
        y,
        (contract, (batch, batch)),
        precision=lax.Precision.HIGHEST if y.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def fold_heads(x_BHD: jax.Array, kv_heads: int) -> jax.Array:
    """[B, H, D] to [K, G*B, D]: rows of one KV head side by side, so that its keys are read once (GQA)."""
    b, heads, dim = x_BHD.shape
    return x_BHD.reshape(b, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3).reshape(kv_heads, -1, dim)


def unfold_heads(x_KM: jax.Array, block_rows: int) -> jax.Array:
    """[K, G*B, ...] back to [B, H, ...]."""
    kv_heads, _, *rest = x_KM.shape
    return jnp.moveaxis(x_KM.reshape(kv_heads, -1, block_rows, *rest), 2, 0).reshape(block_rows, -1, *rest)
