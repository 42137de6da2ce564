"""Embeddings of soft tokens while they are trained: the header and the trailer of packets (KV Packet, 2604.13226).

`ragjax.models.trained` reads what is saved here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragjax.core import ConfigError, Wrapper
from ragjax.core.file import atomic_path
from ragjax.models.trained import PACKET_FORMAT


@dataclass(frozen=True)
class Soft:
    """Numbers of soft tokens before and behind a passage; the paper's 8 and 8."""

    header: int = 8
    trailer: int = 8

    def __post_init__(self) -> None:
        if self.header < 0 or self.trailer < 0 or not self.tokens:
            raise ConfigError(f"a packet needs soft tokens, not {self.header} before and {self.trailer} behind")

    @property
    def tokens(self) -> int:
        return self.header + self.trailer

    def wrapper(self, vocabulary: int) -> Wrapper:
        """The tokens behind a vocabulary of this size."""
        return Wrapper.of(vocabulary, self.header, self.trailer)

    def init(self, embedding_VE: jax.Array, seed: int) -> dict[str, jax.Array]:
        """Embeddings to begin with, float32: those of tokens drawn at random (prompt tuning, arXiv 2104.08691)."""
        drawn = np.random.default_rng([seed, 3]).choice(len(embedding_VE), self.tokens, replace=False)
        return {"soft": embedding_VE[jnp.asarray(np.sort(drawn))].astype(jnp.float32)}

    def save(self, trained: Mapping[str, Any], file: str | Path, about: Mapping[str, str]) -> None:
        """Write a safetensors file, float32; about: what else its header is to say, such as the model's name."""
        from safetensors.numpy import save_file

        soft_SE = np.asarray(trained["soft"], np.float32)
        tensors = {"header": soft_SE[: self.header].copy(), "trailer": soft_SE[self.header :].copy()}
        with atomic_path(Path(file)) as part:
            save_file(tensors, part, {**about, "format": PACKET_FORMAT})
