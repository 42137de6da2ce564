"""`mesh`: several devices beside one, rehearsed on virtual ones."""

from __future__ import annotations

import pytest

from benchmarks import mesh
from benchmarks.latency.bare import LLAMA, QWEN
from tests.support.devices import assert_agreement


def test_with_one_device_it_says_that_it_was_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert mesh.main(["--platform", "cpu", "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mesh: skipped") and out.count("\n") == 1


def test_as_many_devices_as_can_share_out_the_heads() -> None:
    assert [mesh.most_devices(n, LLAMA) for n in (1, 2, 3, 8)] == [1, 2, 2, 8]
    assert [mesh.most_devices(n, QWEN) for n in (2, 4, 8)] == [2, 4, 4]


def test_ratios_say_how_many_times_as_fast() -> None:
    def row(case: str, devices: int, **figures: float) -> dict[str, object]:
        return mesh._known("m", case, devices, 64) | figures

    rows = [
        row("logits", 4, error=1e-6),
        row("prefill", 4, ttft_ms=10.0),
        row("decode", 4, decode_tokens_per_s=60.0),
        row("prefill", 1, ttft_ms=30.0),
        row("decode", 1, decode_tokens_per_s=20.0),
    ]
    found = mesh.with_ratios(rows)
    assert [r.get("ttft_ratio_one") for r in found] == [None, 3.0, None, None, None]
    assert [r.get("decode_ratio_one") for r in found] == [None, None, 3.0, None, None]


REHEARSAL = """
import json, tempfile
from pathlib import Path

import jax

from benchmarks import mesh

file = Path(tempfile.mkdtemp()) / "r.json"
assert mesh.main(["--platform", "cpu", "--quick", "--json", str(file)]) == 0
rows = json.loads(file.read_text())["rows"]
assert [(r["case"], r["devices"]) for r in rows] == [
    ("logits", 4), ("prefill", 4), ("decode", 4), ("prefill", 1), ("decode", 1)
]
assert rows[0]["error"] < 1e-5 and rows[1]["ttft_ratio_one"] > 0 and rows[2]["decode_ratio_one"] > 0
mesh.TOLERANCE = 0.0
assert mesh.main(["--platform", "cpu", "--quick", "--json", str(file)]) == 1
assert "logits differ" in json.loads(file.read_text())["rows"][0]["failed"]
"""


@pytest.mark.long
def test_four_virtual_devices_are_measured() -> None:
    quiet = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n"
    inner = "".join(f"    {line}\n" for line in REHEARSAL.strip().splitlines())
    assert_agreement(quiet + inner + 'print("agree on", jax.device_count(), "devices")\n', devices=4)
