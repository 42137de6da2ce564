"""The device tier's arrays: one page pool per stage of layers.

A pool is created once, donated to every step that writes it, and carried through (design: one donated array per stage,
never a scan input or output). Zeros at the start matter: an unused cell must be finite.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ragjax.kernels.attention import Pages
from ragjax.models.config import ModelConfig


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """The dtype KV is kept in: on CPU bfloat16 as uint16 bits (see `kernels.attention.Pages`)."""
    if platform == "cpu" and dtype == jnp.bfloat16:
        return jnp.dtype(jnp.uint16)
    return jnp.dtype(dtype)


def create(config: ModelConfig, layers: int, pages: int, page_size: int, dtype: jnp.dtype) -> Pages:
    """A pool of zeros for `layers` layers, [layers, pages, K, page_size, D] each for keys and values."""
    shape = (layers, pages, config.num_kv_heads, page_size, config.head_dim)
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def abstract(pool: Pages) -> Pages:
    """The pool's shapes and dtypes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), pool)
