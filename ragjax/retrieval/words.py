"""The rank of passages by their words (BM25; Robertson and Zaragoza 2009), fused with their rank by meaning.

Only passages that are near in meaning are compared, and their words are counted at each search: what is deleted,
filtered out or another tenant's is not among them. It finds as many of the right passages as an index of all words
does.
"""

from __future__ import annotations

import re
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
    """The weight of each word of questions, the latest question first; earlier questions count `fading` times less."""
    found: dict[str, float] = {}
    for n, question in enumerate(questions):
        for word in words(question)[:_MOST_WORDS]:
            found.setdefault(word, fading**n)
    return found


def fused_order(texts: Sequence[str], weights: Mapping[str, float]) -> list[int]:
    """The order of passages, given best first by meaning, by reciprocal rank fusion (Cormack et al. 2009)."""
    scores_N = _bm25(texts, weights)
    _, group_N, sizes_G = np.unique(-scores_N, return_inverse=True, return_counts=True)
    rank_N = (np.cumsum(sizes_G) - (sizes_G + 1) / 2)[group_N]  # equal scores share the mean of their ranks
    by_words_N = np.where(scores_N > 0, 1 / (_RANKS + 1 + rank_N), 0.0)
    total_N = 1 / (_RANKS + 1 + np.arange(len(texts))) + by_words_N
    return [int(i) for i in np.argsort(-total_N, kind="stable")]


def _bm25(texts: Sequence[str], weights: Mapping[str, float]) -> NDArray[np.float64]:
    """The score of each text, float64 [N]; words that only some of the texts have count more."""
    if not texts or not weights:
        return np.zeros(len(texts))
    # to look for the spellings of a word is faster than to cut every text into words
    spelled = ((i, word, (word, *(word + ending for ending, _ in _ENDINGS))) for i, word in enumerate(weights))
    forms = {form: i for i, word, of_word in spelled for form in of_word if _stem(form) == word}
    count_NW, length_N = np.zeros((len(texts), len(weights))), np.ones(len(texts))
    for n, text in enumerate(texts):
        found = _WORD.findall(text.lower())
        length_N[n] += len(found)
        for word in found:
            if word in forms:
                count_NW[n, forms[word]] += 1
    known_W = (count_NW > 0).sum(axis=0)
    rarity_W = np.log(1 + (len(texts) - known_W + 0.5) / (known_W + 0.5))
    damping_N1 = (_K1 * (1 - _B + _B * length_N / length_N.mean()))[:, None]
    score_N: NDArray[np.float64] = (count_NW * (_K1 + 1) / (count_NW + damping_N1)) @ (rarity_W * [*weights.values()])
    return score_N


def _stem(word: str) -> str:
    for ending, left in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= left:
            return word[: -len(ending)]
    return word
