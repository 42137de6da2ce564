"""Compressing a prompt's KV on the device: scores, choice and copies of one stage's layers, as one program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ragjax.compress import SCORERS, Evidence
from ragjax.compress.base import Score
from ragjax.compress.choose import choose, quota
from ragjax.core import Compression
from ragjax.core.compression import BY_LAYER
from ragjax.kernels.pages import Pages, as_units, from_storage, to_storage
from ragjax.kernels.rope import Rotation, rotate
from ragjax.runner.stages import OUTSIDE

LEAST = 256
"""Tokens of the shortest prompt that a program is compiled for; the others are its doubles."""


PROMPT_ARRAYS = ("source_N", "offset_N", "count")
"""The arrays that say where a prompt is."""


def bucket(tokens: int) -> int:
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
    """Host arrays of `compact` when all layers keep equally many tokens, padded to its program's sizes, int32."""
    numbers = quota(compression, SCORERS[compression.method], layers, len(source_N))
    nowhere = OUTSIDE + np.arange(compression.program.budget - len(target_B), dtype=np.int32)
    target = {"target_B": np.concatenate([target_B, nowhere])}
    return {**prompt_arrays(source_N, offset_N), **target, **numbers._asdict()}


def prompt_arrays(source_N: NDArray[np.int32], offset_N: NDArray[np.int32]) -> Mapping[str, NDArray[np.int32]]:
    """The arrays that locate a prompt in the pool, padded likewise."""
    count = len(source_N)
    spare = (0, bucket(count) - count)
    return {
        "source_N": np.pad(source_N, spare),
        "offset_N": np.pad(offset_N, spare),
        "count": np.array(count, np.int32),
    }


def shapes_of(compression: Compression, layers: int, tokens: int, page_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes of these arrays for one stage; `tokens` is a bucket."""
    target = "unit_LU" if compression.method in BY_LAYER else "target_B"
    sizes = {
        "N": (tokens,),
        "B": (compression.program.budget,),
        "L": (layers,),
        "LU": (layers, -(-tokens // page_size)),
    }
    names = ("source_N", "offset_N", target, "kept_L", "recent_L", "sources_L", "edges_L")
    shapes = {name: jax.ShapeDtypeStruct(sizes[name.rsplit("_", 1)[1]], jnp.int32) for name in names}
    return {**shapes, "count": jax.ShapeDtypeStruct((), jnp.int32)}


def compact(
    compression: Compression,
    pool: Pages,
    arrays: Mapping[str, jax.Array],
    query_LWHD: jax.Array | None,
    mass_LN: jax.Array | None,
    rotation: Rotation,
    layer_L: jax.Array | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> tuple[Pages, jax.Array]:
    """Copy what each layer of a stage keeps into the target slots, keys rotated at their places in the prompt.

    Where layers keep other numbers, units may be those of any layer of the pool. No target slot is one of the source's.
    pool: of the stage; donated. arrays: `arrays_of`, those by layer of this stage. query_LWHD: rotated queries of the
    prompt's last rows, and mass_LN: attention that each token received, float32, if the scorer asks for them. layer_L:
    places of the stage's layers in the pool (None: all of it). scale, cap: of attention logits.

    Returns:
        The pool, and the indexes that each layer keeps, int32 [L, K, B]; [L, 1, B] where all heads keep the same.
    """
    prompt = _Prompt.of(pool, arrays, rotation, scale, cap)
    by_layer = compression.method in BY_LAYER
    most = len(arrays["source_N"]) if by_layer else compression.budget

    def layer(pool: Pages, of_layer: Any) -> tuple[Pages, jax.Array]:
        index, target, (kept, *numbers), query_WHD, mass_N = of_layer
        evidence = prompt.evidence(pool, index, query_WHD, mass_N)
        score = SCORERS[compression.method].score(evidence)
        index_KB = choose(score.s_NK, evidence, kept, *numbers, compression=compression, most=most)
        heads = evidence.k_NKD.shape[1]
        at_BK1 = jnp.maximum(jnp.broadcast_to(index_KB, (heads, index_KB.shape[1])).T, 0)[..., None]
        new = [jnp.take_along_axis(x_NKD, at_BK1, axis=0) for x_NKD in (evidence.k_NKD, evidence.v_NKD)]
        pool = _put_units(pool, target, kept, *new) if by_layer else _put(pool, index, target, *new)
        return pool, index_KB

    places_L = jnp.arange(pool.k_LPKCD.shape[0], dtype=jnp.int32) if layer_L is None else layer_L
    numbers = tuple(arrays[name] for name in ("kept_L", "recent_L", "sources_L", "edges_L"))
    target_LX = arrays["unit_LU"] if by_layer else jnp.broadcast_to(arrays["target_B"], (len(places_L), most))
    pool, index_LKB = lax.scan(layer, pool, (places_L, target_LX, numbers, query_LWHD, mass_LN))
    return pool, index_LKB


def prefer(
    compression: Compression,
    pool: Pages,
    arrays: Mapping[str, jax.Array],
    query_LWHD: jax.Array,
    rotation: Rotation,
    layer_L: jax.Array | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Share of the budget that each layer of a stage asks for (`Score.preference`), float32 [L]. See `compact`."""
    prompt = _Prompt.of(pool, arrays, rotation, scale, cap)

    def layer(of_layer: tuple[jax.Array, jax.Array]) -> jax.Array:
        score: Score = SCORERS[compression.method].score(prompt.evidence(pool, *of_layer, None))
        return score.preference

    places_L = jnp.arange(pool.k_LPKCD.shape[0], dtype=jnp.int32) if layer_L is None else layer_L
    preference_L: jax.Array = lax.map(layer, (places_L, query_LWHD))
    return preference_L


class _Prompt(NamedTuple):
    page_N: jax.Array
    slot_N: jax.Array
    tokens: jax.Array
    cos_NR: jax.Array
    sin_NR: jax.Array
    scale: float | None
    cap: float | None

    @staticmethod
    def of(
        pool: Pages, arrays: Mapping[str, jax.Array], rotation: Rotation, scale: float | None, cap: float | None
    ) -> _Prompt:
        page_N, slot_N = (f(arrays["source_N"], pool.page_size) for f in (jnp.floor_divide, jnp.remainder))
        return _Prompt(page_N, slot_N, arrays["count"], *rotation.at(arrays["offset_N"]), scale, cap)

    def evidence(
        self, pool: Pages, layer: jax.Array, query_WHD: jax.Array | None, mass_N: jax.Array | None
    ) -> Evidence:
        k_NKD, v_NKD = (x[layer, self.page_N, :, self.slot_N, :] for x in (pool.k_LPKCD, pool.v_LPKCD))
        turned_NKD = rotate(from_storage(k_NKD).astype(jnp.float32), self.cos_NR[:, None], self.sin_NR[:, None])
        mass_NK = None if mass_N is None else mass_N[:, None]
        turned_NKD = to_storage(turned_NKD, k_NKD.dtype)
        return Evidence(turned_NKD, v_NKD, self.tokens, query_WHD, mass_NK, scale=self.scale, cap=self.cap)


def _put(pool: Pages, layer: jax.Array, target_B: jax.Array, k_BKD: jax.Array, v_BKD: jax.Array) -> Pages:
    page_B, slot_B = (f(target_B, pool.page_size) for f in (jnp.floor_divide, jnp.remainder))

    def put(x: jax.Array, new_BKD: jax.Array) -> jax.Array:
        return x.at[layer, page_B, :, slot_B, :].set(new_BKD, mode="drop", unique_indices=True)

    return Pages(put(pool.k_LPKCD, k_BKD), put(pool.v_LPKCD, v_BKD))


def _put_units(pool: Pages, unit_U: jax.Array, kept: jax.Array, k_BKD: jax.Array, v_BKD: jax.Array) -> Pages:
    number_B = jnp.arange(len(k_BKD), dtype=jnp.int32)
    slot_B = number_B % pool.page_size
    unit_B = jnp.where(number_B < kept, unit_U[number_B // pool.page_size], OUTSIDE + number_B)
    units = as_units(pool)

    def put(x: jax.Array, new_BKD: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return x.at[0, unit_B, :, slot_B, :].set(new_BKD, mode="drop", unique_indices=True).reshape(shape)

    return Pages(put(units.k_LPKCD, k_BKD, pool.k_LPKCD.shape), put(units.v_LPKCD, v_BKD, pool.v_LPKCD.shape))


@dataclass(frozen=True)
class Kept:
    """Tokens that a compression kept, on the device, by stage.

    indexes: int32 [layers, K, B] of each stage, or [layers, 1, B] where all heads keep the same; -1 behind the last.
    number_L: tokens of each layer, int32 [layers], on the host, where layers keep other numbers.
    """

    budget: int
    indexes: Sequence[jax.Array]
    number_L: NDArray[np.int32] | None = None
