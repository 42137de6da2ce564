"""`ragjax gate --alpha`: the least alpha of Cache-Craft that keeps a quality (section 3.2, equation 13).

The validation set is the packaged one: questions on its documents, with the passages that retrieval brings. For each
alpha the cache begins empty, the first 20 questions warm it (as in section 5.1.2), and the others are measured: F1 of
the words of greedy answers against those of `full`, or KL(full || craft) over the positions that predict the answer of
`full`, in nats. Its expected CFO is the share of the passages' tokens that was recomputed. The largest alpha of the
grid recomputes every chunk that stands behind wholly other chunks; the least one that is good is found by bisection.

Exit codes: 0 if one was found and written, 1 if none keeps the quality, 2 if it could not be done as asked.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ragjax.commands.flags import (
    DEFAULTS,
    DEMO,
    Parser,
    add_engine_flags,
    engine_options,
    error_line,
    integer,
    knowledge,
)
from ragjax.core import ConfigError, RagjaxError, Tokens
from ragjax.engine import Engine
from ragjax.engine.measurement import alpha_path
from ragjax.quality.report import Alpha, divergence
from ragjax.reuse.base import Strategy
from ragjax.reuse.craft import Craft
from ragjax.reuse.exact import Full

GRID = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.5, 2.0)
"""Alphas that are considered. CCI is at least 0.5, so that 2 recomputes whole what shares nothing with its past."""

WARM = 20
"""Questions that warm the cache."""

ANSWER_TOKENS = 24
SCORED_TOKENS = 12


@dataclass(frozen=True)
class Desired:
    """A quality that is asked for: "F1", at least `value`, or "KL", at most."""

    name: str
    value: float

    @staticmethod
    def parse(text: str) -> Desired:
        """From "F1=0.9" or "KL=0.05".

        Raises:
            ConfigError: saying what may be written.
        """
        found = re.fullmatch(r"(f1|kl)=([0-9.eE+-]+)", text.strip(), re.IGNORECASE)
        try:
            value = float(found[2]) if found else math.nan
        except ValueError:
            value = math.nan
        name = found[1].upper() if found else ""
        if not 0 <= value <= (1 if name == "F1" else sys.float_info.max):
            raise ConfigError(f'quality: cannot read {text!r}; write "F1=0.9" (0 to 1) or "KL=0.05" (nats, from 0)')
        return Desired(name, value)

    def met_by(self, trial: Trial) -> bool:
        """True if the trial meets the aim."""
        return trial.f1 >= self.value if self.name == "F1" else trial.kl <= self.value

    def of(self, trial: Trial) -> float:
        """The measured value of this quality."""
        return trial.f1 if self.name == "F1" else trial.kl

    def __str__(self) -> str:
        return f"{self.name}={self.value:g}"


@dataclass(frozen=True)
class Trial:
    """Result of one alpha, means over questions. share: of the passages' tokens, recomputed."""

    alpha: float
    f1: float
    kl: float
    share: float


@dataclass(frozen=True)
class Reference:
    """A question, what `full` answers, and its logits over the answer's first tokens, float32 [n, vocab]."""

    question: str
    text: str
    tokens: Tokens
    logits_NV: NDArray[np.float32]


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _run(_options(argv))
    except RagjaxError as error:
        print(error_line("ragjax gate --alpha", error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def candidates() -> dict[str, Strategy]:
    """`full`, and Cache-Craft at every alpha of the grid."""
    made: list[Strategy] = [Full(), *(Craft(_name(alpha), alpha=alpha) for alpha in GRID)]
    return {strategy.name: strategy for strategy in made}


def references(engine: Engine, questions: Sequence[str], step: Callable[[], object]) -> list[Reference]:
    """Answers of `full`. step: called after each question."""
    found = []
    for question in questions:
        answer = engine.answer(question, strategy="full", max_tokens=ANSWER_TOKENS)
        tokens = np.array(answer.tokens[:SCORED_TOKENS] or (0,), np.int32)
        found.append(Reference(question, answer.text, tokens, _scores(engine, question, "full", tokens)))
        step()
    return found


def _scores(engine: Engine, question: str, strategy: str, tokens: Tokens) -> NDArray[np.float32]:
    scores = engine.answer(question, strategy=strategy, continuation=tokens, max_tokens=1).scores
    assert scores is not None
    return scores


def attempt(
    engine: Engine, alpha: float, warm: Sequence[Reference], asked: Sequence[Reference], step: Callable[[], object]
) -> Trial:
    """Measure one alpha from an empty cache on."""
    engine.clear_cache()
    for reference in warm:
        engine.answer(reference.question, strategy=_name(alpha), max_tokens=1)
        step()
    measured = []
    for reference in asked:
        measured.append(_compare(engine, alpha, reference))
        step()
    f1, kl, share = np.mean(measured, axis=0)
    return Trial(alpha, float(f1), float(kl), float(share))


def _compare(engine: Engine, alpha: float, reference: Reference) -> tuple[float, float, float]:
    """F1, KL and share of recomputed tokens of one question."""
    answer = engine.answer(
        reference.question, strategy=_name(alpha), continuation=reference.tokens, max_tokens=ANSWER_TOKENS
    )
    assert answer.scores is not None
    passages = [segment for segment in answer.segments if segment.score is not None]
    tokens = sum(segment.tokens for segment in passages)
    share = sum(segment.recomputed for segment in passages) / tokens if tokens else 0.0
    return word_f1(answer.text, reference.text), divergence(reference.logits_NV, answer.scores).kl, share


def word_f1(text: str, reference: str) -> float:
    """F1 of two texts as bags of lower-case words; 1 for two empty ones."""
    words, others = (Counter(re.findall(r"\w+", each.lower())) for each in (text, reference))
    common = (words & others).total()
    return 2 * common / (words.total() + others.total()) if words or others else 1.0


def _run(options: argparse.Namespace) -> int:
    desired = Desired.parse(options.quality)
    questions = [json.loads(line)["question"] for line in (DEMO / "questions.jsonl").read_text("utf-8").splitlines()]
    questions = questions[: WARM + options.limit]
    asked = replace(engine_options(options), knowledge=knowledge("demo"), strategy="full", compile=False)
    with Engine.load(asked, strategies=candidates()) as engine:
        trials, found = search(engine, desired, questions)
        _print(trials, desired)
        if found is None:
            print(f"no alpha up to {GRID[-1]:g} keeps {desired}: ask for less, or use full")
            return 1
        path = alpha_path(engine.identity)
        Alpha(
            found.alpha, engine.identity.hex(), engine.model_name, engine.dtype, str(desired), desired.of(found),
            len(questions) - WARM, found.share,
        ).save(path)  # fmt: skip
    print(f"alpha {found.alpha:g} keeps {desired} at a mean CFO of {found.share:.3f}; written to {path}")
    return 0


def search(engine: Engine, desired: Desired, questions: Sequence[str]) -> tuple[list[Trial], Trial | None]:
    """Trials, and the least alpha that meets the aim; the first `WARM` questions warm the cache.

    Raises:
        ConfigError: if none would be left to measure.
    """
    if len(questions) <= WARM:
        raise ConfigError(f"{len(questions)} questions are too few: {WARM} of them warm the cache")
    trials: dict[float, Trial] = {}
    tries = 1 + math.ceil(math.log2(len(GRID)))
    with tqdm(total=(1 + tries) * len(questions), unit="question", desc="full") as bar:
        known = references(engine, questions, bar.update)

        def good(alpha: float) -> bool:
            bar.set_description(f"alpha {alpha:g}")
            trials[alpha] = attempt(engine, alpha, known[:WARM], known[WARM:], bar.update)
            return desired.met_by(trials[alpha])

        found = least(GRID, good)
    return list(trials.values()), None if found is None else trials[found]


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


def _print(trials: Sequence[Trial], desired: Desired) -> None:
    print(f"{'alpha':>6} {'mean CFO':>9} {'F1':>6} {'KL':>8}  {desired}")
    for trial in sorted(trials, key=lambda trial: trial.alpha):
        kept = "kept" if desired.met_by(trial) else "not kept"
        print(f"{trial.alpha:6g} {trial.share:9.3f} {trial.f1:6.3f} {trial.kl:8.4f}  {kept}")


def _name(alpha: float) -> str:
    return f"craft-{alpha:g}"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("ragjax gate --alpha", "Cache-Craft's alpha for a model.")
    flag = parser.add_argument
    defaults = replace(DEFAULTS, top_k=5, device_cache_gb=1.0)
    add_engine_flags(parser, ("model", "dtype", "top_k", "device_cache_gb", "tensor_parallel"), defaults=defaults)
    flag("--quality", default="F1=0.9", metavar="F1=X|KL=X", help="what must be kept (default: %(default)s)")
    flag("--limit", type=integer(1), default=60, help=f"questions behind the {WARM} that warm the cache (default: 60)")
    return parser.parse_args(argv)
