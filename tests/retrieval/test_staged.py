"""Staged search: it knows more at each stage, and at the last what a plain search knows, to the bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import Document, RequestError
from ragjax.retrieval import index as module
from ragjax.retrieval.index import NONE, IndexKind, VectorIndex
from ragjax.retrieval.knowledge import SearchStage
from tests.support.shelf import ISLANDS, open_base

DIM = 8
STAGED = pytest.mark.parametrize("kind", [IndexKind.IVF, IndexKind.HNSW])


@pytest.fixture(autouse=True)
def _small_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRAIN_AT", 60)


def _vectors(rng: np.random.Generator, n: int, twins: bool) -> np.ndarray:
    """Unit vectors, float32 [n, DIM]; with twins, many of them are equal."""
    vectors = rng.normal(size=(n, DIM))
    if twins:
        vectors = vectors[rng.integers(max(n // 4, 1), size=n)]
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def _index(kind: IndexKind, rng: np.random.Generator, n: int, twins: bool, gone: int) -> VectorIndex:
    index = VectorIndex(kind, DIM)
    ids = rng.permutation(3 * n)[:n]
    index.add(ids, _vectors(rng, n, twins))
    index.remove(rng.permutation(ids)[:gone].tolist())
    return index


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(IndexKind))
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 150),
    gone=st.floats(0, 1),
    k=st.integers(1, 40),
    stages=st.integers(1, 9),
    twins=st.booleans(),
)
def test_last_stage_is_the_plain_search(
    kind: IndexKind, seed: int, n: int, gone: float, k: int, stages: int, twins: bool
) -> None:
    rng = np.random.default_rng(seed)
    index = _index(kind, rng, n, twins, int(gone * n))
    query = _vectors(rng, 1, False)[0]
    ids, scores = index.search(query, k)
    found = list(index.stages(query, k, stages))
    assert 1 <= len(found) <= stages and [stage.final for stage in found] == [*[False] * (len(found) - 1), True]
    assert found[-1].ids.tobytes() == ids.tobytes() and found[-1].scores.tobytes() == scores.tobytes()
    for stage in found:
        known = stage.ids[stage.ids != NONE].tolist()
        assert len(set(known)) == len(known) and set(known) <= index.ids and len(stage.ids) == k
        assert sorted(zip(-stage.scores, stage.ids, strict=True)) == list(zip(-stage.scores, stage.ids, strict=True))
    for earlier, later in pairwise(found):
        if kind is not IndexKind.HNSW:
            assert (later.scores >= earlier.scores).all(), "a stage forgets what an earlier one found"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 120), k=st.integers(1, 20), twins=st.booleans())
def test_equal_scores_go_by_id(seed: int, n: int, k: int, twins: bool) -> None:
    rng = np.random.default_rng(seed)
    ids, vectors = rng.permutation(3 * n)[:n], _vectors(rng, n, twins)
    index = VectorIndex("flat", DIM)
    index.add(ids, vectors)
    query = _vectors(rng, 1, False)[0]
    _, all_scores = index.search(query, n)
    found, scores = index.search(query, k)
    by_id = dict(zip(*index.search(query, n), strict=True))
    assert scores.tolist()[:n] == all_scores[:k].tolist()
    assert found.tolist()[:n] == sorted(by_id, key=lambda i: (-by_id[i], i))[:k]


def test_a_flat_index_is_searched_at_once() -> None:
    rng = np.random.default_rng(0)
    index = _index(IndexKind.FLAT, rng, 400, False, 0)
    (only,) = index.stages(_vectors(rng, 1, False)[0], 3, 4)
    assert only.final


@pytest.mark.slow
def test_a_stage_of_inverted_lists_searches_its_share() -> None:
    rng = np.random.default_rng(0)
    index = _index(IndexKind.IVF, rng, 400, False, 0)
    early = 0
    for query in _vectors(rng, 50, False):
        first, *_, last = index.stages(query, 1, 4)
        early += first.ids.tolist() == last.ids.tolist()
    assert 0 < early < 50


@STAGED
def test_index_that_changes_between_stages(kind: IndexKind) -> None:
    rng = np.random.default_rng(1)
    index = _index(kind, rng, 100, False, 10)
    query = _vectors(rng, 1, False)[0]
    stages = index.stages(query, 3, 4)
    next(stages)
    index.add(np.array([1_000]), query[None])
    index.remove(index.search(query, 2)[0][1:].tolist())
    (last,) = stages
    assert last.final and last.ids.tolist() == index.search(query, 3)[0].tolist() and last.ids[0] == 1_000


@pytest.mark.parametrize("kind", list(IndexKind))
def test_stages_of_a_knowledge_base_end_with_its_search(kind: IndexKind) -> None:
    with open_base(index_kind=kind) as base:
        base.add([*ISLANDS, *(Document(f"d{i}", f"box number {i % 7} of salt") for i in range(90))])
        base.delete([f"d{i}" for i in range(0, 90, 3)])
        for question, k in (("Who exports salt?", 4), ("box 5", 1), ("honey", 10**19)):
            *_, last = stages = list(base.stages(question, k, 4))
            assert [stage.final for stage in stages] == [False] * (len(stages) - 1) + [True]
            assert last.hits == base.search(question, k)
        assert list(base.stages("salt", 0, 4)) == [SearchStage((), True)]


def test_a_chunk_deleted_between_two_stages_is_not_found() -> None:
    with open_base(index_kind=IndexKind.HNSW) as base:
        base.add(ISLANDS)
        stages = base.stages("The island of Oske exports copper", 4, 2)
        next(stages)
        base.delete(["isle/2"])
        (last,) = stages
        assert last.final and "isle/2" not in {hit.chunk.document_id for hit in last.hits}
        assert last.hits == base.search("The island of Oske exports copper", 4)


def test_a_search_for_nothing_is_refused_at_once() -> None:
    with open_base() as base:
        with pytest.raises(RequestError, match="is empty"):
            base.stages("salt", 1, 4)
        base.add(ISLANDS)
        with pytest.raises(RequestError, match="question is empty"):
            base.stages(" ", 1, 4)
