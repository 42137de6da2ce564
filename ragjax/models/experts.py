"""Mixture of experts: each row goes through the few MLPs that a router gives the greatest weights (Mixtral, Qwen3-MoE).

Sources: Jiang et al. 2024, arXiv 2401.04088; Qwen3, arXiv 2505.09388.
Rows are sorted by their experts. A GPU multiplies each group with its expert's matrices by `jax.lax.ragged_dot`. That
reads all experts on a CPU, so there blocks of rows of one expert are worked on in turn, and only the matrices of chosen
experts are read.

Dimensions: T rows, N experts, C experts of a row, M = T * C, E hidden, F width of an expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

MOST_ROWS = 64
"""Rows of a block on a CPU, at most."""


def mix_experts(
    x_TE: jax.Array, prob_TN: jax.Array, gate_up_N2FE: jax.Array, down_NEF: jax.Array, count: int, share_out: bool
) -> jax.Array:
    """The weighted sum of what a row's experts make of it, float32 [T, E].

    prob_TN: the router's weights. count: experts of a row. share_out: their weights are scaled to add up to one.
    """
    weight_TC, chosen_TC = lax.top_k(prob_TN, count)
    if share_out:
        weight_TC = weight_TC / weight_TC.sum(-1, keepdims=True)
    expert_M = chosen_TC.reshape(-1)
    order_M = jnp.argsort(expert_M, stable=True)
    sizes_N = jnp.zeros(prob_TN.shape[1], jnp.int32).at[expert_M].add(1)
    row_M, weight_M = order_M.astype(jnp.int32) // count, weight_TC.reshape(-1)[order_M]
    given = (x_TE.astype(down_NEF.dtype), row_M, weight_M, sizes_N, gate_up_N2FE, down_NEF)
    made_TE: jax.Array = lax.platform_dependent(*given, cpu=by_blocks, default=by_groups)
    return made_TE


def by_groups(
    x_TE: jax.Array,
    row_M: jax.Array,
    weight_M: jax.Array,
    sizes_N: jax.Array,
    gate_up_N2FE: jax.Array,
    down_NEF: jax.Array,
) -> jax.Array:
    """All groups in one product."""
    n, _, f, e = gate_up_N2FE.shape
    precision = _precision(down_NEF)

    def product(a_MI: jax.Array, b_NOI: jax.Array) -> jax.Array:
        return lax.ragged_dot(
            a_MI, b_NOI.swapaxes(1, 2), sizes_N, precision=precision, preferred_element_type=jnp.float32
        )

    inner_MF = _gated(product(x_TE[row_M], gate_up_N2FE.reshape(n, 2 * f, e)))
    made_ME = product(inner_MF.astype(down_NEF.dtype), down_NEF) * weight_M[:, None]
    return jnp.zeros(x_TE.shape, jnp.float32).at[row_M].add(made_ME)


def by_blocks(
    x_TE: jax.Array,
    row_M: jax.Array,
    weight_M: jax.Array,
    sizes_N: jax.Array,
    gate_up_N2FE: jax.Array,
    down_NEF: jax.Array,
) -> jax.Array:
    """Blocks of rows of one expert in turn, as many as there are."""
    n, _, f, e = gate_up_N2FE.shape
    m = row_M.shape[0]
    rows = min(MOST_ROWS, 1 << max(0, (m // n - 1).bit_length()))
    end_N, blocks_N = jnp.cumsum(sizes_N), -(-sizes_N // rows)
    end_of_blocks_N = jnp.cumsum(blocks_N)
    precision = _precision(down_NEF)

    def product(a_BI: jax.Array, b_NOI: jax.Array, expert: jax.Array) -> jax.Array:
        b_OI = _matrix(b_NOI, expert)
        return lax.dot_general(
            a_BI, b_OI, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def block(i: jax.Array, made_TE: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(end_of_blocks_N, i, side="right").astype(jnp.int32)
        begin = end_N[expert] - sizes_N[expert] + rows * (i - end_of_blocks_N[expert] + blocks_N[expert])
        at_B = begin + jnp.arange(rows, dtype=jnp.int32)
        own_B, at_B = at_B < end_N[expert], jnp.minimum(at_B, m - 1)
        row_B, weight_B = row_M[at_B], jnp.where(own_B, weight_M[at_B], 0.0)
        inner_BF = _gated(product(x_TE[row_B], gate_up_N2FE.reshape(n, 2 * f, e), expert))
        made_BE = product(inner_BF.astype(down_NEF.dtype), down_NEF, expert)
        return made_TE.at[row_B].add(made_BE * weight_B[:, None])

    made_TE: jax.Array = lax.fori_loop(0, end_of_blocks_N[-1], block, jnp.zeros(x_TE.shape, jnp.float32))
    return made_TE


def _matrix(b_NOI: jax.Array, expert: jax.Array) -> jax.Array:
    """One expert's matrix. XLA on CPU slices bfloat16 as float32, after widening all of it; so it is sliced as bits.

    The barrier keeps it from making the bits of all experts before the loop.
    """
    if b_NOI.dtype != jnp.bfloat16:
        plain_OI: jax.Array = lax.dynamic_index_in_dim(b_NOI, expert, keepdims=False)
        return plain_OI
    b_NOI, expert = lax.optimization_barrier((b_NOI, expert))
    bits_OI = lax.dynamic_index_in_dim(lax.bitcast_convert_type(b_NOI, jnp.uint16), expert, keepdims=False)
    matrix_OI: jax.Array = lax.bitcast_convert_type(bits_OI, jnp.bfloat16)
    return matrix_OI


def _gated(gate_up_M2F: jax.Array) -> jax.Array:
    gate_MF, up_MF = jnp.split(gate_up_M2F, 2, axis=-1)
    gated_MF: jax.Array = jax.nn.silu(gate_MF) * up_MF
    return gated_MF


def _precision(weight: jax.Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
