"""The import graph of benchmarks/: commands import rooms and never each other, rooms import downward."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.devices import ROOT

HERE = ROOT / "benchmarks"
ALLOWED: Mapping[str, frozenset[str]] = {
    "common": frozenset(),
    "baseline": frozenset(),
    "policies": frozenset({"common", "baseline"}),
    "kernels": frozenset({"common", "baseline"}),
    "compression": frozenset({"common", "baseline", "quality"}),
    "quality": frozenset({"common", "baseline"}),
    "graph": frozenset({"common", "baseline", "compression", "quality"}),
    "latency": frozenset({"common", "kernels"}),
    "load": frozenset({"common", "baseline", "graph", "latency", "quality"}),
}
"""room -> the rooms whose modules it may import besides its own; commands may import all rooms."""

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in (HERE, *(HERE / room for room in ALLOWED))
    for path in sorted(folder.rglob("*.py") if folder != HERE else folder.glob("*.py"))
}


def is_command(module: str) -> bool:
    """A module directly under benchmarks/, or a room's `__main__`."""
    parts = module.split(".")
    return (len(parts) == 2 and parts[1] not in ALLOWED) or parts[-1] == "__main__"


def wrong(module: str, code: str) -> list[str]:
    """Modules of benchmarks/ that the code imports, also within functions, and must not."""
    targets: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            targets |= {name if name in MODULES else str(node.module) for name in names}
    own = {name for name in targets if name.split(".")[0] == "benchmarks"}
    rooms = frozenset(ALLOWED) if is_command(module) else ALLOWED[module.split(".")[1]] | {module.split(".")[1]}
    return sorted(name for name in own if is_command(name) or name == "benchmarks" or name.split(".")[1] not in rooms)


def test_every_folder_of_code_is_a_room() -> None:
    folders = {path.parent.name for path in HERE.glob("*/*.py")} - {"workers"}
    assert folders == set(ALLOWED), "say in ALLOWED what the new room may import"


@pytest.mark.parametrize("module", [m for m in MODULES if m != "benchmarks"])
def test_commands_import_rooms_and_never_each_other(module: str) -> None:
    assert wrong(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("benchmarks.repair", "from benchmarks.ttft import workload"),
        ("benchmarks.repair", "def late():\n    from benchmarks import ttft"),
        ("benchmarks.graphrag", "from benchmarks.quality.__main__ import options"),
        ("benchmarks.common.report", "import benchmarks.demo"),
        ("benchmarks.common.report", "from benchmarks.latency.prompt import TEXTS"),
        ("benchmarks.quality.score", "from benchmarks.graph import question"),
    ],
)
def test_an_import_that_points_the_wrong_way_is_found(module: str, code: str) -> None:
    assert len(wrong(module, code)) == 1


def test_commands_are_listed_in_the_documentation() -> None:
    listed = Path(ROOT / "docs" / "benchmarks.md").read_text()
    names = {m.split(".")[1] for m in MODULES if m != "benchmarks" and is_command(m)}
    assert [name for name in sorted(names) if f"- `{name}`:" not in listed] == []


@pytest.mark.parametrize("path", MODULES.values(), ids=list(MODULES))
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500
