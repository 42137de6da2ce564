"""Work division of GPU kernels: split-KV over several programs and its merge, and the depth of Triton's pipeline.

Source: split-KV as in Flash-Decoding; the merge is FlashInfer's (arXiv 2501.01005 §3.1), exact.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ragjax.kernels.device import Device

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


STAGES = (5, 3, 1)
"""Best first. A page is found by two loads (entry, then page id), each of which takes a stage: five leave two pages in
flight, three one, one none.
"""


def deepest(need: Callable[[int], int], device: Device) -> int:
    """The most stages whose shared memory, `need(stages)`, the device has; the fewest if it has none of them."""
    return next((stages for stages in STAGES if need(stages) <= device.shared_bytes), STAGES[-1])


def shared_bytes(rows: int, slots: int, k_LPKCD: jax.Array, device: Device, stages: int) -> int:
    """Shared memory that a program of attention takes, at most; docs/kernels.md has what it is compared with.

    rows: folded rows of a program. slots: of a page that are loaded at once. stages: of Triton's pipeline.
    """
    dim, size, flight = k_LPKCD.shape[-1], k_LPKCD.dtype.itemsize, stages // 2
    page = slots * dim * size
    operands = rows * (dim + slots + 1) * size  # queries and probabilities
    if size == 4 or not flight:  # a page passes through it on its way to registers, too
        operands += page
    elif rows >= 64 and device.capability[0] in (9, 10):  # wgmma reads its operands there
        operands += page + rows * slots * size
    return operands + flight * (2 * page + 24 * slots + 4)  # keys, values, intervals and a page's number
