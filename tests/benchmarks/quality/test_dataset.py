"""Question sets in the formats they come in, and the neighbours of their chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import dataset
from benchmarks.quality.similarity import Similarity
from ragjax.core import Chunk, ConfigError, Document
from tests.support import tiny


def test_sets_are_read_and_refused(data: Path) -> None:
    boats, talks = dataset.load(data, "boats"), dataset.load(data, "talks")
    assert [q.id for q in boats.questions] == ["q0", "q1", "q2"]
    assert len(boats.corpus) == 10 and len(talks.corpus) == 9
    with pytest.raises(ConfigError, match=r"no set 'cars'.*boats, talks"):
        dataset.load(data, "cars")


def test_triviaqa_files_need_their_evidence(tmp_path: Path) -> None:
    page = {"Title": "Rome", "Filename": "rome.txt", "Text": "Rome is old."}
    entry = {"Question": "Old?", "QuestionId": "t1", "Answer": {"Value": "Rome", "Aliases": ["Rome", "Roma"]}}
    file = tmp_path / "trivia.json"
    file.write_text(json.dumps({"Data": [{**entry, "EntityPages": [page], "SearchResults": [{"Url": "u"}]}]}))
    found = dataset.triviaqa(file)
    assert found.name == "trivia" and found.questions[0].answers == ("Rome", "Roma")
    assert found.questions[0].passages == (Document("rome.txt", "Rome is old.", "Rome"),)
    file.write_text(json.dumps({"Data": [{**entry, "EntityPages": [{"Title": "Rome", "Filename": "rome.txt"}]}]}))
    with pytest.raises(ConfigError, match="no page has its text"):
        dataset.triviaqa(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="not in TriviaQA's format"):
        dataset.triviaqa(file)


def test_multihop_rag_is_read_in_its_own_form(tmp_path: Path) -> None:
    folder = tmp_path / "text" / "multihop_rag"
    folder.mkdir(parents=True)
    articles = [{"title": t, "body": f"{t} is said.", "url": f"u/{t}"} for t in ("A", "B", "C")]
    evidence = [{"title": t, "fact": "x"} for t in ("C", "A", "C", "lost")]
    entries = [
        {"query": "Who?", "answer": "Ada", "question_type": "inference_query", "evidence_list": evidence},
        {"query": "When?", "answer": "Yes", "evidence_list": []},
    ]
    (folder / dataset.MULTIHOP).write_text(json.dumps(entries))
    (folder / "corpus.json").write_text(json.dumps(articles))
    found = dataset.load(tmp_path, "multihop_rag")
    assert [(q.id, q.text, q.answers) for q in found.questions] == [("multihop-0", "Who?", ("Ada",))]
    assert [p.title for p in found.questions[0].passages] == ["C", "A"] and len(found.corpus) == 3
    (folder / "corpus.json").write_text("{}")
    with pytest.raises(ConfigError, match="no question has both"):
        dataset.load(tmp_path, "multihop_rag")
    (folder / dataset.MULTIHOP).write_text('[{"question": "Who?"}]')
    with pytest.raises(ConfigError, match="not in MultiHop-RAG's format"):
        dataset.load(tmp_path, "multihop_rag")


def test_neighbours_leave_out_copies_and_vectors_are_kept(tmp_path: Path) -> None:
    texts = ["red fox", "red fox", "red fox runs", "blue whale", "red whale", "red whale"]
    chunks = [
        Chunk(str(i), str(i), "", t, np.frombuffer(t.encode(), np.uint8).astype(np.int32)) for i, t in enumerate(texts)
    ]
    encoder = tiny.HashedEncoder()
    similarity = Similarity.of(chunks, encoder, tmp_path)
    vectors = encoder.encode(texts).astype(np.float64)
    order = sorted((2, 3, 4), key=lambda i: -vectors[0] @ vectors[i])
    assert [c.id for c in similarity.neighbours("0", 9)] == [str(i) for i in order]
    assert [c.id for c in similarity.neighbours("0", 1)] == [str(order[0])]

    class Refusing(tiny.HashedEncoder):
        def encode(self, texts: Sequence[str], query: bool = False) -> Any:
            raise AssertionError("the vectors were not kept")

    assert Similarity.of(chunks, Refusing(), tmp_path).neighbours("0", 9) == similarity.neighbours("0", 9)


def test_past_requests_hold_every_needed_chunk(tmp_path: Path) -> None:
    chunks = [Chunk(str(i), str(i), "", f"w{i % 5} v{i % 7}", np.array([i], np.int32)) for i in range(30)]
    similarity = Similarity.of(chunks, tiny.HashedEncoder(), tmp_path)
    needed = [str(i) for i in range(0, 30, 3)]
    requests = list(similarity.past_requests(needed))
    assert {c.id for request in requests for c in request} >= set(needed)
    assert all(len({c.id for c in request}) == 5 for request in requests)
    near = [{c.id for c in similarity.neighbours(c.id, 10)} | {c.id} for c in chunks]
    assert all(any({c.id for c in r} <= group for group in near) for r in requests)
    assert [[c.id for c in r] for r in requests] == [[c.id for c in r] for r in similarity.past_requests(needed)]
