"""The Triton program of `jax_triton.py`: one KV head, one row block, one share of the block's list of entries.

Apart from that module because it needs triton to be imported; nothing else imports it, and only when it is called.
Sources: online softmax as in FlashAttention-2 (arXiv 2307.08691), shares merged by their log-sum-exp as in
Flash-Decoding. Shape suffixes as in docs/dimension_key.md; N is the tile of a page's slots.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-unimported=False

from __future__ import annotations

import triton
import triton.language as tl

WINDOW = tl.constexpr(1024)
"""Ends of runs that are compared at a time."""

INV_LOG2E = tl.constexpr(0.6931471805599453)


@triton.jit
def decode(
    q_THD: tl.tensor,
    index_T: tl.tensor,
    k_LPKCD: tl.tensor,
    v_LPKCD: tl.tensor,
    layer_1: tl.tensor,
    entry_NS: tl.tensor,
    page_NS: tl.tensor,
    count_N: tl.tensor,
    partial_NU: tl.tensor,
    end_NU: tl.tensor,
    offset_S: tl.tensor,
    index_SC: tl.tensor,
    hide_from_SC: tl.tensor,
    hide_until_SC: tl.tensor,
    cos_NR: tl.tensor,
    sin_NR: tl.tensor,
    out_JTHD: tl.tensor,
    lse_JTH: tl.tensor,
    SCALE: tl.constexpr,
    NEVER: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    ENTRIES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """Grid: row blocks, KV heads, splits J. All arguments up to `lse_JTH` are pointers; those after are static.

    SCALE: softmax scale times log2(e). M: BLOCK_ROWS * GROUPS folded rows, padded to what a tensor core takes.
    N: slots of a tile, a divisor of PAGE_SIZE. Heads are handled as two halves: Triton cannot cut a tile.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    half: tl.constexpr = DIM // 2
    parts: tl.constexpr = PAGE_SIZE // N
    # 64 bits wherever a whole pool, or rows times entries, is indexed: they exceed 2^31
    list_of_block = block.to(tl.int64) * ENTRIES
    heads_before = tl.load(layer_1).to(tl.int64) * PAGES * KV_HEADS + kv_head
    k_CD = k_LPKCD + heads_before * (PAGE_SIZE * DIM)
    v_CD = v_LPKCD + heads_before * (PAGE_SIZE * DIM)

    row_M = tl.arange(0, M)
    live_M = row_M < BLOCK_ROWS * GROUPS
    t_M = block * BLOCK_ROWS + row_M // GROUPS
    th_M = t_M.to(tl.int64) * (KV_HEADS * GROUPS) + kv_head * GROUPS + row_M % GROUPS
    index_M = tl.load(index_T + t_M, mask=live_M, other=-1)
    r_R = tl.arange(0, half)
    q_MR = q_THD + th_M[:, None] * DIM + r_R[None, :]
    q1_MR = tl.load(q_MR, mask=live_M[:, None], other=0.0).to(tl.float32) * SCALE
    q2_MR = tl.load(q_MR + half, mask=live_M[:, None], other=0.0).to(tl.float32) * SCALE

    count = tl.load(count_N + block)
    share = tl.cdiv(count, tl.num_programs(2))
    low = tl.minimum(split * share, count)
    high = tl.minimum(low + share, count)
    first, last = _runs_between(end_NU + list_of_block, low, high, ENTRIES)

    acc_MD = tl.zeros((M, DIM), tl.float32)
    max_M = tl.full((M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((M,), tl.float32)
    for u in range(first, last):
        begin = tl.load(end_NU + list_of_block + u - 1, mask=u > 0, other=0)
        partial = tl.load(partial_NU + list_of_block + u)
        end = tl.load(end_NU + list_of_block + u)
        offset = tl.load(offset_S + tl.load(entry_NS + list_of_block + begin))
        rotated1_MR, rotated2_MR = _rotate_back(q1_MR, q2_MR, offset, cos_NR, sin_NR, half)
        rotated1_MR = rotated1_MR.to(k_LPKCD.dtype.element_ty)
        rotated2_MR = rotated2_MR.to(k_LPKCD.dtype.element_ty)
        for i in range(tl.maximum(begin, low) * parts, tl.minimum(partial, high) * parts):
            acc_MD, max_M, sum_M = _visit(
                acc_MD, max_M, sum_M, rotated1_MR, rotated2_MR, index_M, entry_NS + list_of_block + i // parts,
                page_NS + list_of_block + i // parts, i % parts, k_CD, v_CD, index_SC, hide_from_SC, hide_until_SC,
                False, NEVER, PRECISION, KV_HEADS, PAGE_SIZE, DIM, N,
            )  # fmt: skip
        for i in range(tl.maximum(partial, low) * parts, tl.minimum(end, high) * parts):
            acc_MD, max_M, sum_M = _visit(
                acc_MD, max_M, sum_M, rotated1_MR, rotated2_MR, index_M, entry_NS + list_of_block + i // parts,
                page_NS + list_of_block + i // parts, i % parts, k_CD, v_CD, index_SC, hide_from_SC, hide_until_SC,
                True, NEVER, PRECISION, KV_HEADS, PAGE_SIZE, DIM, N,
            )  # fmt: skip

    dead_M = (sum_M == 0.0) | (index_M < 0)
    safe_M = tl.where(dead_M, 1.0, sum_M)
    out_MD = tl.where(dead_M[:, None], 0.0, acc_MD / safe_M[:, None])
    lse_M = tl.where(dead_M, float("-inf"), (max_M + tl.log2(safe_M)) * INV_LOG2E)
    rows = tl.num_programs(0) * BLOCK_ROWS
    jth_M = split.to(tl.int64) * rows * (KV_HEADS * GROUPS) + th_M
    tl.store(out_JTHD + jth_M[:, None] * DIM + tl.arange(0, DIM)[None, :], out_MD, mask=live_M[:, None])
    tl.store(lse_JTH + jth_M, lse_M, mask=live_M)


@triton.jit
def _runs_between(end_U: tl.tensor, low: tl.tensor, high: tl.tensor, ENTRIES: tl.constexpr) -> tuple[tl.tensor, ...]:
    """The runs [first, last) that hold list items [low, high); found by counting, in place of walking there."""
    before = tl.zeros((), tl.int32)
    within = tl.zeros((), tl.int32)
    for start in range(0, ENTRIES, WINDOW):
        u_U = start + tl.arange(0, WINDOW)
        ends_U = tl.load(end_U + u_U, mask=u_U < ENTRIES, other=2147483647)
        before += tl.sum((ends_U <= low).to(tl.int32), axis=0)
        within += tl.sum((ends_U < high).to(tl.int32), axis=0)
    return before, tl.where(low < high, within + 1, before)


@triton.jit
def _rotate_back(
    q1_MR: tl.tensor, q2_MR: tl.tensor, offset: tl.tensor, cos_NR: tl.tensor, sin_NR: tl.tensor, half: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """The query's halves rotated by -offset, as the keys of a run were stored that far back."""
    far = tl.abs(offset).to(tl.int64) * half + tl.arange(0, half)
    cos_R = tl.load(cos_NR + far)
    sin_R = tl.load(sin_NR + far)
    sin_R = tl.where(offset < 0, -sin_R, sin_R)
    rotated1_MR = q1_MR * cos_R[None, :] + q2_MR * sin_R[None, :]
    rotated2_MR = q2_MR * cos_R[None, :] - q1_MR * sin_R[None, :]
    return rotated1_MR, rotated2_MR


@triton.jit
def _visit(
    acc_MD: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    q1_MR: tl.tensor,
    q2_MR: tl.tensor,
    index_M: tl.tensor,
    entry_1: tl.tensor,
    page_1: tl.tensor,
    part: tl.tensor,
    k_CD: tl.tensor,
    v_CD: tl.tensor,
    index_SC: tl.tensor,
    hide_from_SC: tl.tensor,
    hide_until_SC: tl.tensor,
    MASKED: tl.constexpr,
    NEVER: tl.constexpr,
    PRECISION: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    N: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """One tile of a page: logits, the visibility rule where some row does not see the whole page, online softmax."""
    half: tl.constexpr = DIM // 2
    dtype = q1_MR.dtype
    slot_N = part * N + tl.arange(0, N)
    page = tl.load(page_1).to(tl.int64) * (KV_HEADS * PAGE_SIZE * DIM)
    at_RN = page + slot_N[None, :] * DIM + tl.arange(0, half)[:, None]
    logits_MN = tl.dot(q1_MR, tl.load(k_CD + at_RN), input_precision=PRECISION)
    logits_MN = tl.dot(q2_MR, tl.load(k_CD + at_RN + half), logits_MN, input_precision=PRECISION)
    v_ND = tl.load(v_CD + page + slot_N[:, None] * DIM + tl.arange(0, DIM)[None, :])
    if MASKED:
        entry = tl.load(entry_1)
        index_N = tl.load(index_SC + entry * PAGE_SIZE + slot_N)
        from_N = tl.load(hide_from_SC + entry * PAGE_SIZE + slot_N)
        until_N = tl.load(hide_until_SC + entry * PAGE_SIZE + slot_N)
        hidden_MN = (from_N[None, :] <= index_M[:, None]) & (index_M[:, None] < until_N[None, :])
        logits_MN = tl.where((index_N[None, :] <= index_M[:, None]) & ~hidden_MN, logits_MN, float("-inf"))
        # slots that no row can ever see may hold NaN, and 0 * NaN is NaN
        unused_N = (index_N >= NEVER) | ((from_N <= index_N) & (until_N >= NEVER))
        v_ND = tl.where(unused_N[:, None], 0.0, v_ND).to(dtype)
    new_M = tl.maximum(max_M, tl.max(logits_MN, axis=1))
    safe_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    decay_M = tl.exp2(max_M - safe_M)
    prob_MN = tl.exp2(logits_MN - safe_M[:, None])
    acc_MD = tl.dot(prob_MN.to(dtype), v_ND, acc_MD * decay_M[:, None], input_precision=PRECISION)
    return acc_MD, new_M, sum_M * decay_M + tl.sum(prob_MN, axis=1)
