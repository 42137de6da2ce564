"""What an engine cannot be made of is refused before a model is loaded."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from ragjax.core import ConfigError, EngineOptions, Grid
from ragjax.engine import Engine
from ragjax.engine.build import PAGE_SIZE, _check_deterministic, _compile, _grid, _packed_form, measured_profile
from ragjax.models.packed import PackedForm
from ragjax.reuse.exact import Full, Prefix
from tests.support import tiny


def test_a_strategy_goes_by_its_own_name() -> None:
    """Requests are served by the key, settings go by the name: a ratio would be lost between them."""
    with pytest.raises(ConfigError, match="the strategy 'full' is given as 'mine'"):
        Engine.load("none", strategies={"prefix": Prefix(), "mine": Full()})


@pytest.mark.parametrize("given", [["naive"], [Prefix()]])
def test_strategies_come_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match="strategies must be a mapping"):
        Engine.load("none", strategies=given)


def test_64_bits_are_refused() -> None:
    with jax.enable_x64(True), pytest.raises(ConfigError, match="ragjax does not run with jax_enable_x64"):
        Engine.load("none")


def test_on_a_cpu_eight_full_contexts_fit_every_step() -> None:
    """With less room beside a prompt that is computed, requests that decode would take turns."""
    context = 4096
    grid = _grid(tiny.CONFIG, context, "cpu", 1, packed=False)
    assert min(grid.entries_of(shape)[-1] for shape in grid.rows) >= 8 * context // PAGE_SIZE


def test_prefill_times_come_from_two_steps() -> None:
    """RAGCache's profile where none was measured: a step takes 5 ms, a row 0.5 ms, 500 keys as much as a row."""

    class Steps:
        grid = Grid()

        def seconds(self, rows: int) -> float:
            return 5e-3 + rows * 0.5e-3

    profile = measured_profile(Steps(), keys=500)  # no more of a runner is looked at
    assert profile.cost(0, 1) == pytest.approx(5.5e-3, rel=1e-3)
    assert profile.cost(512, 128) == pytest.approx(5e-3 + 128 * (0.5e-3 + 576e-6), rel=1e-3)
    assert profile.cost(0, 1) > profile.cost(0, 128) / 128, "a step's price is spread over its tokens"


@pytest.mark.parametrize("part", ["embedding", "layer"])
def test_a_model_of_nan_ends_the_start(part: str) -> None:
    decoder = tiny.decoder()
    weight = decoder.embedding if part == "embedding" else decoder.layers[1].down
    weight.set_value(weight[...] * float("nan"))
    for made, wrong in ((tiny.make_runner(), False), (tiny.make_runner(decoder), True)):
        assert made.computes_numbers() != wrong
        if wrong:
            with pytest.raises(ConfigError, match="computes no numbers"):
                _compile(made, made.programs(shapes=made.grid.least), progress=False)


def test_weights_of_fewer_bits_are_refused_where_none_stay_packed() -> None:
    options = EngineOptions(model="smollm2-135m-instruct", weights="int8")
    assert _packed_form(options, 1, "bfloat16") == PackedForm(bits=8)
    for devices, dtype in ((2, "bfloat16"), (1, "float32")):
        with pytest.raises(ConfigError, match="weights=int8 needs one CPU"):
            _packed_form(options, devices, dtype)


def test_deterministic_is_refused_where_matrices_are_not_packed() -> None:
    with pytest.raises(ConfigError, match="deterministic needs a checkpoint"):
        _check_deterministic(tiny.decoder(), tiny.make_runner())
