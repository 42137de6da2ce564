"""How fast KV is encoded and decoded at rest, and how much smaller it is: one thread, entries in memory."""

from __future__ import annotations

from collections.abc import Iterator
from time import thread_time
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.report import Row
from ragjax.core import AtRest
from ragjax.store.codec import Codec

COLUMNS = ("at_rest", "layers", "heads", "dim", "tokens", "bytes_share", "error", "encode_mb_s", "decode_mb_s")
SHAPES = ((30, 3, 64, 100), (30, 3, 64, 500), (32, 8, 128, 100))
"""Layers, KV heads, head dimension, tokens: SmolLM2-135M's, and those of models of 8B parameters."""
ROUNDS = 30


def rows() -> Iterator[Row]:
    """Each shape in each encoding. Normal numbers in bfloat16: what they are does not change the work.

    Times are of the thread, the least of `ROUNDS` in turns; MB (10^6 bytes) are of bfloat16, whatever is kept.
    """
    kinds: tuple[AtRest, ...] = get_args(AtRest)
    for layers, heads, dim, tokens in SHAPES:
        pair = _normal((2, layers, heads, tokens, dim))
        codecs = {kind: Codec(kind, layers, heads, dim, pair.dtype) for kind in kinds}
        kept = {kind: codec.encode(*pair) for kind, codec in codecs.items()}
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind, codec in codecs.items():
                start = thread_time()
                codec.encode(*pair)
                middle = thread_time()
                codec.decode(kept[kind][0])
                times[kind].append((middle - start, thread_time() - middle))
        for kind in kinds:
            encode, decode = (pair.nbytes / 1e6 / min(part) for part in zip(*times[kind], strict=True))
            lossy = kind != "raw"  # raw does nothing
            yield {
                "at_rest": kind, "layers": layers, "heads": heads, "dim": dim, "tokens": tokens,
                "bytes_share": codecs[kind].size(tokens) / pair.nbytes, "error": kept[kind][1],
                "encode_mb_s": encode if lossy else None, "decode_mb_s": decode if lossy else None,
            }  # fmt: skip


def _normal(shape: tuple[int, ...]) -> NDArray[Any]:
    """bfloat16 bits."""
    floats = np.random.default_rng(0).standard_normal(shape, np.float32)
    return (floats.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
