"""KV at rest, in host memory and on disk: raw, or rounded to 8 or 4 bits per value.

Every encoding (`ragjax/store/encoding.py`) can cut out some tokens, and some layers, of an entry without decoding it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import AtRest
from ragjax.store.encoding import BFLOAT16, Arrays, Dims, Encoding, Int4, Int8, Raw

ENCODINGS: Mapping[AtRest, Encoding] = {
    "raw": Raw(),
    "int8": Int8(),
    "int4": Int4(),
}


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

    def size(self, tokens: int) -> int:
        """Bytes that an entry of so many tokens takes at rest; one that was cut out of a longer one may take more."""
        layout = ENCODINGS[self.kind].layout(self._dims(tokens))
        return sum(prod(shape) * dtype.itemsize for shape, dtype in layout.values())

    def encode(self, k_LKTD: NDArray[Any], v_LKTD: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], float]:
        """The entry's arrays, and the relative RMS error of its keys or its values, whichever is larger.

        An entry with values that are not finite, which no scale fits, is kept raw.
        """
        raw = {"k": k_LKTD, "v": v_LKTD}, 0.0
        return ENCODINGS[self.kind].encode(k_LKTD, v_LKTD) or raw

    def decode(self, arrays: Arrays) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values, [L, K, n, D] each; of a raw entry its own arrays."""
        return _encoding(arrays).decode(arrays, self.dtype)

    def check(self, arrays: Arrays, tokens: int) -> None:
        """See that these are `tokens` tokens or more of this model's KV.

        Raises:
            ValueError: naming the array and what is wrong with it.
        """
        found = length(arrays)
        if found < tokens:
            raise ValueError(f"an entry has {found} tokens, of which {tokens} are wanted")
        _encoding(arrays).check(arrays, self._dims(found))

    def _dims(self, tokens: int) -> Dims:
        return Dims(self.layers, self.heads, tokens, self.dim, self.dtype)


def kind_of(arrays: Arrays) -> AtRest:
    """Find the encoding of an entry by the names of its arrays.

    Raises:
        ValueError: if its arrays are those of no known encoding.
    """
    for kind, encoding in ENCODINGS.items():
        if arrays.keys() == encoding.names:
            return kind
    raise ValueError(f"an entry of arrays {sorted(arrays)} has no known encoding")


def length(arrays: Arrays) -> int:
    """Tokens of an entry."""
    return _encoding(arrays).length(arrays)


def cut(arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
    """Tokens [begin, end) of an entry, as views."""
    return _encoding(arrays).cut(arrays, begin, end)


def layers(arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
    """Layers [begin, end) of an entry, as views."""
    return {name: x[begin:end] for name, x in arrays.items()}


def _encoding(arrays: Arrays) -> Encoding:
    return ENCODINGS[kind_of(arrays)]
