"""A picture of retrieved subgraphs: entities in columns by their distance, relations along the lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from ragjax.core import ConfigError
from ragjax.retrieval.path import Subgraph, Triple

_SUFFIXES = (".svg", ".png")
_COLUMN, _ROW = 3.6, 0.5  # inches from column to column and from row to row
_LONGEST = 32  # characters of a label
_LETTER = 4.6  # points that one of them is wide


def draw(subgraphs: Sequence[Subgraph], path: str | Path) -> None:
    """Draw subgraphs into an .svg or .png file. The entities that were asked for are filled with colour.

    Labels can be read with up to about 40 entities. Needs the extra `notebook`.

    Raises:
        ConfigError: networkx or matplotlib is missing, there is nothing to draw, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"{path}: a drawing is an .svg or .png file; give it one of these endings")
    if not subgraphs:
        raise ConfigError("there is no subgraph to draw; ask for an entity that the graph knows")
    try:
        import networkx as nx
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"drawing needs {error.name}: pip install '.[notebook]' in ragjax's folder") from error

    places = _places(subgraphs)
    columns, rows = (max(place[axis] for place in places.values()) + 1 for axis in (0, 1))
    figure = Figure(figsize=(_COLUMN * columns, max(2.0, _ROW * (rows + 1))))
    axes = figure.add_subplot()
    axes.set_axis_off()
    _paint(nx, _graph(nx, subgraphs), places, axes, asked={subgraph.entity for subgraph in subgraphs})
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _places(subgraphs: Sequence[Subgraph]) -> dict[str, tuple[float, float]]:
    """Column and row of each entity: behind the one that a path first came from, in the middle of those behind it."""
    column, behind = _tree(subgraphs)
    row: dict[str, float] = {}
    leaves = 0
    for entity in reversed(_preorder(behind)):
        if behind[entity]:
            row[entity] = sum(row[child] for child in behind[entity]) / len(behind[entity])
        else:
            row[entity] = leaves
            leaves += 1
    return {entity: (column[entity], row[entity]) for entity in column}


def _tree(subgraphs: Sequence[Subgraph]) -> tuple[dict[str, int], dict[str, list[str]]]:
    """The column of each entity, and the entities behind it; those without one before them are under ""."""
    column: dict[str, int] = {}
    behind: dict[str, list[str]] = {"": []}
    starts = [(subgraph.entity,) for subgraph in subgraphs]
    for walk in (*starts, *(path.entities for subgraph in subgraphs for path in subgraph.paths)):
        for before, entity in zip(("", *walk), walk, strict=False):
            if entity not in column:
                column[entity] = column.get(before, -1) + 1
                behind[before].append(entity)
                behind[entity] = []
    return column, behind


def _preorder(behind: dict[str, list[str]]) -> list[str]:
    found, left = [], list(behind[""])
    while left:
        entity = left.pop()
        found.append(entity)
        left += behind[entity]
    return found


def _graph(nx: Any, subgraphs: Sequence[Subgraph]) -> Any:
    """One line per pair of entities, with all its relations."""
    graph = nx.DiGraph()
    graph.add_nodes_from(subgraph.entity for subgraph in subgraphs)
    for head, relation, tail in dict.fromkeys(_triples(subgraphs)):
        known = [graph.edges[head, tail]["label"]] if graph.has_edge(head, tail) else []
        graph.add_edge(head, tail, label=", ".join([*known, _label(relation)]))
    return graph


def _triples(subgraphs: Sequence[Subgraph]) -> Iterable[Triple]:
    return (triple for subgraph in subgraphs for path in subgraph.paths for triple in path.triples)


def _paint(nx: Any, graph: Any, places: dict[str, tuple[float, float]], axes: Any, asked: set[str]) -> None:
    nodes = list(graph)
    wide = [(_LETTER * len(_label(name)) + 16) ** 2 for name in nodes]
    for beside, sizes in ((True, wide), (False, 900)):
        lines = [(a, b) for a, b, _ in graph.edges(data="label") if (places[a][0] != places[b][0]) == beside]
        # arrows end where the labels begin: beside them, or above and below
        style = {"edge_color": "0.6", "arrowsize": 12, "nodelist": nodes, "node_size": sizes}
        nx.draw_networkx_edges(graph, places, edgelist=lines, ax=axes, **style)
    for outward, place in ((True, 0.6), (False, 0.3)):  # near the farther end, where lines are apart
        edges = [(a, b, text) for a, b, text in graph.edges(data="label") if (places[a] <= places[b]) == outward]
        labels = {(a, b): _plain(text) for a, b, text in edges}
        nx.draw_networkx_edge_labels(
            graph, places, edge_labels=labels, ax=axes, font_size=7, rotate=False, label_pos=place
        )
    for names, colour in ((asked, "#f4b942"), (set(graph) - asked, "#dbe7f5")):
        nx.draw_networkx_labels(
            graph,
            places,
            labels={name: _plain(_label(name)) for name in graph if name in names},
            ax=axes,
            font_size=8,
            bbox={"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "0.4"},
        )
    axes.margins(0.15, 0.1)


def _label(text: str) -> str:
    return shorten(text, _LONGEST, placeholder="…") if " " in text else text[:_LONGEST]


def _plain(text: str) -> str:
    """Without what matplotlib would read as mathematics."""
    return text.replace("$", r"\$")
