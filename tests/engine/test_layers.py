"""Budgets by layer in the engine: the pages that a request holds, and who runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ragjax.core import Step
from ragjax.core.passes import LayerLayout
from ragjax.engine import Engine
from ragjax.runner.runner import Runner
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.eviction import SAID, budgets, dense, distinct, expected, setting
from tests.support.pace import Hold

CONFIG = replace(tiny.CONFIG, num_layers=9)  # three stages of three layers
METHODS = ("pyramidkv", "cake")


@pytest.fixture(scope="module")
def runners() -> dict[bool, Runner]:
    """An array for each stage, and one for all."""
    return {whole: tiny.make_runner(tiny.decoder(config=CONFIG), pages=100, whole=whole) for whole in (False, True)}


def watch(engine: Engine, patch: pytest.MonkeyPatch) -> list[tuple[Step, int]]:
    """Steps from now on, and pages in use in each."""
    seen: list[tuple[Step, int]] = []
    pool, step = engine._cache.pool, engine._runner.step

    def watched(asked: Step) -> Any:
        seen.append((asked, pool.capacity - pool.free_pages))
        return step(asked)

    patch.setattr(engine._runner, "step", watched)
    return seen


def decoding(seen: list[tuple[Step, int]], tokens: int) -> Iterator[int]:
    """Pages in use while tokens behind a prompt were computed."""
    return (used for step, used in seen if (step.index_T >= tokens).any())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_request_holds_the_containers_of_what_its_layers_keep(
    runners: dict[bool, Runner], whole: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, compression = distinct(), setting(method)
    decoder = tiny.decoder(config=CONFIG)
    nothing = np.zeros((0, CONFIG.head_dim))
    _, layers = dense(decoder, decoder.embed(prompt.tokens), 0, lambda i, h: [nothing, nothing])
    kept = np.array(budgets(layers, compression), np.int32)
    assert kept.sum() == 9 * 48 and len(set(kept.tolist())) > 3
    with tiny.engine(runners[whole], pages=100, lookup=0) as engine:
        seen = watch(engine, monkeypatch)
        given = {"strategy": "full", "compression": compression, "max_tokens": 20}
        engine.answer_prompt(prompt, **given)
        audit_engine(engine)
        held = list(decoding(seen, len(prompt)))
        scored = engine.answer_prompt(prompt, **given, continuation=SAID)
        tiny.check_ended(engine, [])
    containers = LayerLayout(kept, 9 if whole else 3).containers(tiny.PAGE)
    assert min(held) == containers + 1 and max(held) == containers + 2  # the tail has pages of its own
    if whole:
        assert containers <= -(-(48 + tiny.PAGE - 1) // tiny.PAGE)
    assert scored.scores is not None
    np.testing.assert_allclose(scored.scores, expected(decoder, prompt.tokens, compression), atol=2e-3)


@pytest.mark.parametrize("method", METHODS)
def test_an_ordinary_request_answers_alike_beside_one_with_budgets_by_layer(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests decode together; the other one is compressed with a number for all layers, then by layer."""
    found = []
    for other in (setting("snapkv"), setting(method)):
        with tiny.engine(lookup=0) as engine, monkeypatch.context() as patch:
            prompts = [tiny.prompt(1), tiny.prompt(2)]
            for prompt in prompts:
                engine.answer_prompt(prompt, max_tokens=1)
            seen = watch(engine, patch)
            with Hold(engine):
                asked = [
                    engine.begin_prompt(prompts[0], max_tokens=30, want_logits=True),
                    engine.begin_prompt(prompts[1], max_tokens=30, compression=other),
                ]
            mine, theirs = (future.result() for future in asked)
            audit_engine(engine)
        assert len(theirs.tokens) > 5
        together = [step for step, _ in seen if len(np.unique(step.request_T[step.index_T >= 0])) == 2]
        assert len(together) > 5 and any(step.by_layer is not None for step in together) == (other.method == method)
        found.append((mine.tokens, mine.logits))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=0, atol=1e-5)


def test_steps_without_such_requests_have_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.engine(lookup=0) as engine:
        seen = watch(engine, monkeypatch)
        engine.answer_prompt(tiny.prompt(), compression=setting("pyramidkv"), max_tokens=5)
        layered = [step.by_layer is not None for step, _ in seen]
        seen.clear()
        engine.answer_prompt(tiny.prompt(), compression=setting("snapkv"), max_tokens=5)
    assert any(layered) and not layered[0] and layered[-1]
    assert all(step.by_layer is None for step, _ in seen)
