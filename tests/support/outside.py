"""Programs in environments of their own, which have packages that ragjax's has not."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest


def python_of(variable: str, needs: str = "") -> str:
    """The Python that a variable of the environment names; without it, or what it needs, the test is skipped.

    needs: statements that it must be able to run.
    """
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python")
    if run(python, "-c", needs).returncode:
        pytest.skip(f"not there: {needs}")
    return python


def run(*command: str, variables: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (variables or {})
    return subprocess.run(command, env=environment, **{"capture_output": True, "text": True, "timeout": 250, **options})
