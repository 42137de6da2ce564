"""The interface of an encoding of KV at rest, and conversions to and from the pool's precision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

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


class Encoding(ABC):
    """One way to keep keys and values [L, K, n, D]. It holds nothing of an entry."""

    @property
    @abstractmethod
    def names(self) -> frozenset[str]:
        """Names of an entry's arrays; no other encoding has the same."""

    @abstractmethod
    def layout(self, dims: Dims) -> Layout:
        """The arrays that `encode` makes."""

    @abstractmethod
    def encode(self, k_LKTD: NDArray[Any], v_LKTD: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], float] | None:
        """The arrays, and the relative RMS error of keys or values, the larger; None if it cannot hold the values."""

    @abstractmethod
    def decode(self, arrays: Arrays, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values [L, K, n, D] of this dtype; bfloat16 as uint16."""

    @abstractmethod
    def length(self, arrays: Arrays) -> int:
        """Tokens of an entry; 0 if its arrays have too few axes."""

    @abstractmethod
    def cut(self, arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
        """Tokens [begin, end) as an entry that decodes to the same bits. No values are copied."""

    def check(self, arrays: Arrays, dims: Dims) -> None:
        """See that these arrays, perhaps of a cut, are an entry of this size.

        Raises:
            ValueError: naming the array and what is wrong with it.
        """
        require(arrays, self.layout(dims))


def require(arrays: Arrays, layout: Layout) -> None:
    """See that all arrays of a layout are there as it says.

    Raises:
        ValueError: naming the array and what is wrong with it.
    """
    for name, (shape, dtype) in layout.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"array {name} of an entry is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}"
            )


def tokens_of(x_LKTD: NDArray[Any]) -> int:
    """Size of the third axis; 0 if there is none."""
    return int(x_LKTD.shape[2]) if x_LKTD.ndim > 2 else 0


@dataclass(slots=True)
class Loss:
    """Sums up a relative RMS error."""

    error: float = 0.0
    norm: float = 0.0

    def add(self, wide: NDArray[np.float32], back: NDArray[np.float32], dtype: np.dtype[Any]) -> None:
        """Values, and what they were decoded to, which is rounded to `dtype` here."""
        kept = widen(narrow(back, dtype))
        self.error += _squares(np.subtract(kept, wide, dtype=np.float64))
        self.norm += _squares(wide.astype(np.float64))

    @property
    def value(self) -> float:
        """0 for zeros; not finite if a value is not."""
        return float(np.sqrt(self.error / self.norm)) if self.norm else self.error


def _squares(x: NDArray[np.float64]) -> float:
    """Their sum; overwrites x."""
    return float(np.square(x, out=x).sum())


def widen(x: NDArray[Any]) -> NDArray[np.float32]:
    """Convert to float32, exactly."""
    if x.dtype == np.uint16:
        bits: NDArray[np.uint32] = x.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return x.astype(np.float32)


def narrow(x: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert to `dtype`, rounded to nearest; uint16 holds bfloat16 bits."""
    return x.astype(BFLOAT16).view(np.uint16) if dtype == np.uint16 else x.astype(dtype)


def put(x: NDArray[Any], wide: NDArray[np.float32]) -> None:
    """Fill an array with floats, rounded as `narrow` does."""
    whole = x.view(BFLOAT16) if x.dtype == np.uint16 else x
    whole[...] = wide
