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

from ragjax.compress import SCORERS, Evidence
from ragjax.compress.choose import choose, quota
from ragjax.core import Compression
from ragjax.kernels.pages import Pages, from_storage, to_storage
from ragjax.kernels.rope import Rotation, rotate
from ragjax.runner.stages import OUTSIDE

LEAST = 256
"""Tokens of the shortest prompt that a program is compiled for; the others are its doubles."""


def bucket(tokens: int) -> int:
    """Length of the program's arrays for a prompt of so many tokens."""
    return max(LEAST, 1 << (tokens - 1).bit_length())


def buckets(compression: Compression, context: int) -> Sequence[int]:
    """Lengths of all programs for prompts above the budget, of at most `context` tokens."""
    found = [bucket(compression.budget + 1)]
    while found[-1] < context:
        found.append(2 * found[-1])
    return found


def arrays_of(
    compression: Compression,
    layers: int,
    source_N: NDArray[np.int32],
    offset_N: NDArray[np.int32],
    target_B: NDArray[np.int32],
) -> Mapping[str, NDArray[np.int32]]:
    """What `compact` takes from the host, padded to its program's sizes, int32."""
    count, room = len(source_N), compression.program.budget
    spare = (0, bucket(count) - count)
    numbers = quota(compression, SCORERS[compression.method], layers, count)
    nowhere = OUTSIDE + np.arange(room - len(target_B), dtype=np.int32)
    return {
        "source_N": np.pad(source_N, spare),
        "offset_N": np.pad(offset_N, spare),
        "target_B": np.concatenate([target_B, nowhere]),
        "count": np.array(count, np.int32),
        "kept_L": numbers.kept_L,
        "recent_L": numbers.recent_L,
        "sources_L": numbers.sources_L,
    }


def shapes_of(compression: Compression, layers: int, tokens: int) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Of these arrays for one stage of so many layers, `tokens` a bucket."""
    sizes = {"N": (tokens,), "B": (compression.program.budget,), "L": (layers,)}
    names = ("source_N", "offset_N", "target_B", "kept_L", "recent_L", "sources_L")
    shapes = {name: jax.ShapeDtypeStruct(sizes[name[-1]], jnp.int32) for name in names}
    return {**shapes, "count": jax.ShapeDtypeStruct((), jnp.int32)}


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
) -> tuple[Pages, jax.Array, jax.Array | None]:
    """Copy what each layer of a stage keeps into the target slots, keys rotated at their places in the prompt.

    All is read before anything is written: target slots may be some of the source's.

    Args:
        compression: what the program is compiled for (`Compression.program`).
        pool: of the stage; donated.
        arrays: `arrays_of`, those by layer of this stage.
        query_LWHD: rotated queries of the prompt's last rows, float32, if the scorer asks for them.
        mass_LN: attention that each token received, float32, likewise.
        rotation: RoPE table.
        scale: of attention logits (`compress.Evidence`).
        cap: likewise.

    Returns:
        The pool, and the indexes that each layer keeps, int32 [L, K, B]; [L, 1, B] where all heads keep the same. If
        attention was given, what the first head keeps of it, float32 [L, B]; anything behind the last.
    """
    scorer = SCORERS[compression.method]
    page_N, slot_N = (f(arrays["source_N"], pool.page_size) for f in (jnp.floor_divide, jnp.remainder))
    to_page_B, to_slot_B = (f(arrays["target_B"], pool.page_size) for f in (jnp.floor_divide, jnp.remainder))
    cos_NR, sin_NR = rotation.at(arrays["offset_N"])
    numbers = (arrays["kept_L"], arrays["recent_L"], arrays["sources_L"])

    def layer(pool: Pages, of_layer: Any) -> tuple[Pages, tuple[jax.Array, jax.Array | None]]:
        index, kept, recent, sources, query_WHD, mass_N = of_layer
        k_NKD, v_NKD = (x[index, page_N, :, slot_N, :] for x in (pool.k_LPKCD, pool.v_LPKCD))
        turned_NKD = rotate(from_storage(k_NKD).astype(jnp.float32), cos_NR[:, None], sin_NR[:, None])
        k_NKD = to_storage(turned_NKD, k_NKD.dtype)
        mass_NK = None if mass_N is None else mass_N[:, None]
        evidence = Evidence(k_NKD, v_NKD, arrays["count"], query_WHD, mass_NK, scale=scale, cap=cap)
        score = scorer.score(evidence)
        index_KB = choose(score.s_NK, evidence, kept, recent, sources, compression=compression, most=compression.budget)
        at_BK1 = jnp.maximum(jnp.broadcast_to(index_KB, (k_NKD.shape[1], index_KB.shape[1])).T, 0)[..., None]

        def put(x: jax.Array, new_NKD: jax.Array) -> jax.Array:
            new_BKD = jnp.take_along_axis(new_NKD, at_BK1, axis=0)
            return x.at[index, to_page_B, :, to_slot_B, :].set(new_BKD, mode="drop", unique_indices=True)

        mass_B = None if mass_N is None else mass_N[at_BK1[:, 0, 0]]
        return Pages(put(pool.k_LPKCD, k_NKD), put(pool.v_LPKCD, v_NKD)), (index_KB, mass_B)

    layers = jnp.arange(pool.k_LPKCD.shape[0], dtype=jnp.int32)
    pool, (index_LKB, mass_LB) = lax.scan(layer, pool, (layers, *numbers, query_LWHD, mass_LN))
    return pool, index_LKB, mass_LB


@dataclass(frozen=True)
class Kept:
    """What a compression kept, on the device, by stage.

    indexes: int32 [layers, K, B] of each stage, or [layers, 1, B] where all heads keep the same; -1 behind the last.
    mass: attention that these tokens received, float32 [layers, B] of each stage, if any was given.
    """

    budget: int
    indexes: Sequence[jax.Array]
    mass: Sequence[jax.Array]

    def read_mass(self) -> NDArray[np.float32]:
        """Of all layers, float32 [L, budget]; waits for the device."""
        return np.concatenate([np.asarray(mass_LB) for mass_LB in self.mass])[:, : self.budget]
