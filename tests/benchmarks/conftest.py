"""What the benchmarks' tests run under: ceilings that are not measured, samples in a folder of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common import report, samples
from benchmarks.common.machine import Ceilings


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test measures the machine, or leaves samples for another."""
    monkeypatch.setattr(samples, "STORE", tmp_path / "store")
    monkeypatch.setattr(report, "ceilings", lambda: Ceilings(10.0, gemm_bf16_gflops=200.0, gemm_f32_gflops=100.0))
