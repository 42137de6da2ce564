"""`import ragjax`: all that a program needs, and no more than the nouns until the engine is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ragjax
from ragjax import cli, core
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


def without(name: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that lacks a package."""
    lacking = f"import sys; sys.modules[{name!r}] = None; {code}"
    return subprocess.run([sys.executable, "-c", lacking], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fastapi", "uvicorn", "multipart"])
def test_a_server_without_its_packages_says_which(name: str) -> None:
    done = without(name, "import runpy; runpy.run_module('ragjax.serve', run_name='__main__', alter_sys=True)")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"needs the package {name}: pip install '.[serve]'" in done.stderr


def test_windows_is_refused_in_words() -> None:
    code = "import sys; sys.platform = 'win32'; import ragjax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "use Linux, there under WSL 2" in done.stderr


def test_the_command_says_its_version_and_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"ragjax {ragjax.__version__}\n"
    assert cli.main(["srve"]) == 2 and "there is no srve; did you mean serve? There are" in capsys.readouterr().err
    assert cli.main(["xyz"]) == 2 and "choose one of serve, chat, " in capsys.readouterr().err
