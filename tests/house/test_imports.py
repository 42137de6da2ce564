"""The import graph: which room may import which (docs/architecture.md), and what each can do without."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.devices import ROOT
from tests.support.drawing import edges
from tests.support.imports import HEAVY, import_without

# room -> the rooms whose modules it may import besides its own
ALLOWED: Mapping[str, frozenset[str]] = {
    "core": frozenset(),
    "cache": frozenset({"core"}),
    "kernels": frozenset({"core"}),
    "quality": frozenset({"core"}),
    "retrieval": frozenset({"core"}),
    "compress": frozenset({"core", "kernels"}),
    "models": frozenset({"core", "kernels"}),
    "store": frozenset({"core", "kernels", "models"}),
    "reuse": frozenset({"core", "cache"}),
    "runner": frozenset({"core", "compress", "kernels", "models", "store"}),
    "prompting": frozenset({"core", "models", "retrieval"}),
    "schedule": frozenset({"core", "cache", "models", "quality", "reuse"}),
    "engine": frozenset(
        {*("core", "cache", "models", "prompting", "quality", "retrieval", "reuse", "runner", "schedule", "store")}
    ),
    "commands": frozenset({"core", "cache", "engine", "models", "prompting", "quality", "retrieval", "reuse", "store"}),
    "cluster": frozenset({"core", "cache", "engine", "models", "quality", "store"}),
    "serve": frozenset({"core", "cluster", "commands", "engine"}),
    "ragjax": frozenset({"core", "engine"}),  # the package itself and its modules: public names
    "entry": frozenset({"ragjax"}),
}
"""A module belongs to the room whose folder it lies in. A module that Python runs (`python -m …`) is an entry: it only
calls a command, and nothing imports it."""

APART = {"ragjax.cluster.deployment": "ray", "ragjax.serve.cluster": "ray"}
"""Modules that need a package which is not a dependency; others may import them within functions only."""

COMPUTE = ("compress", "kernels", "models", "runner", "store")
"""The rooms that compute; all others decide, and name no jax."""
BARE = ("core", "cache", "prompting", "quality", "reuse", "schedule")
"""Rooms that can be imported without jax."""
JAX = {"jax", "jaxlib", "flax", "orbax", "optax"}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted((ROOT / "ragjax").rglob("*.py"))}


def imports(tree: ast.AST, known: Mapping[str, object] = MODULES) -> Iterator[str]:
    """Every module that the code imports, also within functions; `from package import module` names the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module)


def is_entry(module: str) -> bool:
    """Whether Python runs the module."""
    path = MODULES.get(module)
    return path is not None and (path.stem == "__main__" or '__name__ == "__main__"' in path.read_text())


def room_of(module: str) -> str:
    if is_entry(module):
        return "entry"
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / "ragjax" / parts[1]).is_dir() else "ragjax"


def is_allowed(source: str, target: str) -> bool:
    here, there = room_of(source), room_of(target)
    return there != "entry" and (here == there or there in ALLOWED[here])


def wrong_edges(sources: Mapping[str, ast.AST]) -> list[str]:
    """Imports that point the wrong way, as "module imports module"."""
    return [
        f"{module} imports {target}"
        for module, tree in sources.items()
        for target in imports(tree, {**MODULES, **sources})
        if target.split(".")[0] in {"train", "benchmarks", "tests"}
        or (target.split(".")[0] == "ragjax" and not is_allowed(module, target))
    ]


class _RunAtImport(ast.NodeTransformer):
    """Leaves out what does not run when a module is imported."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        return None

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        return None

    def visit_If(self, node: ast.If) -> ast.If | None:
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else node


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules of which each imports the next while it is imported, and the last the first; [] if there are none."""
    graph = {
        module: {target for target in imports(_RunAtImport().visit(ast.parse(code)), sources) if target in sources}
        for module, code in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


SOURCES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


def test_every_room_has_its_place() -> None:
    assert {room_of(module) for module in MODULES} <= set(ALLOWED), "say in ALLOWED what the new room may import"


def test_the_table_has_no_cycle() -> None:
    rooms = {room: {target.split(".")[0] for target in targets} for room, targets in ALLOWED.items()}
    assert list(TopologicalSorter(rooms).static_order())


def test_the_drawing_shows_the_rule() -> None:
    """docs/figure/rooms.dot: each arrow is allowed, and what is allowed follows from the arrows."""
    drawn: dict[str, set[str]] = {room: set() for room in ALLOWED if room not in ("ragjax", "entry")}
    for source, target in edges((ROOT / "docs" / "figure" / "rooms.dot").read_text()):
        assert target in ALLOWED[source], f"{source} may not import {target}"
        drawn[source].add(target)
    reached: dict[str, set[str]] = {}
    for room in TopologicalSorter(drawn).static_order():
        reached[room] = drawn[room].union(*(reached[below] for below in drawn[room]))
    assert {room: ALLOWED[room] - reached[room] for room in drawn} == {room: set() for room in drawn}


def test_imports_point_one_way() -> None:
    assert wrong_edges(SOURCES) == []


def test_modules_import_each_other_in_no_circle() -> None:
    assert circle({module: path.read_text() for module, path in MODULES.items()}) == []


def test_a_circle_is_found() -> None:
    late = "def f():\n    import a"
    assert circle({"a": "import b", "b": late}) == []
    assert circle({"a": "import b", "b": "from c import x", "c": "import a"}) in (
        list("abca"),
        list("bcab"),
        list("cabc"),
    )


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("ragjax.core.new", "from ragjax.cache.tree import Node"),
        ("ragjax.cache.tree", "def late():\n    import ragjax.engine"),
        ("ragjax.cache.policy.new", "from ragjax.reuse.base import Strategy"),
        ("ragjax.cache.hierarchy", "from ragjax.store.disk import DiskStore"),
        ("ragjax.store.disk", "from ragjax.cache.tree import Node"),
        ("ragjax.schedule.scheduler", "from ragjax.engine.loop import Loop"),
        ("ragjax.schedule.scheduler", "from ragjax.runner import Runner"),
        ("ragjax.schedule.sampling", "from ragjax.kernels import rope"),
        ("ragjax.commands.gate", "from ragjax.cli import main"),
        ("ragjax.kernels.rope", "from ragjax.models.config import ModelConfig"),
        ("ragjax.retrieval.index", "from ragjax.models.encoder import Encoder"),
        ("ragjax.engine.new", "from ragjax import serve"),
        ("ragjax.engine.new", "from ragjax.kernels.rope import Rotation"),
        ("ragjax.models.weights", "import train.depft"),
        ("ragjax.models.weights", "from benchmarks.report import Report"),
    ],
)
def test_an_import_that_points_the_wrong_way_is_found(module: str, code: str) -> None:
    assert len(wrong_edges({module: ast.parse(code)})) == 1


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) not in (*COMPUTE, "entry")])
def test_what_decides_names_no_jax(module: str) -> None:
    assert JAX.isdisjoint(name.split(".")[0] for name in imports(SOURCES[module]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rooms", "blocked"), [(BARE, JAX | HEAVY), ((*COMPUTE, "cache"), HEAVY)], ids=["decide", "compute"]
)
def test_rooms_import_without_what_they_can_do_without(rooms: tuple[str, ...], blocked: set[str]) -> None:
    modules = [module for module in MODULES if room_of(module) in rooms and module not in APART]
    assert modules
    done = import_without(blocked, modules)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("module", "package"), APART.items())
def test_what_stands_apart_says_what_it_needs(module: str, package: str) -> None:
    assert package in set(imports(SOURCES[module]))
    done = import_without({package}, [module])
    assert done.returncode and f"{package} is imported" in done.stderr


def test_an_import_that_is_not_there_is_found() -> None:
    done = import_without({"jax"}, ["ragjax.kernels.rope"])
    assert done.returncode and "jax is imported, and this module must do without" in done.stderr
