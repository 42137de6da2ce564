"""The most similar chunks of every chunk: what its KV is computed behind (FusionRAG, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ragjax.retrieval.index import Ids, VectorIndex, Vectors

_QUERIES = 64  # chunks whose neighbours are searched together: a request's own search waits no longer than for these
_ROUNDING = 1e-5  # the index may misorder scores that are nearer to each other


def nearest_chunks(index: VectorIndex, rows: Sequence[tuple[int, bytes, bytes]], n: int) -> dict[int, tuple[int, ...]]:
    """See `KnowledgeBase.neighbours`. rows: number, tokens and embedding of every chunk, by ascending number."""
    if not rows:
        return {}
    store = _Embedded.of(rows)
    found: dict[int, tuple[int, ...]] = {}
    for begin in range(0, len(rows), _QUERIES):
        found |= _search_exactly(index, store, store.numbers_N[begin : begin + _QUERIES], n)
    return found


def _search_exactly(index: VectorIndex, store: _Embedded, numbers_Q: Ids, n: int) -> dict[int, tuple[int, ...]]:
    """Asks the index for twice as many candidates until those after the last one cannot matter."""
    found: dict[int, tuple[int, ...]] = {}
    left, k = [int(number) for number in numbers_Q], n + 1
    while left:
        ids_QK, scores_QK = index.search(store.embedding_NE[[store.row[number] for number in left]], k)
        enough = k >= len(index)
        rest = []
        for number, ids_K, scores_K in zip(left, ids_QK, scores_QK, strict=True):
            nearest = store.ranked(number, ids_K.tolist())[:n]
            if enough or (len(nearest) == n and scores_K[-1] < nearest[-1][0] - _ROUNDING):
                found[number] = tuple(neighbour for _, neighbour in nearest)
            else:
                rest.append(number)
        left, k = rest, 2 * k
    return found


@dataclass(frozen=True)
class _Embedded:
    """Chunks as neighbours of each other: N numbers, embeddings [N, E], tokens, and the row of each number."""

    numbers_N: Ids
    embedding_NE: Vectors
    tokens: tuple[bytes, ...]
    row: dict[int, int]

    @staticmethod
    def of(rows: Sequence[tuple[int, bytes, bytes]]) -> _Embedded:
        numbers = np.array([number for number, _, _ in rows], np.int64)
        embedding = np.frombuffer(b"".join(blob for _, _, blob in rows), np.float32).reshape(len(rows), -1)
        tokens = tuple(raw for _, raw, _ in rows)
        return _Embedded(numbers, embedding, tokens, {number: i for i, (number, _, _) in enumerate(rows)})

    def ranked(self, number: int, candidates: Iterable[int]) -> list[tuple[float, int]]:
        """(score, number) of the candidates, best first, without those whose tokens were there before.

        Scores are computed again, pair by pair, in float64: those of the index depend in their last bits on what else
        was searched, and an order that changes would have KV computed again for nothing.
        """
        known = [candidate for candidate in candidates if candidate in self.row]
        query_E = self.embedding_NE[self.row[number]].astype(np.float64)
        scores = [float((self.embedding_NE[self.row[candidate]] * query_E).sum()) for candidate in known]
        seen, ranked = {self.tokens[self.row[number]]}, []
        for score, candidate in sorted(zip(scores, known, strict=True), key=lambda pair: (-pair[0], pair[1])):
            raw = self.tokens[self.row[candidate]]
            if raw not in seen:
                seen.add(raw)
                ranked.append((score, candidate))
        return ranked
