"""A device that is full says what to change, wherever it is found to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import jax
import pytest

from ragjax.core import ConfigError
from ragjax.engine import Engine
from ragjax.engine import build as loading
from ragjax.runner.runner import Runner
from tests.data.make_disk import model

FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."


def full(*_: Any, **__: Any) -> NoReturn:
    raise jax.errors.JaxRuntimeError(FULL)


@pytest.mark.parametrize(
    ("where", "what", "told"),
    [
        (loading, "load_model", "no room for the weights: choose a smaller model, or .* --tensor-parallel"),
        ("ragjax.runner.runner.Weights", "of", "no room for the weights: choose a smaller model, or .*"),
        (
            Runner,
            "compile",
            r"no room for what a step computes, beside [\d.e-]+ GB of weights and a cache of 0\.5 GB: lower",
        ),
        (Runner, "warm_up", r"no room for what a step computes, .*: lower --device-cache-gb"),
    ],
)
def test_a_full_device_says_what_to_change(
    where: Any, what: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "compile", lambda *_, **__: None)
    if isinstance(where, str):
        monkeypatch.setattr(f"{where}.{what}", full)
    else:
        monkeypatch.setattr(where, what, full)
    with pytest.raises(ConfigError, match=told):
        Engine.load(model(tmp_path / "tiny"), device_cache_gb=0.5, progress=False)


def test_a_kernel_that_asks_too_much_is_no_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any, **__: Any) -> NoReturn:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 101384")

    monkeypatch.setattr(Runner, "compile", ask)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory"):
        Engine.load(model(tmp_path / "tiny"), device_cache_gb=0.5, progress=False)
