"""What an engine cannot be made of is refused before a model is loaded."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from ragjax.core import ConfigError
from ragjax.engine import Engine
from ragjax.reuse.exact import Full, Prefix


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
