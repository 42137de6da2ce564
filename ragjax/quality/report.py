"""The quality report: what each setting of a method costs on one model, and how far it is from full attention.

Divergence is teacher-forced: KL(full || method) in nats and agreement of the likeliest token, averaged over the
positions that predict a text, then over questions. A budget is compared with one-sided 95% bounds over questions, not
with means: a setting that lies inside by luck is outside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError, Divergence
from ragjax.core.check import put
from ragjax.core.file import atomic_path
from ragjax.core.registry import strategy_named

VERSION = 2
"""Version of the file. In reports of version 1 Cache-Craft found what settings before it had kept."""

EXACT: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 2e-2}
"""Mean KL, in nats, over one answer's positions that rounding alone does not reach, by dtype of weights and KV.

The largest of 30 exact answers of the packaged model in bfloat16 on a CPU was 1e-3.
"""


@dataclass(frozen=True)
class Setting:
    """A strategy and the share of chunk tokens it recomputes; None: its own choice, or it is not selective.

    compression: what is kept of the prompt then, in its short form; None: all.
    """

    strategy: str
    ratio: float | None = None
    compression: str | None = None

    def __post_init__(self) -> None:
        put(self, "strategy", strategy_named(self.strategy))

    def __str__(self) -> str:
        plain = self.strategy if self.ratio is None else f"{self.strategy} at {self.ratio:g}"
        return plain if self.compression is None else f"{plain} under {self.compression}"


MAX_KL = 1e6  # nats; no limit is above
PREFIX = Setting("prefix")  # the cheapest exact setting
MOVED = Setting("moved")  # the setting of conversations, where it lies inside the budget


def divergence(full_NV: NDArray[np.float32], other_NV: NDArray[np.float32]) -> Divergence:
    """Mean over N positions between logits; `inf` if any is not a finite number."""
    if full_NV.shape != other_NV.shape or full_NV.ndim != 2 or not len(full_NV):
        raise ValueError(f"logits of shapes {full_NV.shape} and {other_NV.shape} cannot be compared")
    if not (np.isfinite(full_NV).all() and np.isfinite(other_NV).all()):
        return Divergence(math.inf, 0.0)
    full, other = _log_softmax(full_NV), _log_softmax(other_NV)
    kl = float((np.exp(full) * (full - other)).sum(-1).mean())
    same = float((full_NV.argmax(-1) == other_NV.argmax(-1)).mean())
    return Divergence(max(kl, 0.0), same)


def _log_softmax(logits_NV: NDArray[np.float32]) -> NDArray[np.float64]:
    log_NV = logits_NV.astype(np.float64)
    log_NV -= log_NV.max(-1, keepdims=True)
    log_NV -= np.log(np.exp(log_NV).sum(-1, keepdims=True))
    return log_NV


QUANTILE = 1.645
"""Quantile of the normal distribution at 95%."""


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """One-sided 95% bounds (lower, upper) of the mean; infinite for fewer than two values.

    Normal, with Johnson's correction for skewness (J. Am. Stat. Assoc. 73, 1978; Hall 1992, section 3.2): KL has a long
    tail, and a plain normal bound lies below the mean twice as often as it should.
    """
    if len(values) < 2:
        return -math.inf, math.inf
    if not np.isfinite(values).all():
        return math.inf, math.inf
    n, mean, variance = len(values), float(np.mean(values)), float(np.var(values, ddof=1))
    if variance == 0.0:
        return mean, mean
    margin = QUANTILE * math.sqrt(variance / n)
    shift = float(((np.asarray(values) - mean) ** 3).mean()) * (1 + 2 * QUANTILE**2) / (6 * variance * n)
    return mean - margin + shift, mean + margin + shift


@dataclass(frozen=True)
class Budget:
    """Limits of the divergence from full attention: at most `kl` nats, at least `top1` agreement; None: no limit."""

    kl: float | None = None
    top1: float | None = None

    @staticmethod
    def parse(text: str) -> Budget:
        allowed = 'write "KL=0.05" (nats, from 0), "TOP1=0.95" (0 to 1), or both with a comma between'
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, sign, value = (piece.strip() for piece in part.partition("="))
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            known = name.upper() in ("KL", "TOP1") and name.lower() not in limits
            if not known or not sign or not 0 <= limit <= (1 if name.upper() == "TOP1" else MAX_KL):
                raise ConfigError(f"quality budget: cannot read {part.strip()!r}; {allowed}")
            limits[name.lower()] = limit
        return Budget(**limits)

    def holds(self, kl_hi: float, top1_lo: float) -> bool:
        return (self.kl is None or kl_hi <= self.kl) and (self.top1 is None or top1_lo >= self.top1)

    def __str__(self) -> str:
        limits = {"KL": self.kl, "TOP1": self.top1}
        return ",".join(f"{name}={limit:g}" for name, limit in limits.items() if limit is not None)


@dataclass(frozen=True)
class Measurement:
    setting: Setting
    n: int  # questions
    kl: float  # mean over questions, nats
    kl_hi: float  # its one-sided 95% bound
    top1: float  # mean over questions
    top1_lo: float  # its one-sided 95% bound
    ttft_ms: float  # median
    share: float  # of the chunks' tokens, recomputed, mean

    def __post_init__(self) -> None:
        numbers = (self.kl, self.kl_hi, self.top1, self.top1_lo, self.ttft_ms, self.share)
        if self.n < 2 or not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"{self.setting}: no finite figures over at least two questions")

    @staticmethod
    def of(
        setting: Setting, seen: Sequence[Divergence], ttft_ms: Sequence[float], shares: Sequence[float]
    ) -> Measurement:
        kls, top1s = [one.kl for one in seen], [one.top1 for one in seen]
        return Measurement(
            setting=setting,
            n=len(seen),
            kl=float(np.mean(kls)),
            kl_hi=bounds(kls)[1],
            top1=float(np.mean(top1s)),
            top1_lo=bounds(top1s)[0],
            ttft_ms=float(np.median(ttft_ms)),
            share=float(np.mean(shares)),
        )


@dataclass(frozen=True)
class Report:
    identity: str  # hex of what KV depends on: weights, tokenizer, configuration, dtype
    model: str
    dtype: str
    created: str  # ISO 8601, UTC
    questions: str  # digest of the questions and documents asked
    top_k: int  # chunks that a question got
    measurements: tuple[Measurement, ...]
    conversations: Measurement | None = None  # of `moved`, over conversations

    def predicted(self, setting: Setting) -> Divergence | None:
        """Mean divergence of the setting, or of the nearest smaller ratio measured; None if there is none."""
        alike = (setting.strategy, setting.compression)
        same = [one for one in self.measurements if (one.setting.strategy, one.setting.compression) == alike]
        if setting.ratio is None:
            near = [one for one in same if one.setting.ratio is None]
        else:
            below = [one for one in same if one.setting.ratio is not None and one.setting.ratio <= setting.ratio]
            near = sorted(below, key=lambda one: one.setting.ratio or 0.0)
        return Divergence(near[-1].kl, near[-1].top1) if near else None

    def cheapest(self, budget: Budget) -> Setting | None:
        """The setting of the least time to first token whose bounds lie inside the budget; None if none do."""
        inside = [one for one in self.measurements if budget.holds(one.kl_hi, one.top1_lo)]
        return min(inside, key=lambda one: one.ttft_ms).setting if inside else None

    def ladder(self, budget: Budget) -> tuple[Setting, ...]:
        """The cheapest setting inside, then ever dearer ones of ever less KL, and exact `prefix` at the end."""
        first = self.cheapest(budget)
        rungs: list[Measurement] = []
        for one in sorted(self.measurements, key=lambda one: one.ttft_ms):
            started = bool(rungs) or one.setting == first
            if started and one.setting != PREFIX and (not rungs or one.kl < rungs[-1].kl):
                rungs.append(one)
        return (*(one.setting for one in rungs), PREFIX)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part:
            part.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path, identity: str) -> Report:
        try:
            report = cls._of(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise ConfigError(f"there is no quality report of this model and dtype; {GATE}") from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path}: no quality report: {error!r}; {GATE}") from error
        if report.identity != identity:
            raise ConfigError(f"{path}: the report is of another model, {report.model} in {report.dtype}; {GATE}")
        return report

    @classmethod
    def _of(cls, data: Any) -> Report:
        if data.pop("version") != VERSION:
            raise ValueError(f"not version {VERSION}")
        told = data.pop("conversations", None)
        rows = [
            Measurement(**{**row, "setting": Setting(**row["setting"])})
            for row in (*data.pop("measurements"), *([] if told is None else [told]))
        ]
        data.pop("fit", None)  # earlier reports name the fit of a strategy that is gone,
        if data.pop("alpha", 1.0) != 1.0:  # and Cache-Craft's alpha, which one could calibrate
            raise ValueError("Cache-Craft had another alpha")
        said = None if told is None else rows.pop()
        report = cls(**data, measurements=tuple(rows), conversations=said)
        ratios = (m.setting.ratio for m in report.measurements)
        if report.top_k < 1 or not all(ratio is None or 0 <= ratio <= 1 for ratio in ratios):
            raise ValueError("no chunks, or a ratio outside [0, 1]")
        return report


GATE = "make one by ragjax gate"
"""Advice for errors without a report."""
