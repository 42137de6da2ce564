"""The notebooks in docs/: valid files that name what exists, and cells that run in order."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
BOOKS = sorted(DOCS.glob("*.ipynb"))


def read(name: str) -> dict[str, Any]:
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


@pytest.fixture(params=[path.name for path in BOOKS])
def book(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


@pytest.fixture
def cells(book: dict[str, Any]) -> list[dict[str, Any]]:
    return book["cells"]


def sources(cells: list[dict[str, Any]]) -> list[str]:
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def without_display(source: str) -> str:
    """The cell without what IPython alone can do: the import, and the call of its SVG."""
    return "".join(line for line in source.splitlines(keepends=True) if "SVG" not in line)


def test_it_is_a_notebook_of_a_few_short_cells(book: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5) and book["metadata"]["kernelspec"]["name"]
    assert 6 <= len(cells) <= 9 and len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        keys = {"cell_type", "id", "metadata", "source"}
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell["cell_type"] in ("code", "markdown") and set(cell) == keys | code
        assert len(cell["source"]) <= 15 and all(len(line.rstrip("\n")) <= 120 for line in cell["source"])


def test_it_is_small(book: dict[str, Any]) -> None:
    assert len(json.dumps(book)) < 150_000


def test_the_drawing_is_its_only_output_and_small(cells: list[dict[str, Any]]) -> None:
    (drawn,) = (cell for cell in cells if cell.get("outputs"))
    (output,) = drawn["outputs"]
    assert drawn["source"][-1].startswith("SVG(") and output["output_type"] == "execute_result"
    svg = "".join(output["data"]["image/svg+xml"])
    assert len(svg) < 100_000 and ElementTree.fromstring(svg).tag.endswith("}svg")


def test_every_name_it_imports_from_ragjax_exists(cells: list[dict[str, Any]]) -> None:
    imports = [node for source in sources(cells) for node in ast.walk(ast.parse(source))]
    named = [(node.module, alias.name) for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names]
    ours = [(module, name) for module, name in named if module and module.partition(".")[0] == "ragjax"]
    assert len(ours) >= 3
    assert [(m, n) for m, n in ours if not hasattr(importlib.import_module(m), n)] == []


def run(name: str) -> dict[str, Any]:
    """What a notebook's cells leave, run in order."""
    names: dict[str, Any] = {}
    try:
        for number, source in enumerate(sources(read(name)["cells"])):
            exec(compile(without_display(source), f"cell {number}", "exec"), names)
    finally:
        if "engine" in names:
            names["engine"].close()
    return names


@pytest.mark.model
@pytest.mark.long
def test_the_graphs_cells_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("graph.ipynb")
    first, second = names["first"], names["second"]
    assert ("Museum of Lost Voyages", "has", "17 rooms") in [fact.steps for fact in first.facts]
    reused = {segment.id: segment.reused == segment.tokens for segment in second.segments}
    assert reused == {"system": True, "Museum of Lost Voyages": True, "question": False}
    assert "<svg" in (tmp_path / "subgraph.svg").read_text()
    answer = names["answer"]
    assert answer.cached_tokens == answer.prompt_tokens, "held"
    assert "17 rooms" in capsys.readouterr().out


@pytest.mark.model
@pytest.mark.long
def test_the_compressions_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra notebook")
    monkeypatch.chdir(tmp_path)
    names = run("compress.ipynb")
    for share in names["shares"].values():
        assert share.sum() == pytest.approx(96, abs=0.5) and (share[-32:] == 1).all()
    assert "<svg" in (tmp_path / "compress.svg").read_text()
    assert set(names["said"]) == {"all tokens", *names["METHODS"]}


LONG: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    "strategies.ipynb": lambda names: names["answers"]["naive"].cached_tokens > names["answers"]["full"].cached_tokens,
    "sizing.ipynb": lambda names: names["rates"]["lru"] == sorted(names["rates"]["lru"]) and names["enough"] > 0,
    "quality.ipynb": lambda names: names["chosen"].kl_hi <= names["budget"].kl,
    "training.ipynb": lambda names: not names["failed"] and names["after"]["dev_loss"] < names["before"]["dev_loss"],
    "extending.ipynb": lambda names: {found[-1].text for found in names["answers"].values()} == {names["full"].text},
}
"""What holds when a notebook's cells have run; those that take a minute or two."""


def test_every_notebook_is_run() -> None:
    assert {path.name for path in BOOKS} == {*LONG, "graph.ipynb", "compress.ipynb"}


@pytest.mark.model
@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_the_cells_of_a_long_one_run_in_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra notebook")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DOCS.parent))  # cells that need the repository name it from docs/
    names = run(name)
    assert "<svg" in (tmp_path / name.replace(".ipynb", ".svg")).read_text()
    assert LONG[name](names)
