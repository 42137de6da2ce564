"""The benchmark of compression: its model over arrays, its questions, and its rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compress
from benchmarks.compression.case import NEEDLE, Case, cases
from benchmarks.compression.laboratory import Laboratory
from ragjax.core import ConfigError
from ragjax.core.compression import Compression, GraphKV
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
    for graph in (None, GraphKV()):
        kept = laboratory.keep(prefill, Compression(method, 40, graph, window=8))
        mask = np.asarray(kept.kept_LKN)
        assert (mask.sum(-1) == 40).all() and kept.tokens == 40
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
