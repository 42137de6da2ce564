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
from benchmarks.compression import decode, rest
from benchmarks.compression.case import NEEDLE, Case, cases
from benchmarks.compression.decode import decode_rate
from benchmarks.compression.laboratory import Laboratory
from ragjax.core import Answer, ConfigError, Timings
from ragjax.core.compression import Compression, GraphKV
from ragjax.engine import Engine
from tests.support import tiny
from tests.support.forward import dense_logits

TOKENS = np.random.default_rng(3).permutation(256)[:90].astype(np.int32)
SAID = [5, 80, 200]


@pytest.fixture(scope="module")
def laboratory() -> Laboratory:
    return Laboratory(tiny.decoder(), 128, 4)


@pytest.mark.slow
def test_logits_over_everything_are_the_models(laboratory: Laboratory) -> None:
    prefill = laboratory.prefill(TOKENS)
    want = np.asarray(dense_logits(tiny.decoder(), jnp.asarray(np.concatenate([TOKENS, SAID]).astype(np.int32))))
    np.testing.assert_allclose(prefill.logits_V, want[len(TOKENS) - 1], atol=1e-4)
    found = laboratory.logits(prefill, laboratory.everything(prefill), SAID)
    np.testing.assert_allclose(found, want[len(TOKENS) :], atol=1e-4)


def test_attention_that_tokens_receive_sums_to_the_rows(laboratory: Laboratory) -> None:
    prefill = laboratory.prefill(TOKENS)
    np.testing.assert_allclose(np.asarray(prefill.mass_LNK).sum(1), len(TOKENS), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", compress.METHODS)
def test_budgets_hold_and_the_last_tokens_stay(laboratory: Laboratory, method: str) -> None:
    prefill = laboratory.prefill(TOKENS)
    for graph in (None, GraphKV(), GraphKV(edges="kv")):
        kept = laboratory.keep(prefill, Compression(method, 40, graph, window=8))
        mask = np.asarray(kept.kept_LKN)
        assert mask.sum(-1).tolist() == [[number] * 2 for number in kept.kept_L]
        assert kept.kept_L.sum() == 40 * len(mask)
        assert mask[..., 82:90].all() and not mask[..., 90:].any()


def test_what_is_dropped_is_not_seen(laboratory: Laboratory) -> None:
    """Another prompt's tokens at the dropped places change nothing, as long as the kept KV is the same."""
    prefill = laboratory.prefill(TOKENS)
    kept = laboratory.keep(prefill, Compression("knorm", 40, window=8)).kept_LKN
    before = laboratory.logits(prefill, kept, SAID)
    dropped = ~np.asarray(kept).swapaxes(1, 2)[..., None]
    changed = replace(prefill, k_LNKD=jnp.where(dropped, 9.0, prefill.k_LNKD))
    np.testing.assert_array_equal(laboratory.logits(changed, kept, SAID), before)
    everything = laboratory.everything(prefill)
    assert np.abs(laboratory.logits(prefill, everything, SAID) - before).max() > 0.1


def test_rows_compare_with_the_scorer_alone(laboratory: Laboratory) -> None:
    found = [Case(np.roll(TOKENS, 7 * i), ("a",), 8) for i in range(3)]
    settings = {
        ("knorm", graph, 40): Compression("knorm", 40, compress.GRAPHS[graph], window=8) for graph in ("none", "mutual")
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
    chosen = compress.BENCHMARK.parse(
        ["--part", "memory", "--context", "160", "--budgets", "48", "--methods", "snapkv,pyramidkv"]
    )
    rows = list(decode.memory_rows(chosen))
    assert all(set(row) == set(decode.MEMORY_COLUMNS) for row in rows)
    whole, snapkv, pyramidkv = rows[:3]
    assert whole["pages"] in (160 // tiny.PAGE, 160 // tiny.PAGE + 1) and whole["share"] == 1
    assert snapkv["pages"] == 48 // tiny.PAGE + 1
    assert snapkv["pages"] <= pyramidkv["pages"] < whole["pages"]
    assert snapkv["bytes"] == snapkv["pages"] * tiny.PAGE * tiny.CONFIG.kv_bytes_per_token(4)


@pytest.mark.slow
def test_chunks_encoded_at_rest_are_measured_beside_exact_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def options(*flags: str) -> argparse.Namespace:
        return compress.BENCHMARK.parse(
            ["--part", "rest", "--data", str(tmp_path), "--limit", "2", "--tokens", "4", *flags]
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
    monkeypatch.setattr(rest, "packaged_encoder", tiny.HashedEncoder)
    monkeypatch.setattr(
        Engine, "load", lambda *_, storage, **__: tiny.engine(host_bytes=1 << 22, at_rest=storage.at_rest)
    )
    ways = [way for way in rest.WAYS if way.strategy in ("naive", "blend")]
    found = {(row["strategy"], row["at_rest"]): row for row in rest.rows(options(), "small", ways)}
    assert found.keys() == {("blend", "raw"), ("naive", "raw"), ("naive", "int8"), ("naive", "int4")}
    assert all(row.keys() <= set(rest.COLUMNS) for row in found.values())
    naive, int8, int4 = (found["naive", kind] for kind in ("raw", "int8", "int4"))
    assert naive["bytes_share"] == 1.0 and naive["n"] == 2 and "over_raw" not in naive
    assert int4["bytes_share"] < int8["bytes_share"] < 0.5 and naive["kl"] != int8["kl"]
    assert found["blend", "raw"].get("over_blend") is None
    assert int4["over_raw"] == pytest.approx(int4["kl"] - naive["kl"]) and abs(int4["over_raw"]) > 0
