"""How deep Triton's pipeline is in the attention kernels: as deep as the device's shared memory allows."""

from __future__ import annotations

from collections.abc import Callable

import jax

from ragjax.kernels.device import Device

STAGES = (5, 3, 1)
"""Best first. A page is found by two loads (entry, then page id), each of which takes a stage: five leave two pages in
flight, three one, one none.
"""


def deepest(need: Callable[[int], int], device: Device) -> int:
    """The most stages whose shared memory, `need(stages)`, the device has; the fewest if it has none of them."""
    return next((stages for stages in STAGES if need(stages) <= device.shared_bytes), STAGES[-1])


def shared_bytes(rows: int, slots: int, k_LPKCD: jax.Array, device: Device, stages: int) -> int:
    """Shared memory that a program of attention takes, at most; docs/kernels.md has what it is compared with.

    Args:
        rows: folded rows of a program.
        slots: of a page that are loaded at once.
        k_LPKCD: the pool.
        device: what the program is compiled for.
        stages: of Triton's pipeline.
    """
    dim, size, flight = k_LPKCD.shape[-1], k_LPKCD.dtype.itemsize, stages // 2
    page = slots * dim * size
    operands = rows * (dim + slots + 1) * size  # queries and probabilities
    if size == 4 or not flight:  # a page passes through it on its way to registers, too
        operands += page
    elif rows >= 64 and device.capability[0] in (9, 10):  # wgmma reads its operands there
        operands += page + rows * slots * size
    return operands + flight * (2 * page + 24 * slots + 4)  # keys, values, intervals and a page's number
