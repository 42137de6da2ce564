"""How KV is kept at rest, in host memory and on disk: as it is, or in 8 bits per value with a scale per channel.

A channel is one (layer, KV head, head dimension) of the keys or of the values; its float32 scale maps the channel's
largest magnitude over the entry's tokens to that of the 8-bit format: int8, or float8_e4m3fn (arXiv:2209.05433). Keys
have a few channels of large magnitude, the same for all tokens, which would drown the others if a token had one scale
(KIVI, arXiv:2402.02750, section 3). All tokens share the scales, so some can be cut out without decoding the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ragjax.core import AtRest

Arrays = Mapping[str, NDArray[Any]]
"""An entry at rest. raw: "k", "v" [L, K, n, D]; else "k.int8" or "k.float8" (its bits as uint8) [L, K, n, D] and
"k.scale" float32 [L, K, D], and the same for v."""

LARGEST = {"int8": 127.0, "float8": 448.0}
"""Largest magnitude of a format."""

BFLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
BITS = {"int8": np.dtype(np.int8), "float8": np.dtype(np.uint8)}
FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
"""The value of each of float8's bit patterns: looking them up is ten times faster than casting."""


def rest_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype at rest of values that have this one in the pool: bfloat16 is kept as uint16 bits."""
    return np.dtype(np.uint16) if dtype == BFLOAT16 else dtype


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes the KV of one model.

    Attributes:
        kind: how `encode` does it; `decode` reads every kind.
        layers, heads, dim: L, K and D.
        dtype: of keys and values as they come and go (`rest_dtype`); uint16 holds bfloat16 bits.
    """

    kind: AtRest
    layers: int
    heads: int
    dim: int
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        if self.kind not in get_args(AtRest):
            raise ValueError(f"kind {self.kind!r} is none of {', '.join(get_args(AtRest))}")

    def size(self, tokens: int) -> int:
        """Bytes that an entry of so many tokens takes at rest."""
        channels = 2 * self.layers * self.heads * self.dim
        if self.kind == "raw":
            return channels * tokens * self.dtype.itemsize
        return channels * (tokens + np.dtype(np.float32).itemsize)

    def encode(self, k_LKTD: NDArray[Any], v_LKTD: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], float]:
        """The entry's arrays, and the relative RMS error of its keys or its values, whichever is larger.

        An entry with values that are not finite is kept raw, since no scale fits them.
        """
        raw = {"k": k_LKTD, "v": v_LKTD}
        if self.kind == "raw":
            return raw, 0.0
        peaks = [_peaks(x) for x in raw.values()]
        if not all(np.isfinite(peak).all() for peak in peaks):
            return raw, 0.0
        arrays: dict[str, NDArray[Any]] = {}
        losses = []
        for (name, x_LKTD), peak_LKD in zip(raw.items(), peaks, strict=True):
            scale_LKD = _scales(peak_LKD, LARGEST[self.kind])
            arrays[f"{name}.{self.kind}"], loss = _quantise(x_LKTD, scale_LKD, self.kind)
            arrays[f"{name}.scale"] = scale_LKD
            losses.append(loss)
        return arrays, max(losses)

    def decode(self, arrays: Arrays) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values, [L, K, n, D] each; of a raw entry its own arrays."""
        kind = kind_of(arrays)
        if kind == "raw":
            return arrays["k"], arrays["v"]
        k_LKTD, v_LKTD = (_restore(arrays[f"{x}.{kind}"], arrays[f"{x}.scale"], self.dtype) for x in "kv")
        return k_LKTD, v_LKTD

    def check(self, arrays: Arrays, tokens: int) -> None:
        """See that these are `tokens` tokens or more of this model's KV.

        Raises:
            ValueError: naming the array and what is wrong with it.
        """
        kind = kind_of(arrays)
        found = length(arrays)
        if found < tokens:
            raise ValueError(f"an entry has {found} tokens, of which {tokens} are wanted")
        values = (self.layers, self.heads, found, self.dim), (self.dtype if kind == "raw" else BITS[kind])
        scales = (self.layers, self.heads, self.dim), np.dtype(np.float32)
        for name, array in arrays.items():
            shape, dtype = scales if name.endswith(".scale") else values
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"array {name} of an entry is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}"
                )


def kind_of(arrays: Arrays) -> AtRest:
    """How an entry is encoded.

    Raises:
        ValueError: if its arrays are those of no known encoding.
    """
    for kind in get_args(AtRest):
        if set(arrays) == _names(kind):
            known: AtRest = kind
            return known
    raise ValueError(f"an entry of arrays {sorted(arrays)} has no known encoding")


def length(arrays: Arrays) -> int:
    """Tokens of an entry."""
    shape = next(array.shape for name, array in arrays.items() if not name.endswith(".scale"))
    return int(shape[2]) if len(shape) > 2 else 0


def cut(arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
    """Tokens [begin, end) of an entry, as views."""
    return {name: x if name.endswith(".scale") else x[:, :, begin:end] for name, x in arrays.items()}


def layers(arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
    """Layers [begin, end) of an entry, as views."""
    return {name: x[begin:end] for name, x in arrays.items()}


def _names(kind: AtRest) -> set[str]:
    return {"k", "v"} if kind == "raw" else {f"{x}.{part}" for x in "kv" for part in (kind, "scale")}


# One layer at a time below: float32 copies of a whole entry would take several times its size.


def _peaks(x_LKTD: NDArray[Any]) -> NDArray[np.float32]:
    """Largest magnitude of each channel, [L, K, D]."""
    return np.stack([np.abs(_widen(x_KTD)).max(axis=1, initial=0) for x_KTD in x_LKTD])


def _scales(peak_LKD: NDArray[np.float32], largest: float) -> NDArray[np.float32]:
    limits = np.finfo(np.float32)
    # half the range, since decoding may round the peak up; and a channel too small for a scale is kept as zeros
    scale_LKD = np.minimum(peak_LKD, limits.max / 2) / np.float32(largest)
    return np.where(scale_LKD < limits.tiny, np.float32(1), scale_LKD)


def _quantise(x_LKTD: NDArray[Any], scale_LKD: NDArray[np.float32], kind: str) -> tuple[NDArray[Any], float]:
    """The 8-bit values, and their relative RMS error."""
    bits_LKTD = np.empty(x_LKTD.shape, BITS[kind])
    error = norm = 0.0
    for x_KTD, scale_KD, bits_KTD in zip(x_LKTD, scale_LKD, bits_LKTD, strict=True):
        wide_KTD = _widen(x_KTD)
        scaled_KTD = np.clip(wide_KTD / scale_KD[:, None], -LARGEST[kind], LARGEST[kind])
        bits_KTD[...] = np.rint(scaled_KTD) if kind == "int8" else scaled_KTD.astype(FLOAT8).view(np.uint8)
        back_KTD = _widen(_narrow(_expand(bits_KTD, scale_KD), x_LKTD.dtype))
        error += _squares(np.subtract(back_KTD, wide_KTD, dtype=np.float64))
        norm += _squares(wide_KTD.astype(np.float64))
    return bits_LKTD, float(np.sqrt(error / norm)) if norm else 0.0


def _restore(bits_LKTD: NDArray[Any], scale_LKD: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    x_LKTD = np.empty(bits_LKTD.shape, dtype)
    for bits_KTD, scale_KD, x_KTD in zip(bits_LKTD, scale_LKD, x_LKTD, strict=True):
        x_KTD[...] = _narrow(_expand(bits_KTD, scale_KD), dtype)
    return x_LKTD


def _expand(bits_KTD: NDArray[Any], scale_KD: NDArray[np.float32]) -> NDArray[np.float32]:
    wide_KTD: NDArray[np.float32]
    wide_KTD = FLOAT8_VALUES.take(bits_KTD) if bits_KTD.dtype == np.uint8 else bits_KTD.astype(np.float32)
    wide_KTD *= scale_KD[:, None]
    return wide_KTD


def _squares(x: NDArray[np.float64]) -> float:
    return float(np.square(x).sum())


def _widen(x: NDArray[Any]) -> NDArray[np.float32]:
    if x.dtype == np.uint16:
        bits: NDArray[np.uint32] = x.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return x.astype(np.float32)


def _narrow(x: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    return x.astype(BFLOAT16).view(np.uint16) if dtype == np.uint16 else x.astype(dtype)
