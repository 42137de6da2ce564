"""`e2e`: whole models on the bare runner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import e2e
from benchmarks.common import gpu
from benchmarks.common.machine import Ceilings
from benchmarks.latency import bare
from benchmarks.latency.bare import (
    FULL,
    LLAMA,
    QWEN,
    REHEARSAL,
    TINY,
    Layout,
    Ours,
    Pass,
    cut,
    hf_config,
    random_decoder,
)
from ragjax.core import NEVER
from ragjax.models.decoder import Decoder, Weight
from tests.support.checks import FakeRival
from tests.support.forward import dense_logits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours(TINY, REHEARSAL)


LAYOUT = Layout(128, 32, 8, 16)


def dense(tokens: np.ndarray) -> np.ndarray:
    return np.asarray(dense_logits(random_decoder(TINY, "float32"), jnp.asarray(tokens)))


@pytest.fixture(scope="module")
def whole(ours: Ours) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a prompt and three after it, and logits of the plain forward."""
    tokens = ours.tokens(131, 0)
    return tokens, dense(tokens)


def near(got: np.ndarray, what: np.ndarray) -> bool:
    return bool(np.abs(got - what).max() <= 1e-4 * np.abs(what).max())


def test_full_pass_and_decoding_equal_the_plain_forward(ours: Ours, whole: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, what = whole
    assert near(ours.prefill(LAYOUT.full(), tokens[:128])[0], what[127])
    tails = [LAYOUT.table(LAYOUT.full().spans)]
    for i in range(3):
        got = ours.next_tokens([LAYOUT], tails, [tokens[128 + i : 129 + i]], i)
        assert near(got[0], what[128 + i])


def test_recomputing_everything_equals_the_plain_forward(ours: Ours, whole: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, what = whole
    ours.prefill(LAYOUT.chunks(), tokens[:120])
    half = ours.prefill(LAYOUT.recompute(0.5), pick(LAYOUT.recompute(0.5), tokens))
    assert np.isfinite(half).all() and not near(half[0], what[127])
    once = LAYOUT.recompute(1.0)
    assert near(ours.prefill(once, pick(once, tokens))[0], what[127])


def pick(one: Pass, tokens: np.ndarray) -> np.ndarray:
    return tokens[one.order]


def test_naive_equals_the_plain_forward_of_a_single_chunk(ours: Ours) -> None:
    layout = Layout(64, 32, 8, 16)  # system of 24, a chunk of 32, a question
    tokens = ours.tokens(64, 5)
    ours.prefill(layout.chunks(), tokens[:56])
    assert near(ours.prefill(layout.naive(), tokens[56:])[0], dense(tokens)[63])


def test_chunks_are_moved_to_their_places() -> None:
    spans = LAYOUT.naive().spans
    assert [s.offset for s in spans] == [0, 0, 32, 64, 0]
    live = np.concatenate([s.indices for s in LAYOUT.recompute(0.15).spans])
    assert sorted(live[live < NEVER]) == list(range(128))
    fresh = LAYOUT.recompute(0.15).spans[-2]
    assert len(fresh.indices) == 18 and fresh.run.pages[0] == LAYOUT.fresh_page


def test_the_floor_counts_the_pairs_that_see_each_other_alone() -> None:
    """Chunks that do not see one another take no products between them."""
    limits = Ceilings(1.0, 1e3, 1.0)
    whole, apart = LAYOUT.full(), LAYOUT.chunks()
    a_pair = 4 * TINY.num_heads * TINY.head_dim * TINY.num_layers / 1e9
    a_row = e2e.floor_ms(TINY, [replace(whole, order=whole.order[:1])], limits) - a_pair
    system, chunks = 24, 3 * [32]
    seen = system * (system + 1) // 2 + sum(n * system + n * (n + 1) // 2 for n in chunks)
    assert LAYOUT.starts == [0, 24, 56, 88, 120]
    assert e2e.floor_ms(TINY, [apart], limits) == pytest.approx(120 * a_row + seen * a_pair)
    assert e2e.floor_ms(TINY, [whole], limits) == pytest.approx(128 * a_row + 128 * 129 // 2 * a_pair)


def test_requests_side_by_side_decode_as_alone(ours: Ours) -> None:
    setting = ours.setting
    apart = [Layout(32, 32, 8, 16, first) for first in e2e._first_pages(setting)]
    assert len(apart) >= 4
    prompts = [ours.tokens(33, 10 + i) for i in range(len(apart))]
    for layout, tokens in zip(apart, prompts, strict=True):
        ours.prefill(layout.full(), tokens[:32])
    tails = [layout.table(layout.full().spans) for layout in apart]
    got = ours.next_tokens(apart, tails, [tokens[32:] for tokens in prompts], 0)
    for logits, tokens in zip(got, prompts, strict=True):
        assert near(logits, dense(tokens)[32])


def test_passes_fit_buckets_and_pool_at_full_size() -> None:
    full = FULL
    for config in full.models.values():
        grid = full.grid(config)
        group = 1 << (config.num_groups - 1).bit_length()
        assert all(shape.block * group == 128 and shape.rows % shape.block == 0 for shape in grid.rows[1:])
    buckets = full.rows
    for context in full.contexts:
        layout = Layout(context, full.chunk, full.question, full.page)
        assert layout.starts[1] == 480 and np.diff(layout.starts[1:-1]).tolist() == [512] * (context // 512 - 2)
        some = layout.recompute(e2e.SHARE)
        assert len(some.order) <= max(buckets)
        used = {p for s in some.spans for p in s.run.pages} | set(layout.runs[-1].pages)
        assert max(used) <= full.entries and sum(len(s.run.pages) for s in some.spans) + 2 <= full.entries
        for one in (layout.full(), layout.chunks(), some, layout.naive()):
            assert len(np.unique(one.slot)) == len(one.slot) == len(one.order)
            padded = sum(cut(len(one.order), buckets))
            assert padded >= len(one.order) and (padded <= 1.3 * len(one.order) or padded <= 1280)
    assert len(e2e._first_pages(full)) == 8


@pytest.mark.parametrize(("n", "what"), [(1, [64]), (64, [64]), (70, [64, 64]), (700, [1280]), (8192, [4096, 4096])])
def test_rows_are_cut_into_buckets(n: int, what: list[int]) -> None:
    assert cut(n, FULL.rows) == what


def test_real_sizes_are_right() -> None:
    for config, billions in ((LLAMA, 8.03), (QWEN, 7.62)):
        shapes = [w.shape for w in weights_of(config)]
        assert sum(int(np.prod(s)) for s in shapes) == pytest.approx(billions * 1e9, rel=5e-3)


def weights_of(config: Any) -> Iterator[Any]:
    decoder = Decoder.abstract(config)
    for owner in (decoder, *decoder.layers):
        yield from (w for w in vars(owner).values() if isinstance(w, Weight))


def test_random_weights_are_on_the_device_and_not_equal() -> None:
    decoder = random_decoder(TINY, "bfloat16")
    one, other = (np.asarray(layer.qkv[...].astype(jnp.float32)) for layer in list(decoder.layers)[:2])
    assert 0.8 < one.std() * 8 < 1.2 and not np.array_equal(one, other)
    assert (np.asarray(decoder.norm[...]) == 1).all() and decoder.head is not None


def test_e2e_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: Ours) -> None:
    runner = ours.runner
    monkeypatch.setattr(gpu, "Rival", FakeRival)
    monkeypatch.setattr(bare, "make_runner", lambda *_: runner)
    assert e2e.main(["--platform", "cpu", "--quick", "--json", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    told = {(r["system"], r["strategy"], r["state"], r["batch"]) for r in rows}
    assert {("ragjax", "full", "cold", 1), ("ragjax", "naive", "cold", 1), ("ragjax", "naive", "warm", 1)} <= told
    assert {("ragjax", "recompute-15", "warm", 1), ("transformers", "full", "cold", 1)} <= told
    full = next(r for r in rows if (r["system"], r["strategy"], r["state"]) == ("ragjax", "full", "cold"))
    assert full["ttft_ratio_transformers"] == pytest.approx(100.0 / full["ttft_ms"])
    assert all(r["decode_tokens_per_s"] > 0 for r in rows if r["state"] == "decode")
    assert {r["attention"] for r in rows if r["system"] == "ragjax"} == {"xla"}


def test_logits_that_are_not_finite_are_a_failure(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ours, "prefill", lambda *_: np.full((1, 4), np.nan))
    with pytest.raises(ArithmeticError, match="not finite"):
        ours.first_token([LAYOUT.naive()], 1)


@pytest.mark.long
@pytest.mark.skipif(gpu.torch_python() is None, reason="no interpreter has PyTorch")
def test_transformers_generates_with_random_weights() -> None:
    rival = gpu.Rival(e2e.WORKER)
    try:
        for config in (TINY, replace(TINY, family="qwen2", qkv_bias=True)):
            shapes = {"family": config.family, "config": hf_config(config), "device": "cpu", "dtype": "float32"}
            told = rival.ask({"op": "load", **shapes}, 100)
            assert told["parameters"] == sum(int(np.prod(w.shape)) for w in weights_of(config))
            found = rival.ask({"op": "generate", "context": 24, "batch": 2, "new": 5, "runs": 1}, 60)
            assert found["ttft_ms"] > 0
    finally:
        rival.close()
