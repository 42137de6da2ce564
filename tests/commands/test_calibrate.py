"""The search for alpha: by bisection, over a real engine in miniature, into a file that says whose it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ragjax.commands import calibrate
from ragjax.commands.calibrate import GRID, Desired, Trial, candidates, least, search, word_f1
from ragjax.core import Answer, ConfigError, SegmentReport, Timings
from ragjax.quality.report import Alpha

ALPHA = Alpha(0.3, "ab", "tiny", "float32", "F1=0.9", 0.93, 60, 0.2)


@pytest.mark.parametrize("first", [0, 1, 5, len(GRID) - 1])
def test_the_least_good_alpha_is_found_in_few_tries(first: int) -> None:
    tried: list[float] = []

    def good(alpha: float) -> bool:
        tried.append(alpha)
        return alpha >= GRID[first]

    assert least(GRID, good) == GRID[first] and len(tried) <= 5 and len(set(tried)) == len(tried)
    assert least(GRID, lambda _: False) is None and least([1.0], lambda _: True) == 1.0


def test_a_quality_is_read_and_kept() -> None:
    trial = Trial(0.3, f1=0.9, kl=0.05, share=0.2)
    assert Desired.parse("f1=0.9").met_by(trial) and not Desired.parse("F1=0.91").met_by(trial)
    assert Desired.parse("KL=0.05").met_by(trial) and not Desired.parse("kl=0.049").met_by(trial)
    assert str(Desired.parse(" KL=5e-2 ")) == "KL=0.05" and Desired.parse("KL=0.05").of(trial) == 0.05


@pytest.mark.parametrize("text", ["", "F1", "F1=", "F1=1.1", "KL=-1", "KL=nan", "EM=0.5", "F1=0.5,KL=1", "KL=1e999"])
def test_a_quality_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="write "):
        Desired.parse(text)


def test_words_in_common() -> None:
    assert word_f1("The mayor, Ann.", "the mayor Ann") == 1 and word_f1("", "") == 1 and word_f1("a", "") == 0
    assert word_f1("a a b", "a c") == pytest.approx(2 * 1 / 5)


def test_the_file_comes_back_and_is_refused_where_it_must_be(tmp_path: Path) -> None:
    path = tmp_path / "craft" / "ab.json"
    ALPHA.save(path)
    assert Alpha.load(path, "ab") == ALPHA and [p.name for p in path.parent.iterdir()] == ["ab.json"]
    good = json.loads(path.read_text())
    for text, identity, message in (
        (path.read_text(), "cd", "another model"),
        ("{", "ab", "cannot be read"),
        ("[]", "ab", "cannot be read"),
        (json.dumps({**good, "version": 9}), "ab", "of version 9"),
        (json.dumps({**good, "value": None}), "ab", "cannot be read"),
        (json.dumps({**good, "value": -1.0}), "ab", "no usable alpha"),
        (json.dumps({k: v for k, v in good.items() if k != "share"}), "ab", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            Alpha.load(path, identity)
    with pytest.raises(ConfigError, match="cannot be read"):
        Alpha.load(tmp_path / "none.json", "ab")


class Scripted:
    """An engine whose craft is as far from full as alpha is from 0.5, and that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def clear_cache(self) -> None:
        self.asked.append(("clear", ""))

    def answer(
        self, question: str, *, strategy: str, max_tokens: int, continuation: NDArray[np.int32] | None = None
    ) -> Answer:
        self.asked.append((strategy, question))
        alpha = 1.0 if strategy == "full" else float(strategy.removeprefix("craft-"))
        logits = np.zeros((len(continuation), 5), np.float32) if continuation is not None else None
        if logits is not None:
            logits[:, 0] = max(0.0, 0.5 - alpha)
        return Answer(
            text="a b c d" if alpha >= 0.5 else "a b",
            finish_reason="stop",
            tokens=(3, 4)[:max_tokens],
            prompt_tokens=12,
            cached_tokens=0,
            strategy=strategy,
            exact_to=None,
            segments=(
                SegmentReport("system", "", 7, 0, 7),
                SegmentReport("x", "", 10, 9, 1, score=0.5),
                SegmentReport("y", "", 30, 23, 7 if alpha < 1 else 29, score=0.4),
            ),
            timings=Timings(),
            scores=logits,
        )


def test_each_alpha_begins_with_an_empty_cache_that_the_first_questions_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "WARM", 2)
    engine = Scripted()
    questions = [f"q{i}" for i in range(5)]
    trials, found = search(engine, Desired("F1", 0.9), questions)  # type: ignore[arg-type]
    assert found is not None and found.alpha == 0.5 and found.share == pytest.approx(8 / 40)
    for trial in trials:
        assert trial.f1 == pytest.approx(1.0 if trial.alpha >= 0.5 else 2 / 3)
        assert (trial.kl > 0) == (trial.alpha < 0.5)
        name = f"craft-{trial.alpha:g}"
        at = engine.asked.index((name, "q0"))
        assert engine.asked[at - 1 : at + 5] == [("clear", ""), *((name, question) for question in questions)]
    assert {name for name, _ in engine.asked} <= {"clear", *candidates()}
    with pytest.raises(ConfigError, match="2 questions are too few"):
        search(engine, Desired("F1", 0.5), questions[:2])  # type: ignore[arg-type]


def test_what_no_alpha_keeps_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "references", lambda engine, questions, step: list(questions))
    monkeypatch.setattr(calibrate, "attempt", lambda engine, alpha, warm, asked, step: Trial(alpha, alpha / 4, 1, 0))
    questions = ["?"] * 30
    trials, found = search(None, Desired("F1", 0.6), questions)  # type: ignore[arg-type]
    assert found is None and [trial.alpha for trial in trials] == [GRID[-1]]
    trials, found = search(None, Desired("F1", 0.07), questions)  # type: ignore[arg-type]
    assert found is not None and found.alpha == 0.3 and len(trials) < 6


@pytest.mark.parametrize("arguments", [["--quality", "EM=1"], ["--qual", "F1=1"], ["--limit", "0"], ["--top-k", "x"]])
def test_bad_flags_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.main(arguments) == 2
    assert "ragjax gate --alpha: error:" in capsys.readouterr().err
