"""Reports with random damage: they are read, or refused with a ConfigError."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from ragjax.core import ConfigError
from ragjax.quality.report import Alpha, Measurement, Report, Setting
from tests.support.mutation import EXAMPLES, altered, damaged, tried

CREATED = "2026-01-01T00:00:00+00:00"
ROW = Measurement(Setting("naive", 0.5), n=9, kl=0.1, kl_hi=0.2, top1=0.9, top1_lo=0.8, ttft_ms=9.0, share=0.5)
MADE = {
    Report: Report("ab", "tiny", "float32", CREATED, "cd", 3, (ROW,)),
    Alpha: Alpha(0.3, "ab", "tiny", "float32", "F1=0.9", 0.93, 60, 0.2),
}


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_damaged_reports(tmp_path: Path, kind: type[Report | Alpha], examples: int) -> None:
    path = tmp_path / "report.json"
    MADE[kind].save(path)
    assert kind.load(path, "ab") == MADE[kind]
    whole = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            kind.load(path, "ab")

    tried(examples, altered(json.loads(whole)) | damaged(whole), check)
