"""Drawings: every entity and relation is written in them, and what cannot be drawn is said."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from ragjax.core import ConfigError
from ragjax.retrieval import drawing
from ragjax.retrieval.drawing import draw
from ragjax.retrieval.path import RelationPath, Subgraph

FILMS = Subgraph(
    "Heat",
    (
        RelationPath(("Heat", "directed by", "Michael Mann")),
        RelationPath(("Heat", "starred actors", "Al Pacino", "starred actors (inverse)", "Serpico")),
        RelationPath(("Heat", "written by", "Michael Mann")),
    ),
)


def test_an_svg_holds_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    other = Subgraph("Cost", (RelationPath(("Cost", "is", "$5 & <6>$")),))
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        draw([FILMS, other, Subgraph("Alone", ())], tmp_path / "graph.svg")
    text = (tmp_path / "graph.svg").read_text()
    shown = set(re.findall(r"<text[^>]*>(.*?)</text>", text))
    assert {"Heat", "Michael Mann", "Al Pacino", "Serpico", "Cost", "$5 &amp; &lt;6&gt;$", "Alone"} <= shown
    assert {"directed by, written by", "starred actors", "is"} <= shown
    assert text.count("#f4b942") == 3  # those asked for


def test_a_png_is_a_picture(tmp_path: Path) -> None:
    draw([FILMS], tmp_path / "graph.PNG")
    assert (tmp_path / "graph.PNG").read_bytes().startswith(b"\x89PNG")


def test_triplets_that_lead_to_the_entity_are_drawn(tmp_path: Path) -> None:
    paths = tuple(RelationPath(steps) for steps in [("a", "r", "b"), ("b", "s", "a"), ("c", "r", "a"), ("d", "q", "c")])
    draw([Subgraph("a", paths)], tmp_path / "graph.svg")


def test_forty_entities_stand_apart() -> None:
    paths = tuple(RelationPath(("hub", f"r{n % 5}", f"e{n % 8}", "s", f"leaf {n}")) for n in range(40))
    places = drawing._places([Subgraph("hub", paths)])
    assert len(places) == 49
    for column in (1.0, 2.0):
        rows = sorted(row for at, row in places.values() if at == column)
        assert all(b - a >= 1 for a, b in pairwise(rows))


@pytest.mark.parametrize(
    ("name", "subgraphs", "message"),
    [("g.pdf", [FILMS], r"\.svg or \.png"), ("g", [FILMS], r"\.svg or \.png"), ("g.svg", [], "no subgraph to draw"),
     ("no/g.svg", [FILMS], "cannot be written")],
)  # fmt: skip
def test_what_cannot_be_drawn(name: str, subgraphs: list[Subgraph], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        draw(subgraphs, tmp_path / name)


@pytest.mark.parametrize("package", ["networkx", "matplotlib.figure"])
def test_a_library_that_is_missing_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"needs {package.split('.')[0]}.*pip install '.\[notebook\]' in ragjax's folder"
    ):
        draw([FILMS], tmp_path / "graph.svg")
