"""Splitting one list of keys over several programs, and putting attentions over disjoint keys together again.

Source: split-KV as in Flash-Decoding; the merge is FlashInfer's (arXiv 2501.01005 §3.1), exact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

PROGRAMS = 264
"""Programs that fill a device: two for each of 132 multiprocessors (H100, H200)."""

LEAST_ENTRIES = 4
"""List items of a split at least, were all entries visible."""


def splits(programs: int, entries: int) -> int:
    """Into how many parts to split lists of at most `entries` items, where there are `programs` without."""
    if 2 * programs > PROGRAMS:
        return 1
    return max(1, min(-(-PROGRAMS // programs), entries // LEAST_ENTRIES))


def merge_states(
    out1_THD: jax.Array, lse1_TH: jax.Array, out2_THD: jax.Array, lse2_TH: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention of the same rows over two disjoint sets of keys, as over both; float32."""
    return merge_splits(jnp.stack([out1_THD, out2_THD]), jnp.stack([lse1_TH, lse2_TH]))


def merge_splits(out_JTHD: jax.Array, lse_JTH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Likewise over J of them, along the first axis; the other axes may be any."""
    if lse_JTH.shape[0] == 1:
        return out_JTHD[0], lse_JTH[0]
    lse_TH = jax.nn.logsumexp(lse_JTH, axis=0)
    weight_JTH = jnp.exp(lse_JTH - jnp.where(jnp.isneginf(lse_TH), 0.0, lse_TH))
    return (out_JTHD * weight_JTH[..., None]).sum(0), lse_TH
