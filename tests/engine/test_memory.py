"""A device that is full says what to change, wherever it is found to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import pytest

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import ConfigError, DeviceFullError, Prompt, Step
from ragjax.engine import Engine
from ragjax.engine import build as loading
from ragjax.runner.runner import Runner
from tests.data.make_disk import model
from tests.support import tiny
from tests.support.pace import Hold

FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."


SHARED = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 101384"


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
        raise jax.errors.JaxRuntimeError(SHARED)

    monkeypatch.setattr(Runner, "compile", ask)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory"):
        Engine.load(model(tmp_path / "tiny"), device_cache_gb=0.5, progress=False)


# ----------------------------------------------------------------------------- while requests are served


Which = Callable[..., bool]
"""Whether a program of this name, kind and sizes, is meant."""


def refuse(monkeypatch: pytest.MonkeyPatch, which: Which, told: str = FULL) -> None:
    """Programs that are meant are made at their next use, which fails."""
    programs = tiny.runner()._programs
    make = programs._make

    def failing(name: Any) -> Any:
        if which(*name):
            raise jax.errors.JaxRuntimeError(told)
        return make(name)

    kept = {name: program for name, program in programs.compiled.items() if not which(*name)}
    monkeypatch.setattr(programs, "compiled", kept)
    monkeypatch.setattr(programs, "_make", failing)


def is_measuring(kind: str, *sizes: Any) -> bool:
    return kind == "stage" and len(sizes) > 3


@pytest.mark.parametrize(
    ("which", "asked"),
    [
        (is_measuring, {"strategy": "blend"}),
        (lambda kind, *sizes: kind == "sample" and sizes[1] > 0, {"strategy": "full", "logit_bias": {7: 1.0}}),
        (lambda kind, *_: kind == "compact", {"strategy": "full", "compression": "knorm:64"}),
    ],
    ids=["measure", "adjust", "compact"],
)
def test_a_program_that_finds_no_room_at_its_first_use_ends_the_request_that_needs_it(
    which: Which, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny.engine() as engine:
        prompts = [tiny.prompt(seed, 20, (30,)) for seed in (1, 2)]
        alone = [engine.answer_prompt(prompt, strategy="full", max_tokens=20).tokens for prompt in prompts]
    with tiny.engine() as engine:
        with monkeypatch.context() as planted:
            refuse(planted, which)
            with Hold(engine):
                others = [engine.begin_prompt(prompt, strategy="full", max_tokens=20) for prompt in prompts]
                needs = engine.begin_prompt(tiny.prompt(3), max_tokens=8, **asked)
            with pytest.raises(DeviceFullError, match=r"no room .* a cache of .* GB: lower --device-cache-gb") as told:
                needs.result(60)
            assert FULL in str(told.value.__cause__)
            assert [other.result(60).tokens for other in others] == alone
        stats = engine.stats()
        assert stats["errors_total"] == 1 and stats["step_failures_total"] and not stats["device_losses_total"]
        assert "no room" in caplog.text and FULL in caplog.text
        again = engine.begin_prompt(tiny.prompt(3), max_tokens=8, **asked)
        tiny.check_ended(engine, [again])


def test_what_finds_no_room_outside_of_steps_says_so_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(KnowledgeCache, "reserve", full)
        with pytest.raises(DeviceFullError, match="lower --device-cache-gb"):
            engine.answer_prompt(tiny.prompt(), strategy="full", max_tokens=2)
    tiny.check_ended(engine, [engine.begin_prompt(tiny.prompt(), strategy="full", max_tokens=2)])


def test_a_fault_of_a_kernel_is_told_as_it_is(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, is_measuring, SHARED)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory"):
        engine.answer_prompt(tiny.prompt(), strategy="blend", max_tokens=2)
    tiny.check_ended(engine, [])


def test_one_that_fills_the_device_and_loses_its_memory_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others, though they run beside it, start again no more than twice."""
    lost, bad = False, tiny.prompt(3, 20, ())
    run, reset = Runner.step, Runner.reset

    def step(self: Runner, step: Step) -> Any:
        nonlocal lost
        if poison in step.token_T:
            lost = True
            full()
        return run(self, step)

    def restored(self: Runner) -> None:
        nonlocal lost
        lost = False
        reset(self)

    with tiny.engine() as engine:
        prompts = [tiny.prompt(seed, 20, (30,)) for seed in (1, 2)]
        alone = [engine.answer_prompt(prompt, strategy="full", max_tokens=30).tokens for prompt in prompts]
    theirs = np.concatenate([*(prompt.tokens for prompt in prompts), *alone])
    poison = np.setdiff1d(np.arange(tiny.CONFIG.vocab_size), theirs)[-1]
    bad.segments[-1].tokens[-1] = poison
    monkeypatch.setattr(Runner, "lost", property(lambda _: lost))
    monkeypatch.setattr(Runner, "step", step)
    monkeypatch.setattr(Runner, "reset", restored)
    with tiny.engine() as engine:
        with Hold(engine):
            others = [engine.begin_prompt(prompt, strategy="full", max_tokens=30) for prompt in prompts]
            fills = engine.begin_prompt(Prompt(bad.segments), strategy="full", max_tokens=5)
        with pytest.raises(DeviceFullError, match="no room"):
            fills.result(60)
        assert [other.result(60).tokens for other in others] == alone
        assert engine.stats()["device_losses_total"] == 2 and engine.stats()["errors_total"] == 1
        tiny.check_ended(engine, [])
