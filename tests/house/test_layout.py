"""How tests/ is laid out: a folder for every room, and helpers that several test modules use in tests/support."""

from __future__ import annotations

import ast

import pytest

from tests.support.devices import ROOT

TESTS = ROOT / "tests"
ROOMS = [
    *sorted(folder.name for folder in (ROOT / "ragjax").iterdir() if (folder / "__init__.py").is_file()),
    *("train", "benchmarks", "house"),  # house: documentation, packaging, imports
]
NOT_ROOMS = {"support", "data"}


def imported_tests(code: str) -> list[str]:
    """Test modules that the code imports, also within the programs that it holds as text."""
    texts = [code]
    texts += [
        node.value
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value
    ]
    lines = (line.split() for text in texts for line in text.splitlines())
    named = {line[1] for line in lines if len(line) > 1 and line[0] in ("from", "import")}
    return sorted(name for name in named if name.split(".")[0] == "tests" and name.split(".")[1] not in NOT_ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_tests(room: str) -> None:
    assert list((TESTS / room).rglob("test_*.py"))


def test_every_folder_is_a_room() -> None:
    paths = [path.relative_to(TESTS) for path in TESTS.rglob("*.py")]
    assert {path.parts[0] for path in paths if len(path.parts) > 1} - NOT_ROOMS <= set(ROOMS)
    assert not list(TESTS.glob("test_*.py"))


@pytest.mark.slow
def test_no_test_module_imports_another() -> None:
    found = {str(path.relative_to(ROOT)): imported_tests(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}, "move what is shared to tests/support"


def test_an_import_of_a_test_module_is_found() -> None:
    room = "tests." + "cache"
    assert imported_tests(f"from tests.support import tiny\nP = '\\nfrom {room} import test_pool as t'") == [room]
    assert imported_tests(f"def late():\n    import {room}.test_pool") == [f"{room}.test_pool"]
