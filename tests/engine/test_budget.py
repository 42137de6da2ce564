"""Budgets of requests in the engine: what is picked, told and counted, what is refused; and a fit from end to end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragjax.commands import fitting, gate
from ragjax.core import ConfigError, Divergence, Document, Message, Rag, RequestError, StorageOptions
from ragjax.core.fit import Fit, Forecast
from ragjax.engine import Engine
from ragjax.engine.measurement import fit_of, fit_path, report_of, report_path
from ragjax.engine.preprocessing import PreprocessReport, preprocess
from ragjax.prompting.chat import chat_prompt
from ragjax.quality.contract import Contract
from ragjax.quality.fit import FitReport
from ragjax.quality.report import Budget, Measurement, Report, Setting
from ragjax.reuse import strategies
from ragjax.reuse.budget import EXPECTED, RATIO, Fitted
from ragjax.reuse.fitted import Weighted
from ragjax.serve.response import account
from tests.support import tiny

WORDS = [
    "ferry",
    "harbour",
    "lantern",
    "council",
    "mayor",
    "bridge",
    "orchard",
    "copper",
    "violin",
    "glacier",
    "meadow",
    "candle",
]
DOCUMENTS = [
    Document(name, f"The {name} of {other} stands by the {third}.")
    for name, other, third in zip(WORDS, WORDS[3:], WORDS[5:], strict=False)
]
HELD = tuple(((math.log(x), x), (-9.0, 0.0), (-9.0, 0.0)) for x in np.linspace(0.02, 1.0, 40))
FORECAST = Forecast((0.0, 0.1, 0.4), intercept=0.0, slope=1.0, mass=0.0, uncertainty=0.0, held=HELD)
FITTED = Fitted(Fit({"received-4": 0.8, "start": 0.2}, 3, FORECAST))
QUESTION = "Where does the ferry of the council stand?"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny.engine(extra=[FITTED], top_k=3) as made:
        made.add_documents(DOCUMENTS)
        preprocess(made, n=2, progress=False)
        yield made


def test_the_ratio_falls_with_the_budget_and_is_told(engine: Engine) -> None:
    answers = [engine.answer(QUESTION, quality=kl, max_tokens=2) for kl in (1e-4, 0.5, 0.9, 1.5)]
    ratios = [answer.figures[RATIO] for answer in answers]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] == 1.0 and ratios[-1] == 0.0
    assert any(0 < ratio < 1 for ratio in ratios)
    for kl, answer in zip((1e-4, 0.5, 0.9, 1.5), answers, strict=True):
        assert answer.strategy == "fitted" and answer.recompute_ratio == answer.figures[RATIO]
        assert answer.figures[EXPECTED] <= kl * 1.2
        assert account(answer, engine.pieces, ())["figures"][EXPECTED] == answer.figures[EXPECTED]
    assert answers[-1].predicted is None and answers[-1].exact_to is None and not answers[-1].notices


def test_a_budget_that_no_ratio_keeps_is_full_attention_and_says_so(engine: Engine) -> None:
    before = engine.stats()["quality_requests_total"]
    tight = engine.answer(QUESTION, quality=1e-4, max_tokens=3)
    wide = engine.answer(QUESTION, quality=1.5, max_tokens=3)
    assert tight.exact_to == "full" and tight.tokens == engine.answer(QUESTION, strategy="full", max_tokens=3).tokens
    assert tight.predicted == Divergence(0.0, 1.0) and "within 0.0001: all was recomputed" in tight.notices[0]
    after = engine.stats()["quality_requests_total"]
    assert isinstance(before, dict) and isinstance(after, dict) and wide.figures[RATIO] < 1
    assert {name: after[name] - before[name] for name in after} == {"within": 1, "full": 1}


def test_what_was_not_calibrated_runs_full_attention_and_says_so(engine: Engine) -> None:
    given = engine.answer(QUESTION, quality=1.5, documents=DOCUMENTS[:2], max_tokens=2)
    assert given.strategy == "full" and given.exact_to == "full" and "preprocessed chunks" in given.notices[0]
    many = engine.answer(QUESTION, quality=1.5, top_k=4, max_tokens=2)
    assert many.strategy == "full" and "up to 3 chunks, and here are 4" in many.notices[0]


def test_chunks_whose_preprocessed_kv_is_not_there_are_recomputed(engine: Engine) -> None:
    """It lies behind the system prompt that it was computed for: behind another one it is not found."""
    messages = [Message("system", "Answer in French."), Message("user", QUESTION)]
    before = engine.stats()["quality_requests_total"]
    found = engine.answer(messages, quality=1.5, max_tokens=2)
    assert found.strategy == "fitted" and found.exact_to == "full" and found.figures[RATIO] == 1.0
    assert EXPECTED not in found.figures and "not all of it was found" in found.notices[0]
    assert found.tokens == engine.answer(messages, strategy="full", max_tokens=2).tokens
    after = engine.stats()["quality_requests_total"]
    assert isinstance(before, dict) and isinstance(after, dict) and after["full"] == before["full"] + 1


def test_pages_that_a_budget_gives_back_are_noted(engine: Engine) -> None:
    seen: list[bool] = []
    freed = engine._loop._execution._freed
    engine._loop._execution._freed = lambda: (seen.append(True), freed())[1]
    try:
        engine.answer(QUESTION, strategy="full", max_tokens=1)
        assert not seen
        engine.answer(QUESTION, quality=1.5, max_tokens=1)
        assert seen == [True]
    finally:
        engine._loop._execution._freed = freed


def test_a_budget_excludes_what_it_picks(engine: Engine) -> None:
    for field, value in (("strategy", "naive"), ("recompute_ratio", 0.2), ("keep_top", 1), ("graph", "facts")):
        with pytest.raises(RequestError, match=f"give {field} or quality, not both") as refused:
            engine.answer(QUESTION, quality=0.1, **{field: value})
        assert refused.value.param == f"rag.{field}"
    with pytest.raises(RequestError, match="give compression or quality"):
        engine.answer(QUESTION, quality=0.1, compression="snapkv:64")
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(RequestError, match="must be above 0"):
            Rag(kl=wrong)


def test_without_a_fit_budgets_and_the_strategy_are_refused() -> None:
    with tiny.engine() as engine:
        for asked in ({"quality": 0.1}, {"strategy": "fitted"}):
            with pytest.raises(RequestError, match="gate --fit"):
                engine.answer("Where?", **asked)


def test_a_server_that_compresses_takes_budgets_of_whole_prompts_only() -> None:
    with tiny.engine(extra=[FITTED], compression="knorm:64") as engine:
        with pytest.raises(RequestError, match="add compression none"):
            engine.answer("Where?", quality=0.1)
        assert engine.answer("Where?", quality=0.1, compression="none", max_tokens=1).compression is None


def test_after_a_fault_a_budget_runs_full_attention() -> None:
    contract = Contract(Setting("prefix"), "float32")
    with tiny.engine(extra=[FITTED], contract=contract) as engine:
        engine.add_documents(DOCUMENTS)
        contract.observe(Setting("prefix"), True, Divergence(1.0, 0.0))
        answer = engine.answer(QUESTION, quality=1.5, max_tokens=1)
        assert answer.strategy == "full" and "labelled exact and is not" in answer.notices[-1]


def test_a_fit_end_to_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "TRIALS", (0.1, 0.3, 0.5))
    questions = [asked(engine, f"What of the {word}?", seed) for seed, word in enumerate(WORDS[:6])]
    steps: list[int] = []
    report = fitting.fit(engine, questions, lambda: steps.append(1))
    assert len(steps) == fitting.count_answers(6) and (report.fitted, report.held) == (3, 3)
    Weighted(report.fit.weights)
    assert sum(report.fit.weights.values()) == pytest.approx(1) and report.fit.top_k == 3
    assert len(report.contest) == len(fitting.CONTESTANTS) + 2 and all(len(one.kls) == 3 for one in report.contest)
    assert report.fit.forecast is None, "three questions held out promise nothing"
    assert report.checked.keys() == {"fitted", "ragjax"} and all(kl > 0 for kl in report.checked.values())
    assert "too few questions were held out" in "\n".join(fitting.table(report))
    engine.audit()
    with pytest.raises(ConfigError, match="a fit takes 4 questions"):
        fitting.fit(engine, questions[:3], int)


def asked(engine: Engine, text: str, seed: int) -> fitting.Asked:
    prompt = chat_prompt(engine.tokenizer, (Message("user", text),), engine.search(text))
    return fitting.Asked(prompt, np.random.default_rng(seed).integers(0, 256, 5).astype(np.int32))


def test_the_command_keeps_a_fit_where_a_server_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fitting, "TRIALS", (0.2,))
    made = tiny.engine(identity=b"me" * 16, top_k=2)
    made.add_documents(DOCUMENTS[:4])
    loaded: dict[str, object] = {}
    monkeypatch.setattr(Engine, "load", lambda *_, **options: loaded.update(options) or made)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "Where is the ferry?", "answers": ["At nine."]}\n' * 4)
    flags = ["--fit", "--knowledge", str(tmp_path), "--questions", str(questions), "--json", str(tmp_path / "fit.json")]
    assert gate.main(flags) == 0
    report = FitReport.load(tmp_path / "fit.json", (b"me" * 16).hex())
    assert fit_of(b"me" * 16) == report.fit and fit_of(b"us" * 16) is None
    assert "fitted on 2 questions, checked on 2 others" in capsys.readouterr().out
    assert not loaded["compile"] and loaded["storage"] == StorageOptions(host_gb=gate.HOST_GB)
    kept = fit_path(b"me" * 16)
    kept.write_text(kept.read_text().replace(next(iter(report.fit.weights)), "charm"))
    with pytest.raises(ConfigError, match=r"no signal 'charm'; run .*gate --fit again"):
        fit_of(b"me" * 16)


def test_a_fit_without_room_for_the_kv_that_it_measures_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiny.engine(top_k=2)
    made.add_documents(DOCUMENTS[:4])
    monkeypatch.setattr(Engine, "load", lambda *_, **__: made)
    monkeypatch.setattr(gate, "preprocess", lambda *_, **__: PreprocessReport(4, 4, 0, 3, 1.0))
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "Where is the ferry?", "answers": ["At nine."]}\n' * 4)
    assert gate.main(["--fit", "--knowledge", str(tmp_path), "--questions", str(questions)]) == 2
    assert "3 preprocessed chunks has no room, not in 8 GiB of host memory either: raise" in capsys.readouterr().err


def test_figures_of_another_fit_are_left_out(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    identity, known = b"me" * 16, {**strategies(), "fitted": FITTED}
    rows = tuple(Measurement(Setting(name), 4, 0.1, 0.2, 0.9, 0.8, 5.0, 0.1) for name in ("naive", "fitted"))
    report = Report(identity.hex(), "tiny", "float32", "now", "q", 3, rows, fit=FITTED.digest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGJAX_CACHE", str(tmp_path))
        for fit, kept in ((FITTED.digest, rows), ("another", rows[:1]), ("", rows[:1])):
            replace(report, fit=fit).save(report_path(identity))
            read = report_of(identity, Budget(0.5), known, 3)
            assert read is not None and read.measurements == kept
    assert caplog.text.count("fitted had another fit") == 2
