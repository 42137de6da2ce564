"""For tests of the GPU's checks: a record of rows, the small attention that is timed, and PyTorch in words."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import gpu, report
from benchmarks.kernels import masks
from benchmarks.kernels.bench import Model
from benchmarks.kernels.correctness import Shape
from benchmarks.kernels.masks import Mask
from ragjax.kernels.table import visible

SMALL = Model(
    heads=4, kv_heads=2, dim=64, dtype="float32", lengths=(256,), page_sizes=(64,), recomputed=64, batch=2,
    context=128, backward=128, pieces=(32, 64), loop=2,
)  # fmt: skip
SHAPE = Shape(64, "float32", 4, 16, 8, 32)


def record_of(part: str = "kernels", seconds: float = 100.0, out: Path | None = None) -> gpu.Record:
    chosen = Namespace(platform="cpu", quick=True, seconds=seconds, json=out, out=None)
    return gpu.Record(chosen, report.Header(part, "command", {}, {"python": "3"}), gpu.Clock(seconds))


def seen(mask: Mask) -> np.ndarray:
    """By the kernels' own rule, bool [T, N]."""
    rule = visible(masks.rows_of(mask), masks.entries_of(mask, 64))
    return np.asarray(rule).reshape(len(mask.index_T), -1)


def timed(case: str, backend: str = "triton", page: int = 64, **figures: Any) -> dict[str, Any]:
    known = {"case": case, "backend": backend, "page_size": page, "keys": 32768, "rows": 32768, "block_rows": 32}
    return {**known, "peer": None, "ratio": None, "temp_bytes": 10, **figures}


class FakeRival:
    """PyTorch in words."""

    def __init__(self, script: str):
        self.asked: list[str] = []

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        return {"load": {}, "generate": {"ttft_ms": 100.0, "decode_tokens_per_s": 10.0}}[request["op"]]

    def __enter__(self) -> FakeRival:
        return self

    def __exit__(self, *_: object) -> None:
        pass
