"""KV as it is, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.store.encoding.base import Arrays, Dims, Encoding, Layout, tokens_of


class Raw(Encoding):
    """Arrays "k" and "v" [L, K, n, D]."""

    names = frozenset({"k", "v"})

    def layout(self, dims: Dims) -> Layout:
        """Both as they come."""
        return dict.fromkeys(("k", "v"), ((dims.layers, dims.heads, dims.tokens, dims.dim), dims.dtype))

    def encode(self, k_LKTD: NDArray[Any], v_LKTD: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], float]:
        """The arrays themselves."""
        return {"k": k_LKTD, "v": v_LKTD}, 0.0

    def decode(self, arrays: Arrays, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The arrays themselves."""
        return arrays["k"], arrays["v"]

    def length(self, arrays: Arrays) -> int:
        """Of the keys."""
        return tokens_of(arrays["k"])

    def cut(self, arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
        """Views."""
        return {name: x[:, :, begin:end] for name, x in arrays.items()}
