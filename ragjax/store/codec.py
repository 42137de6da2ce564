"""KV at rest, in host memory and on disk: raw, or rounded to 8 or 4 bits per value.

Every encoding can cut out some tokens, and some layers, of an entry without decoding it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ragjax.core import AtRest

Arrays = Mapping[str, NDArray[Any]]
"""An entry at rest, by names that tell its encoding. The first axis of every array is the layers."""

Layout = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of each array of an entry."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Dims:
    """Shape of keys and of values, [layers, heads, tokens, dim], and dtype; uint16 holds bfloat16 bits."""

    layers: int
    heads: int
    tokens: int
    dim: int
    dtype: np.dtype[Any]


class Encoding:
    """One way to keep keys and values [L, K, n, D]; it holds nothing of an entry. This one keeps them as they are."""

    names = frozenset({"k", "v"})
    """Names of an entry's arrays; no other encoding has the same."""
    values = "k"
    """The array that has a value for each token."""

    def layout(self, dims: Dims) -> Layout:
        return dict.fromkeys(("k", "v"), ((dims.layers, dims.heads, dims.tokens, dims.dim), dims.dtype))

    def encode(self, k_LKTD: NDArray[Any], v_LKTD: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], float] | None:
        """The arrays, and the relative RMS error of keys or values, the larger; None if it cannot hold the values."""
        return {"k": k_LKTD, "v": v_LKTD}, 0.0

    def decode(self, arrays: Arrays, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        return arrays["k"], arrays["v"]

    def length(self, arrays: Arrays) -> int:
        """Tokens of an entry; 0 if its arrays have too few axes."""
        return tokens_of(arrays[self.values])

    def cut(self, arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
        """Tokens [begin, end) as an entry that decodes to the same bits. No values are copied."""
        return {name: x[:, :, begin:end] for name, x in arrays.items()}

    def check(self, arrays: Arrays, dims: Dims) -> None:
        """Raise ValueError unless these arrays, perhaps of a cut, are an entry of this size."""
        require(arrays, self.layout(dims))


def require(arrays: Arrays, layout: Layout) -> None:
    """Raise ValueError unless all arrays of a layout are there as it says."""
    for name, (shape, dtype) in layout.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"array {name} of an entry is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}"
            )


def tokens_of(x_LKTD: NDArray[Any]) -> int:
    return int(x_LKTD.shape[2]) if x_LKTD.ndim > 2 else 0


@dataclass(slots=True)
class Loss:
    """Sums up a relative RMS error."""

    error: float = 0.0
    norm: float = 0.0

    def add(self, wide: NDArray[np.float32], back: NDArray[np.float32], dtype: np.dtype[Any]) -> None:
        kept = widen(narrow(back, dtype))
        self.error += float(np.square(np.subtract(kept, wide, dtype=np.float64)).sum())
        self.norm += float(np.square(wide.astype(np.float64)).sum())

    @property
    def value(self) -> float:
        return float(np.sqrt(self.error / self.norm)) if self.norm else self.error


def widen(x: NDArray[Any]) -> NDArray[np.float32]:
    if x.dtype == np.uint16:
        bits: NDArray[np.uint32] = x.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return x.astype(np.float32)


def narrow(x: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    return x.astype(BFLOAT16).view(np.uint16) if dtype == np.uint16 else x.astype(dtype)


def put(x: NDArray[Any], wide: NDArray[np.float32]) -> None:
    whole = x.view(BFLOAT16) if x.dtype == np.uint16 else x
    whole[...] = wide


_LARGEST_INT8 = np.float32(127)
TINY = np.finfo(np.float32).tiny


class Int8(Encoding):
    """8 bits per value, with a scale per channel: "k.int8" [L, K, n, D] and "k.scale" float32 [L, K, D]; "v" the same.

    A channel is one (layer, KV head, head dimension) of the keys or of the values; its scale maps the channel's largest
    magnitude over the entry's tokens to 127. Keys have a few channels of large magnitude, the same for all tokens,
    which would drown the others if a token had one scale (KIVI, arXiv 2402.02750, section 3). All tokens share scales,
    so some can be cut out without decoding the entry.
    """

    names = frozenset({"k.int8", "k.scale", "v.int8", "v.scale"})
    values = "k.int8"

    def layout(self, dims: Dims) -> Layout:
        values = (dims.layers, dims.heads, dims.tokens, dims.dim), np.dtype(np.int8)
        scales = (dims.layers, dims.heads, dims.dim), np.dtype(np.float32)
        return {name: scales if name.endswith(".scale") else values for name in self.names}

    def encode(self, k_LKTD: NDArray[Any], v_LKTD: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], float] | None:
        arrays: dict[str, NDArray[Any]] = {}
        losses = []
        for name, x_LKTD in (("k", k_LKTD), ("v", v_LKTD)):
            peak_LKD = np.stack([np.abs(widen(x_KTD)).max(axis=1, initial=0) for x_KTD in x_LKTD])
            if not np.isfinite(peak_LKD).all():
                return None
            # half the range, since decoding may round the peak up; and a channel too small for a scale is kept as zeros
            scale_LKD = np.minimum(peak_LKD, np.finfo(np.float32).max / 2) / _LARGEST_INT8
            arrays[f"{name}.scale"] = np.where(scale_LKD < TINY, np.float32(1), scale_LKD)
            arrays[f"{name}.int8"], loss = _quantise(x_LKTD, arrays[f"{name}.scale"])
            losses.append(loss)
        return arrays, max(losses)

    def decode(self, arrays: Arrays, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        k_LKTD, v_LKTD = (np.empty(arrays[f"{x}.int8"].shape, dtype) for x in "kv")
        for name, x_LKTD in (("k", k_LKTD), ("v", v_LKTD)):
            scaled = zip(arrays[f"{name}.int8"], arrays[f"{name}.scale"], x_LKTD, strict=True)
            for bits_KTD, scale_KD, x_KTD in scaled:
                put(x_KTD, bits_KTD.astype(np.float32) * scale_KD[:, None])
        return k_LKTD, v_LKTD

    def cut(self, arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
        return {name: x if name.endswith(".scale") else x[:, :, begin:end] for name, x in arrays.items()}


# One layer at a time below: float32 copies of a whole entry would take several times its size.


def _quantise(x_LKTD: NDArray[Any], scale_LKD: NDArray[np.float32]) -> tuple[NDArray[np.int8], float]:
    bits_LKTD = np.empty(x_LKTD.shape, np.int8)
    loss = Loss()
    for x_KTD, scale_KD, bits_KTD in zip(x_LKTD, scale_LKD, bits_LKTD, strict=True):
        wide_KTD = widen(x_KTD)
        scaled_KTD = np.clip(wide_KTD / scale_KD[:, None], -_LARGEST_INT8, _LARGEST_INT8)
        bits_KTD[...] = np.rint(scaled_KTD)
        loss.add(wide_KTD, bits_KTD.astype(np.float32) * scale_KD[:, None], x_LKTD.dtype)
    return bits_LKTD, loss.value


GROUP = 32
"""Tokens of a group of keys, channels of a group of values."""

_LARGEST_INT4 = np.float32(15)
LOW, HIGH = np.uint8(15), np.uint8(4)

AT_ONCE = 2**16
"""Keys that are decoded together: NumPy's calls take long beside the work on one layer of a short entry."""

Floats = NDArray[np.float32]


class Int4(Encoding):
    """4 bits per value, with a scale and a minimum per group of 32: keys by channel, values by token.

    KIVI (arXiv 2402.02750, section 3): a value x of a group becomes round((x - min) / scale), 0 to 15, where
    scale = (max - min) / 15. A group of keys is one channel of 32 tokens, since keys have a few channels of large
    magnitude; a group of values is 32 channels of one token, so that its error stays with the token. KIVI leaves the
    tokens that do not fill a group unquantised; here they join the last group, which has up to 63 (or they are the only
    one). Scales and minima are bfloat16, which has float32's range. The bits of a key and of the value at the same
    place share a byte, so no dimension need be even. Keys are encoded as they come, rotated.

    In the arrays, Z are groups of tokens and E of channels; bfloat16 is kept as uint16 bits.

    "kv.int4" uint8 [L, K, n, D]: keys in the low half, values in the high one. "k.scale", "k.least" uint16
    [L, K, Z, D]. "v.scale", "v.least" uint16 [L, K, n, E]. "k.skip" uint8 [L], all the same: tokens of the first group
    of keys that were cut off. Token t is of the group min((skip + t) // 32, Z - 1).
    """

    names = frozenset({"kv.int4", "k.scale", "k.least", "k.skip", "v.scale", "v.least"})
    values = "kv.int4"

    def layout(self, dims: Dims) -> Layout:
        return _layout(dims, max(dims.tokens // GROUP, min(dims.tokens, 1)))

    def encode(self, k_LKTD: NDArray[Any], v_LKTD: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], float] | None:
        layers, heads, tokens, dim = k_LKTD.shape
        layout = self.layout(Dims(layers, heads, tokens, dim, k_LKTD.dtype))
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}
        losses = Loss(), Loss()
        if k_LKTD.size:
            spread = _Spread(_group_of(arrays), k_LKTD.shape[-1])
            for layer, pair in enumerate(zip(k_LKTD, v_LKTD, strict=True)):
                _encode_layer({name: x[layer] for name, x in arrays.items()}, pair, spread, losses)
        loss = [one.value for one in losses]
        return (arrays, max(loss)) if np.isfinite(loss).all() else None

    def decode(self, arrays: Arrays, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        bits_LKTD = arrays["kv.int4"]
        k_LKTD, v_LKTD = (np.empty(bits_LKTD.shape, dtype) for _ in "kv")
        if not bits_LKTD.size:
            return k_LKTD, v_LKTD
        spread = _Spread(_group_of(arrays), bits_LKTD.shape[-1])
        step = max(1, AT_ONCE // bits_LKTD[0].size)
        for first in range(0, len(bits_LKTD), step):
            some = slice(first, first + step)
            wide = _decode_layers({name: x[some] for name, x in arrays.items()}, spread)
            for x_LKTD, wide_LKTD in zip((k_LKTD, v_LKTD), wide, strict=True):
                put(x_LKTD[some], wide_LKTD)
        return k_LKTD, v_LKTD

    def cut(self, arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
        """Views; of keys, the groups that the tokens lie in, with the number of tokens before them in the first."""
        group_T = _group_of(arrays)[begin:end]
        first, stop = (group_T[0], group_T[-1] + 1) if len(group_T) else (0, 0)
        skip = _skip(arrays) + begin - GROUP * first if len(group_T) else 0
        by_token = {name: arrays[name][:, :, begin:end] for name in ("kv.int4", "v.scale", "v.least")}
        by_group = {name: arrays[name][:, :, first:stop] for name in ("k.scale", "k.least")}
        return {**by_token, **by_group, "k.skip": np.full_like(arrays["k.skip"], skip)}

    def check(self, arrays: Arrays, dims: Dims) -> None:
        found = tokens_of(arrays["k.scale"])
        require(arrays, _layout(dims, found))
        skip = _skip(arrays)
        if (arrays["k.skip"] != skip).any():
            raise ValueError("array k.skip of an entry is not the same for all layers")
        full = -(-(skip + dims.tokens) // GROUP) if dims.tokens else 0
        if skip >= 2 * GROUP or not full - 1 <= found <= full or bool(found) != bool(dims.tokens):
            raise ValueError(f"array k.scale of an entry is of {found} groups for {dims.tokens} tokens from {skip} on")


def _layout(dims: Dims, groups: int) -> Layout:
    layers, heads, tokens, dim, _ = astuple(dims)
    byte, level = np.dtype(np.uint8), np.dtype(np.uint16)
    keys = (layers, heads, groups, dim), level
    values = (layers, heads, tokens, -(-dim // GROUP)), level
    bits = (layers, heads, tokens, dim), byte
    return {
        "kv.int4": bits, "k.scale": keys, "k.least": keys, "v.scale": values, "v.least": values,
        "k.skip": ((layers,), byte),
    }  # fmt: skip


def _skip(arrays: Arrays) -> int:
    return int(arrays["k.skip"][0])


def _group_of(arrays: Arrays) -> NDArray[np.intp]:
    group_T = (_skip(arrays) + np.arange(tokens_of(arrays["kv.int4"]))) // GROUP
    return np.minimum(group_T, tokens_of(arrays["k.scale"]) - 1)


@dataclass(frozen=True, slots=True)
class _Spread:
    """Spreads what groups have over the tokens and channels in them. group_T: each token's group of keys. dim: D."""

    group_T: NDArray[np.intp]
    dim: int

    def keys(self, x: NDArray[np.uint16]) -> Floats:
        """From [..., K, Z, D] to [..., K, n, D]."""
        return widen(x).take(self.group_T, axis=-2)

    def values(self, x: NDArray[np.uint16]) -> Floats:
        """From [..., K, n, E] to [..., K, n, D]."""
        return widen(x).repeat(GROUP, axis=-1)[..., : self.dim]


# Few layers at a time below: float32 copies of a whole entry would take several times its size, and leave the caches.


def _encode_layer(
    arrays: Arrays, pair: tuple[NDArray[Any], NDArray[Any]], spread: _Spread, losses: tuple[Loss, Loss]
) -> None:
    halves = []
    ways = ("k", 1, spread.keys), ("v", 2, spread.values)
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of values that are too large is not kept
        for (name, axis, over), x_KTD, loss in zip(ways, pair, losses, strict=True):
            wide_KTD = widen(x_KTD)
            levels = _levels(wide_KTD, axis, arrays[f"{name}.scale"].shape[axis])
            arrays[f"{name}.least"][...], arrays[f"{name}.scale"][...] = levels
            least_KTD, scale_KTD = map(over, levels)
            steps_KTD = (wide_KTD - least_KTD) / scale_KTD
            np.clip(np.rint(steps_KTD, out=steps_KTD), np.float32(0), _LARGEST_INT4, out=steps_KTD)
            halves.append(steps_KTD.astype(np.uint8))
            steps_KTD *= scale_KTD
            steps_KTD += least_KTD
            loss.add(wide_KTD, steps_KTD, x_KTD.dtype)
    k_bits_KTD, v_bits_KTD = halves
    arrays["kv.int4"][...] = k_bits_KTD | v_bits_KTD << HIGH


def _levels(x: Floats, axis: int, groups: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Minimum, rounded down, and the scale that fits it, of each group along an axis: bfloat16 bits."""
    starts = GROUP * np.arange(groups)
    lowest = np.minimum.reduceat(x, starts, axis=axis)
    # dropping bits moves a number towards zero
    down = lowest.view(np.uint32) + np.where(lowest < 0, np.uint32(0xFFFF), np.uint32(0))
    least = (down >> np.uint32(16)).astype(np.uint16)
    scale: Floats = (np.maximum.reduceat(x, starts, axis=axis) - widen(least)) / _LARGEST_INT4
    whole = np.where(scale < TINY, np.float32(1), scale)  # a group too flat for a scale is its minimum
    return least, narrow(whole, np.dtype(np.uint16))


def _decode_layers(arrays: Arrays, spread: _Spread) -> tuple[Floats, Floats]:
    bits_LKTD = arrays["kv.int4"]
    k_LKTD, v_LKTD = (bits_LKTD & LOW).astype(np.float32), (bits_LKTD >> HIGH).astype(np.float32)
    k_LKTD *= spread.keys(arrays["k.scale"])
    k_LKTD += spread.keys(arrays["k.least"])
    v_LKTD *= spread.values(arrays["v.scale"])
    v_LKTD += spread.values(arrays["v.least"])
    return k_LKTD, v_LKTD


ENCODINGS: Mapping[AtRest, Encoding] = {"raw": Encoding(), "int8": Int8(), "int4": Int4()}


def rest_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype at rest of values that have this one in the pool: bfloat16 is kept as uint16 bits."""
    return np.dtype(np.uint16) if dtype == BFLOAT16 else dtype


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes the KV of one model. kind: how `encode` does it; `decode` reads every kind. dtype: `rest_dtype`."""

    kind: AtRest
    layers: int
    heads: int
    dim: int
    dtype: np.dtype[Any]

    def size(self, tokens: int) -> int:
        """Bytes that an entry of so many tokens takes at rest; one that was cut out of a longer one may take more."""
        layout = ENCODINGS[self.kind].layout(self._dims(tokens))
        return sum(prod(shape) * dtype.itemsize for shape, dtype in layout.values())

    def encode(self, k_LKTD: NDArray[Any], v_LKTD: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], float]:
        """The arrays, and the relative RMS error of keys or values, the larger. What is not finite is kept raw."""
        raw = {"k": k_LKTD, "v": v_LKTD}, 0.0
        return ENCODINGS[self.kind].encode(k_LKTD, v_LKTD) or raw

    def decode(self, arrays: Arrays) -> tuple[NDArray[Any], NDArray[Any]]:
        return _encoding(arrays).decode(arrays, self.dtype)

    def check(self, arrays: Arrays, tokens: int) -> None:
        found = length(arrays)
        if found < tokens:
            raise ValueError(f"an entry has {found} tokens, of which {tokens} are wanted")
        _encoding(arrays).check(arrays, self._dims(found))

    def _dims(self, tokens: int) -> Dims:
        return Dims(self.layers, self.heads, tokens, self.dim, self.dtype)


def kind_of(arrays: Arrays) -> AtRest:
    for kind, encoding in ENCODINGS.items():
        if arrays.keys() == encoding.names:
            return kind
    raise ValueError(f"an entry of arrays {sorted(arrays)} has no known encoding")


def length(arrays: Arrays) -> int:
    return _encoding(arrays).length(arrays)


def cut(arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
    return _encoding(arrays).cut(arrays, begin, end)


def layers(arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
    return {name: x[begin:end] for name, x in arrays.items()}


def _encoding(arrays: Arrays) -> Encoding:
    return ENCODINGS[kind_of(arrays)]
