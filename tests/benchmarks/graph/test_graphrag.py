"""The graph benchmark's arithmetic, and a run of its parts on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import graphrag
from benchmarks.common.samples import Progress, Samples
from benchmarks.graph import communities, part
from benchmarks.graph.part import accuracy, capacity, pairs, requests, work, workload
from benchmarks.graph.question import Question, prompt_of, questions_of
from benchmarks.quality import __main__ as quality
from ragjax.core import ConfigError, Kind, StepLimits
from ragjax.core.depprompt import layout
from ragjax.engine import Engine
from ragjax.retrieval.triples import RelationPath, Subgraph
from tests.support import tiny
from tests.support.fakes import WordEncoder
from tests.support.files import write_lines

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two films and who made them, twice over; one line without any path."""
    lines = [
        {
            "id": f"q{i}",
            "question": f"Who directed {film}?",
            "answers": [who],
            "topic_entities": [film],
            "triples": [[film, "by", who], [film, "in", "1999"], [who, "from", "Rome"]],
            "paths": [[film, "by", who]],
        }
        for i, (film, who) in enumerate([("Heat", "Mann"), ("Alien", "Scott")] * 2)
    ]
    lines.insert(1, {**lines[0], "paths": [], "triples": []})
    write_lines(tmp_path / "kg" / "films" / "questions.jsonl", lines)
    return tmp_path


def test_pairs_are_those_of_the_mask(engine: Engine) -> None:
    paths = (("a", "r", "b", "s", "c"), ("a", "r", "b", "t", "d"), ("a", "u", "e"))
    question = Question("1", "what?", ("c",), (Subgraph("a", tuple(map(RelationPath, paths))),))
    written, merged = (prompt_of(engine, question, trees) for trees in (False, True))
    found = pairs(written, merged, question)
    assert found["visited"] == layout(merged, "path").visible().sum()
    assert found["self"] == np.tril(np.ones((len(written),) * 2)).sum()
    # by hand: bytes of "a -" shared by three, of "a -r-> b -" by two
    nodes = [segment for segment in merged.segments if segment.kind is Kind.NODE]
    assert [len(node) for node in nodes] == [3, 7, 6, 6, 6]
    assert found["predicted"] == pytest.approx(3**2 + 3 * (((16 + 16 + 9) / 3) ** 2 - 3**2))
    assert found["predicted_self"] == pytest.approx((3 * (16 + 16 + 9) / 3) ** 2)


def test_questions_without_a_path_are_left_out(folder: Path) -> None:
    found = questions_of(folder, "films", 3)
    assert [q.id for q in found] == ["q0", "q1", "q2"] and found[0].answers == ("Mann",)
    assert {path.steps for s in found[0].subgraphs for path in s.paths} >= {
        ("Heat", "by", "Mann"),
        ("Heat", "in", "1999"),
    }
    with pytest.raises(ConfigError, match=r"sets of .*: films"):
        questions_of(folder, "songs", 3)


def test_sets_of_text_are_asked_over_an_extracted_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passage = {"id": "p", "title": "Heat", "text": "Heat is by Mann."}
    lines = [{"id": f"t{i}", "question": f"Who made {film}?", "answers": ["Mann"], "passages": [passage]}
             for i, film in enumerate(["Solaris", "Heat", "Heat 2"])]  # fmt: skip
    write_lines(tmp_path / "text" / "films" / "questions.jsonl", lines)
    write_lines(tmp_path / "films.jsonl", [{"id": "c", "triples": [["Heat", "by", "Mann"]]}])
    monkeypatch.setattr(graphrag, "packaged_encoder", WordEncoder)
    chosen = graphrag.BENCHMARK.parse(["--data", str(tmp_path), "--sets", "films", "--graphs", str(tmp_path)])
    found = graphrag._questions(chosen, "films")
    assert [q.id for q in found] == ["t1", "t2"]
    assert [path.steps for s in found[0].subgraphs for path in s.paths] == [("Heat", "by", "Mann")]
    assert graphrag.main(["--data", str(tmp_path), "--sets", "films"]) == 1  # a set of text has no graph of its own


def test_samples_belong_to_the_weights_behind_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "m.gguf"
    for module in (graphrag, quality):
        chosen = module.BENCHMARK.parse(["--data", str(tmp_path), "--model", str(model)])
        seen = set()
        for weights in (b"1", b"1", b"22"):
            model.write_bytes(weights)
            seen.add(json.dumps(module.settings_of(chosen)))
        assert len(seen) == 2


def test_requests_are_skewed_and_draw_no_entity_twice() -> None:
    questions = [
        Question(str(i), "?", ("a",), (Subgraph(f"e{i}", (RelationPath((f"e{i}", "r", "x")),)),)) for i in range(50)
    ]
    drawn = requests(questions, 200)
    assert all(len({s.entity for s in q.subgraphs}) == 10 for q in drawn)
    counts = sorted((sum(s.entity == f"e{i}" for q in drawn for s in q.subgraphs) for i in range(50)), reverse=True)
    assert sum(counts[:10]) > 0.4 * sum(counts)


def test_the_device_cache_of_a_workload_is_a_fifth_of_the_data_or_one_request() -> None:
    assert capacity(20_000, 1_000)[0] == pytest.approx(4_000, rel=0.05)
    tokens, context = capacity(2_000, 1_000)
    assert 1_000 < context < tokens < 1_400


def test_a_workload_with_the_cache_and_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "opened", lambda *args, **kwargs: tiny.engine())
    asked = requests(questions_of(folder, "films", 3), 3)
    made = workload("model", "float32", "films", asked, Progress(10))
    rows = {r["method"]: r for r in made}
    assert rows["dependency"]["hit_rate"] < rows["dependency-cached"]["hit_rate"] < 1
    assert rows["dependency"]["capacity_share"] > 0.2
    assert rows["self"]["hit_rate"] == rows["streaming"]["hit_rate"] == 0


def test_a_length_with_too_many_entities_is_left_out_and_said(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(part, "LENGTHS", (120,))
    monkeypatch.setattr(StepLimits, "holds", lambda *_: False)
    assert not part.length(engine, "films", questions_of(folder, "films", 3), runs=1)
    assert "films: no 120 tokens: the prompt has " in capsys.readouterr().err


def test_the_other_parts(engine: Engine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "LENGTHS", (120, 100_000))
    monkeypatch.setattr(communities, "packaged_encoder", WordEncoder)
    questions = questions_of(folder, "films", 3)
    progress = Progress(10)
    made = work(engine, "films", questions)
    samples = Samples("graphrag", {})
    made += accuracy(engine, "films", questions, samples, progress)
    made += part.length(engine, "films", questions, runs=1)
    rows = {(r["part"], r["method"], r["positions"]): r for r in made}
    assert {part for part, _, _ in rows} == set(graphrag.PARTS) - {"workload"}
    assert rows["accuracy", "self", None]["logprob_minus_self"] == 0
    assert rows["accuracy", "dependency", "path"]["n"] == 3
    assert "logprob_minus_preorder" in rows["accuracy", "dependency", "path"]
    assert (
        rows["length", "dependency", "path"]["hit_rate"] == 0 < rows["length", "dependency-cached", "path"]["hit_rate"]
    )
    assert rows["work", "dependency", None]["visited_share"] < 1
    assert 0 < rows["length", "self", None]["visited_share"] <= 1
    assert len(samples._samples) == 18 and rows["accuracy", "communities", None]["n"] == 3
