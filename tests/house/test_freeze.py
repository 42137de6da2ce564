"""What nobody is to change by accident: tokens, `exact_to` and account of answers, the HTTP description, the names of
metrics and of ragjax, and folders that earlier code wrote. `python -m tests.support.frozen` writes what it is now.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import ragjax
from ragjax import Engine
from tests.support import frozen
from tests.support.matrix import few

NAMES = """
Answer ClosedError ConfigError Divergence Document Engine EngineOptions Graph Kind Message OverloadError Prompt Rag
RagjaxError Request RequestError Sampling Segment SegmentReport StorageOptions Timings
"""


def stored(name: str) -> Any:
    return json.loads((frozen.HOME / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return frozen.model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with frozen.prepared(folder) as made:
        yield made


@pytest.fixture(scope="module")
def served(engine: Engine) -> tuple[dict[str, Any], dict[str, list[str]]]:
    return frozen.described(engine)


FEW = [name for name in frozen.STRATEGIES if name != "full"]  # which says what prefix says


@pytest.mark.parametrize("strategy", few(frozen.STRATEGIES, FEW))  # anchor marks chunks: the last to use documents
def test_answers(engine: Engine, strategy: str) -> None:
    found = json.loads(json.dumps([frozen.record(answer) for answer in frozen.answers(engine, strategy)]))
    assert frozen.differences(found, stored("answers")[strategy]) == []


@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_other_token_label_or_count_is_seen(where: int) -> None:
    rows = stored("answers")["craft"]
    found = [row[:3] for row in stored("answers")["craft"]]
    assert frozen.differences(found, rows) == []
    found[5][where] = ([*found[5][0][:-1], 1], "block", [[0, 0, 0], *found[5][2][1:]])[where]
    assert len(frozen.differences(found, rows)) == 1
    assert len(frozen.differences(found[:-1], rows)) == 2


def test_the_http_description(served: tuple[dict[str, Any], dict[str, list[str]]]) -> None:
    assert not (lines := frozen.changed(served[0], stored("openapi"))), lines


def test_metrics_and_their_labels(served: tuple[dict[str, Any], dict[str, list[str]]]) -> None:
    assert not (lines := frozen.changed(served[1], stored("metrics"))), lines


def test_one_other_field_is_seen() -> None:
    before = {"a": {"b": [1, 2]}, "c": {}}
    assert frozen.changed(before, before) == ""
    after = {"a": {"b": [1]}, "c": {"d": 0}, "e": []}
    assert frozen.changed(after, before) == "appeared: /c/d\nappeared: /e\nvanished: /a/b/1\nvanished: /c"
    assert frozen.changed({"a": {"b": [1, 3]}, "c": {}}, before) == "changed: /a/b/1: 2 is now 3"


def test_folders_of_earlier_code_are_found_and_hit(folder: Path, tmp_path: Path) -> None:
    home = shutil.copytree(frozen.HOME / "folders", tmp_path / "folders")
    names = sorted(path.name for path in home.glob("*/*"))
    kept, before = asdict(frozen.ask_kept(folder, home)), stored("folders")
    assert sorted(path.name for path in home.glob("*/*")) == names, "no second folder was made"
    assert kept == before
    for tiers, (_, _, segments) in zip(before["tiers"], before["answers"], strict=True):
        assert "disk" in tiers and sum(reused for _, reused, _ in segments) > 0


def test_names_of_ragjax() -> None:
    assert sorted(ragjax.__all__) == NAMES.split()
