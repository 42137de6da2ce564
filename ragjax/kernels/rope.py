"""Rotary position embedding: tables in float64 on the host, rotation of half-split heads.

Source: Su et al., RoFormer (arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints.
A float32 angle loses 2e-3 at position 32K, so angles are formed in float64 and only cos and sin are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """cos and sin of every position times every frequency, float32 [N, R] with R = head_dim / 2."""

    cos_NR: jax.Array
    sin_NR: jax.Array

    @staticmethod
    def table(inv_freq_R: NDArray[np.float64], length: int) -> Rotation:
        angle_NR = np.arange(length, dtype=np.float64)[:, None] * inv_freq_R.astype(np.float64)
        cos_NR, sin_NR = np.cos(angle_NR).astype(np.float32), np.sin(angle_NR).astype(np.float32)
        return Rotation(jax.device_put(cos_NR), jax.device_put(sin_NR))

    def at(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(cos, sin) at integer positions of either sign and any shape, float32 [..., R]."""
        cos = jnp.take(self.cos_NR, jnp.abs(position), axis=0, mode="clip")
        sin = jnp.take(self.sin_NR, jnp.abs(position), axis=0, mode="clip")
        return cos, jnp.where((position < 0)[..., None], -sin, sin)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the last axis (D = 2R, half-split) of x by the angle; float32 in and out, cos and sin broadcast."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
