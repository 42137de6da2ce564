"""Cache-Craft's alpha, calibrated for a model (section 3.2, equation 13), in a file next to the model's cache.

`python -m ragjax.reuse.calibrate` writes it; whoever loads a model gives it to `Craft`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ragjax.core import ConfigError
from ragjax.quality.report import write

VERSION = 1
"""Of the file format."""


@dataclass(frozen=True)
class Alpha:
    """The least alpha that kept a quality.

    value: alpha. identity: hex digest of all that the model's KV depends on. model, dtype: what they were.
    quality: what was asked for, "F1=0.9" for instance; reached: its value at this alpha, over `questions` questions.
    share: mean share of the chunks' tokens that was recomputed.
    """

    value: float
    identity: str
    model: str
    dtype: str
    quality: str
    reached: float
    questions: int
    share: float

    def save(self, path: Path) -> None:
        """Write it, at once or not at all."""
        write(path, {"version": VERSION, **asdict(self)})

    @staticmethod
    def load(path: Path, identity: str) -> Alpha:
        """Read it.

        Raises:
            ConfigError: if it is damaged, of another version, or another model's.
        """
        again = "delete it, or run python -m ragjax.reuse.calibrate again"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            version = found.pop("version")
            if version != VERSION:
                raise ConfigError(f"{path} is of version {version!r}, not {VERSION}: {again}")
            alpha = Alpha(**{field.name: found[field.name] for field in fields(Alpha)})
            usable = math.isfinite(alpha.value) and alpha.value >= 0
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read ({error}): {again}") from error
        if not usable:
            raise ConfigError(f"{path} holds no usable alpha: {again}")
        if alpha.identity != identity:
            raise ConfigError(f"{path} was made for another model, tokenizer or dtype: {again}")
        return alpha


def least(grid: Sequence[float], good: Callable[[float], bool]) -> float | None:
    """The least of ascending values that is good, by bisection; None if not even the largest is.

    Quality is taken to rise with alpha, as eq. 13 does; few values are tried, and what lies between is trusted.
    """
    if not good(grid[-1]):
        return None
    low, high = -1, len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(grid[middle]) else (middle, high)
    return grid[high]
