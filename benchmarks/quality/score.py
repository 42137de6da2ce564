"""How good an answer is, and how sure we are: text scores, divergence of distributions, paired bootstrap intervals.

EM and F1 are those of SQuAD v1.1's official script (Rajpurkar et al. 2016, arXiv:1606.05250), transcribed because no
small package keeps them; ROUGE-L (Lin 2004) is rapidfuzz's longest common subsequence over the words that Google's
`rouge-score` cuts, without stemming; Jaccard and the comparison with full recomputation's own answer
are Cache-Craft's (section 5), normalised F1 is FusionRAG's equation 11. `grounded` is K-Precision (Adlakha et al. 2023,
arXiv:2307.16877).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import LCSseq

Floats = NDArray[np.float64]
Values = Sequence[float] | Floats

RESAMPLES = 2000
LEVEL = 0.95
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """SQuAD's reading of an answer: lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, references: Sequence[str]) -> float:
    """1 if the text is one of the references, both normalised."""
    return float(any(normalised(text) == normalised(reference) for reference in references))


def answered(text: str, references: Sequence[str]) -> float:
    """1 if a reference occurs in the text as whole words, both normalised."""
    padded = f" {normalised(text)} "
    return float(any(f" {normalised(reference)} " in padded for reference in references if normalised(reference)))


def f1(text: str, references: Sequence[str]) -> float:
    """Overlap in words with the best reference, harmonic mean of precision and recall."""
    return max(_overlap(normalised(text).split(), normalised(reference).split()) for reference in references)


def _overlap(words: Sequence[str], reference: Sequence[str]) -> float:
    common = sum((Counter(words) & Counter(reference)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(words), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def rouge_l(text: str, references: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of words (in ROUGE's reading), with the best reference."""
    return max(_subsequence(_rouge_words(text), _rouge_words(reference)) for reference in references)


def _rouge_words(text: str) -> list[str]:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).split()


def _subsequence(words: Sequence[str], reference: Sequence[str]) -> float:
    common = LCSseq.similarity(words, reference)
    return 2 * common / (len(words) + len(reference)) if common else 0.0


def jaccard(text: str, other: str) -> float:
    """Shared words over all words, both normalised; 1 if neither has any."""
    mine, theirs = set(normalised(text).split()), set(normalised(other).split())
    return len(mine & theirs) / len(mine | theirs) if mine or theirs else 1.0


def grounded(text: str, passages: Sequence[str]) -> float:
    """Share of the answer's words that occur in a passage, all normalised (K-Precision); 0 for an answer without words.

    A deterministic stand-in for a judge of faithfulness: it sees words that come from nowhere, not what they say.
    """
    words = normalised(text).split()
    known = {word for passage in passages for word in normalised(passage).split()}
    return sum(word in known for word in words) / len(words) if words else 0.0


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval; None where it is undefined, or the interval has no bound."""

    value: float | None
    lo: float | None
    hi: float | None

    def __str__(self) -> str:
        bounds = ("-" if x is None else f"{x:.3f}" for x in (self.lo, self.hi))
        return f"{'-' if self.value is None else f'{self.value:.3f}'} [{', '.join(bounds)}]"

    def columns(self, name: str) -> dict[str, float | None]:
        return {name: self.value, f"{name}_lo": self.lo, f"{name}_hi": self.hi}


class Bootstrap:
    """Resamples of questions, the same for every figure, so that figures of equal questions are paired.

    Questions of a group (a set) are drawn among themselves: a pooled figure keeps the sets' sizes.
    """

    def __init__(self, groups: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0):
        random = np.random.default_rng(seed)
        names = np.asarray(groups)
        if not len(names):
            raise ValueError("there are no questions to draw from")
        members = [np.flatnonzero(names == name) for name in dict.fromkeys(groups)]
        self._drawn_RQ = np.concatenate([random.choice(m, (resamples, len(m))) for m in members], axis=1)

    def mean(self, values: Values) -> Estimate:
        v_Q = np.asarray(values, np.float64)
        return self._estimate(lambda drawn: v_Q[drawn].mean(-1), v_Q)

    def difference(self, values: Values, base: Values) -> Estimate:
        """Mean of the paired differences from `base`."""
        return self.mean(np.asarray(values, np.float64) - np.asarray(base, np.float64))

    def ratio(self, numerator: Values, denominator: Values) -> Estimate:
        """Ratio of sums; undefined where the denominator's sum is not positive.

        The interval has no sides (None) if more resamples are undefined than one may leave out.
        """
        n_Q, d_Q = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)

        def figure(drawn: NDArray[np.int64]) -> Floats:
            top, bottom = n_Q[drawn].sum(-1), d_Q[drawn].sum(-1)
            defined = bottom > 1e-12
            return np.asarray(np.where(defined, top / np.where(defined, bottom, 1), np.nan), np.float64)

        return self._estimate(figure, n_Q)

    def _estimate(self, figure: Callable[[NDArray[np.int64]], Floats], values: Floats) -> Estimate:
        if len(values) != self._drawn_RQ.shape[1]:
            raise ValueError(f"{len(values)} values for {self._drawn_RQ.shape[1]} questions")
        value = float(figure(np.arange(len(values))))
        drawn = figure(self._drawn_RQ)
        tail = (1 - LEVEL) / 2
        if not np.isfinite(value) or np.mean(~np.isfinite(drawn)) > tail:
            return Estimate(value if np.isfinite(value) else None, None, None)
        lo, hi = np.nanquantile(drawn, [tail, 1 - tail])
        return Estimate(value, float(lo), float(hi))


Samples = Sequence[Mapping[str, Any]]


def column(samples: Samples, metric: str) -> list[float]:
    return [float(sample[metric]) for sample in samples]


def compared(
    samples: Samples, metrics: Sequence[str], others: Mapping[str, Samples] | None = None, groups: Sequence[str] = ()
) -> dict[str, float | None]:
    """Means over questions and paired differences from other samples, each with its interval, as columns of a row.

    others: by what the column is called behind the metric, "minus_full" for instance. groups: the set of each question.
    """
    bootstrap, made = Bootstrap(groups or [""] * len(samples)), dict[str, float | None]()
    for metric in metrics:
        mine = column(samples, metric)
        made |= bootstrap.mean(mine).columns(metric)
        for name, other in (others or {}).items():
            made |= bootstrap.difference(mine, column(other, metric)).columns(f"{metric}_{name}")
    return made


def normalised_f1(bootstrap: Bootstrap, f1s: Values, full: Values, reused: Values) -> tuple[Estimate, str | None]:
    """FusionRAG, equation 11, as a share: 0 is full reuse without repair, 1 is full attention; ratio of sums.

    Only where full attention beats full reuse by an interval that excludes zero is there anything to recover. Otherwise
    it is undefined, and the second value says why.
    """
    base = np.asarray(reused, np.float64)
    gap = bootstrap.difference(full, base)
    if gap.lo is None or gap.lo <= 0:
        return Estimate(None, None, None), f"full - naive F1 {gap}"
    return bootstrap.ratio(np.asarray(f1s, np.float64) - base, np.asarray(full, np.float64) - base), None
