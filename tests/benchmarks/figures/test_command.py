"""`python -m benchmarks.figures` on the tiny model, and what it refuses."""

from __future__ import annotations

import importlib
import json
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import report
from benchmarks.figures import __main__ as command
from benchmarks.figures import cachecraft_7, cachecraft_8, cachecraft_12, observe
from benchmarks.figures.base import Setup
from benchmarks.figures.catalogue import ELSEWHERE, FIGURES
from ragjax.core import ConfigError, Kind
from ragjax.engine import Engine
from tests.support import tiny
from tests.support.matrix import few

ISSUE = {
    *(f"fusionrag_{n}" for n in ("3", "7a", "13", "14a", "16", "17")),
    *(f"cachecraft_{n}" for n in (7, 8, 12, 14, 16, 17, 20, 21, 25, 26, 27)),
}


def test_every_figure_is_there_and_says_what_it_is() -> None:
    assert set(FIGURES) == ISSUE
    for name, figure in FIGURES.items():
        paper, number = name.split("_")
        assert figure.paper == f"{ {'fusionrag': 'FusionRAG', 'cachecraft': 'Cache-Craft'}[paper] }, Figure {number}"
        assert figure.shows and figure.differs and figure.columns and figure.quick <= figure.limit
        module = importlib.import_module(figure.panels.__module__)
        assert f"Figure {number}" in str(module.__doc__) or f"and {number}:" in str(module.__doc__)


def test_the_list_names_all_figures_and_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*FIGURES, *ELSEWHERE))
    for line in ELSEWHERE.values():
        assert importlib.util.find_spec(f"benchmarks.{line.split()[0]}") is not None


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "required"),
        (["--figure", "fusionrag_99"], "invalid choice"),
        (["--figure", "fusionrag_3"], "give --data DIR"),
        (["--figure", "fusionrag_14a", "--data", "."], "leave out --data"),
        (["--figure", "fusionrag_3", "--list"], "not allowed"),
        (["--figure", "fusionrag_3", "--rows", __file__], "--rows goes with"),
        (["--figure", "fusionrag_3", "--rows", __file__, "--plot", "x.png", "--quick"], "--rows goes with"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert word in capsys.readouterr().err


def test_a_file_that_is_no_report_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"rows": [{"set": "x"}]}')
    for file, name in ((Path(__file__), "fusionrag_3"), (other, "fusionrag_13")):
        arguments = ["--figure", name, "--rows", str(file), "--plot", str(tmp_path / "x.png")]
        assert command.main(arguments) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2 and not (tmp_path / "x.png").exists()


def test_a_figure_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --data"):
        _ = Setup(None, "m", "float32", 1, None).folder  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- runs


def test_the_command_measures_draws_and_draws_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "weights_of", str)
    out, drawn, again = tmp_path / "r.json", tmp_path / "a.png", tmp_path / "b.png"
    flags = [
        "--figure",
        "cachecraft_16",
        "--data",
        str(setup.data),
        "--quick",
        "--json",
        str(out),
        "--plot",
        str(drawn),
    ]
    assert command.main(flags) == 0
    document = json.loads(out.read_text())
    assert document["benchmark"] == "figures" and {"command", "machine", "versions"} <= set(document)
    assert {r["part"] for r in document["rows"]} == {"set", "layer", "chunk"} and document["rows"][0]["n"] == 2
    assert command.main(["--figure", "cachecraft_17", "--rows", str(out), "--plot", str(again)]) == 0
    assert drawn.stat().st_size > 5000 and again.stat().st_size > 5000


def test_full_attention_is_watched() -> None:
    with tiny.engine() as engine:
        look = observe.Observer(engine)
        prompt = tiny.prompt()
        seen = look.see(prompt)
        engine.audit()
    assert seen.chunks == [1, 2, 3] and seen.score_LTZ.shape == (3, len(prompt), 5)
    assert [seen.values(i).shape[1] for i in seen.chunks] == [40, 33, 57]
    # what a row gives to all segments, and to itself, is one
    assert (seen.score_LTZ.sum(-1) <= 1 + 1e-4).all() and seen.score_LTZ[:, 1:].sum() > 0
    first, third = seen.influence(1), seen.influence(3)
    assert first.cci == 0.5 and third.cci > 0.5 and len(third) == 57 and len(third.before) == 2
    assert seen.asked().shape == (3, 3)
    question = seen.score_LTZ[:, prompt.starts[-2] :, 1:4].sum(1)
    np.testing.assert_allclose(seen.asked(), question, rtol=1e-5)


def test_a_chunk_moves_with_what_stands_before_it(setup: Setup) -> None:
    rows = cachecraft_7.measure(setup)
    assert [r["chunks_before"] for r in rows] == list(cachecraft_7.BEFORE)
    assert rows[0]["deviation"] < 1e-4 < rows[1]["deviation"]  # alone it is itself
    assert rows[1]["by_layer"][0] < 1e-4 < rows[1]["by_layer"][1]  # the first layer's values depend on the token alone
    assert len(cachecraft_7.panels(rows)) == 2


def test_the_same_prefix_is_no_trial(setup: Setup) -> None:
    with setup.engine() as engine:
        made = cachecraft_12.trials(observe.Observer(engine), setup, "nq_open")
    each = cachecraft_12.PREFIX + cachecraft_12.ORDERS
    assert len(made) == 2 * each
    replaced, reordered = made[: cachecraft_12.PREFIX], made[cachecraft_12.PREFIX : each]
    assert [t.gamma for t in replaced] == [0] * 4 and replaced[-1].beta == 0
    betas = [t.beta for t in replaced]
    assert all(0 <= b <= 1 for b in betas) and betas[0] > 0
    assert all(t.beta == pytest.approx(1) for t in reordered) and all(t.deviation > 1e-5 for t in replaced)
    rows = cachecraft_12.rows_of("nq_open", made)
    assert {r["by"] for r in rows} == {"cci", "1 - beta", "gamma", "tokens"}
    assert rows[-1]["carried"] == pytest.approx(1.0) and rows[-1]["cci_without"] == pytest.approx(0.5)


def test_chunks_of_one_request_are_exact(setup: Setup) -> None:
    """What is reused from the same request in the same order is full attention; from five others it is not."""
    question = setup.questions("2wikimultihopqa").questions[0]
    others = [p for q in setup.questions("nq_open").questions for p in q.passages]
    with setup.engine() as engine:
        look = observe.Observer(engine)
        made = cachecraft_8.reuse(look, question, (look.chunk(p) for p in cycle(others)), 0)
        engine.audit()
    assert [s["recomputed_share"] for s in made] == [0.0] * 5
    assert made[0]["kl"] < 1e-6 and made[0]["rougeL_vs_full"] == 1.0 and made[4]["kl"] > 1e-4


def test_prompts_are_those_of_chat_requests(setup: Setup) -> None:
    question = setup.questions("nq_open").questions[0]
    with setup.engine() as engine:
        assert isinstance(engine, Engine)
        look = observe.Observer(engine)
        prompt = look.prompt(question.text, [look.chunk(p) for p in question.passages])
        answer = engine.answer(question.text, documents=question.passages, max_tokens=1)
    assert sum(s.kind is Kind.CHUNK for s in prompt.segments) == 10 and len(prompt) == answer.prompt_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    few(
        ["fusionrag_3", "fusionrag_17", "cachecraft_21", "cachecraft_25", "cachecraft_26"],
        ["fusionrag_3", "cachecraft_25"],
    ),
)
def test_figures_of_answers_measure_and_draw(name: str, setup: Setup, tmp_path: Path) -> None:
    rows = FIGURES[name].measure(setup)
    command.draw(FIGURES[name], rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
    assert set(FIGURES[name].columns) <= set().union(*rows) and rows[0]["set"] and rows[0]["n"] == 2
