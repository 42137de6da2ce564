"""Compressing a prompt's KV on the device: scores, choice and copies of one stage's layers, as one program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ragjax.compress.choose import Quota, choose, quota
from ragjax.compress.scorers import SCORERS, Evidence
from ragjax.core import Compression
from ragjax.kernels.pages import Pages, from_storage, to_storage
from ragjax.kernels.rope import Rotation, rotate
from ragjax.runner.stages import OUTSIDE

LEAST = 256
"""Tokens of the shortest prompt that a program is compiled for; the others are its doubles."""


def bucket(tokens: int) -> int:
    return max(LEAST, 1 << (tokens - 1).bit_length())


def buckets(compression: Compression, context: int) -> Sequence[int]:
    """Lengths of all programs for prompts above the budget, of at most `context` tokens."""
    found = [bucket(compression.budget + 1)]
    while found[-1] < context:
        found.append(2 * found[-1])
    return found


def arrays_of(
    compression: Compression, source_N: NDArray[np.int32], offset_N: NDArray[np.int32], target_B: NDArray[np.int32]
) -> Mapping[str, NDArray[np.int32]]:
    """Host arrays of `compact`, padded to its program's sizes, int32."""
    count = len(source_N)
    numbers = quota(compression, SCORERS[compression.method], count)
    spare = (0, bucket(count) - count)
    nowhere = OUTSIDE + np.arange(compression.program.budget - len(target_B), dtype=np.int32)
    return {
        "source_N": np.pad(source_N, spare),
        "offset_N": np.pad(offset_N, spare),
        "target_B": np.concatenate([target_B, nowhere]),
        "count": np.array(count, np.int32),
        **{name: np.array(number, np.int32) for name, number in numbers._asdict().items()},
    }


def shapes_of(compression: Compression, tokens: int) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes of these arrays; `tokens` is a bucket."""
    sizes = {"source_N": tokens, "offset_N": tokens, "target_B": compression.program.budget}
    shapes = {name: jax.ShapeDtypeStruct((size,), jnp.int32) for name, size in sizes.items()}
    return shapes | {name: jax.ShapeDtypeStruct((), jnp.int32) for name in ("count", *Quota._fields)}


def compact(
    compression: Compression,
    pool: Pages,
    arrays: Mapping[str, jax.Array],
    query_LWHD: jax.Array | None,
    mass_LN: jax.Array | None,
    rotation: Rotation,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> tuple[Pages, jax.Array]:
    """Copy what each layer of a stage keeps into the target slots, keys rotated at their places in the prompt.

    No target slot is one of the source's. pool: of the stage; donated. arrays: `arrays_of`. query_LWHD: rotated queries
    of the prompt's last rows, and mass_LN: attention that each token received, float32, if the scorer asks for them.
    scale, cap: of attention logits.

    Returns:
        The pool, and the indexes that each layer keeps, int32 [L, K, B]; [L, 1, B] where all heads keep the same.
    """
    page_N, slot_N = arrays["source_N"] // pool.page_size, arrays["source_N"] % pool.page_size
    cos_NR, sin_NR = rotation.at(arrays["offset_N"])
    numbers = Quota(*(arrays[name] for name in Quota._fields))

    def layer(pool: Pages, of_layer: Any) -> tuple[Pages, jax.Array]:
        index, query_WHD, mass_N = of_layer
        k_NKD, v_NKD = (x[index, page_N, :, slot_N, :] for x in (pool.k_LPKCD, pool.v_LPKCD))
        turned_NKD = rotate(from_storage(k_NKD).astype(jnp.float32), cos_NR[:, None], sin_NR[:, None])
        turned_NKD = to_storage(turned_NKD, k_NKD.dtype)
        mass_NK = None if mass_N is None else mass_N[:, None]
        evidence = Evidence(turned_NKD, v_NKD, arrays["count"], query_WHD, mass_NK, scale=scale, cap=cap)
        s_NK = SCORERS[compression.method].score(evidence)
        index_KB = choose(s_NK, evidence, numbers, compression)
        heads = evidence.k_NKD.shape[1]
        at_BK1 = jnp.maximum(jnp.broadcast_to(index_KB, (heads, index_KB.shape[1])).T, 0)[..., None]
        new = [jnp.take_along_axis(x_NKD, at_BK1, axis=0) for x_NKD in (evidence.k_NKD, evidence.v_NKD)]
        return _put(pool, index, arrays["target_B"], *new), index_KB

    layer_L = jnp.arange(pool.k_LPKCD.shape[0], dtype=jnp.int32)
    pool, index_LKB = lax.scan(layer, pool, (layer_L, query_LWHD, mass_LN))
    return pool, index_LKB


def _put(pool: Pages, layer: jax.Array, target_B: jax.Array, k_BKD: jax.Array, v_BKD: jax.Array) -> Pages:
    page_B, slot_B = target_B // pool.page_size, target_B % pool.page_size

    def put(x: jax.Array, new_BKD: jax.Array) -> jax.Array:
        return x.at[layer, page_B, :, slot_B, :].set(new_BKD, mode="drop", unique_indices=True)

    return Pages(put(pool.k_LPKCD, k_BKD), put(pool.v_LPKCD, v_BKD))


@dataclass(frozen=True)
class Kept:
    """Tokens that a compression kept, on the device, by stage.

    indexes: int32 [layers, K, B] of each stage, or [layers, 1, B] where all heads keep the same; -1 behind the last.
    """

    budget: int
    indexes: Sequence[jax.Array]
