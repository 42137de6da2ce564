"""From logits to tokens: greedy, or drawn after temperature, top-k and top-p (nucleus, arXiv 1904.09751).

The vocabulary is never sorted. A cutoff is the largest number whose tokens at or above it are enough, found by
bisection over the 32 bits of float32 in the order of their values: it is exact. Of tokens that are equal at the cutoff,
those of the lowest ids are kept. The draw takes the token whose logit is the largest with Gumbel noise (arXiv
1411.0030), which depends on a key and the token alone: logits that differ a little seldom draw another token. It is
made without a logarithm of the logits: the largest ratio of a weight to an exponential number.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128
"""Tokens of a block of the vocabulary."""

ALTERNATIVES = 20
"""Likeliest tokens that are reported with a token."""

SLACK = 1e-6
"""Share of the nucleus's mass that sums of float32 do not tell."""


def adjust(logits_NV: jax.Array, token_NA: jax.Array, factor_NA: jax.Array, add_NA: jax.Array) -> jax.Array:
    """Logits with penalties and biases, float32 [N, V].

    Args:
        logits_NV: float32.
        token_NA: which tokens change in each row, int32, none twice; V or more: none.
        factor_NA: what their logits are divided by if above 0, and multiplied by otherwise (repetition penalty).
        add_NA: what is added then.
    """
    row_N1 = jnp.arange(logits_NV.shape[0])[:, None]
    x_NA = logits_NV.at[row_N1, token_NA].get(mode="fill", fill_value=0.0)
    x_NA = jnp.where(x_NA > 0, x_NA / factor_NA, x_NA * factor_NA) + add_NA
    return logits_NV.at[row_N1, token_NA].set(x_NA, mode="drop")


def allow(logits_NV: jax.Array, bits_NW: jax.Array) -> jax.Array:
    """Logits of the tokens that may be chosen, and -inf for the others, float32 [N, V].

    bits_NW: uint32, W words of 32 tokens: token t may be chosen if bit t % 32 of word t // 32 is set.
    """
    bit_V = jnp.arange(logits_NV.shape[1], dtype=jnp.uint32)
    set_NV = (bits_NW[:, bit_V // 32] >> (bit_V % 32)) & 1
    return jnp.where(set_NV == 1, logits_NV, -jnp.inf)


def choose(
    logits_NV: jax.Array, temperature_N: jax.Array, top_k_N: jax.Array, top_p_N: jax.Array, key_N2: jax.Array
) -> jax.Array:
    """The next token of each row, int32 [N].

    Args:
        logits_NV: float32; -inf for tokens that cannot be.
        temperature_N: float32; 0 takes the likeliest token.
        top_k_N: likeliest tokens that may be drawn, int32; 0 for no limit.
        top_p_N: mass that the likeliest of these reach together, float32; 1 for no limit.
        key_N2: of the noise of each draw, uint32.
    """
    vocabulary = logits_NV.shape[1]
    logits_NV = jnp.pad(logits_NV, ((0, 0), (0, -vocabulary % BLOCK)), constant_values=-jnp.inf)
    greedy_N = _likeliest_one(logits_NV)
    top_k_N = jnp.where(top_k_N < vocabulary, top_k_N, 0)
    drawn_N: jax.Array = lax.cond(
        (temperature_N > 0).any(),
        lambda: _draw(logits_NV, temperature_N, top_k_N, top_p_N, key_N2, greedy_N),
        lambda: greedy_N,
    )
    return jnp.where(temperature_N > 0, drawn_N, greedy_N)


def logprobs(logits_NV: jax.Array, token_N: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Natural-log probabilities of tokens, and the likeliest tokens with theirs, likeliest first.

    Returns:
        float32 [N]; int32 and float32 [N, Y], Y as `ALTERNATIVES`, or as many as there are tokens.
    """
    log_NV = logits_NV - logits_NV.max(-1, keepdims=True)
    log_NV = log_NV - jnp.log(_sum(jnp.exp(log_NV)))[:, None]
    top_NY, id_NY = lax.top_k(log_NV, min(ALTERNATIVES, logits_NV.shape[1]))
    return jnp.take_along_axis(log_NV, token_N[:, None], axis=1)[:, 0], id_NY.astype(jnp.int32), top_NY


def _draw(
    logits_NV: jax.Array,
    temperature_N: jax.Array,
    top_k_N: jax.Array,
    top_p_N: jax.Array,
    key_N2: jax.Array,
    greedy_N: jax.Array,
) -> jax.Array:
    scale_N1 = jnp.where(temperature_N > 0, temperature_N, 1.0)[:, None]
    weight_NV = jnp.exp((logits_NV - logits_NV.max(-1, keepdims=True)) / scale_N1)
    rank_NV = _ordered(logits_NV)
    cuts_k_N, cuts_p_N = top_k_N > 0, top_p_N < 1.0
    weight_NV = lax.cond(
        cuts_k_N.any(),
        lambda: jnp.where(cuts_k_N[:, None], _likeliest(weight_NV, rank_NV, top_k_N), weight_NV),
        lambda: weight_NV,
    )
    weight_NV = lax.cond(
        cuts_p_N.any(),
        lambda: jnp.where(cuts_p_N[:, None], _nucleus(weight_NV, rank_NV, top_p_N), weight_NV),
        lambda: weight_NV,
    )
    token_N = _likeliest_one(weight_NV / exponential(key_N2, logits_NV.shape[1]))
    return jnp.where(weight_NV.max(-1) > 0, token_N, greedy_N)


def exponential(key_N2: jax.Array, vocabulary: int) -> jax.Array:
    """A number of the exponential distribution for each token of draws with these keys, float32 [N, V]."""
    token_V = jnp.arange(vocabulary, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    bits_NV = _mixed(_mixed(token_V ^ key_N2[:, :1]) ^ key_N2[:, 1:])
    # the smallest shares, which win, have all 32 bits
    return -jnp.log1p(-jnp.minimum((bits_NV.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24))


def _mixed(bits: jax.Array) -> jax.Array:
    """Bits that all depend on all (the end of MurmurHash3, https://github.com/aappleby/smhasher)."""
    bits = (bits ^ bits >> 16) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ bits >> 13) * jnp.uint32(0xC2B2AE35)
    return bits ^ bits >> 16


def _likeliest_one(logits_NV: jax.Array) -> jax.Array:
    """The token of the largest logit, int32 [N]: the first of equal ones, and 0 if a logit is no number."""
    logits_NOW = _blocks(logits_NV)
    max_NO = logits_NOW.max(-1)
    max_N1 = max_NO.max(-1, keepdims=True)
    block_N = _first(max_NO == max_N1)
    found_N = block_N < max_NO.shape[1]
    logits_NW = jnp.take_along_axis(logits_NOW, jnp.where(found_N, block_N, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(found_N, block_N * BLOCK + _first(logits_NW == max_N1), 0)


def _likeliest(weight_NV: jax.Array, rank_NV: jax.Array, top_k_N: jax.Array) -> jax.Array:
    """The weights of the k likeliest tokens; 0 for the others."""

    def count(chosen_NV: jax.Array) -> jax.Array:
        return chosen_NV.sum(-1, dtype=jnp.int32)

    cutoff_N1 = _cutoff(rank_NV, lambda chosen_NV: count(chosen_NV) >= top_k_N)[:, None]
    above_NV, equal_NV = rank_NV > cutoff_N1, rank_NV == cutoff_N1
    missing_N = top_k_N - count(above_NV)
    return jnp.where(above_NV | _lowest(equal_NV, missing_N), weight_NV, 0.0)


def _nucleus(weight_NV: jax.Array, rank_NV: jax.Array, top_p_N: jax.Array) -> jax.Array:
    """The weights of the likeliest tokens that reach the mass together; 0 for the others."""

    def mass(chosen_NV: jax.Array) -> jax.Array:
        return _sum(jnp.where(chosen_NV, weight_NV, 0.0))

    target_N = top_p_N * _sum(weight_NV) * (1 - SLACK)
    cutoff_N1 = _cutoff(rank_NV, lambda chosen_NV: mass(chosen_NV) >= target_N)[:, None]
    above_NV, equal_NV = rank_NV > cutoff_N1, (rank_NV == cutoff_N1) & (weight_NV > 0)
    each_N = jnp.where(equal_NV, weight_NV, 0.0).max(-1)
    missing_N = jnp.ceil((target_N - mass(above_NV)) / jnp.where(each_N > 0, each_N, 1.0)).astype(jnp.int32)
    return jnp.where(above_NV | _lowest(equal_NV, jnp.maximum(missing_N, 1)), weight_NV, 0.0)


def _ordered(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the numbers; equal numbers have equal ones."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _cutoff(rank_NV: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest rank [N] such that those at or above it are enough, bit by bit; 0 if none are."""

    def decide(i: jax.Array, cutoff_N: jax.Array) -> jax.Array:
        higher_N = cutoff_N | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(rank_NV >= higher_N[:, None]), higher_N, cutoff_N)

    cutoff_N: jax.Array = lax.fori_loop(0, 32, decide, jnp.zeros(rank_NV.shape[0], jnp.uint32))
    return cutoff_N


def _lowest(chosen_NV: jax.Array, count_N: jax.Array) -> jax.Array:
    """Keep the `count` chosen tokens with the lowest ids; bool [N, V]."""
    last_N = _at_mass(chosen_NV.astype(jnp.float32), count_N.astype(jnp.float32) - 0.5)
    return chosen_NV & (jnp.arange(chosen_NV.shape[1]) <= last_N[:, None]) & (count_N > 0)[:, None]


def _at_mass(weight_NV: jax.Array, mass_N: jax.Array) -> jax.Array:
    """The first token, int32 [N], at which the weights in the order of ids sum up to more than this.

    If rounding leaves the sum short, the last token that has a weight; V if none has any.
    """
    weight_NOW = _blocks(weight_NV)
    sum_NO = weight_NOW.sum(-1)
    before_NO = jnp.cumsum(sum_NO, -1) - sum_NO
    inside_NO = (sum_NO > 0) & (before_NO <= mass_N[:, None])
    block_N = jnp.where(inside_NO, jnp.arange(sum_NO.shape[1]), 0).max(-1)  # the last that begins before it
    of_block = block_N[:, None]
    weight_NW = jnp.take_along_axis(weight_NOW, of_block[..., None], axis=1)[:, 0]
    rest_N = mass_N - jnp.take_along_axis(before_NO, of_block, axis=1)[:, 0]
    reached_NW = (weight_NW > 0) & (jnp.cumsum(weight_NW, -1) > rest_N[:, None])
    within_N = _first(reached_NW)
    last_N = jnp.where(weight_NW > 0, jnp.arange(BLOCK, dtype=jnp.int32), -1).max(-1)  # -1: no token has a weight
    within_N = jnp.where(within_N < BLOCK, within_N, last_N)
    return jnp.where(within_N >= 0, block_N * BLOCK + within_N, weight_NV.shape[1]).astype(jnp.int32)


def _first(found_NX: jax.Array) -> jax.Array:
    """The first place [N] of each row where it holds; the length of a row if nowhere."""
    length = found_NX.shape[1]
    return jnp.where(found_NX, jnp.arange(length, dtype=jnp.int32), length).min(-1)


def _blocks(x_NV: jax.Array) -> jax.Array:
    """Rows in blocks of the vocabulary, zeros behind its end, [N, O, W]."""
    n, size = x_NV.shape
    return jnp.pad(x_NV, ((0, 0), (0, -size % BLOCK))).reshape(n, -1, BLOCK)


def _sum(x_NV: jax.Array) -> jax.Array:
    """Sums of the rows, block by block: sums of many numbers of float32 one after another lose some."""
    return _blocks(x_NV).sum(-1).sum(-1)
