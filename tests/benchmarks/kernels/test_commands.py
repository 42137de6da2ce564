"""`kernels`, rehearsed on a CPU; and the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from benchmarks.common import machine
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import correctness
from benchmarks.kernels.bench import PRE_ROTATED, Bench
from tests.support.checks import SHAPE
from tests.support.imports import HEAVY, import_without

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr(kernels, "Bench", lambda *_: bench)
    monkeypatch.setattr(kernels, "QUICK_SHAPES", (SHAPE,))
    monkeypatch.setattr(machine, "milliseconds", lambda work, **_: jax.block_until_ready(work()) is not None and 2.0)


def test_kernels_rehearsal(tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--platform", "cpu", "--quick", "--json", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    cases = {r["case"] for r in rows}
    assert {
        "correctness",
        "scores",
        "key-scores",
        "segment-scores",
        "block-lists",
        "chunks",
        "tree",
        "causal",
        "graph",
        "recompute-moved",
        "gate",
    } <= cases
    assert {"recompute-in-place", "recompute-patched", "decode-in-place", "decode-moved", "backward"} <= cases
    products = [r for r in rows if r["case"] == "product-4bit"]
    assert [(r["rows"], r["backend"]) for r in products] == [(n, name) for n in (1, 16) for name in ("cpu", "xla")]
    assert all(0 < r["error"] < 1e-2 and r["ceiling_share"] > 0 for r in products)
    keys = {"case", "backend", "dtype", "head_dim", "rows", "keys", "visible_share", "ms", "tflops", "peer", "ratio"}
    assert all(keys <= set(r) for r in rows if r["case"] in ("chunks", "tree", "causal", "recompute-moved"))
    moved = next(r for r in rows if r["case"] == "recompute-moved")
    assert (moved["peer"], moved["ratio"]) == (PRE_ROTATED, 1.0)
    words = capsys.readouterr().out
    assert words.index("ceiling") < words.index("correctness") < words.index("timings") < words.index("targets")


def test_a_wrong_result_ends_with_an_error_after_all_timings(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correctness, "TOLERANCE", {"float32": (0.0, 0.0, 0.0)})
    monkeypatch.setattr(kernels, "backward", lambda *_: None)
    assert kernels.main(["--platform", "cpu", "--quick", "--json", str(tmp_path / "r.json")]) == 1
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert any(r["case"] == "tree" and r["ms"] == 2.0 for r in rows)


def test_the_check_needs_neither_servers_nor_tests_packages() -> None:
    blocked = {*HEAVY, "tqdm", "hypothesis", "psutil", "pytest", "tokenizers", "huggingface_hub", "jinja2", "torch"}
    done = import_without(blocked, ["benchmarks.kernels.__main__", "benchmarks.e2e"])
    assert done.returncode == 0, done.stderr


def check(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), *arguments]
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "JAX_PLATFORMS")}
    settings = kept | {"PYTHON": sys.executable} | environment
    return subprocess.run(command, env=settings, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["speed"], ["--quick"]])
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
