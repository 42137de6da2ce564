"""The figure of fine-tuning: its rows by hand, misplaced branches, and a run on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import finetuning
from benchmarks.finetuning import METHODS, Misplaced, misplaced
from benchmarks.graph.part import Uncached
from benchmarks.graph.question import Question, prompt_of
from ragjax.core import Kind
from ragjax.core.depprompt import DepPrompt, LinearNode, TreeNode, begins_of
from ragjax.retrieval.triples import RelationPath, Subgraph
from tests.support import tiny
from tests.support.files import write_lines

pytestmark = pytest.mark.slow

PATHS = (("a", "r", "b", "s", "c"), ("a", "r", "b", "t", "d"), ("a", "u", "e"))
QUESTION = Question("1", "what?", ("c",), (Subgraph("a", tuple(map(RelationPath, PATHS))),))


def test_misplaced_branches_stand_behind_others_and_no_child_before_its_parent() -> None:
    runs = [np.array(path, np.int32) for path in ([1, 2, 3, 4], [1, 2, 5], [6, 7, 8, 9, 10])]
    nodes = (LinearNode("system", runs[0]), TreeNode("tree", tuple(runs)), LinearNode("task", runs[1]))
    seen: set[tuple[int, ...]] = set()
    for longer in range(40):  # the draw goes by the prompt's length
        task = LinearNode("task", np.arange(1, 2 + longer, dtype=np.int32))
        prompt = DepPrompt((*nodes[:2], task)).prompt()
        own, moved = begins_of(prompt, "path"), tuple(misplaced(prompt))
        gaps = [m - o for m, o in zip(moved, own, strict=True)]
        assert gaps[0] == 0 == gaps[-1]
        tree = [i for i, s in enumerate(prompt.segments) if s.kind is Kind.NODE]
        total = sum(len(prompt.segments[i]) for i in tree)
        for i in tree:
            above = [j for j in prompt.segments[i].depends or () if j in tree]
            assert all(gaps[j] <= gaps[i] for j in above)
            assert 0 <= gaps[i] < total
        seen.add(tuple(gaps))
    assert len(seen) > 20


def test_misplaced_branches_change_the_answer_and_others_do_not() -> None:
    with tiny.engine() as engine:
        prompt = prompt_of(engine, QUESTION, trees=True)
        assert tuple(misplaced(prompt)) != begins_of(prompt, "path")
        scores = [
            engine.answer_prompt(prompt, strategy=s, max_tokens=1, continuation=np.array([5], np.int32)).scores
            for s in ("dependency", Uncached(), Misplaced())
        ]
    assert all(found is not None for found in scores)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-4)
    assert not np.allclose(scores[0], scores[2], rtol=1e-3, atol=1e-3)


def test_rows_and_verdict_by_hand() -> None:
    def samples(*accuracies: float) -> list[dict[str, float]]:
        return [{"accuracy": a, "f1": a / 2, "logprob": a - 1, "prompt_tokens": 10} for a in accuracies]

    values = {
        "films": [samples(0, 0), samples(0, 0), samples(1, 0), samples(1, 1), samples(0, 0)],
        "songs": [samples(1), samples(0), samples(1), samples(1), samples(1)],
    }
    made = list(finetuning.rows({name: dict(zip(METHODS, parts, strict=True)) for name, parts in values.items()}))
    tuned = next(r for r in made if r["set"] == "pooled" and r["repositioned"] == "yes" and r["tuned"] == "yes")
    assert tuned["n"] == 3 and tuned["accuracy"] == 1
    assert tuned["accuracy_minus_control"] == pytest.approx(1 / 3)
    assert tuned["f1_minus_self"] == pytest.approx(1 / 3)
    assert finetuning.verdict(made).startswith("tuned dependency attention is not inferior")
    worse = {name: dict(zip(METHODS, [*p[:3], p[4], p[3]], strict=True)) for name, p in values.items()}
    assert "may be inferior" in finetuning.verdict(list(finetuning.rows(worse)))


def test_only_what_was_put_aside_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"id": f"q{i}", "question": "Who?", "answers": ["Mann"], "topic_entities": ["Heat"],
         "triples": [["Heat", "by", "Mann"]], "paths": [["Heat", "by", "Mann"]]}
        for i in range(3)
    ]  # fmt: skip
    write_lines(tmp_path / "kg" / "films" / "questions.jsonl", lines)
    aside = tmp_path / "aside.jsonl"
    aside.write_text(json.dumps({"id": "q1", "question": "Who?", "answer": "Mann"}) + "\n")
    opened: list[str] = []

    def tiny_engine(model: str, *_: object) -> object:
        opened.append(model)
        return tiny.engine()

    monkeypatch.setattr(finetuning, "opened", tiny_engine)
    monkeypatch.setattr(finetuning, "weights_of", str)
    models = ["--model", "base", "--tuned", "new", "--control", "other"]
    command = ["--data", str(tmp_path), "--sets", "films", "--aside", str(aside), *models]
    assert finetuning.main([*command, "--json", str(tmp_path / "out.json")]) == 0
    assert opened == ["base", "new", "other"]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 2 * len(METHODS) and all(r["n"] == 1 for r in rows)
    aside.write_text(json.dumps({"id": "q9", "question": "Who?", "answer": "Mann"}) + "\n")
    assert finetuning.main(command) == 1
    assert "no question of films was put aside" in capsys.readouterr().err
