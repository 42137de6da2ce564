"""Reports with random damage: they are read, or refused with a ConfigError."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from ragjax.core import ConfigError
from ragjax.quality.report import Measurement, Report, Setting
from tests.support.mutation import EXAMPLES, altered, damaged, tried

CREATED = "2026-01-01T00:00:00+00:00"
ROW = Measurement(Setting("naive", 0.5), n=9, kl=0.1, kl_hi=0.2, top1=0.9, top1_lo=0.8, ttft_ms=9.0, share=0.5)
REPORT = Report("ab", "tiny", "float32", CREATED, "cd", 3, (ROW,))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_reports(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "report.json"
    REPORT.save(path)
    assert Report.load(path, "ab") == REPORT
    whole = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            Report.load(path, "ab")

    tried(examples, altered(json.loads(whole)) | damaged(whole), check)
