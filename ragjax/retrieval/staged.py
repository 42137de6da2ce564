"""One vector search cut into stages, each of which knows more (RAGCache, section 6, "Pipelined vector search").

The paper cuts a search of inverted lists by lists, and one of a proximity graph by time. faiss cannot stop a walk
through a graph half way, so that one is searched anew at each stage, with a longer list of candidates.

Results are ordered by score, equal scores by id. Dimensions: E embedding, K results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]
Found = tuple[Vectors, Ids]
"""Scores float32 [K] and ids int64 [K], best first."""

NONE = -1
"""The id of a result that does not exist; its score is -inf."""


@dataclass(frozen=True)
class Stage:
    """What a search knows after a stage: ids int64 [K] and scores float32 [K], as `VectorIndex.search` gives them.

    final: whether it is the last stage, whose results are those of a plain search.
    """

    ids: Ids
    scores: Vectors
    final: bool

    @classmethod
    def of(cls, found: Found, *, final: bool = False) -> Stage:
        """A stage of these results."""
        return cls(found[1], found[0], final)


def settle(search: Callable[[int], Found], k: int, most: int) -> Found:
    """The k best of one query, equal scores by id, at the edge too, where faiss takes any of them.

    search: the k best in any order among equals. most: number of vectors.
    """
    wide = k + 1
    while True:
        scores_K, ids_K = by_score(*search(min(wide, max(most, k))))
        if wide >= most or ids_K[-1] == NONE or scores_K[-1] < scores_K[k - 1]:
            return scores_K[:k], ids_K[:k]
        wide *= 4


def by_score(scores_K: Vectors, ids_K: Ids) -> Found:
    """Results best first, equal scores by id; the score of those that do not exist becomes -inf."""
    scores_K = np.where(ids_K == NONE, np.float32(-np.inf), scores_K)
    order = np.lexsort((ids_K, -scores_K))
    return scores_K[order], ids_K[order]


def flat_stages(index: Any, query_1E: Vectors, k: int, n: int) -> Iterator[Stage]:
    """Equal slices of the vectors of a flat index in faiss' IndexIDMap2, at most n."""
    inner: Any = faiss.downcast_index(index.index)
    numbers_N = faiss.vector_to_array(index.id_map)
    edges = np.linspace(0, inner.ntotal, min(n, max(inner.ntotal, 1)) + 1).astype(int).tolist()
    best = _nothing(k)
    for begin, end in pairwise(edges):
        # a view, made anew at each stage: the vectors move when some are added
        vectors_NE = faiss.rev_swig_ptr(inner.get_xb(), inner.ntotal * inner.d).reshape(-1, inner.d)[begin:end]

        def search(wide: int, vectors_NE: Vectors = vectors_NE, begin: int = begin) -> Found:
            scores_1K, at_1K = faiss.knn(query_1E, vectors_NE, wide, faiss.METRIC_INNER_PRODUCT)
            known_K = np.where(at_1K[0] == NONE, NONE, numbers_N[np.maximum(at_1K[0], 0) + begin])
            return scores_1K[0], known_K

        best = _merged(best, settle(search, k, end - begin) if end > begin else _nothing(k), k)
        yield Stage.of(best, final=end == edges[-1])


def list_stages(index: Any, query_1E: Vectors, k: int, n: int) -> Iterator[Stage]:
    """The lists that a search of faiss' IndexIVFFlat visits, nearest first, in at most n groups."""
    distances_1L, lists_1L = index.quantizer.search(query_1E, index.nprobe)  # NONE behind the last list
    visited = min(index.nprobe, index.nlist)
    groups = np.array_split(np.arange(visited), min(n, visited))
    best = _nothing(k)
    for number, group in enumerate(groups, 1):
        chosen_1L = np.full_like(lists_1L, NONE)  # which faiss passes over
        chosen_1L[0, group] = lists_1L[0, group]

        def search(wide: int, chosen_1L: Ids = chosen_1L) -> Found:
            scores_1K, ids_1K = index.search_preassigned(query_1E, wide, chosen_1L, distances_1L)
            return scores_1K[0], ids_1K[0]

        best = _merged(best, settle(search, k, index.ntotal), k)
        yield Stage.of(best, final=number == len(groups))


def _nothing(k: int) -> Found:
    return np.full(k, -np.inf, np.float32), np.full(k, NONE, np.int64)


def _merged(a: Found, b: Found, k: int) -> Found:
    scores_K, ids_K = by_score(np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]]))
    return scores_K[:k], ids_K[:k]
