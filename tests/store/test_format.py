"""Entries that an earlier version wrote (`tests/data/make_disk.py`) are found, read and used as if written today."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ragjax.core import Answer
from ragjax.store.codec import Codec, kind_of
from ragjax.store.disk import DiskStore
from tests.data.make_disk import ENCODINGS, HOME, ask, model, prompts
from tests.support.disks import read_entry

CODEC = Codec("raw", 3, 2, 16, np.dtype(np.float32))
GIGA = 2**30
LOSS = {"raw": 0.0, "int8": 0.01}
"""Relative RMS error of an encoding."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def cold(folder: Path) -> list[Answer]:
    """What is answered without any entry."""
    return ask(folder, None, "raw")


def open_store(directory: Path) -> DiskStore:
    (name,) = (entry.name for entry in directory.iterdir())
    return DiskStore.open(directory, bytes.fromhex(name), about={}, max_bytes=GIGA)


@pytest.fixture(params=ENCODINGS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return shutil.copytree(HOME / request.param, tmp_path / request.param)


@pytest.mark.slow
@pytest.mark.parametrize("index", ["kept", "lost"])
def test_a_prompt_is_answered_from_old_entries(old: Path, folder: Path, cold: list[Answer], index: str) -> None:
    (home,) = old.iterdir()
    if index == "lost":
        (home / "index.sqlite").unlink()
    answers = ask(folder, old, old.name)
    assert [path.name for path in old.iterdir()] == [home.name], "the model's identity is the same"
    tolerance = 1e-4 if old.name == "raw" else 0.5
    for answer, expected, (strategy, _, prompt) in zip(answers, cold, prompts(), strict=True):
        assert all(report.tier == "disk" for report in answer.segments[1:] if report.reused), "the system is shared"
        kept = prompt.segments if strategy == "prefix" else prompt.segments[:-1]
        assert answer.cached_tokens == min(sum(map(len, kept)), sum(map(len, prompt.segments)) - 1)
        assert np.abs(answer.logits - expected.logits).max() < tolerance


@pytest.mark.slow
def test_old_entries_are_what_is_written_today(old: Path, folder: Path, tmp_path: Path) -> None:
    ask(folder, tmp_path / "new", old.name)
    with open_store(old) as before, open_store(tmp_path / "new") as today:
        keys = today._index.all_keys()
        assert set(keys) == set(before._index.all_keys()) and len(keys) == 13
        assert {before.find(key).provenance for key in keys} == {"causal", "isolated", "dependency"}
        for key in keys:
            assert before.find(key) == today.find(key)
            arrays, expected = read_entry(before, key), read_entry(today, key)
            assert kind_of(arrays) == old.name and {*arrays} == {*expected}
            for got, wanted in zip(CODEC.decode(arrays), CODEC.decode(expected), strict=True):
                assert np.linalg.norm(got - wanted) <= (1e-5 + LOSS[old.name]) * np.linalg.norm(wanted)
        assert before.verify() == ()
