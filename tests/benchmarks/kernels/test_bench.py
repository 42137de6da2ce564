"""Timings and the figures that follow from them; the targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import gpu, report
from benchmarks.common.machine import Ceilings, chained, milliseconds
from benchmarks.kernels import masks
from benchmarks.kernels.bench import FULL, Bench, gates, plan, spot_error, with_ratios
from tests.support.cases import HOPPER
from tests.support.checks import seen, timed

pytestmark = pytest.mark.slow


def test_every_mask_suits_the_kernel_at_full_size() -> None:
    bench = Bench(FULL)
    bench.__dict__["device"] = HOPPER
    for page_size in FULL.page_sizes:
        for mask in (*plan(FULL), masks.patched(32768, FULL.recomputed, page_size)):
            if mask.name == "graph" or (page_size == 128 and len(mask.index_N) == 16384):
                continue  # shapes that others have as well
            block = 1 if mask.name.startswith("decode") else 32
            assert bench.block_rows("triton", mask, page_size) == block, mask.name
            assert "triton" in bench.backends(mask, page_size)


def test_plan_is_what_the_targets_need() -> None:
    model = FULL
    made = list(plan(model))
    assert len({(m.name, len(m.index_N)) for m in made}) == len(made)
    assert {"chunks", "tree", "causal", "graph"} <= {m.name for m in made if len(m.index_N) == 16384}
    some = next(m for m in made if m.name == "recompute-moved")
    assert 0.15 <= len(some.index_T) / 32768 <= 0.155
    assert len(np.unique(some.offset_N)) > 30
    for mask in made:
        if mask.name in ("chunks", "tree"):
            widths = np.diff(np.unique(np.concatenate([[0], mask.hide_from_N, mask.hide_until_N])))
            assert widths.max() > 256


def test_spot_check_finds_a_wrong_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "ALIGN", 64)
    mask = masks.recompute(256, 64, moved=True, low=32, high=64)
    assert len(np.unique(mask.offset_N)) == 3
    view = masks.view_of(mask, bench.pages(4, 64), bench.table, bench.scale, 32)
    q = bench.queries(64)
    out = bench.program("xla", q, view, 0)(q, view)[0]
    assert spot_error(mask, q, out, view) < 1e-5
    assert spot_error(mask, q, out.at[-1, 0, 3].add(1.0), view) > 1e-2
    assert spot_error(replace(mask, offset_N=np.zeros_like(mask.offset_N)), q, out, view) > 1e-2


def test_tflops_count_visited_tiles(bench: Bench) -> None:
    mask = masks.chunks(256, low=32, high=64, join=32)
    view = bench.view(mask, 64, 32)
    tiles = seen(mask).reshape(8, 32, 4, 64).any((1, 3)).sum()
    found = bench.figures(mask, view, ms=2.0)
    assert found["tflops"] == pytest.approx(4 * tiles * 32 * 64 * 64 * 4 / 2e-3 / 1e12)
    assert found["visited_share"] == tiles / 32 and found["visible_share"] == seen(mask).mean()


def test_decode_counts_bytes_of_keys_and_values(bench: Bench) -> None:
    mask = masks.decode(2, 128, moved=False)
    found = bench.figures(mask, bench.view(mask, 64, 1), ms=1.0)
    assert found["gb_s"] == pytest.approx(2 * 2 * 128 * 2 * 64 * 4 / 1e-3 / 1e9)
    assert found["visible_share"] == found["visited_share"] == 1.0


def test_chained_calls_are_calls_in_a_row() -> None:
    assert float(jax.jit(chained(lambda x, y: x * y, 3))(jnp.float32(1.0), jnp.float32(2.0))) == 8.0
    assert milliseconds(lambda: jnp.zeros(3), samples=1, least_s=1e-3) > 0


def gate_rows(speed: float, moved_ms: float, gb_s: float, temp: int, entry: int) -> list[report.Row]:
    rows = [timed(c, page=p, ms=1.0, tflops=speed - (p == 128), keys=k)
            for c in ("chunks", "tree") for p in (64, 128) for k in (32768, 16384)]  # fmt: skip
    rows += [timed("recompute-in-place", ms=1.0), timed("recompute-moved", ms=moved_ms)]
    rows += [timed("decode-in-place", gb_s=gb_s, ms=1.0), timed("causal", ms=1.0, tflops=1.0, temp_bytes=temp)]
    return [*rows, timed("block-lists", ms=1.0, largest_list_bytes=entry * 1024 * 512)]


def test_targets_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    limits, model = Ceilings(4000.0, 700e3, 1.0), FULL

    def verdicts(*figures: Any) -> list[bool | None]:
        rows = with_ratios(gate_rows(*figures))
        return [g["passed"] for g in gates(rows, limits, model)]

    assert verdicts(290.0, 1.07, 2900.0, 2**29, 4) == [True, None, True, True, True, True]
    assert verdicts(270.0, 1.09, 2700.0, 2**31, 8) == [False, None, False, False, False, False]
    assert [g["passed"] for g in gates([], limits, model)] == [None] * 6
    one_missing = [r for r in gate_rows(290.0, 1, 1, 1, 4) if (r["case"], r["keys"]) != ("tree", 16384)]
    assert gates(with_ratios(one_missing), limits, model)[0]["passed"] is None


def test_a_rehearsal_judges_no_target() -> None:
    assert gpu.gate("speed", "> 1", 2.0, lambda x: x > 1)["passed"] is None
