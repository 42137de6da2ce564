"""`import ragjax`: all that a program needs, and no more than the nouns until the engine is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ragjax
from ragjax import core
from ragjax.engine import Engine

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()


def test_the_package_has_what_the_reference_lists() -> None:
    listed = {name for name in re.findall(r"^::: ragjax\.core\.([A-Z]\w+)$", REFERENCE, re.MULTILINE)}
    errors = {"RagjaxError", "ConfigError", "RequestError", "OverloadError", "ClosedError"}
    assert listed | errors | {"Engine"} <= set(ragjax.__all__) <= set(dir(ragjax))
    assert all(getattr(ragjax, name) is getattr(core, name) for name in ragjax.__all__ if name != "Engine")
    assert ragjax.Engine is Engine


def test_names_are_listed_without_jax() -> None:
    code = "import sys, ragjax; assert 'Engine' in dir(ragjax) and 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
