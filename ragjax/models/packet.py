"""Soft tokens around passages: a header before each, a trailer behind it (KV Packet, arXiv 2604.13226).

They are embeddings and nothing else, trained by `python -m train.packet` so that passages that are computed by
themselves are read as if each had seen the others; the model's weights stay as they are. In a prompt they are tokens
behind the vocabulary: no text has them, and the model never says one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from ragjax.core import ConfigError, Wrapper
from ragjax.models.decoder import Decoder

FORMAT = "ragjax-packet-1"


@dataclass(frozen=True)
class Packet:
    """Embeddings of a header and a trailer, float32 [h, E] and [t, E].

    about: what else the file says: the model's name, and the digest of the weights that they were trained with.
    """

    header_HE: NDArray[np.float32]
    trailer_HE: NDArray[np.float32]
    about: Mapping[str, str]

    @staticmethod
    def load(file: str | Path) -> Packet:
        """Read a file of `save`.

        Raises:
            ConfigError: if it is no such file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            handle: Any = safe_open(file, framework="np")
            about = dict(handle.metadata() or {})
            if about.pop("format", None) != FORMAT:
                raise ConfigError(f"{file}: not a packet of ragjax")
            header, trailer = (handle.get_tensor(name).astype(np.float32) for name in ("header", "trailer"))
            if header.ndim != 2 or trailer.shape[1:] != header.shape[1:]:
                raise ValueError(f"shapes {header.shape} and {trailer.shape}")
            return Packet(header, trailer, about)
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read as a packet: {error}") from error

    def wrapper(self, vocabulary: int) -> Wrapper:
        """The tokens that have these embeddings behind a vocabulary of this size."""
        return Wrapper.of(vocabulary, len(self.header_HE), len(self.trailer_HE))

    def apply(self, decoder: Decoder) -> None:
        """Give a decoder these embeddings, in place.

        Raises:
            ConfigError: if its width is another.
        """
        rows_SE = np.concatenate([self.header_HE, self.trailer_HE])
        if rows_SE.shape[1] != decoder.config.hidden_size:
            raise ConfigError(
                f"the packet's embeddings have {rows_SE.shape[1]} components, the model's {decoder.config.hidden_size}"
            )
        config = replace(decoder.config, soft_tokens=len(rows_SE))
        soft = Decoder.abstract(config).soft
        assert soft is not None
        soft.set_value(jnp.asarray(rows_SE))
        decoder.config, decoder.soft = config, nnx.data(soft)
