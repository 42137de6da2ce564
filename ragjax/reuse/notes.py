"""Notes: what is kept with a preprocessed chunk besides its KV.

Its drift always, and its influence (`influence.py`) if that was asked for. The drift of a token says how much its
values changed when the chunk was computed behind its neighbours instead of alone: the distance of both, summed over
the layers. A token that changed there changes in other company too, so drift tells which tokens are worth recomputing
before anybody asks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragjax.reuse.influence import Influence

_HEAD = struct.Struct("<HI")  # version, tokens
_VERSION = 2  # an influence by itself begins with 1


@dataclass(frozen=True)
class Notes:
    """drift_N: of each token of the chunk, float32 [n], from 0 on; kept in half precision."""

    drift_N: NDArray[np.float32]
    influence: Influence | None = None

    def encode(self) -> bytes:
        """As bytes, for `KnowledgeCache.admit_segment(meta=...)`."""
        head = _HEAD.pack(_VERSION, len(self.drift_N))
        drift = np.minimum(self.drift_N, np.finfo(np.float16).max).astype("<f2").tobytes()
        return head + drift + (b"" if self.influence is None else self.influence.encode())


def notes_of(meta: bytes) -> Notes | None:
    """What `Notes.encode` wrote; None if the bytes hold something else, or nothing.

    Raises:
        ValueError: if the bytes do not add up.
    """
    if len(meta) < _HEAD.size or _HEAD.unpack_from(meta)[0] != _VERSION:
        return None
    end = _HEAD.size + 2 * _HEAD.unpack_from(meta)[1]
    if len(meta) < end:
        raise ValueError(f"the notes of a chunk have {len(meta)} bytes, and the drift alone takes {end}")
    drift_N = np.frombuffer(meta[_HEAD.size : end], "<f2").astype(np.float32)
    return Notes(drift_N, Influence.decode(meta[end:]))


def drift(deviation_LN: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each token, float32 [n], from the squared distance of its values by layer (`Measure.DEVIATION`), [L, n]."""
    drift_N: NDArray[np.float32] = np.sqrt(np.maximum(deviation_LN, 0.0)).sum(0, dtype=np.float32)
    return drift_N
