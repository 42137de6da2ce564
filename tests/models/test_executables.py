"""Executables on disk: loaded programs compute the same, nothing is traced, and what is not sound is not run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from ragjax.core import Grid, Measure, RowShape, Step
from ragjax.core.step import STEP_ARRAYS
from ragjax.models import executables
from ragjax.models.executables import Executables
from ragjax.runner import programs
from ragjax.runner.runner import Runner
from tests.support import tiny
from tests.support.devices import without_compilation_cache

GRID = Grid(rows=(RowShape(4, 4),), entries=(32,), logits=(2,))
MEASURES = {Measure.KEY_SCORE}


def runner(folder: Path, grid: Grid = GRID) -> Runner:
    return Runner(tiny.decoder(), pages=20, page_size=16, grid=grid, scanned=True, executables=Executables(folder))


def logits(made: Runner) -> np.ndarray[Any, Any]:
    """What a step of padding and random tokens gives."""
    step = tiny_step(made)
    return made.logits(made.step(step), [0, 3])


def tiny_step(made: Runner) -> Any:
    arrays: dict[str, Any] = {**made._programs.padding(STEP_ARRAYS, 4, 32)}
    arrays["token_T"] = np.array([3, 1, 4, 1], np.int32)
    arrays["index_T"] = arrays["position_T"] = np.arange(4, dtype=np.int32)
    arrays["request_T"] = np.zeros(4, np.int32)
    arrays["slot_T"] = 16 + np.arange(4, dtype=np.int32)
    arrays["page_S"][0], arrays["request_S"][0] = 1, 0
    arrays["index_SC"][0] = np.arange(16)
    return Step(**arrays)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is traced by the module of programs."""
    found: list[str] = []

    def noted(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            found.append(name)
            return getattr(jax, name)(*args, **options)

        return call

    traced = {name: noted(name) for name in ("jit", "eval_shape")}
    monkeypatch.setattr(programs, "jax", SimpleNamespace(**{**vars(jax), **traced}))
    return found


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """JAX's own compilation cache is off."""
    with without_compilation_cache():
        yield


@pytest.fixture(scope="module")
def folder(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in which the programs are kept."""
    made = tmp_path_factory.mktemp("kept") / "executables"
    kept = runner(made)
    kept.compile(kept.programs(MEASURES))
    return made


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    made = tmp_path / "executables"
    made.mkdir(mode=0o700)
    for path in folder.iterdir():
        (made / path.name).write_bytes(path.read_bytes())
    return made


def test_a_later_start_traces_nothing_and_computes_the_same(folder: Path, tmp_path: Path, traces: list[str]) -> None:
    plain = runner(tmp_path / "none")
    expected = logits(plain)
    assert traces
    traces.clear()
    made = runner(folder)
    made.compile(made.programs(MEASURES))
    np.testing.assert_array_equal(logits(made), expected)
    assert made.calls == plain.calls
    assert traces == []


def test_programs_of_another_kind_have_other_keys(copy: Path, traces: list[str]) -> None:
    other = Grid(rows=(RowShape(4, 2),), entries=(32,), logits=(2,))
    runner(copy, other)._programs.get("stage", 4, 32, 3)
    assert traces
    traces.clear()
    runner(copy)._programs.get("stage", 4, 32, 3)
    assert traces == []


@pytest.mark.parametrize("what", ["XLA_FLAGS", "code", "setting"])
def test_a_key_holds_what_a_program_depends_on(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices()[:1]
    before = executables.key_of(devices, {"name": 1})
    assert executables.key_of(devices, {"name": 1}) == before != executables.key_of(devices, {"name": 2})
    if what == "XLA_FLAGS":
        monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    elif what == "code":
        monkeypatch.setattr(executables, "_code", lambda: "other")
    else:
        with jax.default_matmul_precision("highest"):
            assert executables.key_of(devices, {"name": 1}) != before
        return
    assert executables.key_of(devices, {"name": 1}) != before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def link(path: Path) -> None:
    """A file that is elsewhere."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("spoil", [cut, flip, open_to_others, link])
def test_what_is_not_sound_is_removed_and_compiled_anew(
    spoil: Any, copy: Path, folder: Path, traces: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(runner(folder))
    traces.clear()
    number = len(list(copy.iterdir()))
    for path in list(copy.iterdir()):
        spoil(path)
        if spoil is link:
            break
    made = runner(copy)
    made.compile(made.programs(MEASURES))
    np.testing.assert_array_equal(logits(made), expected)
    assert traces and caplog.text.count("compiled anew") == 1
    store = made._programs._executables
    assert store is not None and store.refused == (1 if spoil is link else number)
    assert len(list(copy.iterdir())) == number and not any(path.is_symlink() for path in copy.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in copy.iterdir() if spoil is not link)


@pytest.mark.parametrize("whose", ["others may write", "another user"])
def test_a_folder_of_others_is_not_read(
    whose: str, copy: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if whose == "another user":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        copy.chmod(0o777)
    runner(copy)._programs.get("end", 4, 2)
    assert traces and whose in caplog.text


def test_a_folder_has_its_size(tmp_path: Path) -> None:
    folder = tmp_path / "executables"
    programs = runner(folder)._programs
    for name in (("end", 4, 2), ("extract", 1), ("insert", 1)):
        programs.get(*name)
    paths = list(folder.iterdir())
    for i, path in enumerate(paths):
        os.utime(path, (i, i))
    left = [path.stat().st_size for path in paths[1:]]
    assert executables.shrink(folder, sum(left)) == left and set(folder.iterdir()) == set(paths[1:])


def test_a_program_that_ran_is_not_kept_and_that_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = runner(tmp_path / "none")
    made.step(tiny_step(made))
    store = Executables(tmp_path / "executables")
    store.keep("key", made._programs.get("begin", 4, 32), None)
    assert "cannot be kept" in caplog.text and not list((tmp_path / "executables").iterdir())


def test_it_is_not_used_beside_the_cache_of_jax(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jax.config.update(executables.ENABLED, True)
    try:
        runner(tmp_path / "executables")._programs.get("end", 4, 2)
    finally:
        jax.config.update(executables.ENABLED, False)
        compilation_cache.reset_cache()
    assert "JAX_COMPILATION_CACHE_DIR" in caplog.text and not list((tmp_path / "executables").iterdir())
