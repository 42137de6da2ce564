"""The device tier's arrays: a page pool for the layers of each stage.

A pool is created once, donated to every step that writes it, and carried through (design: one donated array per stage,
never a scan input or output). Zeros at the start matter: an unused slot must be finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragjax.kernels.pages import Pages
from ragjax.models.config import ModelConfig

DType = np.dtype[Any]

Excerpt = tuple[Pages, ...]
"""Copies of some pages in all layers: for each stage, [layers of the stage, pages, K, C, D] of keys and of values."""

BUCKETS = (16, 4, 1)
"""Pages that one program moves. A request is cut into these sizes, none padded: what is moved is what was asked."""


def storage_dtype(dtype: DType, platform: str) -> DType:
    """The dtype KV is kept in: on CPU bfloat16 as uint16 bits (see `kernels.pages.Pages`)."""
    if platform == "cpu" and dtype == jnp.bfloat16:
        return np.dtype(np.uint16)
    return dtype


def create(config: ModelConfig, layers: int, pages: int, page_size: int, dtype: DType) -> Pages:
    """A pool of zeros for `layers` layers, [layers, pages, K, page_size, D] each for keys and values."""
    shape = (layers, pages, config.num_kv_heads, page_size, config.head_dim)
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def cuts(pages: int, buckets: Sequence[int] = BUCKETS) -> Iterator[slice]:
    begin = 0
    for size in buckets:
        while pages - begin >= size:
            yield slice(begin, begin + size)
            begin += size


def extract(pool: Pages, page_P: jax.Array) -> Pages:
    """Copies of the pages with these numbers (int32, within the pool)."""
    taken: Pages = jax.tree.map(lambda x_LPKCD: x_LPKCD.at[:, page_P].get(mode="promise_in_bounds"), pool)
    return taken


def insert(pool: Pages, page_P: jax.Array, new: Pages) -> Pages:
    """Overwrite the pages with these numbers (none twice)."""

    def put(pool_LPKCD: jax.Array, new_LPKCD: jax.Array) -> jax.Array:
        return pool_LPKCD.at[:, page_P].set(new_LPKCD, mode="promise_in_bounds", unique_indices=True)

    return Pages(put(pool.k_LPKCD, new.k_LPKCD), put(pool.v_LPKCD, new.v_LPKCD))
