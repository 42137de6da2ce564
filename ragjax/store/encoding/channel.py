"""8 bits per value, with a scale per channel.

A channel is one (layer, KV head, head dimension) of the keys or of the values; its float32 scale maps the channel's
largest magnitude over the entry's tokens to that of the 8-bit format: int8, or float8_e4m3fn (arXiv:2209.05433). Keys
have a few channels of large magnitude, the same for all tokens, which would drown the others if a token had one scale
(KIVI, arXiv:2402.02750, section 3). All tokens share the scales, so some can be cut out without decoding the entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ragjax.store.encoding.base import Arrays, Dims, Encoding, Layout, Loss, put, tokens_of, widen

LARGEST = {"int8": 127.0, "float8": 448.0}
"""Largest magnitude of a format."""

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
BITS = {"int8": np.dtype(np.int8), "float8": np.dtype(np.uint8)}
FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
"""The value of each of float8's bit patterns: looking them up is ten times faster than casting."""


@dataclass(frozen=True)
class ByChannel(Encoding):
    """Arrays "k.int8" or "k.float8" (its bits as uint8) [L, K, n, D] and "k.scale" float32 [L, K, D]; "v" the same."""

    kind: Literal["int8", "float8"]

    @property
    def names(self) -> frozenset[str]:
        """Values and scales, of keys and of values."""
        return frozenset(f"{x}.{part}" for x in "kv" for part in (self.kind, "scale"))

    def layout(self, dims: Dims) -> Layout:
        """One byte a value, and four a channel."""
        values = (dims.layers, dims.heads, dims.tokens, dims.dim), BITS[self.kind]
        scales = (dims.layers, dims.heads, dims.dim), np.dtype(np.float32)
        return {name: scales if name.endswith(".scale") else values for name in self.names}

    def encode(self, k_LKTD: NDArray[Any], v_LKTD: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], float] | None:
        """None for values that are not finite, which no scale fits."""
        pair = {"k": k_LKTD, "v": v_LKTD}
        peaks = [_peaks(x) for x in pair.values()]
        if not all(np.isfinite(peak).all() for peak in peaks):
            return None
        arrays: dict[str, NDArray[Any]] = {}
        losses = []
        for (name, x_LKTD), peak_LKD in zip(pair.items(), peaks, strict=True):
            scale_LKD = _scales(peak_LKD, LARGEST[self.kind])
            arrays[f"{name}.{self.kind}"], loss = _quantise(x_LKTD, scale_LKD, self.kind)
            arrays[f"{name}.scale"] = scale_LKD
            losses.append(loss)
        return arrays, max(losses)

    def decode(self, arrays: Arrays, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Values times their scales."""
        k_LKTD, v_LKTD = (_restore(arrays[f"{x}.{self.kind}"], arrays[f"{x}.scale"], dtype) for x in "kv")
        return k_LKTD, v_LKTD

    def length(self, arrays: Arrays) -> int:
        return tokens_of(arrays[f"k.{self.kind}"])

    def cut(self, arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
        """Views; the scales stay."""
        return {name: x if name.endswith(".scale") else x[:, :, begin:end] for name, x in arrays.items()}


# One layer at a time below: float32 copies of a whole entry would take several times its size.


def _peaks(x_LKTD: NDArray[Any]) -> NDArray[np.float32]:
    """Largest magnitude of each channel, [L, K, D]."""
    return np.stack([np.abs(widen(x_KTD)).max(axis=1, initial=0) for x_KTD in x_LKTD])


def _scales(peak_LKD: NDArray[np.float32], largest: float) -> NDArray[np.float32]:
    limits = np.finfo(np.float32)
    # half the range, since decoding may round the peak up; and a channel too small for a scale is kept as zeros
    scale_LKD = np.minimum(peak_LKD, limits.max / 2) / np.float32(largest)
    return np.where(scale_LKD < limits.tiny, np.float32(1), scale_LKD)


def _quantise(x_LKTD: NDArray[Any], scale_LKD: NDArray[np.float32], kind: str) -> tuple[NDArray[Any], float]:
    """The 8-bit values, and their relative RMS error."""
    bits_LKTD = np.empty(x_LKTD.shape, BITS[kind])
    loss = Loss()
    for x_KTD, scale_KD, bits_KTD in zip(x_LKTD, scale_LKD, bits_LKTD, strict=True):
        wide_KTD = widen(x_KTD)
        scaled_KTD = np.clip(wide_KTD / scale_KD[:, None], -LARGEST[kind], LARGEST[kind])
        bits_KTD[...] = np.rint(scaled_KTD) if kind == "int8" else scaled_KTD.astype(FLOAT8).view(np.uint8)
        loss.add(wide_KTD, _expand(bits_KTD, scale_KD), x_LKTD.dtype)
    return bits_LKTD, loss.value


def _restore(bits_LKTD: NDArray[Any], scale_LKD: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    x_LKTD = np.empty(bits_LKTD.shape, dtype)
    for bits_KTD, scale_KD, x_KTD in zip(bits_LKTD, scale_LKD, x_LKTD, strict=True):
        put(x_KTD, _expand(bits_KTD, scale_KD))
    return x_LKTD


def _expand(bits_KTD: NDArray[Any], scale_KD: NDArray[np.float32]) -> NDArray[np.float32]:
    wide_KTD: NDArray[np.float32]
    wide_KTD = FLOAT8_VALUES.take(bits_KTD) if bits_KTD.dtype == np.uint8 else bits_KTD.astype(np.float32)
    wide_KTD *= scale_KD[:, None]
    return wide_KTD
