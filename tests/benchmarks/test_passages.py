"""The benchmark of passages that stand alone: its models, its rows, and the demo as a set of questions."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks import passages
from benchmarks.passages import ANCHOR, NAIVE, PACKET, Found
from benchmarks.quality.evaluation import FULL
from ragjax.core import Chunk
from ragjax.retrieval.chunking import Chunker


def samples(kl: list[float], answered: list[float], ttft: list[float]) -> list[dict[str, float]]:
    return [
        {"kl": k, "top1": 1 - k, "answered": a, "rougeL_vs_full": 0.5, "ttft_ms": t}
        for k, a, t in zip(kl, answered, ttft, strict=True)
    ]


def test_rows_compare_every_model_with_the_untouched_one() -> None:
    found: Found = {
        ("base", FULL): samples([0, 0, 0], [1, 1, 0], [90, 90, 90]),
        ("base", NAIVE): samples([0.6, 0.4, 0.2], [1, 0, 0], [10, 20, 30]),
        ("base", ANCHOR): samples([0.1, 0.2, 0.3], [1, 1, 0], [40, 40, 40]),
        ("soft", NAIVE): samples([0.5, 0.5, 0.5], [0, 0, 0], [10, 10, 20]),
        ("soft", PACKET): samples([0.1, 0.1, 0.1], [1, 0, 1], [11, 12, 20]),
    }
    made = {(row["model"], row["strategy"]): row for row in passages.rows("demo", found)}
    assert list(made) == [(model, setting.strategy) for model, setting in found]
    packet = made["soft", "packet"]
    assert packet["n"] == 3 and packet["kl"] == pytest.approx(0.1) and packet["top1"] == pytest.approx(0.9)
    assert packet["answered"] == pytest.approx(2 / 3) and packet["answered_minus_full"] == pytest.approx(0)
    assert packet["answered_minus_full_lo"] < 0 < packet["answered_minus_full_hi"]
    assert packet["kl_minus_anchor"] == pytest.approx(-0.1)
    assert packet["ttft_over_naive"] == pytest.approx(1.1), "of the same model's naive, question by question"
    assert made["base", "naive"]["answered_minus_full"] == pytest.approx(-1 / 3)
    assert set(packet) >= set(passages.COLUMNS)


def test_models_are_asked_for_what_they_were_trained_for() -> None:
    chosen = argparse.Namespace(model="m", adapter=["a"], packet=["p", "q"])
    assert [(arm.name, arm.settings) for arm in passages.arms(chosen)] == [
        ("m", (FULL, NAIVE, ANCHOR)),
        ("a", (FULL, NAIVE)),
        ("p", (FULL, NAIVE, PACKET)),
        ("q", (FULL, NAIVE, PACKET)),
    ]


def test_a_chunk_as_a_passage_is_cut_into_the_same_chunk() -> None:
    def encode(text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    chunker = Chunker(encode, max_tokens=80)
    for text in ("One line.", "A first sentence is here. " * 6):
        for chunk in chunker.chunks(passages.Document("d", text, "Title")):
            (again,) = chunker.chunks(passages._passage(chunk))
            assert isinstance(again, Chunk) and again.text == chunk.text
            np.testing.assert_array_equal(again.tokens, chunk.tokens)


def test_a_set_that_is_not_there_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert passages.main(["--adapter", "a", "--data", str(tmp_path), "--sets", "other"]) == 1
    assert "no set 'other'" in capsys.readouterr().err
