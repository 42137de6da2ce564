"""The raw Triton decode kernel: its launch, its refusals, and the program itself against the float64 oracle.

The program runs under Triton's interpreter, which needs the triton package: those tests are marked `compile` and run
by `make test-gpu-compile`. tests/test_compile.py holds what a GPU would be given.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.baseline.attention import jax_triton as attention_jax_triton
from benchmarks.baseline.attention.jax_triton import Launch, arguments, constants
from ragjax.kernels.attention import split
from ragjax.kernels.device import Device
from tests.support.cases import FAR, HOPPER, Case, Request, Shape, check, make_case, random_cases
from tests.support.compiler import MODELS, production_call

SHAPES = {
    "d64-p16-g7-b1": Shape(64, 16, 2, 7, 1, 8),
    "d128-p16-g4-b2": Shape(128, 16, 1, 4, 2, 8, max_offset=FAR, scaled=True),
    "d64-p64-g3-b8": Shape(64, 64, 1, 3, 8, 16, max_offset=FAR),
    "d128-p128-g1-b1": Shape(128, 128, 2, 1, 1, 6),
    "d64-p16-g4-b1-bfloat16": Shape(64, 16, 2, 4, 1, 8, "bfloat16", scaled=True),
    "d128-p64-g2-b1-float16": Shape(128, 64, 1, 2, 1, 6, "float16"),
}
SOURCE = Path(attention_jax_triton.__file__).with_name("jax_triton_kernel.py")
DECODE = production_call(MODELS["llama-3-8b"], 64, rows=8, block_rows=1)


# ------------------------------------------------------------------------------------------ the launch


def test_program_takes_what_it_is_given() -> None:
    """By number and by name, without triton: the program's parameters are read off its source."""
    functions = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.FunctionDef)]
    parameters = next(f.args.args for f in functions if f.name == "decode")
    static = [p.arg for p in parameters if p.annotation and ast.unparse(p.annotation) == "tl.constexpr"]
    q, view = DECODE
    assert static == list(constants(q, view, Launch.of(q, view, HOPPER)))
    assert len(parameters) - len(static) == len(jax.eval_shape(arguments, q, view)) + 2


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("shape", "device", "reason"),
    [
        (Shape(64, 16, 2, 4, 1, 8), HOPPER, None),
        (Shape(64, 16, 2, 8, 4, 8), HOPPER, None),
        (Shape(64, 16, 2, 4, 1, 8), Device("cpu"), "on GPUs, not on cpu"),
        (Shape(64, 16, 2, 4, 1, 8), Device("gpu", (7, 5)), "compute capability 8.0, the device has 7.5"),
        (Shape(64, 16, 2, 11, 3, 9), HOPPER, "33 rows share a KV head"),
        (Shape(16, 16, 2, 4, 1, 8), HOPPER, "head dimension 16"),
        (Shape(64, 8, 2, 4, 1, 8), HOPPER, "pages of 8 slots"),
        (Shape(64, 24, 2, 4, 1, 8), HOPPER, "pages of 24 slots"),
        (Shape(64, 16, 2, 4, 1, 8, "uint16"), HOPPER, "uint16"),
    ],
)
def test_refusal_names_its_reason(
    shape: Shape, device: Device, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jax_triton", "triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    case = make_case(shape, [Request("chain", [3, 4], False)], 0)
    refusal = attention_jax_triton.refusal(case.q, case.view(), device)
    assert (refusal is None) if reason is None else (refusal is not None and reason in refusal)


def test_absence_of_jax_triton_is_a_refusal_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    refusal = attention_jax_triton.refusal(*DECODE, HOPPER)
    assert refusal and "ModuleNotFoundError" in refusal
    assert "ragjax[cuda12]" in refusal and "ragjax[cuda13]" in refusal


# ------------------------------------------------------------------------------- the program, interpreted


def run(case: Case, monkeypatch: pytest.MonkeyPatch, splits: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """`attend` as a whole, with jax-triton's part done by the interpreter."""
    from tests.support.interpreter import launch

    def triton_call(
        *arrays: jax.Array,
        kernel: Any,
        out_shape: Sequence[jax.ShapeDtypeStruct],
        grid: tuple[int, ...],
        name: str,
        num_warps: int,
        num_stages: int,
        **static: Any,
    ) -> list[jax.Array]:
        outs = [np.full(s.shape, np.nan, s.dtype) for s in out_shape]
        launch(kernel, grid, [*map(np.ascontiguousarray, arrays), *outs], **static)
        return [jnp.asarray(out) for out in outs]

    jax_triton = ModuleType("jax_triton")
    jax_triton.triton_call = triton_call  # type: ignore[attr-defined]
    view = case.view()
    programs = splits * case.shape.kv_heads * view.blocks.count_N.shape[0]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "jax_triton", jax_triton)
        patched.setattr(split, "PROGRAMS", programs)
        out, lse = attention_jax_triton.attend(case.q, view)
    return np.asarray(out), np.asarray(lse)


@pytest.mark.compile
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_program_equals_oracle(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_cases(SHAPES[name], 12, lambda case, _: check(case, *run(case, monkeypatch, splits=splits)))


@pytest.mark.compile
def test_windows_of_long_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists longer than a window of `_runs_between`, and more runs in them than one split visits."""
    from benchmarks.baseline.attention import jax_triton_kernel as kernel

    monkeypatch.setattr(kernel, "WINDOW", type(kernel.WINDOW)(2))
    case = rich(SHAPES["d64-p16-g7-b1"])
    assert int(case.view().blocks.runs_N.max()) > 4
    check(case, *run(case, monkeypatch, splits=5))


@pytest.mark.compile
def test_output_has_the_dtype_of_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    case = rich(SHAPES["d64-p16-g4-b1-bfloat16"])
    out, lse = run(replace(case, q=case.q.astype(jnp.bfloat16)), monkeypatch)
    assert out.dtype == jnp.bfloat16 and lse.dtype == np.float32
    worst_out, worst_lse = case.errors(out.astype(np.float32), lse)
    assert worst_out < 2e-2 and worst_lse < 2e-2


@pytest.mark.compile
def test_pool_beyond_32_bits(tmp_path: Path) -> None:
    """Pages at the far end of a pool of more than 2^32 elements give what they give at the front of a small one.

    The pool is a sparse file: of its 8 GiB only the pages in use are ever written.
    """
    from benchmarks.baseline.attention.jax_triton_kernel import decode
    from tests.support.interpreter import launch

    case = rich(SHAPES["d128-p64-g2-b1-float16"])
    view = case.view()
    static = constants(case.q, view, Launch.of(case.q, view, HOPPER))
    grid = Launch.of(case.q, view, HOPPER).grid
    arrays = [np.ascontiguousarray(x) for x in arguments(case.q, view)]

    def attend(arrays: list[np.ndarray], static: dict[str, Any]) -> np.ndarray:
        out, lse = np.full((grid[2], *case.q.shape), np.nan, np.float32), np.full((grid[2], *case.q.shape[:2]), np.nan)
        launch(decode, grid, [*arrays, out, lse.astype(np.float32)], **static)
        return out

    what = attend(arrays, static)
    layers, small, *page = arrays[2].shape
    large = 2**32 // (layers * int(np.prod(page))) + small
    for i in (2, 3):
        pool = np.memmap(tmp_path / str(i), np.float16, "w+", shape=(layers, large, *page))
        pool[case.layout.layer, -small:] = arrays[i][case.layout.layer]
        arrays[i] = pool
    arrays[6] = arrays[6] + np.int32(large - small)  # the pages of the lists
    np.testing.assert_array_equal(attend(arrays, {**static, "PAGES": large}), what)


def rich(shape: Shape, garbage: float = np.nan) -> Case:
    """Requests that make full and partial items, several runs, and rows that are padding beside others."""
    requests = [Request("tree", [18, 9, 20, 11, 18, 9], True), Request("isolated", [20, 11, 18, 7], False)]
    return make_case(replace(shape, rows=16 * shape.block_rows), requests, 7, garbage)
