"""The benchmark of speculative retrieval: its slow index, its pairs of samples, its rows and its figure."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import speculate
from benchmarks.common.plot import draw
from ragjax.core import ConfigError
from ragjax.retrieval.index import VectorIndex
from tests.support import tiny


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, asked in (
        ("nq_open", {"question": "who sells tar"}),
        ("mmlu", {"question": "Which?", "choices": ["a", "b"]}),
    ):
        folder = tmp_path / "text" / name
        folder.mkdir(parents=True)
        (folder / "questions.jsonl").write_text(json.dumps(asked) + "\n")
    goods = ("tar", "salt", "wool", "figs")
    entries = [{"id": f"d{i}", "title": "Pier", "text": f"isle {i} sells {goods[i % 4]}"} for i in range(12)]
    (tmp_path / "text" / "nq_open" / "corpus.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    return tmp_path


def test_the_distant_index_finds_the_same_later() -> None:
    index = VectorIndex("hnsw", 4)
    index.add(np.arange(9), np.eye(9, 4, dtype=np.float32))
    distant, query = speculate.Distant(index, 3, 0.01), np.eye(1, 4, dtype=np.float32)[0]
    for search in (lambda: distant.search(query, 2), lambda: list(distant.stages(query, 2, 3))):
        began = time.perf_counter()
        search()
        assert time.perf_counter() - began >= 0.03
    assert [s.ids.tolist() for s in distant.stages(query, 2, 3)] == [s.ids.tolist() for s in index.stages(query, 2, 3)]
    assert len(distant) == 9 and distant.kind == "hnsw"


def test_questions_have_their_choices_and_documents_are_those_of_all_sets(data: Path) -> None:
    assert speculate.questions(data, "mmlu") == ["Which?\na\nb"] and speculate.questions(data, "nq_open") == [
        "who sells tar"
    ]
    assert len(speculate.documents(data, None)) == 12 and len(speculate.documents(data, 3)) == 3
    with pytest.raises(ConfigError, match="no set 'other'"):
        speculate.questions(data, "other")
    with pytest.raises(ConfigError, match="none of"):
        speculate.documents(data / "text", None)


@pytest.mark.slow
def test_less_of_a_search_is_exposed_where_an_early_stage_has_the_final_chunks(data: Path, tmp_path: Path) -> None:
    chosen = Namespace(strategy="prefix", top_k=2, stages=4)
    with tiny.engine(index="hnsw") as engine:
        engine.add_documents(speculate.documents(data, None))
        base = engine.knowledge_base()
        asked = [f"isle {i} sells tar" for i in range(6)]
        known = speculate.early(base, asked, 2, 4)
        assert list(known) == ["early_1", "early_2", "early_3"] and all(0 <= share <= 1 for share in known.values())
        base._index = speculate.Distant(base._index, 4, 0.02)  # type: ignore[assignment]
        pairs = speculate.measure(engine, asked, chosen)["pairs"]
    made = speculate.row(pairs)
    assert made["n"] == 6 and made["exposed_ms_off"] >= 80
    assert made["less"] == made["exposed_ms_off"] / made["exposed_ms"]
    assert all(on["hit"] for _, on in pairs if on["exposed_ms"] < on["search_ms"])
    assert all(off["exposed_ms"] == off["search_ms"] and not off["hit"] + off["wrong"] for off, _ in pairs)
    where = {"set": "nq_open", "index": "flat", "search_ms": 80.0}
    draw([{**where, **made}], tmp_path, speculate.FIGURES)
    assert (tmp_path / "speculation.png").stat().st_size > 1000
