"""The packages of integrations/: their own tests, against an engine in miniature, and their types.

They run in a Python that has LangChain or LlamaIndex, which RAGJAX_CLIENTS_PYTHON names.
"""

from __future__ import annotations

import os
import tomllib

import pytest

from ragjax.core import Document
from tests.support import tiny
from tests.support.devices import ROOT
from tests.support.outside import python_of, run
from tests.support.serving import serving

PACKAGES = {"langchain": "langchain_openai", "llama_index": "llama_index.llms.openai_like"}


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A package's folder, and a Python that has what it stands on."""
    python = python_of("RAGJAX_CLIENTS_PYTHON", f"import {PACKAGES[request.param]}, pytest, mypy")
    return str(ROOT / "integrations" / request.param), python


def test_its_tests_pass_against_a_server(package: tuple[str, str]) -> None:
    folder, python = package
    doors = [Document("north", "It is red.", "The north door"), Document("south", "It is blue.", "The south door")]
    with tiny.engine() as engine, serving(engine) as served:
        engine.add_documents(doors, "doors")
        server = {"RAGJAX_TEST_URL": served.url + "/v1"}
        done = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder, variables=server)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def test_its_types_are_sound(package: tuple[str, str]) -> None:
    folder, python = package
    done = run(python, "-m", "mypy", "--cache-dir", os.devnull, cwd=folder)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", PACKAGES)
def test_it_depends_on_the_ecosystem_alone(name: str) -> None:
    project = tomllib.loads((ROOT / "integrations" / name / "pyproject.toml").read_text())["project"]
    assert project["readme"] == "README.md" and not any(line.startswith("ragjax") for line in project["dependencies"])


def test_a_chunk_that_is_sent_back_finds_its_kv() -> None:
    """What the retrievers' texts rely on: a chunk's own text, without a title, has the chunk's tokens."""
    with tiny.engine() as engine:
        engine.add_documents([Document("north", "It is red. " * 30, "The north door")])
        asked = {"strategy": "naive", "max_tokens": 1}
        engine.answer("Which door?", top_k=2, **asked)
        chunks = [hit.chunk for hit in engine.search("Which door?", top_k=2)]
        found = engine.answer("Red?", documents=[Document(chunk.id, chunk.text) for chunk in chunks], **asked)
        segments = [segment for segment in found.segments if "#" in segment.id]
    assert len(segments) == len(chunks) == 2 and all(segment.reused == segment.tokens for segment in segments)
