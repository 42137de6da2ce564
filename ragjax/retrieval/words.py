"""The rank of passages by their words (BM25; Robertson and Zaragoza 2009), fused with their rank by meaning.

Only passages that are near in meaning are compared, and their words are counted at each search. So nothing is kept:
what is deleted, filtered out or another tenant's is not among them. On the sets of `benchmarks.retrieval` this finds as
many of the right passages as an index of all words does.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

POOL = 50
"""Passages near in meaning whose words are compared."""

_WORD = re.compile(r"\w+")
_ENDINGS = (("ing", 4), ("ed", 4), ("es", 4), ("s", 3))  # and the letters that must be left
_K1, _B = 1.2, 0.75  # BM25's usual ones
_RANKS = 10  # what is added to each rank: the more, the less do the first ones count
_MOST_WORDS = 256  # of a question


def words(text: str) -> list[str]:
    """The words of a text, in lower case, without the commonest endings of English."""
    return [_stem(word) for word in _WORD.findall(text.lower())]


def weights_of(questions: Sequence[str], fading: float) -> dict[str, float]:
    """What each word of questions counts, the latest question first; one of earlier ones counts `fading` times less."""
    found: dict[str, float] = {}
    for n, question in enumerate(questions):
        for word in words(question)[:_MOST_WORDS]:
            found.setdefault(word, fading**n)
    return found


def fused_order(texts: Sequence[str], weights: Mapping[str, float]) -> list[int]:
    """The order of passages by reciprocal rank fusion (Cormack et al. 2009) of two ranks, best first.

    Args:
        texts: the passages, best first by meaning.
        weights: what each word of the question counts.
    """
    scores_N = _bm25(texts, weights)
    _, group_N, sizes_G = np.unique(-scores_N, return_inverse=True, return_counts=True)
    rank_N = (np.cumsum(sizes_G) - (sizes_G + 1) / 2)[group_N]  # equal scores share the mean of their ranks
    by_words_N = np.where(scores_N > 0, 1 / (_RANKS + 1 + rank_N), 0.0)
    total_N = 1 / (_RANKS + 1 + np.arange(len(texts))) + by_words_N
    return [int(i) for i in np.argsort(-total_N, kind="stable")]


def _bm25(texts: Sequence[str], weights: Mapping[str, float]) -> NDArray[np.float64]:
    """The score of each text, float64 [n]; words that only some of the texts have count more."""
    bags = [Counter(words(text)) for text in texts]
    length_N = np.array([bag.total() for bag in bags], np.float64)
    damping_N = _K1 * (1 - _B + _B * length_N / max(length_N.mean(), 1.0)) if bags else length_N
    total_N = np.zeros(len(bags))
    for word, weight in weights.items():
        count_N = np.array([bag[word] for bag in bags], np.float64)
        known = int((count_N > 0).sum())
        if known:
            rarity = math.log(1 + (len(bags) - known + 0.5) / (known + 0.5))
            total_N += weight * rarity * count_N * (_K1 + 1) / (count_N + damping_N)
    return total_N


def _stem(word: str) -> str:
    for ending, left in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= left:
            return word[: -len(ending)]
    return word
