"""The device tier's arrays: one page pool per stage of layers.

A pool is created once, donated to every step that writes it, and carried through (design: one donated array per stage,
never a scan input or output). Zeros at the start matter: an unused cell must be finite.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ragjax.kernels.pages import Pages
from ragjax.models.config import ModelConfig

DType = np.dtype[Any]


def storage_dtype(dtype: DType, platform: str) -> DType:
    """The dtype KV is kept in: on CPU bfloat16 as uint16 bits (see `kernels.pages.Pages`)."""
    if platform == "cpu" and dtype == jnp.bfloat16:
        return np.dtype(np.uint16)
    return dtype


def create(config: ModelConfig, layers: int, pages: int, page_size: int, dtype: DType) -> Pages:
    """A pool of zeros for `layers` layers, [layers, pages, K, page_size, D] each for keys and values."""
    shape = (layers, pages, config.num_kv_heads, page_size, config.head_dim)
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
