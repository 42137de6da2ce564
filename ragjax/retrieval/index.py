"""A vector index over faiss (Douze et al. 2024, arXiv:2401.08281), by inner product of normalised vectors.

It is exact (flat), or inverted lists (ivf), or a proximity graph (hnsw; Malkov and Yashunin 2016, arXiv:1603.09320).
One thread may write while others search: what takes long (training, rebuilding) happens beside the live index, which is
then swapped. A search can be cut into stages, each of which knows more (RAGCache, section 6): inverted lists by lists;
a graph is searched anew at each stage, with more candidates, since faiss cannot stop half way.

Dimensions: N vectors, Q queries, E embedding, K results.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import faiss
import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from ragjax.core import INDEXES, ConfigError
from ragjax.core.file import atomic_path
from ragjax.core.registry import meant, name_of, settings_of

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]
Found = tuple[Vectors, Ids]
"""Scores float32 and ids int64, [K] or [Q, K], best first."""

NONE = -1
"""The id of a result that does not exist; its score is -inf."""

TRAIN_AT = 1_000
"""An ivf index answers exactly until it holds this many vectors; k-means needs enough to place its lists."""

_HNSW_LINKS = 32
_HNSW_EF = 64
PER_LIST = 4  # vectors of a list in the mean, at least
_SLICE = 256  # vectors added between two chances for a search to get in


class IndexKind(StrEnum):
    FLAT = "flat"
    IVF = "ivf"
    HNSW = "hnsw"


@dataclass(frozen=True)
class IndexShape:
    """A kind of index, and settings of inverted lists.

    lists: in all, one for each `PER_LIST` vectors at most (0: the root of the vectors). probe: share of the lists that
    a search visits; of 8 lists at least unless the number of lists was given.
    """

    kind: IndexKind
    lists: Annotated[int, Ge(1)] = 0
    probe: Annotated[float, Gt(0), Le(1)] = 0.1

    @staticmethod
    def parse(text: str) -> IndexShape:
        if name_of(text) not in INDEXES:
            raise ConfigError(f"unknown index {name_of(text)!r}; {meant(name_of(text), INDEXES)}")
        shape = IndexShape(IndexKind(name_of(text)), **settings_of("index", text, IndexShape))
        if shape.kind is not IndexKind.IVF and ":" in text:
            raise ConfigError(f"index {shape.kind}: it takes no settings; ivf does")
        return shape


class VectorIndex:
    """Vectors float32 [dim], each under an id of its own, searched by inner product."""

    def __init__(self, kind: str, dim: int):
        self.text, self.shape = str(kind), IndexShape.parse(kind)
        self.kind = self.shape.kind
        self.dim = dim
        self._lock = threading.Lock()
        self._ids: set[int] = set()
        self._bury(set())
        self._faiss = _hnsw(dim) if self.kind is IndexKind.HNSW else _flat(dim)
        self._trained_on = 0
        self._version = 0  # of what can be found

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._ids)

    @property
    def exact(self) -> bool:
        """True if a search finds the true nearest: flat always, ivf before it holds TRAIN_AT vectors."""
        return self.kind is IndexKind.FLAT or (self.kind is IndexKind.IVF and not self._trained_on)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add vectors float32 [n, dim] under new ids int64 [n]."""
        self.update(remove=(), ids=ids, vectors=vectors)

    def remove(self, ids: Iterable[int]) -> None:
        self.update(remove=ids, ids=np.empty(0, np.int64), vectors=np.empty((0, self.dim), np.float32))

    def update(self, remove: Iterable[int], ids: Ids, vectors: Vectors) -> None:
        """Remove, then add. The removed are gone before the first of the added can be found."""
        self._remove(set(remove))
        if self._dead.intersection(ids.tolist()):
            self._rebuild()
        for start in range(0, len(ids), _SLICE):
            some = slice(start, start + _SLICE)
            with self._lock:
                self._faiss.add_with_ids(
                    np.ascontiguousarray(vectors[some], np.float32), np.ascontiguousarray(ids[some], np.int64)
                )
                self._ids.update(ids[some].tolist())
                self._version += 1
        if self.kind is IndexKind.HNSW:
            stale = len(self._dead) > len(self._ids)
        else:
            stale = self.kind is IndexKind.IVF and len(self) >= max(TRAIN_AT, 4 * self._trained_on)
        if stale:
            self._rebuild()

    def search(self, queries: Vectors, k: int) -> tuple[Ids, Vectors]:
        """The k nearest of each query: ids int64 and scores float32, [Q, k] for queries [Q, dim], [k] for one [dim].

        Best first, equal scores of a single query by id. Where fewer than k vectors are known the rest has the id NONE
        and the score -inf.
        """
        queries_QE = np.ascontiguousarray(np.atleast_2d(queries), np.float32)
        if len(queries_QE) == 1:
            with self._lock, _one_thread():
                scores_K, ids_K = self._search_one(queries_QE, k)
            return (ids_K, scores_K) if queries.ndim == 1 else (ids_K[None], scores_K[None])
        with self._lock:
            scores_QK, ids_QK = self._search(queries_QE, k)
        return ids_QK, np.where(ids_QK == NONE, np.float32(-np.inf), scores_QK)

    def search_among(self, query: Vectors, k: int, ids: Ids) -> tuple[Ids, Vectors]:
        """Search with one query [dim] among the vectors of these ids alone, exactly for every kind of index.

        Ids that are absent are passed over.
        """
        query_1E = np.ascontiguousarray(query[None], np.float32)
        with self._lock, _one_thread():
            ids_N = np.array([number for number in ids.tolist() if number in self._ids], np.int64)
            scores_K, ids_K = settle(lambda wide: self._search_every(query_1E, wide, ids_N), k, len(ids_N))
        return ids_K, scores_K

    def stages(self, query: Vectors, k: int, n: int) -> Iterator[IndexStage]:
        """The search of one query [dim] in at most n stages; the last one's results are those of `search`, bit for bit.

        flat, and ivf without lists yet: one. ivf: the nearest lists in n groups. hnsw: n searches with ever more
        candidates. When the index changes between two stages, a plain search is the last one.
        """
        query_1E = np.ascontiguousarray(query[None], np.float32)
        begun: tuple[int, Iterator[IndexStage]] | None = None
        final = False
        while not final:
            with self._lock, _one_thread():  # held by stages alone, so that a writer gets in between
                begun = begun or (self._version, self._cut(query_1E, k, n))
                same = begun[0] == self._version
                stage = next(begun[1]) if same else IndexStage(*self._search_one(query_1E, k), final=True)
            yield stage
            final = stage.final

    def save(self, path: str | Path) -> None:
        path = Path(path)
        with self._lock:
            blob = faiss.serialize_index(self._faiss)
            dead = np.array(sorted(self._dead), np.int64)
            trained_on = self._trained_on
        with atomic_path(path, durable=True) as part, part.open("wb") as file:
            np.savez(file, kind=np.array(self.text), blob=blob, dead=dead, trained_on=np.array(trained_on))

    @classmethod
    def load(cls, path: str | Path) -> VectorIndex:
        """Read what `save` wrote. Raises ConfigError if the file is missing, broken or of another program."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
                kind, blob, dead = str(stored["kind"]), stored["blob"], stored["dead"]
                trained_on = int(stored["trained_on"])
            loaded = faiss.deserialize_index(blob)
        except Exception as error:  # zip, numpy and faiss each raise their own
            raise ConfigError(f"{path}: not a saved index: {error}") from error
        index = cls(kind, loaded.d)
        index._faiss, index._trained_on = loaded, trained_on
        index._bury(set(dead.tolist()))
        index._ids = set(_contents(loaded)[0].tolist()) - index._dead
        return index

    def _cut(self, query_1E: Vectors, k: int, n: int) -> Iterator[IndexStage]:
        if self._trained_on:
            yield from list_stages(self._faiss, query_1E, k, n)
            return
        for part in range(1, n) if self.kind is IndexKind.HNSW else ():
            yield IndexStage(*by_score(*self._walk(query_1E, k, math.ceil(_candidates(k) * part / n))))
        yield IndexStage(*self._search_one(query_1E, k), final=True)

    def _search_one(self, query_1E: Vectors, k: int) -> Found:
        search = partial(self._search, query_1E)
        # the walk through a graph depends on k; what it finds is only put in order
        return by_score(*search(k)) if self.kind is IndexKind.HNSW else settle(search, k, len(self._ids))

    def _walk(self, queries_QE: Vectors, k: int, candidates: int) -> Found:
        beam = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]  # its stubs lack it
            sel=self._selector, efSearch=candidates
        )
        found: Found = self._faiss.search(queries_QE, k, params=beam)
        return found

    def _bury(self, dead: set[int]) -> None:
        """Hide these ids, which the hnsw graph cannot remove, from every search."""
        self._dead = dead
        self._selector = faiss.IDSelectorNot(faiss.IDSelectorBatch(np.array(sorted(dead), np.int64)))

    def _remove(self, gone: set[int]) -> None:
        if not gone:
            return
        with self._lock:
            self._ids -= gone
            self._version += 1
            if self.kind is IndexKind.HNSW:
                self._bury(self._dead | gone)
            else:
                self._faiss.remove_ids(np.array(sorted(gone), np.int64))

    def _search(self, queries_QE: Vectors, k: int) -> Found:
        if self.kind is not IndexKind.HNSW:
            found: Found = self._faiss.search(queries_QE, k)
            return found
        scores_QK, ids_QK = self._walk(queries_QE, k, _candidates(k))
        if ((ids_QK != NONE).sum(axis=1) >= min(k, len(self))).all():
            return scores_QK, ids_QK
        # the beam met too many dead, or the graph is in parts: the stored vectors know better
        ids_N, vectors_NE = self._living()
        exact = _flat(self.dim)
        exact.add_with_ids(vectors_NE, ids_N)
        found = exact.search(queries_QE, k)
        return found

    def _search_every(self, query_1E: Vectors, k: int, ids_N: Ids) -> Found:
        if self._trained_on:
            selector = faiss.IDSelectorBatch(ids_N)
            lists = faiss.SearchParametersIVF(sel=selector, nprobe=self._faiss.nlist)  # type: ignore[call-arg]
            found: Found = self._faiss.search(query_1E, k, params=lists)
            return found
        # a walk through a graph that passes over most of it finds little: the vectors that it stores are compared
        inner: Any = faiss.downcast_index(self._faiss.index)
        stored = faiss.downcast_index(inner.storage) if self.kind is IndexKind.HNSW else inner
        numbers_M = faiss.vector_to_array(self._faiss.id_map)
        selector = faiss.IDSelectorBatch(np.flatnonzero(np.isin(numbers_M, ids_N)))
        chosen = faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
        scores_1K, at_1K = stored.search(query_1E, k, params=chosen)
        return scores_1K, np.where(at_1K == NONE, NONE, numbers_M[np.maximum(at_1K, 0)])

    def _living(self) -> tuple[Ids, Vectors]:
        ids_N, vectors_NE = _contents(self._faiss)
        alive_N = ~np.isin(ids_N, np.array(sorted(self._dead), np.int64))
        return ids_N[alive_N], vectors_NE[alive_N]

    def _rebuild(self) -> None:
        """Build afresh from the living vectors; only the writer changes what is read here, so no lock is held."""
        ids_N, vectors_NE = self._living()
        train = self.kind is IndexKind.IVF
        fresh = _ivf(vectors_NE, self.shape) if train else _hnsw(self.dim)
        fresh.add_with_ids(vectors_NE, ids_N)
        with self._lock:
            self._faiss = fresh
            self._version += 1
            self._bury(set())
            self._trained_on = len(ids_N) if train else 0


def _candidates(k: int) -> int:
    return max(_HNSW_EF, 2 * k)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Search on the calling thread alone.

    Waking OpenMP's threads, which busy CPUs delay by milliseconds, costs more than one query gains. OpenMP keeps this
    number per calling thread, so that other threads are not concerned.
    """
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def _flat(dim: int) -> Any:
    return faiss.IndexIDMap2(faiss.IndexFlatIP(dim))


def _hnsw(dim: int) -> Any:
    return faiss.IndexIDMap2(faiss.IndexHNSWFlat(dim, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT))


def _ivf(vectors_NE: Vectors, shape: IndexShape) -> Any:
    """Trained lists, empty; unless told, as many of them as balance finding lists against scanning them."""
    n, dim = vectors_NE.shape
    lists = min(shape.lists, n // PER_LIST) or math.isqrt(n)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1
    index.train(vectors_NE)
    index.nprobe = max(1 if shape.lists else 8, round(shape.probe * lists))
    return index


def _contents(index: Any) -> tuple[Ids, Vectors]:
    if isinstance(index, faiss.IndexIVF):
        return _list_contents(index)
    ids_N = faiss.vector_to_array(index.id_map).astype(np.int64)
    inner = faiss.downcast_index(index.index)
    vectors_NE = inner.reconstruct_n(0, inner.ntotal) if len(ids_N) else np.empty((0, index.d), np.float32)
    return ids_N, vectors_NE


def _list_contents(index: Any) -> tuple[Ids, Vectors]:
    ids, vectors = [np.empty(0, np.int64)], [np.empty((0, index.d), np.float32)]
    for number in range(index.nlist):
        size = index.invlists.list_size(number)
        if not size:
            continue
        codes = faiss.rev_swig_ptr(index.invlists.get_codes(number), size * index.code_size)
        ids.append(faiss.rev_swig_ptr(index.invlists.get_ids(number), size).copy())
        vectors.append(codes.view(np.float32).reshape(size, index.d).copy())
    return np.concatenate(ids), np.concatenate(vectors)


@dataclass(frozen=True)
class IndexStage:
    """Results of a search after a stage: scores float32 [K] and ids int64 [K] that `VectorIndex.search` would give."""

    scores: Vectors
    ids: Ids
    final: bool = False


def settle(search: Callable[[int], Found], k: int, most: int) -> Found:
    """The k best [K] of one query, equal scores by id, at the edge too, where faiss takes any of them."""
    wide = k + 1
    while True:
        scores_K, ids_K = by_score(*search(min(wide, max(most, k))))
        if wide >= most or ids_K[-1] == NONE or scores_K[-1] < scores_K[k - 1]:
            return scores_K[:k], ids_K[:k]
        wide *= 4


def by_score(scores: Vectors, ids: Ids) -> Found:
    """Results of one query, [K], best first, equal scores by id; the score of those that do not exist becomes -inf."""
    ids_K = ids.ravel()
    scores_K = np.where(ids_K == NONE, np.float32(-np.inf), scores.ravel())
    order = np.lexsort((ids_K, -scores_K))
    return scores_K[order], ids_K[order]


def list_stages(index: Any, query_1E: Vectors, k: int, n: int) -> Iterator[IndexStage]:
    distances_1L, lists_1L = index.quantizer.search(query_1E, index.nprobe)  # NONE behind the last list
    visited = min(index.nprobe, index.nlist)
    groups = np.array_split(np.arange(visited), min(n, visited))
    best = np.full(k, -np.inf, np.float32), np.full(k, NONE, np.int64)
    for number, group in enumerate(groups, 1):
        chosen_1L = np.full_like(lists_1L, NONE)  # which faiss passes over
        chosen_1L[0, group] = lists_1L[0, group]
        more = settle(partial(index.search_preassigned, query_1E, Iq=chosen_1L, Dq=distances_1L), k, index.ntotal)
        scores_K, ids_K = by_score(np.concatenate([best[0], more[0]]), np.concatenate([best[1], more[1]]))
        best = scores_K[:k], ids_K[:k]
        yield IndexStage(*best, final=number == len(groups))
