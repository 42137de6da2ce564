"""The vector index: every kind finds what it should, forgets what was removed, and survives a restart."""

from pathlib import Path

import numpy as np
import pytest

from ragjax.core import ConfigError
from ragjax.retrieval.index import NONE, TRAIN_AT, IndexKind, VectorIndex
from tests.support.meanwhile import meanwhile

DIM = 24
KINDS = pytest.mark.parametrize("kind", list(IndexKind))


def _vectors(n: int, seed: int = 0) -> np.ndarray:
    """Clustered unit vectors, float32 [n, DIM]."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(40, DIM))
    vectors = centres[rng.integers(40, size=n)] + 0.5 * rng.normal(size=(n, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def _filled(kind: IndexKind, vectors: np.ndarray, first: int = 0) -> VectorIndex:
    index = VectorIndex(kind, DIM)
    index.add(np.arange(first, first + len(vectors)), vectors)
    return index


def _recall(index: VectorIndex, vectors: dict[int, np.ndarray], queries: np.ndarray, k: int = 5) -> float:
    """Share of the true k nearest that a search finds; every result must be alive, distinct and rightly scored."""
    ids = np.array(sorted(vectors))
    scores = queries @ np.stack([vectors[i] for i in ids]).T
    truth = ids[np.argsort(-scores, axis=1)[:, :k]]
    found_QK, scores_QK = index.search(queries, k)
    for found, got, query in zip(found_QK, scores_QK, queries, strict=True):
        assert len(set(found.tolist())) == k and set(found.tolist()) <= set(vectors)
        np.testing.assert_allclose(got, [query @ vectors[i] for i in found], atol=1e-5)
        assert (np.diff(got) <= 0).all()
    return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(truth.tolist(), found_QK.tolist(), strict=True)]))


@KINDS
def test_finds_the_nearest(kind: IndexKind) -> None:
    vectors = _vectors(1500)
    index = _filled(kind, vectors, first=10)
    assert len(index) == 1500 and index.exact is (kind is IndexKind.FLAT)
    recall = _recall(index, dict(enumerate(vectors, start=10)), _vectors(100, seed=1))
    assert recall == 1 if index.exact else recall > 0.9


@pytest.mark.slow
@KINDS
@pytest.mark.smoke
def test_random_adds_and_removes(kind: IndexKind) -> None:
    rng = np.random.default_rng(3)
    index, mirror, fresh = VectorIndex(kind, DIM), {}, 0
    for step in range(12):
        vectors = _vectors(rng.integers(1, 400), seed=step)
        ids = np.arange(fresh, fresh + len(vectors))
        gone = rng.permutation(list(mirror))[: rng.integers(len(mirror) + 1) if step % 3 else 0].tolist()
        index.update(gone, ids, vectors)
        mirror = {i: v for i, v in mirror.items() if i not in set(gone)} | dict(zip(ids.tolist(), vectors, strict=True))
        fresh += len(vectors)
        assert index.ids == set(mirror) and len(index) == len(mirror)
        if len(mirror) >= 5:
            assert _recall(index, mirror, _vectors(30, seed=100 + step)) > 0.85


@KINDS
def test_removed_ids_may_return(kind: IndexKind) -> None:
    old, new = _vectors(20), _vectors(20, seed=1)
    index = _filled(kind, old)
    index.remove([3, 4])
    index.add(np.array([3]), new[:1])
    index.update([5], np.array([5]), new[1:2])
    assert index.search(new[0], 1)[0] == [3] and index.search(new[1], 1)[0] == [5]
    assert index.search(old[3], 1)[1] < 0.999 and index.search(old[5], 1)[1] < 0.999
    assert index.ids == set(range(20)) - {4}


@KINDS
def test_fewer_than_k(kind: IndexKind) -> None:
    vectors = _vectors(3)
    index = _filled(kind, vectors)
    ids, scores = index.search(vectors[0], 5)
    assert ids.dtype == np.int64 and scores.dtype == np.float32
    assert ids[0] == 0 and set(ids[:3].tolist()) == {0, 1, 2}
    assert (ids[3:] == NONE).all() and (scores[3:] == -np.inf).all()
    index.remove([0, 1, 2])
    assert (index.search(vectors[:2], 4)[0] == NONE).all()
    index.add(np.array([7]), vectors[:1])
    assert index.search(vectors[0], 1)[0] == [7]


@KINDS
def test_a_search_among_some_is_exact(kind: IndexKind) -> None:
    vectors = np.concatenate([_vectors(1400), _vectors(100)])  # the last have their equals among the first
    index = _filled(kind, vectors, first=10)
    index.remove(range(10, 110, 2))
    rng = np.random.default_rng(0)
    for count in (1, 3, 700):
        chosen = rng.permutation(np.arange(10, 1510))[:count]
        alive = np.array(sorted(set(chosen.tolist()) & index.ids), np.int64)
        for query in _vectors(5, seed=1):
            ids, scores = index.search_among(query, 5, np.append(chosen, [0, 9_999]))
            found = sorted(zip(alive.tolist(), vectors[alive - 10] @ query, strict=True), key=lambda x: (-x[1], x[0]))[
                :5
            ]
            assert ids.dtype == np.int64 and scores.dtype == np.float32
            assert ids.tolist() == [number for number, _ in found] + [NONE] * (5 - len(found))
            np.testing.assert_allclose(scores[: len(found)], [score for _, score in found], atol=1e-5)
    assert index.search_among(vectors[0], 2, np.empty(0, np.int64))[0].tolist() == [NONE, NONE]


def test_hnsw_finds_the_living_among_many_dead() -> None:
    """The nearest are all dead, and the beam alone would come back with too few."""
    vectors = _vectors(600)
    query = vectors[0]
    nearest = np.argsort(-(vectors @ query))[:300].tolist()
    index = _filled(IndexKind.HNSW, vectors)
    index.remove(nearest)
    assert index._faiss.ntotal == 600  # dead, but not rebuilt yet
    alive = {i: v for i, v in enumerate(vectors) if i not in set(nearest)}
    assert _recall(index, alive, query[None], k=250) > 0.95
    index.remove([next(iter(alive))])
    assert index._faiss.ntotal == 299  # more dead than living: rebuilt


def test_hnsw_finds_all_copies() -> None:
    """Equal vectors may tear the graph apart; the search must not come back short."""
    index = _filled(IndexKind.HNSW, np.repeat(_vectors(3), 200, axis=0))
    assert len(set(index.search(_vectors(3)[0], 600)[0].tolist()) - {NONE}) == 600


@pytest.mark.slow
def test_ivf_is_exact_until_it_can_train() -> None:
    vectors = _vectors(TRAIN_AT)
    index = _filled(IndexKind.IVF, vectors[:-1])
    assert index.exact
    index.add(np.array([TRAIN_AT - 1]), vectors[-1:])
    assert not index.exact and len(index) == TRAIN_AT
    assert index._faiss.nlist == 31
    index.add(np.arange(TRAIN_AT, 4 * TRAIN_AT), _vectors(3 * TRAIN_AT, seed=1))
    assert index._faiss.nlist == 63  # trained again once it had grown fourfold


@pytest.mark.slow
@KINDS
def test_save_and_load(kind: IndexKind, tmp_path: Path) -> None:
    vectors, queries = _vectors(1200), _vectors(20, seed=1)
    index = _filled(kind, vectors)
    index.remove(range(100, 300))
    index.save(tmp_path / "index")
    loaded = VectorIndex.load(tmp_path / "index")
    assert (loaded.kind, loaded.dim, loaded.exact, loaded.ids) == (kind, DIM, index.exact, index.ids)
    for got, wanted in zip(loaded.search(queries, 10), index.search(queries, 10), strict=True):
        np.testing.assert_array_equal(got, wanted)
    for each in (index, loaded):  # goes on as if never closed
        each.update([7], np.array([5000]), queries[:1])
    assert loaded.search(queries[0], 1)[0] == [5000]
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = _filled(IndexKind.FLAT, _vectors(10))
    index.save(tmp_path / "index")
    before = (tmp_path / "index").read_bytes()
    index.remove([0])
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        index.save(tmp_path / "index")
    assert (tmp_path / "index").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("content", [b"", b"not an index", None])
def test_broken_files_are_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "index"
    _filled(IndexKind.FLAT, _vectors(50)).save(path)
    path.write_bytes(path.read_bytes()[:1000] if content is None else content)
    with pytest.raises(ConfigError, match="index: not a saved index"):
        VectorIndex.load(path)


@pytest.mark.slow
@KINDS
def test_searches_while_writing(kind: IndexKind) -> None:
    """Readers see a whole index at every moment, also while it trains or is rebuilt."""
    steady = _vectors(300)
    index = _filled(kind, steady)

    def read() -> None:
        for i in (0, 150, 299):
            ids, scores = index.search(steady[i], 1)
            assert ids[0] == i and scores[0] > 0.999

    with meanwhile(read):
        for step in range(6):
            ids = np.arange(1000 * (step + 1), 1000 * (step + 1) + 400)
            index.add(ids, _vectors(400, seed=step + 1))
            if step % 2:
                index.remove([*ids.tolist(), *(ids - 1000).tolist()])
