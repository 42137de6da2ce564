"""The correctness matrix: right backends pass, wrong ones are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import scores
from benchmarks.kernels.correctness import CONTENTS, SHAPES, correctness, show_correctness
from ragjax.kernels.attention import op as attention
from ragjax.kernels.attention.op import Backend
from ragjax.kernels.view import View
from tests.support.checks import SHAPE, record_of

pytestmark = pytest.mark.slow


def wrong(change: Callable[[jax.Array, View], tuple[jax.Array, jax.Array]]) -> Backend:
    return Backend(change, lambda *_: None)


def shifted_rotation(q: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    entries = replace(view.entries, offset_S=-view.entries.offset_S)
    return attention.BACKENDS["reference"].attend(q, replace(view, entries=entries))


def without_intervals(q: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    entries = replace(view.entries, hide_from_SC=jnp.zeros_like(view.entries.hide_from_SC),
                    hide_until_SC=jnp.zeros_like(view.entries.hide_until_SC))  # fmt: skip
    return attention.BACKENDS["reference"].attend(q, replace(view, entries=entries))


def reads_unused_slots(q: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    out, lse = attention.BACKENDS["reference"].attend(q, view)
    page = view.pages.v_LPKCD[view.layer, view.entries.page_S[0]]
    return out + 0.0 * page.sum().astype(out.dtype), lse


def base_two(q: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    out, lse = attention.BACKENDS["reference"].attend(q, view)
    return out, lse / jnp.log(2.0)


def test_right_backends_pass_and_refusals_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows = correctness(record_of(), (SHAPE,))
    assert {r["backend"] for r in rows} == {"cpu", "reference", "xla"}
    assert all(r["cases"] == len(CONTENTS) and r["wrong"] == 0 for r in rows)
    assert show_correctness(rows)
    assert "triton does not serve 1 of 1 shapes" in capsys.readouterr().out


@pytest.mark.parametrize("change", [shifted_rotation, without_intervals, reads_unused_slots, base_two])
def test_a_wrong_backend_is_found(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in attention.BACKENDS if n != "reference"]:
        monkeypatch.delitem(attention.BACKENDS, name)  # type: ignore[arg-type]
    monkeypatch.setitem(attention.BACKENDS, "wrong", wrong(change))  # type: ignore[arg-type]
    rows = correctness(record_of(), (SHAPE,))
    assert next(r for r in rows if r["backend"] == "reference")["wrong"] == 0
    assert next(r for r in rows if r["backend"] == "wrong")["wrong"] > 0
    assert not show_correctness(rows)


def test_a_backend_that_does_not_compile_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(q: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError("no such instruction")

    for name in list(attention.BACKENDS):
        monkeypatch.delitem(attention.BACKENDS, name)  # type: ignore[arg-type]
    monkeypatch.setitem(attention.BACKENDS, "broken", wrong(broken))  # type: ignore[arg-type]
    record = record_of()
    rows = correctness(record, (SHAPE,))
    assert "no such instruction" in rows[0]["failed"]
    assert not show_correctness(rows)


def test_what_there_was_no_time_for_is_not_right() -> None:
    record = record_of(seconds=1e-9)
    rows = correctness(record, (SHAPE,))
    assert {r["failed"] for r in rows} == {"no time"} and len(record.skipped) == len(rows)
    assert not show_correctness(rows)


def test_the_matrix_covers_what_it_should() -> None:
    for prefill in (True, False):
        own = [s for s in SHAPES if (s.block_rows > 1) == prefill]
        assert {s.dim for s in own} == {64, 128} and {s.page_size for s in own} == {64, 128}
        for dtype in ("bfloat16", "float16", "float32"):
            assert {s.groups for s in own if s.dtype == dtype} == {1, 4, 7, 8}
            assert {s.dim for s in own if s.dtype == dtype} == {64, 128}
        padded = [s.block_rows * (1 << (s.groups - 1).bit_length()) for s in own if s.block_rows > 1]
        assert set(padded) <= {64, 128}


def test_right_scores_pass() -> None:
    rows = scores.correctness(record_of(), (SHAPE,))
    assert [(r["backend"], r["cases"], r["wrong"]) for r in rows] == [("xla", len(CONTENTS), 0)]
    assert scores.show(rows)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("key_scores", lambda op, q, lse, view, chosen, **more: op(q, lse, view, None, **more)),
        ("key_scores", lambda op, q, lse, *rest, **more: op(q, lse + 1e-3, *rest, **more)),
        ("row_segment_score", lambda op, q, lse, view, row, *rest, **more: op(q, lse, view, row - 1, *rest, **more)),
    ],
    ids=["all rows count", "sums of another softmax", "segments of other rows"],
)
def test_wrong_scores_are_found(name: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, name, partial(change, getattr(scores, name)))
    rows = scores.correctness(record_of(), (SHAPE,))
    assert rows[0]["wrong"] and not scores.show(rows)


def test_scores_that_cannot_be_compiled_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such instruction")

    monkeypatch.setattr(scores, "key_scores", broken)
    rows = scores.correctness(record_of(), (SHAPE,))
    assert "no such instruction" in rows[0]["failed"] and not scores.show(rows)
