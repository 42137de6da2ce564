"""Attention of a prompt's last rows, and pooling along the tokens they attend to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.compress.base import Evidence
from ragjax.kernels.pages import from_storage

T = TypeVar("T")


def by_head(evidence: Evidence, summary: Callable[[jax.Array], T]) -> T:
    """A summary of the window's attention for each KV head: its leaves have a first axis K.

    The summary gets float32 [W, G, N]: what each of the last W rows gives to each token before the window, from a
    softmax over all tokens that the row sees; 0 for the window's own tokens and for padding. One KV head at a time, so
    that no more than W x G x N probabilities exist.

    Raises:
        ValueError: without queries.
    """
    q_WHD = evidence.q_WHD
    if q_WHD is None:
        raise ValueError("this scorer needs the window's queries (Evidence.q_WHD)")
    tokens, heads, width = evidence.k_NKD.shape
    rows = q_WHD.shape[0]
    q_WKGD = q_WHD.reshape(rows, heads, -1, width).astype(jnp.float32)
    index_N = jnp.arange(tokens)
    row_W = evidence.count - rows + jnp.arange(rows)
    seen_WN = index_N <= row_W[:, None]
    before_N = index_N < evidence.count - rows

    def of_head(head: jax.Array) -> T:
        k_ND = from_storage(evidence.k_NKD[:, head]).astype(jnp.float32)
        logit_WGN = jnp.einsum("wgd,nd->wgn", q_WKGD[:, head], k_ND, precision=lax.Precision.HIGHEST)
        logit_WGN *= width**-0.5 if evidence.scale is None else evidence.scale
        if evidence.cap is not None:
            logit_WGN = evidence.cap * jnp.tanh(logit_WGN / evidence.cap)
        logit_WGN = jnp.where(seen_WN[:, None], logit_WGN, -jnp.inf)
        return summary(jnp.where(before_N, jax.nn.softmax(logit_WGN, axis=-1), 0.0))

    stacked: T = lax.map(of_head, jnp.arange(heads))
    return stacked


def max_pool(s_GN: jax.Array, size: int) -> jax.Array:
    """The maximum over `size` tokens around each (`size` odd)."""
    reach = (size // 2, size // 2)
    pooled_GN: jax.Array = lax.reduce_window(s_GN, -jnp.inf, lax.max, (1, size), (1, 1), ((0, 0), reach))
    return pooled_GN


def mean_pool(s_GN: jax.Array, size: int) -> jax.Array:
    """The mean over `size` tokens around each (`size` odd); what lies outside counts as 0."""
    reach = (size // 2, size // 2)
    sum_GN: jax.Array = lax.reduce_window(s_GN, 0.0, lax.add, (1, size), (1, 1), ((0, 0), reach))
    return sum_GN / size
