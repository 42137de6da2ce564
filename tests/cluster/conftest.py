"""What real replicas need: a Python with Ray, and a model that answers fast."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.devices import ROOT

DATA = ROOT / "tests" / "data"


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("RAGJAX_RAY_PYTHON")
    if not found:
        pytest.skip("RAGJAX_RAY_PYTHON names no Python with ragjax[ray]")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, with a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    for source in (DATA / "tiny_llama", DATA / "disk" / "tokenizer"):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder
