"""The benchmark of compression: its model over arrays, its questions, and its rows."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compress
from benchmarks.compression import condense, memory
from benchmarks.compression.case import NEEDLE, Case, cases
from benchmarks.compression.decode import decode_rate
from benchmarks.compression.laboratory import Laboratory
from ragjax.core import Answer, ConfigError, Timings
from ragjax.core.compression import Compression, Graph
from ragjax.engine import Engine
from tests.support import tiny
from tests.support.matrix import few

TOKENS = np.random.default_rng(3).permutation(256)[:90].astype(np.int32)
SAID = [5, 80, 200]


@pytest.fixture(scope="module")
def laboratory() -> Laboratory:
    return Laboratory(tiny.decoder(), 128, 4)


def test_logits_over_everything_are_the_models(laboratory: Laboratory) -> None:
    prefill = laboratory.prefill(TOKENS)
    want = np.asarray(tiny.decoder().logits(jnp.asarray(np.concatenate([TOKENS, SAID]).astype(np.int32))))
    np.testing.assert_allclose(prefill.logits_V, want[len(TOKENS) - 1], atol=1e-4)
    found = laboratory.logits(prefill, laboratory.everything(prefill), SAID)
    np.testing.assert_allclose(found, want[len(TOKENS) :], atol=1e-4)


def test_attention_that_tokens_receive_sums_to_the_rows(laboratory: Laboratory) -> None:
    prefill = laboratory.prefill(TOKENS)
    np.testing.assert_allclose(np.asarray(prefill.mass_LNK).sum(1), len(TOKENS), rtol=1e-4)


@pytest.mark.parametrize("method", compress.METHODS)
def test_budgets_hold_and_the_last_tokens_stay(laboratory: Laboratory, method: str) -> None:
    prefill = laboratory.prefill(TOKENS)
    for graph in (None, Graph(), Graph(edges="qk")):
        kept = laboratory.keep(prefill, Compression(method, 40, graph, window=8))
        mask = np.asarray(kept.kept_LKN)
        assert mask.sum(-1).tolist() == [[number] * 2 for number in kept.kept_L]
        assert kept.kept_L.sum() == 40 * len(mask)
        assert mask[..., 82:90].all() and not mask[..., 90:].any()


def test_what_is_dropped_is_not_seen(laboratory: Laboratory) -> None:
    """Another prompt's tokens at the dropped places change nothing, as long as the kept KV is the same."""
    prefill = laboratory.prefill(TOKENS)
    kept = laboratory.keep(prefill, Compression("streaming", 40, window=8)).kept_LKN
    before = laboratory.logits(prefill, kept, SAID)
    dropped = ~np.asarray(kept).swapaxes(1, 2)[..., None]
    changed = replace(prefill, k_LNKD=jnp.where(dropped, 9.0, prefill.k_LNKD))
    np.testing.assert_array_equal(laboratory.logits(changed, kept, SAID), before)
    everything = laboratory.everything(prefill)
    assert np.abs(laboratory.logits(prefill, everything, SAID) - before).max() > 0.1


def test_rows_compare_with_the_scorer_alone(laboratory: Laboratory) -> None:
    found = [Case(np.roll(TOKENS, 7 * i), ("a",)) for i in range(3)]
    settings = {
        ("streaming", graph, 40): Compression("streaming", 40, compress.GRAPHS[graph], window=8)
        for graph in ("none", "mutual")
    }
    rows = list(compress.rows(laboratory, tiny.byte_tokenizer(), frozenset(), "any", found, settings))
    assert all(set(row) <= set(compress.COLUMNS) for row in rows)
    plain, graph = rows
    assert plain["kl"] > 1e-3 and plain["kept_tokens"] == 40 and plain["n"] == 3 and "kl_change" not in plain
    assert graph["kl_change"] == pytest.approx(graph["kl"] - plain["kl"])
    assert plain["bytes"] == 40 * 3 * 2 * 16 * 2 * 2
    ends = frozenset(range(260))
    with pytest.raises(ConfigError, match="two tokens"):
        list(compress.rows(laboratory, tiny.byte_tokenizer(), ends, "any", found, settings))


def test_needles_stand_at_their_depths(tmp_path: Path) -> None:
    folder = tmp_path / NEEDLE
    folder.mkdir()
    hay = " ".join(f"Sentence {i}." for i in range(400))
    (folder / "haystack.jsonl").write_text(json.dumps({"text": hay}) + "\n")
    needles = [{"needle": "The key is 7.", "question": "Which?", "answers": ["7"], "depth": d} for d in (0, 0.5, 1)]
    (folder / "needles.jsonl").write_text("".join(json.dumps(needle) + "\n" for needle in needles))
    tokenizer = tiny.byte_tokenizer()
    texts = [tokenizer.decode(case.tokens.tolist()) for case in cases(tokenizer, tmp_path, NEEDLE, 3, 900)]
    places = [text.index("The key is 7.") / len(text) for text in texts]
    assert places[0] < places[1] < places[2]
    assert all(text.rstrip().endswith("assistant") or "Which?" in text for text in texts)


def test_rates_add_up() -> None:
    timings = Timings(ttft=100.0, total=600.0)
    answer = Answer("", "length", tuple(range(11)), 1, 0, "prefix", None, (), timings)
    assert decode_rate([answer, answer]) == pytest.approx(40)


@pytest.mark.slow
def test_pages_of_a_request_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "load", lambda _: tiny.engine(pages=100, lookup=0))
    chosen = compress.options(
        ["--part", "memory", "--context", "160", "--budgets", "48", "--methods", "snapkv,pyramidkv"]
    )
    rows = list(memory.rows(chosen))
    assert all(set(row) == set(memory.COLUMNS) for row in rows)
    whole, snapkv, pyramidkv = rows[:3]
    assert whole["pages"] in (160 // tiny.PAGE, 160 // tiny.PAGE + 1) and whole["share"] == 1
    assert snapkv["pages"] == 48 // tiny.PAGE + 1
    assert snapkv["pages"] <= pyramidkv["pages"] < whole["pages"]
    assert snapkv["bytes"] == snapkv["pages"] * tiny.PAGE * tiny.CONFIG.kv_bytes_per_token(4)


@pytest.mark.parametrize("flags", [["--methods", "zip"], ["--graphs", "zip"], ["--budgets", "8"], ["--part", "zip"]])
def test_flags_that_cannot_work_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        compress.options(flags)


@pytest.mark.slow
@pytest.mark.parametrize("everything", few([False, True], [False]))
def test_condensed_chunks_are_measured_beside_whole_ones(
    everything: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(*flags: str) -> argparse.Namespace:
        return compress.options(
            ["--part", "condense", "--data", str(tmp_path), "--limit", "2", "--tokens", "4", *flags]
        )

    folder = tmp_path / "text" / "small"
    folder.mkdir(parents=True)
    texts = [
        {"id": f"p{i}", "title": f"T{i}", "text": f"The ferry number {i} leaves at {i} o'clock in the morning."}
        for i in range(4)
    ]
    lines = [
        {
            "id": f"q{i}",
            "question": f"When leaves ferry {i}?",
            "answers": [f"{i} o'clock"],
            "passages": texts[i : i + 3],
        }
        for i in range(2)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.setattr(condense, "packaged_encoder", tiny.HashedEncoder)
    monkeypatch.setattr(
        Engine, "load", lambda *_, storage, **__: tiny.engine(host_bytes=1 << 22, at_rest=storage.at_rest)
    )
    some = [way for way in condense.WAYS if way.strategy in ("naive", "blend") and way.share in (1, 0.25)]
    measured = condense.WAYS if everything else some
    rows = list(condense.rows(options(), "small", measured))
    assert len(rows) == len(measured) and all(row.keys() <= set(condense.COLUMNS) for row in rows)
    found = {(row["strategy"], row["chosen_by"], round(row["kept_share"], 2), row["at_rest"]): row for row in rows}
    naive = found["naive", "all", 1.0, "raw"]
    assert naive["bytes_share"] == 1.0 and naive["n"] == 2
    assert 0.2 < found["naive", "repeat", 0.25, "raw"]["bytes_share"] < 0.3
    assert found["naive", "repeat", 0.25, "raw"]["kl"] != naive["kl"] != found["naive", "all", 1.0, "int8"]["kl"]
    assert found["naive", "all", 1.0, "int8"]["bytes_share"] < 0.5
    assert found["blend", "all", 1.0, "raw"].get("over_blend") is None

    ways = [way for way in condense.WHOLE if way.strategy in ("naive", "blend") and way.at_rest != "int8"]
    whole = {(row["strategy"], row["at_rest"]): row for row in condense.rows(options(), "small", ways)}
    assert whole.keys() == {("blend", "raw"), ("naive", "raw"), ("naive", "int4")}
    assert whole["naive", "int4"]["bytes_share"] < found["naive", "all", 1.0, "int8"]["bytes_share"]
    assert whole["naive", "raw"]["kl"] == pytest.approx(naive["kl"]) and "over_raw" not in whole["naive", "raw"]
    change = whole["naive", "int4"]["kl"] - naive["kl"]
    assert whole["naive", "int4"]["over_raw"] == pytest.approx(change) and abs(change) > 0
