"""The GPU check, rehearsed on a CPU: masks, the correctness matrix, timings, targets, peers and whole models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import e2e, envs, gpu, kernels, masks, peers, report
from benchmarks.masks import Mask
from ragjax.core import NEVER
from ragjax.kernels.attention import op as attention
from ragjax.kernels.attention.op import Backend
from ragjax.kernels.table import visible
from ragjax.kernels.view import View
from tests.support.cases import HOPPER
from tests.support.imports import HEAVY, import_without

ROOT = Path(__file__).parents[2]
SMALL = kernels.Model(
    heads=4, kv_heads=2, dim=64, dtype="float32", lengths=(256,), page_sizes=(64,), recomputed=64, batch=2,
    context=128, backward=128, pieces=(32, 64), loop=2,
)  # fmt: skip
SHAPE = kernels.Shape(64, "float32", 4, 16, 8, 32)
LIMITS = gpu.Ceilings(100.0, 1.0)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "STORE", tmp_path / "store")
    monkeypatch.setattr(gpu, "ceilings", lambda quick: LIMITS)


@pytest.fixture(scope="module")
def bench() -> kernels.Bench:
    """Compiled programs of the small model, shared."""
    return kernels.Bench(SMALL, samples=1)


def record_of(part: str = "kernels", seconds: float = 100.0, out: Path | None = None) -> gpu.Record:
    chosen = gpu.Options(part, "cpu", True, seconds, out, None)
    return gpu.Record(chosen, report.Header(part, "command", {}, {"python": "3"}), gpu.Clock(seconds))


# --------------------------------------------------------------------------------------------- masks


def some_masks() -> list[Mask]:
    cut = {"low": 24, "high": 60}
    return [
        masks.causal(256),
        masks.chunks(256, join=16, **cut),
        masks.tree(256, join=16, **cut),
        masks.graph(256),
        masks.recompute(256, 64, moved=False, **cut),
        masks.recompute(256, 64, moved=True, **cut),
        masks.patched(256, 50, 64, **cut),
        masks.decode(3, 128, moved=True, **cut),
    ]


def seen(mask: Mask) -> np.ndarray:
    """By the kernels' own rule, bool [T, N]."""
    rule = visible(masks.rows_of(mask), masks.entries_of(mask, 64))
    return np.asarray(rule).reshape(len(mask.index_T), -1)


@pytest.mark.parametrize("mask", some_masks(), ids=lambda m: m.name)
def test_visible_pairs_are_counted_right(mask: Mask) -> None:
    assert masks.visible_pairs(mask) == seen(mask).sum()
    assert masks.pairs(mask) >= masks.visible_pairs(mask) > 0
    assert mask.is_causal == (mask.name == "causal")
    assert (mask.offset_N.reshape(-1, 64) == mask.offset_N[::64, None]).all()  # a page has one offset


TREES = [masks.tree(256, low=12, high=40, join=16, seed=3), masks.graph(256, seed=3)]


@pytest.mark.parametrize("mask", TREES, ids=lambda m: m.name)
def test_what_a_row_of_a_tree_sees_is_one_path(mask: Mask) -> None:
    """Ancestors form a chain: of two keys that a row sees, the later one sees the earlier one."""
    got, join = seen(mask), int(mask.hide_until_N.max())
    widths = []
    for q in range(join):
        path = np.flatnonzero(got[q])
        assert path[-1] == q and path[0] == 0
        assert (got[np.ix_(path, path)] == np.tri(len(path), dtype=bool)).all()
        widths.append(len(path))
    assert got[join:, :join].all() and join < 256
    assert min(w / (q + 1) for q, w in enumerate(widths)) < 0.6 and got.sum() < 0.9 * 256 * 257 / 2


def test_chunks_see_the_system_prompt_and_themselves() -> None:
    mask = masks.chunks(512, low=32, high=64, join=64)
    got, ends = seen(mask), np.unique(mask.hide_from_N[mask.hide_from_N > 0])
    system = int(np.argmax(mask.hide_until_N > 0))
    chunk_N = np.searchsorted(ends, np.arange(512), side="right")
    for q in range(system, 448, 13):
        own = chunk_N[:448] == chunk_N[q]
        assert (got[q, system : q + 1] == own[system : q + 1]).all() and got[q, :system].all()
    assert got[448:, :448].all() and len(ends) > 4


def test_what_is_recomputed_stands_once() -> None:
    mask = masks.patched(256, 50, 64)
    live = mask.index_N[mask.index_N < NEVER]
    assert sorted(live) == list(range(256)) and np.isin(mask.index_T, mask.index_N[256:]).all()
    assert masks.visible_pairs(mask) == masks.visible_pairs(masks.recompute(256, 50, moved=True))


def test_offsets_move_chunks_from_behind_the_first() -> None:
    offset = masks.recompute(1024, 64, moved=True, low=100, high=200).offset_N
    assert offset[0] == 0 and (offset >= 0).all() and len(np.unique(offset)) > 3
    assert not masks.recompute(1024, 64, moved=False).offset_N.any()


# ---------------------------------------------------------------------------------------- correctness


def wrong(change: Callable[[jax.Array, View], tuple[jax.Array, jax.Array]]) -> Backend:
    return Backend(change, lambda *_: None)


def shifted_rotation(q: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    entries = replace(view.entries, offset_AS=-view.entries.offset_AS)
    return attention.BACKENDS["reference"].attend(q, replace(view, entries=entries))


def without_intervals(q: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    entries = replace(view.entries, hide_from_ASC=jnp.zeros_like(view.entries.hide_from_ASC),
                    hide_until_ASC=jnp.zeros_like(view.entries.hide_until_ASC))  # fmt: skip
    return attention.BACKENDS["reference"].attend(q, replace(view, entries=entries))


def reads_unused_slots(q: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    out, lse = attention.BACKENDS["reference"].attend(q, view)
    page = view.pages.v_LPKCD[view.layer, view.entries.page_AS[0, 0]]
    return out + 0.0 * page.sum().astype(out.dtype), lse


def base_two(q: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    out, lse = attention.BACKENDS["reference"].attend(q, view)
    return out, lse / jnp.log(2.0)


def test_right_backends_pass_and_refusals_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows = kernels.correctness(record_of(), (SHAPE,))
    assert {r["backend"] for r in rows} == {"reference", "xla"}
    assert all(r["cases"] == len(kernels.CONTENTS) and r["wrong"] == 0 for r in rows)
    assert kernels.show_correctness(rows)
    assert "triton does not serve 1 of 1 shapes" in capsys.readouterr().out


@pytest.mark.parametrize("change", [shifted_rotation, without_intervals, reads_unused_slots, base_two])
def test_a_wrong_backend_is_found(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in attention.BACKENDS if n != "reference"]:
        monkeypatch.delitem(attention.BACKENDS, name)  # type: ignore[arg-type]
    monkeypatch.setitem(attention.BACKENDS, "wrong", wrong(change))  # type: ignore[arg-type]
    rows = kernels.correctness(record_of(), (SHAPE,))
    assert next(r for r in rows if r["backend"] == "reference")["wrong"] == 0
    assert next(r for r in rows if r["backend"] == "wrong")["wrong"] > 0
    assert not kernels.show_correctness(rows)


def test_a_backend_that_does_not_compile_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(q: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError("no such instruction")

    for name in list(attention.BACKENDS):
        monkeypatch.delitem(attention.BACKENDS, name)  # type: ignore[arg-type]
    monkeypatch.setitem(attention.BACKENDS, "broken", wrong(broken))  # type: ignore[arg-type]
    record = record_of()
    rows = kernels.correctness(record, (SHAPE,))
    assert "no such instruction" in rows[0]["failed"]
    assert not kernels.show_correctness(rows)


def test_what_there_was_no_time_for_is_not_right() -> None:
    record = record_of(seconds=1e-9)
    rows = kernels.correctness(record, (SHAPE,))
    assert {r["failed"] for r in rows} == {"no time"} and len(record.skipped) == len(rows)
    assert not kernels.show_correctness(rows)


def test_the_matrix_covers_what_it_should() -> None:
    for prefill in (True, False):
        own = [s for s in kernels.SHAPES if (s.block_rows > 1) == prefill]
        assert {s.dim for s in own} == {64, 128} and {s.page_size for s in own} == {64, 128}
        for dtype in ("bfloat16", "float16", "float32"):
            assert {s.groups for s in own if s.dtype == dtype} == {1, 4, 7, 8}
            assert {s.dim for s in own if s.dtype == dtype} == {64, 128}
        padded = [s.block_rows * (1 << (s.groups - 1).bit_length()) for s in own if s.block_rows > 1]
        assert set(padded) <= {64, 128}


# --------------------------------------------------------------------------------------------- timing


def test_every_mask_suits_the_kernel_at_full_size() -> None:
    bench = kernels.Bench(kernels.FULL)
    bench.__dict__["device"] = HOPPER
    for page_size in kernels.FULL.page_sizes:
        for mask in (*kernels.plan(kernels.FULL), masks.patched(32768, kernels.FULL.recomputed, page_size)):
            if mask.name == "graph" or (page_size == 128 and len(mask.index_N) == 16384):
                continue  # shapes that others have as well
            block = 1 if mask.name.startswith("decode") else 32
            assert bench.block_rows("triton", mask, page_size) == block, mask.name
            assert "triton" in bench.backends(mask, page_size)


def test_plan_is_what_the_targets_need() -> None:
    model = kernels.FULL
    made = list(kernels.plan(model))
    assert len({(m.name, len(m.index_N)) for m in made}) == len(made)
    assert {"chunks", "tree", "causal", "graph"} <= {m.name for m in made if len(m.index_N) == 16384}
    some = next(m for m in made if m.name == "recompute-moved")
    assert 0.15 <= len(some.index_T) / 32768 <= 0.155
    assert len(np.unique(some.offset_N)) > 30
    for mask in made:
        if mask.name in ("chunks", "tree"):
            widths = np.diff(np.unique(np.concatenate([[0], mask.hide_from_N, mask.hide_until_N])))
            assert widths.max() > 256


def test_spot_check_finds_a_wrong_row(bench: kernels.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "ALIGN", 64)
    mask = masks.recompute(256, 64, moved=True, low=32, high=64)
    assert len(np.unique(mask.offset_N)) == 3
    view = masks.view_of(mask, bench.pages(4, 64), bench.table, bench.scale, 32)
    q = bench.queries(64)
    out = bench.program("xla", q, view, 0)(q, view)[0]
    assert kernels.spot_error(mask, q, out, view) < 1e-5
    assert kernels.spot_error(mask, q, out.at[-1, 0, 3].add(1.0), view) > 1e-2
    assert kernels.spot_error(replace(mask, offset_N=np.zeros_like(mask.offset_N)), q, out, view) > 1e-2


def test_tflops_count_visited_tiles(bench: kernels.Bench) -> None:
    mask = masks.chunks(256, low=32, high=64, join=32)
    view = bench.view(mask, 64, 32)
    tiles = seen(mask).reshape(8, 32, 4, 64).any((1, 3)).sum()
    found = bench.figures(mask, view, ms=2.0)
    assert found["tflops"] == pytest.approx(4 * tiles * 32 * 64 * 64 * 4 / 2e-3 / 1e12)
    assert found["visited_share"] == tiles / 32 and found["visible_share"] == seen(mask).mean()


def test_decode_counts_bytes_of_keys_and_values(bench: kernels.Bench) -> None:
    mask = masks.decode(2, 128, moved=False)
    found = bench.figures(mask, bench.view(mask, 64, 1), ms=1.0)
    assert found["gb_s"] == pytest.approx(2 * 2 * 128 * 2 * 64 * 4 / 1e-3 / 1e9)
    assert found["visible_share"] == found["visited_share"] == 1.0


def test_chained_calls_are_calls_in_a_row() -> None:
    assert float(jax.jit(gpu.chained(lambda x, y: x * y, 3))(jnp.float32(1.0), jnp.float32(2.0))) == 8.0
    assert gpu.milliseconds(lambda: jnp.zeros(3), samples=1, least_s=1e-3) > 0


def timed(case: str, backend: str = "triton", page: int = 64, **figures: Any) -> dict[str, Any]:
    known = {"case": case, "backend": backend, "page_size": page, "keys": 32768, "rows": 32768, "block_rows": 32}
    return {**known, "peer": None, "ratio": None, "temp_bytes": 10, **figures}


def gate_rows(speed: float, moved_ms: float, gb_s: float, temp: int, entry: int) -> list[report.Row]:
    rows = [timed(c, page=p, ms=1.0, tflops=speed - (p == 128), keys=k)
            for c in ("chunks", "tree") for p in (64, 128) for k in (32768, 16384)]  # fmt: skip
    rows += [timed("recompute-in-place", ms=1.0), timed("recompute-moved", ms=moved_ms)]
    rows += [timed("decode-in-place", gb_s=gb_s, ms=1.0), timed("causal", ms=1.0, tflops=1.0, temp_bytes=temp)]
    return [*rows, timed("block-lists", ms=1.0, largest_list_bytes=entry * 1024 * 512)]


def test_targets_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    limits, model = gpu.Ceilings(4000.0, 700.0), kernels.FULL

    def verdicts(*figures: Any) -> list[bool | None]:
        rows = kernels.with_ratios(gate_rows(*figures))
        return [g["passed"] for g in kernels.gates(rows, limits, model)]

    assert verdicts(290.0, 1.07, 2900.0, 2**29, 4) == [True, None, True, True, True, True]
    assert verdicts(270.0, 1.09, 2700.0, 2**31, 8) == [False, None, False, False, False, False]
    assert [g["passed"] for g in kernels.gates([], limits, model)] == [None] * 6
    one_missing = [r for r in gate_rows(290.0, 1, 1, 1, 4) if (r["case"], r["keys"]) != ("tree", 16384)]
    assert kernels.gates(kernels.with_ratios(one_missing), limits, model)[0]["passed"] is None


def test_a_rehearsal_judges_no_target() -> None:
    assert gpu.gate("speed", "> 1", 2.0, lambda x: x > 1)["passed"] is None


# --------------------------------------------------------------------------------------------- record


def test_rows_are_written_as_they_come_and_found_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.json"
    record = record_of(out=file)
    assert record.row("a", {"case": "a"}, lambda: {"ms": np.float32(2.0), "error": float("inf")})
    document = json.loads(file.read_text())
    assert document["rows"] == [{"case": "a", "ms": 2.0, "error": "inf"}]
    assert list(document) == ["benchmark", "command", "machine", "versions", "rows"]

    def fails() -> Mapping[str, Any]:
        raise RuntimeError("out of memory")

    assert record.row("b", {"case": "b"}, fails) is None
    assert record.failed == ["b"] and "out of memory" in json.loads(file.read_text())["rows"][1]["failed"]
    again = record_of(out=file)
    assert again.has("a") and not again.has("b")
    assert again.row("a", {}, fails) == {"case": "a", "ms": 2.0, "error": "inf"}
    assert again.row("b", {"case": "b"}, lambda: {"ms": 1.0})
    again.finish()
    assert not record_of().has("a")


def test_nothing_is_begun_when_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(seconds=1e-9)
    assert record.row("a", {}, lambda: {"ms": 1.0}) is None
    record.finish()
    assert record.skipped == ["a"] and "no time for 1 measurements (a)" in capsys.readouterr().out


def test_the_file_is_named_by_day_device_and_part(tmp_path: Path) -> None:
    chosen = gpu.options("peers", "x", ["--platform", "cpu", "--out", str(tmp_path)])
    file = gpu.result_file(chosen)
    assert file is not None and file.parent == tmp_path and file.name.endswith("-cpu-peers.json")


@pytest.mark.parametrize("module", [kernels, peers, e2e])
@pytest.mark.parametrize("flags", [["--qui"], ["--seconds", "0"], ["--platform", "tpu"], ["--out", "a", "--json", "b"]])
def test_wrong_flags_are_errors(module: Any, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        module.main(flags)
    assert stop.value.code == 2


def test_version_comes_from_the_project_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "versions", lambda packages: {"jax": "1"})
    assert gpu.versions() == {"jax": "1", "ragjax": "0.1.0"}


# ---------------------------------------------------------------------------------------- whole parts


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, bench: kernels.Bench) -> None:
    monkeypatch.setattr(kernels, "Bench", lambda *_: bench)
    monkeypatch.setattr(peers, "Bench", lambda *_: bench)
    monkeypatch.setattr(kernels, "QUICK_SHAPES", (SHAPE,))
    monkeypatch.setattr(gpu, "milliseconds", lambda work, **_: jax.block_until_ready(work()) is not None and 2.0)


def test_kernels_rehearsal(tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--platform", "cpu", "--quick", "--json", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    cases = {r["case"] for r in rows}
    assert {"correctness", "block-lists", "chunks", "tree", "causal", "graph", "recompute-moved", "gate"} <= cases
    assert {"recompute-in-place", "recompute-patched", "decode-in-place", "decode-moved", "backward"} <= cases
    keys = {"case", "backend", "dtype", "head_dim", "rows", "keys", "visible_share", "ms", "tflops", "peer", "ratio"}
    assert all(keys <= set(r) for r in rows if r["case"] in ("chunks", "tree", "causal", "recompute-moved"))
    moved = next(r for r in rows if r["case"] == "recompute-moved")
    assert (moved["peer"], moved["ratio"]) == (kernels.PRE_ROTATED, 1.0)
    words = capsys.readouterr().out
    assert words.index("ceiling") < words.index("correctness") < words.index("timings") < words.index("targets")


def test_a_wrong_result_ends_with_an_error_after_all_timings(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TOLERANCE", {"float32": (0.0, 0.0, 0.0)})
    monkeypatch.setattr(kernels, "backward", lambda *_: None)
    assert kernels.main(["--platform", "cpu", "--quick", "--json", str(tmp_path / "r.json")]) == 1
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert any(r["case"] == "tree" and r["ms"] == 2.0 for r in rows)


class FakeRival:
    """PyTorch in words."""

    def __init__(self, script: str):
        self.asked: list[str] = []

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        op = request["op"]
        if op == "flex_output":
            raise envs.RivalError("this one cannot")
        answers = {
            "start": {"versions": {"torch": "2"}},
            "flash": {"ms": 12.0},
            "flex": {"ms": 6.0, "mask_ms": 1.0, "visited_pairs": 4096},
            "load": {},
            "generate": {"ttft_ms": 100.0, "decode_tokens_per_s": 10.0},
        }
        assert op != "flex" or {"index_T", "index_N", "hide_from_N", "hide_until_N"} <= set(np.load(request["file"]))
        return answers[op]

    def close(self) -> None:
        pass


def test_peers_rehearsal(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "Rival", FakeRival)
    assert peers.main(["--platform", "cpu", "--quick", "--json", str(tmp_path / "r.json")]) == 1  # the failed checks
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    some = {r["peer"]: r for r in rows if r["case"] == "recompute-moved" and r["backend"] == "xla"}
    assert some[peers.FLASH]["ratio"] == 6.0 and some[peers.FLASH]["peer_form"] == peers.DENSE
    assert some[peers.FLEX]["ratio"] == 3.0 and some[peers.FLEX]["peer_mask_ms"] == 1.0
    assert some[peers.CUDNN]["peer_ms"] == 2.0
    assert [r["measured"] for r in rows if r["case"] == "gate"] == [6.0, 3.0]
    assert sum("this one cannot" in r.get("failed", "") for r in rows) == 3


def test_peers_compare_our_best_page_size() -> None:
    rows = [timed("causal", page=64, ms=4.0), timed("causal", page=128, ms=2.0), timed("causal", peers.FLASH, ms=6.0)]
    ours = [r for r in peers.joined(rows) if r["backend"] == "triton"]
    assert [(r["page_size"], r["ratio"], r["peer_form"]) for r in ours] == [(128, 3.0, peers.EQUAL)]


# ----------------------------------------------------------------------------------------- whole models


@pytest.fixture(scope="module")
def ours() -> e2e.Ours:
    return e2e.Ours(e2e.TINY, e2e.REHEARSAL)


LAYOUT = e2e.Layout(128, 32, 8, 16)


def dense(tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(e2e.random_decoder(e2e.TINY, "float32").logits)(jnp.asarray(tokens)))


@pytest.fixture(scope="module")
def whole(ours: e2e.Ours) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a prompt and three after it, and logits of the plain forward."""
    tokens = ours.tokens(131, 0)
    return tokens, dense(tokens)


def near(got: np.ndarray, what: np.ndarray) -> bool:
    return bool(np.abs(got - what).max() <= 1e-4 * np.abs(what).max())


def test_full_pass_and_decoding_equal_the_plain_forward(ours: e2e.Ours, whole: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, what = whole
    assert near(ours.prefill(LAYOUT.full(), tokens[:128])[0], what[127])
    tails = [LAYOUT.table(LAYOUT.full().spans)]
    for i in range(3):
        got = ours.next_tokens([LAYOUT], tails, [tokens[128 + i : 129 + i]], i)
        assert near(got[0], what[128 + i])


def test_recomputing_everything_equals_the_plain_forward(ours: e2e.Ours, whole: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, what = whole
    ours.prefill(LAYOUT.chunks(), tokens[:120])
    half = ours.prefill(LAYOUT.recompute(0.5), pick(LAYOUT.recompute(0.5), tokens))
    assert np.isfinite(half).all() and not near(half[0], what[127])
    once = LAYOUT.recompute(1.0)
    assert near(ours.prefill(once, pick(once, tokens))[0], what[127])


def pick(one: e2e.Pass, tokens: np.ndarray) -> np.ndarray:
    return tokens[one.order]


def test_naive_equals_the_plain_forward_of_a_single_chunk(ours: e2e.Ours) -> None:
    layout = e2e.Layout(64, 32, 8, 16)  # system of 24, a chunk of 32, a question
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
    limits = gpu.Ceilings(1.0, 1.0)
    whole, apart = LAYOUT.full(), LAYOUT.chunks()
    a_pair = 4 * e2e.TINY.num_heads * e2e.TINY.head_dim * e2e.TINY.num_layers / 1e9
    a_row = e2e.floor_ms(e2e.TINY, [replace(whole, order=whole.order[:1])], limits) - a_pair
    system, chunks = 24, 3 * [32]
    seen = system * (system + 1) // 2 + sum(n * system + n * (n + 1) // 2 for n in chunks)
    assert LAYOUT.starts == [0, 24, 56, 88, 120]
    assert e2e.floor_ms(e2e.TINY, [apart], limits) == pytest.approx(120 * a_row + seen * a_pair)
    assert e2e.floor_ms(e2e.TINY, [whole], limits) == pytest.approx(128 * a_row + 128 * 129 // 2 * a_pair)


def test_requests_side_by_side_decode_as_alone(ours: e2e.Ours) -> None:
    setting = ours.setting
    apart = [e2e.Layout(32, 32, 8, 16, first) for first in e2e._first_pages(setting)]
    assert len(apart) >= 4
    prompts = [ours.tokens(33, 10 + i) for i in range(len(apart))]
    for layout, tokens in zip(apart, prompts, strict=True):
        ours.prefill(layout.full(), tokens[:32])
    tails = [layout.table(layout.full().spans) for layout in apart]
    got = ours.next_tokens(apart, tails, [tokens[32:] for tokens in prompts], 0)
    for logits, tokens in zip(got, prompts, strict=True):
        assert near(logits, dense(tokens)[32])


def test_passes_fit_buckets_and_pool_at_full_size() -> None:
    full = e2e.FULL
    for config in full.models.values():
        grid = full.grid(config)
        group = 1 << (config.num_groups - 1).bit_length()
        assert all(block * group == 128 and rows % block == 0 for rows, block in grid.rows[1:])
    buckets = full.rows
    for context in full.contexts:
        layout = e2e.Layout(context, full.chunk, full.question, full.page)
        assert layout.starts[1] == 480 and np.diff(layout.starts[1:-1]).tolist() == [512] * (context // 512 - 2)
        some = layout.recompute(e2e.SHARE)
        assert len(some.order) <= max(buckets)
        used = {p for s in some.spans for p in s.run.pages} | set(layout.runs[-1].pages)
        assert max(used) <= full.entries and sum(len(s.run.pages) for s in some.spans) + 2 <= full.entries
        for one in (layout.full(), layout.chunks(), some, layout.naive()):
            assert len(np.unique(one.slot)) == len(one.slot) == len(one.order)
            padded = sum(e2e.cut(len(one.order), buckets))
            assert padded >= len(one.order) and (padded <= 1.3 * len(one.order) or padded <= 1280)
    assert len(e2e._first_pages(full)) == 8


@pytest.mark.parametrize(("n", "what"), [(1, [64]), (64, [64]), (70, [64, 64]), (700, [1280]), (8192, [4096, 4096])])
def test_rows_are_cut_into_buckets(n: int, what: list[int]) -> None:
    assert e2e.cut(n, e2e.FULL.rows) == what


def test_real_sizes_are_right() -> None:
    for config, billions in ((e2e.LLAMA, 8.03), (e2e.QWEN, 7.62)):
        shapes = [w.shape for w in weights_of(config)]
        assert sum(int(np.prod(s)) for s in shapes) == pytest.approx(billions * 1e9, rel=5e-3)


def weights_of(config: Any) -> Iterator[Any]:
    decoder = e2e.Decoder.abstract(config)
    for owner in (decoder, *decoder.layers):
        yield from (w for w in vars(owner).values() if isinstance(w, e2e.Weight))


def test_random_weights_are_on_the_device_and_not_equal() -> None:
    decoder = e2e.random_decoder(e2e.TINY, "bfloat16")
    one, other = (np.asarray(layer.qkv[...].astype(jnp.float32)) for layer in list(decoder.layers)[:2])
    assert 0.8 < one.std() * 8 < 1.2 and not np.array_equal(one, other)
    assert (np.asarray(decoder.norm[...]) == 1).all() and decoder.head is not None


def test_e2e_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: e2e.Ours) -> None:
    runner = ours.runner
    monkeypatch.setattr(gpu, "Rival", FakeRival)
    monkeypatch.setattr(e2e, "make_runner", lambda *_: runner)
    assert e2e.main(["--platform", "cpu", "--quick", "--json", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    told = {(r["system"], r["strategy"], r["state"], r["batch"]) for r in rows}
    assert {("ragjax", "full", "cold", 1), ("ragjax", "naive", "cold", 1), ("ragjax", "naive", "warm", 1)} <= told
    assert {("ragjax", "recompute-15", "warm", 1), ("transformers", "full", "cold", 1)} <= told
    full = next(r for r in rows if (r["system"], r["strategy"], r["state"]) == ("ragjax", "full", "cold"))
    assert full["ttft_ratio_transformers"] == pytest.approx(100.0 / full["ttft_ms"])
    assert all(r["decode_tokens_per_s"] > 0 for r in rows if r["state"] == "decode")
    assert {r["attention"] for r in rows if r["system"] == "ragjax"} == {"xla"}


def test_logits_that_are_not_finite_are_a_failure(ours: e2e.Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e.Ours, "carry_out", lambda *_: np.full((1, 4), np.nan))
    with pytest.raises(ArithmeticError, match="not finite"):
        ours.first_token([LAYOUT.naive()], 1)


# ----------------------------------------------------------------------------------- the bare machine


def test_the_check_needs_neither_servers_nor_tests_packages() -> None:
    blocked = {*HEAVY, "tqdm", "hypothesis", "psutil", "pytest", "tokenizers", "huggingface_hub", "jinja2", "torch"}
    done = import_without(blocked, ["benchmarks.kernels", "benchmarks.peers", "benchmarks.e2e"])
    assert done.returncode == 0, done.stderr


def check(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), *arguments]
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "JAX_PLATFORMS")}
    settings = kept | {"PYTHON": sys.executable} | environment
    return subprocess.run(command, env=settings, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [[], ["speed"], ["--quick"]])
def test_script_refuses_wrong_usage(arguments: list[str]) -> None:
    done = check(arguments)
    assert done.returncode == 2 and "usage: bash benchmarks/gpu_check.sh" in done.stderr


def test_script_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    done = check(["kernels", str(tmp_path / "new")])
    assert done.returncode == 1 and "no CUDA device" in done.stderr, done.stderr
    assert (tmp_path / "new").is_dir()


def test_script_hands_flags_on(tmp_path: Path) -> None:
    done = check(["e2e", str(tmp_path), "--no-such-flag"])
    assert done.returncode == 2 and "--no-such-flag" in done.stderr


# -------------------------------------------------------------------------------------------- PyTorch

needs_torch = pytest.mark.skipif(gpu.torch_python() is None, reason="no interpreter has PyTorch")


@pytest.mark.long
@needs_torch
def test_flex_attention_computes_what_we_compute(tmp_path: Path, bench: kernels.Bench) -> None:
    rival = gpu.Rival(peers.WORKER)
    try:
        one = peers.Peers(bench, rival, tmp_path, gpu.Clock(200))
        record = record_of("peers")
        assert peers.check_equal(record, one)
        assert all(row["error"] < 1e-5 for row in record.rows.values())
        assert one.flash(masks.causal(256))["ms"] > 0
        found = one.flex(masks.chunks(256, low=32, high=64, join=32))
        assert found["mask_ms"] > 0 and found["visited_share"] == 0.75  # of tiles of 128 x 128
    finally:
        rival.close()


@pytest.mark.long
@needs_torch
def test_transformers_generates_with_random_weights() -> None:
    rival = gpu.Rival(e2e.WORKER)
    try:
        for config in (e2e.TINY, replace(e2e.TINY, family="qwen2", qkv_bias=True)):
            shapes = {"family": config.family, "config": e2e.hf_config(config), "device": "cpu", "dtype": "float32"}
            told = rival.ask({"op": "load", **shapes}, 100)
            assert told["parameters"] == sum(int(np.prod(w.shape)) for w in weights_of(config))
            found = rival.ask({"op": "generate", "context": 24, "batch": 2, "new": 5, "runs": 1}, 60)
            assert found["ttft_ms"] > 0
    finally:
        rival.close()


@pytest.mark.long
@needs_torch
def test_a_worker_that_takes_too_long_is_ended_and_started_anew() -> None:
    rival = gpu.Rival(peers.WORKER)
    try:
        with pytest.raises(envs.RivalError, match="ended"):
            rival.ask({"op": "start"}, 1)
        assert "torch" in rival.ask({"op": "start"}, 100)["versions"]
    finally:
        rival.close()
