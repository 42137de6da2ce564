"""FLOP counts of a step, peak FLOP/s of the machine, and a log of JSON lines.

MFU is the model's FLOPs over the time at peak (PaLM, arXiv 2204.02311, appendix B): what remat computes twice does not
count, nor do hidden pairs of tokens.
"""

from __future__ import annotations

import json
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ragjax.core import ConfigError
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import INPUTS
from train.batch import Microbatch
from train.model import shapes_of

PEAKS: Mapping[str, float] = {
    "A100": 312e12,
    "A6000": 154.8e12,
    "H100": 989e12,
    "H200": 989e12,
    "L40": 181e12,
    "RTX 4090": 165e12,
}
"""Dense bfloat16 FLOP/s with float32 sums by what a device's kind contains, from NVIDIA's data sheets."""


def peak_flops(dtype: jnp.dtype) -> float | None:
    """FLOP/s that all devices can do: by the device's kind, or by a short product on CPUs. None if it is not known."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _measured_peak(dtype)
    known = next((peak for name, peak in PEAKS.items() if name in device.device_kind), None)
    return None if known is None else known * jax.device_count()


def _measured_peak(dtype: jnp.dtype, n: int = 2048) -> float:
    """The best of a few products of n x n matrices."""
    x = jnp.ones((n, n), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x.T, preferred_element_type=jnp.float32))
    seconds = timeit.repeat(lambda: product(x).block_until_ready(), number=1, repeat=6)  # the first one compiles
    return 2 * n**3 / min(seconds)


@dataclass(frozen=True)
class Cost:
    """FLOPs of a step, forward and backward: so many for a token, a target and a visible pair of tokens.

    A product of a token with a matrix takes two FLOPs a weight; backward takes as many for the gradient of its input,
    and as many again for that of the matrix where it is trained. An adapter's two products are left out: they are few.
    Attention takes 4 H D a pair and layer, backward twice that.
    """

    token: float
    target: float
    pair: float

    @staticmethod
    def of(config: ModelConfig, *, whole: bool = True, distil: bool = False) -> Cost:
        """Cost of a model. whole: its own weights are trained. distil: a teacher runs too."""
        shapes = shapes_of(config)["layers"]
        each = (6 if whole else 4) + 2 * distil
        token = each * sum(prod(shapes[name]) for name in INPUTS)
        target = each * config.vocab_size * config.hidden_size
        return Cost(token, target, (12 + 4 * distil) * config.num_heads * config.head_dim * config.num_layers)

    def flops(self, microbatches: Sequence[Microbatch]) -> float:
        """FLOPs of a step without padding."""
        return sum(self.token * m.tokens + self.target * m.targets + self.pair * m.pairs for m in microbatches)


class Log:
    """A file of JSON lines, each written at once; a context, whose end closes it."""

    def __init__(self, file: str | Path, keep_until: int = 0):
        """Open a log; of one that is there, lines of steps beyond `keep_until` go, and so does a torn last line."""
        file = Path(file)
        kept = [line for line in _lines(file) if line.get("step", 0) <= keep_until] if keep_until else []
        try:
            self._stream = file.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file}: cannot be written: {error}") from error
        for line in kept:
            self.write(line)

    def write(self, values: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(values) + "\n")
        self._stream.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _lines(file: Path) -> list[dict[str, Any]]:
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
