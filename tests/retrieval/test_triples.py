"""Triples: what goes into a store comes out of it, files are read or refused by line, and paths are what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragjax.core import ConfigError, RequestError
from ragjax.retrieval.facts import FactStore
from ragjax.retrieval.triple_files import read_triples
from ragjax.retrieval.triples import INVERSE, Alias, RelationPath, Subgraph, Triple, maximal
from tests.support.fakes import WordEncoder

FACTS = [
    Triple("Alice", "likes", "Titanic"),
    Triple("Titanic", "type", "Tragedy"),
    Triple("Titanic", "type", "Romance"),
    Triple("Bob", "likes", "Titanic"),
    Triple("Bob", "knows", "Bob"),
]


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FactStore]:
    made = FactStore(tmp_path / "graph.sqlite" if request.param == "disk" else None, WordEncoder())
    yield made
    made.close()


# ------------------------------------------------------------------------------------------- the store


def test_what_is_added_is_there_once(store: FactStore) -> None:
    assert store.add_facts([*FACTS, *FACTS]) == (5, ["Alice", "Titanic", "Tragedy", "Romance", "Bob"])
    assert store.add_facts(FACTS[:2]) == (0, [])
    assert len(store) == 5 and len(store.entities) == 5
    assert "Romance" in store and "Alice" in store and "likes" not in store and "" not in store
    assert store.edges("Titanic", 10) == (FACTS[2], FACTS[1], FACTS[0], FACTS[3])
    assert store.edges("Bob", 10) == (FACTS[4], FACTS[3])  # its edge to itself is told once
    assert store.edges("nobody", 10) == ()
    assert store.others(FACTS[1:]) == [FACTS[0]]
    assert store.delete_facts([FACTS[2], FACTS[2], Triple("a", "b", "c")]) == (1, ["Romance"])
    assert len(store) == 4 and "Romance" not in store
    assert store.delete_facts([]) == (0, [])


def test_a_limit_holds_for_each_direction(store: FactStore) -> None:
    store.add_facts([Triple("hub", "r", f"t{n}") for n in range(20)])
    store.add_facts([Triple(f"h{n}", "r", "hub") for n in range(20)])
    edges = store.edges("hub", 7)
    assert [edge.head == "hub" for edge in edges] == [True] * 7 + [False] * 7
    assert edges == store.edges("hub", 7)
    assert len(set(edges)) == 14


def test_an_inverse_relation_is_stored_forwards(store: FactStore) -> None:
    turned = [Triple("Titanic", "likes" + INVERSE, "Alice"), Triple("x", "r" + 2 * INVERSE, "y")]
    assert store.add_facts(turned)[0] == 2
    assert store.add_facts([FACTS[0], Triple("x", "r", "y")])[0] == 0


def test_aliases_are_no_triples(store: FactStore) -> None:
    told = [Alias("Bob", "Bobby"), Alias("Bob", "Rob"), Alias("Bob", "Rob")]
    assert store.add_facts([], told) == store.add_facts([], [Alias("Alice", "Al"), *told]) == (0, [])
    assert (len(store), len(store.entities), "Bob" in store) == (0, 0, False)
    assert store.aliases() == [("Alice", "Al"), ("Bob", "Bobby"), ("Bob", "Rob")]


@pytest.mark.parametrize("bad", [Triple("", "r", "t"), Triple("h", " ", "t"), Triple("h", "r", "\ud800")])
def test_a_name_that_is_none_is_refused(store: FactStore, bad: Triple) -> None:
    with pytest.raises(RequestError, match=r"blank name|not valid Unicode"):
        store.add_facts([bad])
    with pytest.raises(RequestError):
        store.add_facts([Triple("h", INVERSE, "t")])
    with pytest.raises(RequestError):
        store.add_facts([], [Alias("h", " ")])
    assert len(store) == 0


NAMES = st.text(min_size=1).filter(str.strip)


@given(head=NAMES, relation=NAMES.filter(lambda name: not name.endswith(INVERSE)), tail=NAMES)
def test_any_name_survives(head: str, relation: str, tail: str) -> None:
    store = FactStore(None, WordEncoder())
    triple = Triple(head, relation, tail)
    assert store.add_facts([triple], [Alias(head, tail)])[0] == 1
    assert store.edges(head, 5) == (triple,)
    assert set(store.entities) == {head, tail}
    assert store.aliases() == [Alias(head, tail)]
    store.close()


# ----------------------------------------------------------------------------------------------- files


def _write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_tsv(tmp_path: Path) -> None:
    path = _write(tmp_path / "g.tsv", "\ufeffAlice\tlikes\tTitanic\r\n\n Bob  B \tis a\t 男 \n")
    assert list(read_triples(path)) == [Triple("Alice", "likes", "Titanic"), Triple("Bob B", "is a", "男")]


def test_jsonl_in_its_three_forms(tmp_path: Path) -> None:
    lines = [
        {"head": "a", "relation": "r", "tail": "b", "source": "x"},
        ["b", "r", "c\nd"],
        {"id": "q1", "triples": [["c", "r", "d"], ["d", "r", "e"]]},
        {"triples": []},
    ]
    path = _write(tmp_path / "g.jsonl", "\n".join(map(json.dumps, lines)))
    assert [" ".join(triple) for triple in read_triples(path)] == ["a r b", "b r c d", "c r d", "d r e"]


NTRIPLES = """
<http://x.org/Bob_Ross> <http://x.org/o#born%20in> <http://x.org/e/1> .
<http://x.org/Bob_Ross> <http://x.org/o#age> "52"^^<http://www.w3.org/2001/XMLSchema#integer> .
_:b <http://x.org/o#sees> <http://x.org/e/2> .
# labels may come last
<http://x.org/e/1> <http://www.w3.org/2000/01/rdf-schema#label> "Paris (fr)"@fr .
<http://x.org/e/1> <http://www.w3.org/2000/01/rdf-schema#label> "Paris"@en .
<http://x.org/e/1> <http://www.w3.org/2000/01/rdf-schema#label> "Paris, France"@en-GB .
<http://x.org/e/2> <http://www.w3.org/2000/01/rdf-schema#label> "Paris" .
<http://x.org/e/1> <http://www.w3.org/2004/02/skos/core#altLabel> "City of Light" .
<http://x.org/Bob_Ross> <http://www.w3.org/2004/02/skos/core#altLabel> "Bob" .
_:b <http://www.w3.org/2004/02/skos/core#altLabel> "Nobody" .
"""


def test_ntriples_go_by_their_labels(tmp_path: Path) -> None:
    items = list(read_triples(_write(tmp_path / "g.nt", NTRIPLES)))
    assert [item for item in items if isinstance(item, Triple)] == [
        Triple("Bob Ross", "born in", "Paris"),
        Triple("Bob Ross", "age", "52"),
        Triple("_:b", "sees", "Paris (2)"),
    ]
    assert {item for item in items if isinstance(item, Alias)} == {
        Alias("Paris", "Paris (fr)"),
        Alias("Paris", "City of Light"),
        Alias("Paris", "Paris, France"),
        Alias("Paris (2)", "Paris"),
        Alias("Bob Ross", "Bob"),
        Alias("_:b", "Nobody"),
    }


@pytest.mark.parametrize(
    ("iris", "names", "labels"),
    [
        (["city/1", "person/2", "myth/2"], ["Paris", "Paris (2)", "Paris (myth/2)"], {}),
        (["a/b/1", "b/1", "c/b/1", "a/c/b/1"], ["Paris", "Paris (1)", "Paris (b/1)", "Paris (c/b/1)"], {}),
        (["2", "2/", "2#"], ["Paris", "Paris (2)", "Paris (x.org/2)"], {}),
        (["a/1", "b/1", "c/1", "d/1"], ["Paris", "Paris (1)", "Paris (1) (1)", "Paris (d/1)"], {"c/1": "Paris (1)"}),
    ],
)
def test_iris_of_one_label_stay_apart(
    iris: list[str], names: list[str], labels: dict[str, str], tmp_path: Path
) -> None:
    """labels: of some other ones, which may be written like a name in brackets."""
    lines = []
    for iri in iris:
        lines.append(
            f'<http://x.org/{iri}> <http://www.w3.org/2000/01/rdf-schema#label> "{labels.get(iri, "Paris")}" .'
        )
        lines.append(f'<http://x.org/{iri}> <http://x.org/is> "a" .')
    items = read_triples(_write(tmp_path / "g.nt", "\n".join(lines)))
    assert [item.head for item in items if isinstance(item, Triple)] == names


ACB = Triple("a", "c", "b")


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("g.tsv", "Head\tRelation\tTail\na\tc\tb\n", [ACB]),
        ("g.tsv", "\ufeffs\tp\to\na\tc\tb\ns\tp\to\n", [ACB, Triple("s", "p", "o")]),
        ("g.tsv", "# head\trelation\ttail\n#\n## by hand\n#tag\tc\tb\n", [Triple("#tag", "c", "b")]),
        ("g.tsv", 'a\tc\tb\t\n"a"\t"c"\t"d, e"\n"a"\tc\tb\n', [ACB, Triple("a", "c", "d, e"), Triple('"a"', "c", "b")]),
        ("g.jsonl", '["a", "c", 5]\n["a", "c", 0.5]\n', [Triple("a", "c", "5"), Triple("a", "c", "0.5")]),
        ("g.nt", "\ufeff<http://x/a> <http://x/c> <http://x/b> .\n", [ACB]),
        ("g.nq", "<http://x/a> <http://x/c> <http://x/b> <http://x/g> .\n", [ACB]),
        ("g.ttl", "@prefix e: <http://x/> .\ne:a e:c e:b .\n", [ACB]),
    ],
)  # fmt: skip
def test_what_other_tools_write_is_read(name: str, text: str, facts: list[Triple], tmp_path: Path) -> None:
    assert list(read_triples(_write(tmp_path / name, text))) == facts


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("g.tsv", "a\t \tb\n\tc\tb\na\tc\tb\n"),
        ("g.jsonl", '["a", "", "b"]\n{"triples": [["a", "c", " "], ["a", "c", "b"]]}\n'),
        ("g.nt", '<http://x/a> <http://x/n> "" .\n<http://x/a> <http://x/n> " " .\n<http://x/a> <http://x/c> "b" .\n'),
    ],
)
def test_triples_with_an_empty_part_are_left_out(
    name: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert list(read_triples(_write(tmp_path / name, text))) == [ACB]
    assert f"{name}: left out 2 triple(s) with an empty part" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("g.tsv", "a\tr\tb\na b c\n", r"g\.tsv:2: 1 column.*tabs"),
        ("g.tsv", "a\tr\tb\tc\n", r":1: 4 column"),
        ("g.tsv", b"a\tr\tb\n\xff\tr\tb\n", r":2: not UTF-8"),
        ("g.jsonl", '["a","r","b"]\n{"head": "a"', r":2: broken JSON"),
        ("g.jsonl", '["a","r"]', r":1: a triple of 2 part"),
        ("g.jsonl", '{"head": "a", "tail": "b"}', r":1: no triple"),
        ("g.jsonl", "7", r":1: no triple"),
        ("g.jsonl", '{"triples": ["abc"]}', r":1: a triple of 1 part"),
        ("g.jsonl", '{"triples": [["a", "r", true]]}', r":1: the tail must be a string, not bool"),
        ("g.jsonl", '["a", "r", "\\ud800"]', r":1: the tail is not valid Unicode"),
        ("g.jsonl", "[" * 100_000, r":1: broken JSON"),
        ("g.nt", "<http://a> <http://b> <http://c> .\n<http://a> oops .\n", r":2: not N-Triples"),
        ("g.nt", b"<http://a> <http://b> \"\xff\" .\n", r"g\.nt.*"),
        ("g.ttl", "@prefix e: <http://e> .\ne:a oops .\n", r":2: not Turtle"),
        ("g.xml", "", r"\.tsv, \.jsonl, \.nt, \.nq, \.ttl"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(name: str, text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_triples(_write(tmp_path / name, text)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_triples(tmp_path / "g.tsv")


# ----------------------------------------------------------------------------------------------- paths


def test_a_path_and_its_triples() -> None:
    path = RelationPath(("Alice", "likes", "Titanic", "likes (inverse)", "Bob"))
    assert path.text == "Alice -likes-> Titanic -likes (inverse)-> Bob"
    assert path.triples == (Triple("Alice", "likes", "Titanic"), Triple("Bob", "likes", "Titanic"))
    assert path == RelationPath(path.steps, 0.5)  # a score makes no other path
    assert RelationPath(path.steps[:3]).begins(path) and not path.begins(RelationPath(path.steps[:3]))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), "3, 5, 7"),
        (("a",), "3, 5, 7"),
        (("a", "r", "b", "r"), "3, 5, 7"),
        (("a", "r", " "), "empty"),
        (("a", INVERSE, "b"), "empty"),
        (("a", "r", "a"), "'a' twice"),
        (("a", "r", "b", "r (inverse)", "a"), "'a' twice"),
        (("a", "r", "\udfff"), "Unicode"),
    ],
)
def test_what_is_no_path_is_refused(steps: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        RelationPath(steps)


def test_a_long_path_is_checked_at_once() -> None:
    """To compare each entity with all before it would take 20,000 of them seconds."""
    compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    steps = (Name("e0"), *(step for i in range(1, 20_000) for step in ("r", Name(f"e{i}"))))
    assert len(RelationPath(steps).entities) == 20_000
    with pytest.raises(RequestError, match="'e7' twice"):
        RelationPath((*steps, "r", Name("e7")))
    assert compared < 100_000


def test_equal_sets_of_paths_make_equal_subgraphs() -> None:
    paths = [RelationPath(("a", r, b)) for r, b in [("r", "b"), ("q", "c"), ("r", "a2")]]
    assert Subgraph("a", (*paths, paths[0])) == Subgraph("a", tuple(reversed(paths)))
    assert [path.steps[2] for path in Subgraph("a", tuple(paths)).paths] == ["c", "a2", "b"]


@given(st.sets(st.lists(st.sampled_from("abcd"), min_size=2, max_size=4, unique=True).map(tuple)))
def test_maximal_paths_are_those_that_begin_no_other(walks: set[tuple[str, ...]]) -> None:
    paths = [RelationPath(_steps(walk)) for walk in walks]
    brute = {p for p in paths if not any(p != q and q.steps[: len(p.steps)] == p.steps for q in paths)}
    assert set(maximal(paths)) == brute


def _steps(walk: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for name in walk for part in (name, "r"))[:-1]
