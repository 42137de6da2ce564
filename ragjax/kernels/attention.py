"""`paged_interval_attention`: the one attention op of ragjax, its contract and the choice of backend.

Query rows (any subset of the tokens of many requests) attend to keys that lie in a paged pool. A key is
visible to a row iff both belong to the same request and

    order[key] <= order[row]  and not  (hide_from[key] <= order[row] < hide_until[key])

which says causal attention, independent chunks, dependency trees, stale cells and unused cells with O(n)
numbers (FusionRAG §4.3, DepCache §3.3; the interval form is FlashMask's, arXiv 2410.01359). A cached key is stored
rotated at the position it was computed at; a slot's RoPE offset moves it to where it takes part, without copying
or rewriting the page. `attention_ref.py` is the definition, `attention_xla.py` the blockwise form for CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.kernels.rope import Rotation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """The pool: keys and values, [L, P, K, C, D] each (docs/dimension_key.md).

    dtype float32, float16, bfloat16, or uint16 holding bfloat16 bits: XLA on CPU would otherwise widen a whole
    bfloat16 array to float32 for every update of it.
    """

    k_LPKCD: jax.Array
    v_LPKCD: jax.Array

    @property
    def page_size(self) -> int:
        """Cells of a page (C)."""
        return int(self.k_LPKCD.shape[3])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Query rows, int32 [T] each. Padding rows have order -1 and see nothing.

    Blocks of consecutive rows (see `block_rows`) must not mix requests.
    """

    order_T: jax.Array
    position_T: jax.Array
    request_T: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Keys of the pass: a slot is one page as one request sees it. A leading axis of 1 (all layers alike) or L.

    page, offset: int32 [A, S]; request: int32 [S], -1 for an unused slot.
    order, hide_from, hide_until: int32 [A, S, C]; a cell that takes no part has order `core.NEVER`.
    """

    page_AS: jax.Array
    offset_AS: jax.Array
    request_S: jax.Array
    order_ASC: jax.Array
    hide_from_ASC: jax.Array
    hide_until_ASC: jax.Array

    def layer(self, layer: int) -> Slots:
        """The slots as one layer sees them, leading axis 1."""
        if self.page_AS.shape[0] == 1:
            return self
        pick = slice(layer, layer + 1)
        return Slots(
            self.page_AS[pick],
            self.offset_AS[pick],
            self.request_S,
            self.order_ASC[pick],
            self.hide_from_ASC[pick],
            self.hide_until_ASC[pick],
        )


Backend = Literal["xla", "reference"]


def paged_interval_attention(
    q_THD: jax.Array,
    rows: Rows,
    pages: Pages,
    layer: int | jax.Array,
    slots: Slots,
    rotation: Rotation,
    *,
    scale: float,
    block_rows: int,
    blocks: Blocks | None = None,
    backend: Backend = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Attention of rows over the keys of their request that are visible to them.

    Args:
        q_THD: queries rotated at `rows.position_T`, float32.
        rows: order, position and request of each row.
        pages: the pool, whole; it is read at `layer` alone.
        layer: index into the pool's layer axis.
        slots: the keys, with a leading axis of 1 (`Slots.layer`).
        rotation: the model's RoPE table, long enough for every |offset|.
        scale: softmax scale, 1/sqrt(D) as a rule.
        block_rows: rows of a block; T is a multiple of it and a block holds rows of one request only.
        blocks: visible slots per row block, shared by all layers with equal slots (`visible_blocks`).
        backend: which implementation computes it.

    Returns:
        out float32 [T, H, D] and the natural log of the softmax denominator, float32 [T, H]. A row that sees no
        key gets zeros and -inf.

    Raises:
        ValueError: naming the argument whose shape or dtype does not fit.
    """
    from ragjax.kernels import attention_ref, attention_xla  # the backends import this contract

    _check(q_THD, rows, pages, slots, rotation, blocks, block_rows)
    if backend not in get_args(Backend):
        raise ValueError(f"backend {backend!r} is none of {', '.join(get_args(Backend))}")
    if backend == "reference":
        return attention_ref.attend(q_THD, rows, pages, layer, slots, rotation, scale=scale)
    if blocks is None:
        blocks = visible_blocks(rows, slots, block_rows)
    return attention_xla.attend(q_THD, rows, pages, layer, slots, rotation, blocks, scale=scale, block_rows=block_rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """For each block of rows the slots any of them can see: the first `count_N` entries of `slot_NS`, int32."""

    slot_NS: jax.Array
    count_N: jax.Array


def visible_blocks(rows: Rows, slots: Slots, block_rows: int) -> Blocks:
    """Slots visible to each row block, in slot order, never truncated.

    Exact per key against the block's range of orders: a slot is skipped iff each of its keys is hidden from all
    orders in [min, max] of the block.
    """
    order_NB = rows.order_T.reshape(-1, block_rows)
    live_NB = order_NB >= 0
    low_N11 = jnp.where(live_NB, order_NB, jnp.int32(2**30)).min(1)[:, None, None]
    high_N11 = order_NB.max(1)[:, None, None]
    request_N = jnp.where(live_NB, rows.request_T.reshape(-1, block_rows), -1).max(1)
    order_SC, hide_from_SC, hide_until_SC = slots.order_ASC[0], slots.hide_from_ASC[0], slots.hide_until_ASC[0]
    first_NSC = jnp.maximum(low_N11, order_SC)  # orders before a key's own do not see it anyway
    hidden_NSC = (order_SC > high_N11) | ((hide_from_SC <= first_NSC) & (hide_until_SC > high_N11))
    same_NS = (slots.request_S == request_N[:, None]) & (slots.request_S >= 0)
    seen_NS = same_NS & ~hidden_NSC.all(-1)
    slot_NS = jnp.argsort(~seen_NS, axis=1, stable=True).astype(jnp.int32)
    return Blocks(slot_NS, seen_NS.sum(1, dtype=jnp.int32))


def visible(rows: Rows, slots: Slots) -> jax.Array:
    """The rule itself, bool [T, S, C]: an n x n array, for the definition and for tests only."""
    q_T11 = rows.order_T[:, None, None]
    order_SC, hide_from_SC, hide_until_SC = slots.order_ASC[0], slots.hide_from_ASC[0], slots.hide_until_ASC[0]
    same_TS = (rows.request_T[:, None] == slots.request_S) & (slots.request_S >= 0) & (rows.order_T >= 0)[:, None]
    return same_TS[:, :, None] & (order_SC <= q_T11) & ~((hide_from_SC <= q_T11) & (q_T11 < hide_until_SC))


def merge_states(
    out1_THD: jax.Array, lse1_TH: jax.Array, out2_THD: jax.Array, lse2_TH: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Exact merge of two attentions of the same rows over disjoint keys (FlashInfer §3.1, arXiv 2501.01005)."""
    lse_TH = jnp.logaddexp(lse1_TH, lse2_TH)
    safe_TH = jnp.where(jnp.isneginf(lse_TH), 0.0, lse_TH)
    return (
        out1_THD * jnp.exp(lse1_TH - safe_TH)[..., None] + out2_THD * jnp.exp(lse2_TH - safe_TH)[..., None],
        lse_TH,
    )


def write_pages(pages: Pages, layer: int | jax.Array, cell_T: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array) -> Pages:
    """Put new keys and values into cells (page * C + cell, int32 [T]) of one layer; padding rows name cells of page 0.

    On CPU the pool must be donated for this to happen in place.
    """
    page_T, cell_T = cell_T // pages.page_size, cell_T % pages.page_size

    def put(pool: jax.Array, new_TKD: jax.Array) -> jax.Array:
        return pool.at[layer, page_T, :, cell_T, :].set(to_storage(new_TKD, pool.dtype))

    return Pages(put(pages.k_LPKCD, k_TKD), put(pages.v_LPKCD, v_TKD))


def to_storage(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Cast to the pool's dtype (uint16: bfloat16 bits)."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def from_storage(x: jax.Array) -> jax.Array:
    """The pool's values as floats (uint16: bfloat16 bits)."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _check(
    q_THD: jax.Array,
    rows: Rows,
    pages: Pages,
    slots: Slots,
    rotation: Rotation,
    blocks: Blocks | None,
    block_rows: int,
) -> None:
    for name, array, rank in (("q_THD", q_THD, 3), ("pages.k_LPKCD", pages.k_LPKCD, 5)):
        if array.ndim != rank:
            raise ValueError(f"{name} has {array.ndim} axes, not {rank}")
    t, heads, dim = q_THD.shape
    _, _, kv_heads, cells, pool_dim = pages.k_LPKCD.shape
    s = slots.request_S.shape[-1]
    if block_rows < 1 or t % block_rows:
        raise ValueError(f"block_rows {block_rows} does not divide the {t} rows of q_THD")
    wanted = {
        "rows.order_T": (rows.order_T.shape, (t,)),
        "rows.position_T": (rows.position_T.shape, (t,)),
        "rows.request_T": (rows.request_T.shape, (t,)),
        "pages.v_LPKCD": (pages.v_LPKCD.shape, pages.k_LPKCD.shape),
        "slots.request_S": (slots.request_S.shape, (s,)),
        "slots.page_AS": (slots.page_AS.shape, (1, s)),
        "slots.offset_AS": (slots.offset_AS.shape, (1, s)),
        "slots.order_ASC": (slots.order_ASC.shape, (1, s, cells)),
        "slots.hide_from_ASC": (slots.hide_from_ASC.shape, (1, s, cells)),
        "slots.hide_until_ASC": (slots.hide_until_ASC.shape, (1, s, cells)),
        "rotation.cos_NR": (rotation.cos_NR.shape[1:], (pool_dim // 2,)),
    }
    if blocks is not None:
        wanted["blocks.slot_NS"] = (blocks.slot_NS.shape, (t // block_rows, s))
        wanted["blocks.count_N"] = (blocks.count_N.shape, (t // block_rows,))
    for name, (shape, want) in wanted.items():
        if tuple(shape) != tuple(want):
            raise ValueError(f"{name} has shape {tuple(shape)}, not {tuple(want)}")
    integers = {f"rows.{n}": x for n, x in vars(rows).items()} | {f"slots.{n}": x for n, x in vars(slots).items()}
    for name, array in integers.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}, not int32")
    if q_THD.dtype != jnp.float32:
        raise ValueError(f"q_THD is {q_THD.dtype}, not float32")
    if pages.k_LPKCD.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.uint16):
        raise ValueError(f"pages.k_LPKCD is {pages.k_LPKCD.dtype}, not float32, float16, bfloat16 or uint16")
    if pages.v_LPKCD.dtype != pages.k_LPKCD.dtype:
        raise ValueError(f"pages.v_LPKCD is {pages.v_LPKCD.dtype}, not {pages.k_LPKCD.dtype} as pages.k_LPKCD")
    if dim != pool_dim or heads % kv_heads:
        raise ValueError(f"q_THD has {heads} heads of {dim}; the pool has {kv_heads} KV heads of {pool_dim}")
