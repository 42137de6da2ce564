"""The knowledge graph: what a question names is found, and the paths around it are those a search by hand finds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragjax.core import ConfigError, RequestError
from ragjax.retrieval import facts
from ragjax.retrieval import graph as module
from ragjax.retrieval.facts import FactStore
from ragjax.retrieval.graph import COMPARED, Entity, KnowledgeGraph
from ragjax.retrieval.lexicon import MAX_WORDS, Lexicon
from ragjax.retrieval.triples import INVERSE, Alias, Triple
from tests.support.fakes import WordEncoder
from tests.support.growth import calls
from tests.support.meanwhile import meanwhile

FILMS = [
    Triple("Heat", "directed by", "Michael Mann"),
    Triple("Heat", "starred actors", "Al Pacino"),
    Triple("Serpico", "starred actors", "Al Pacino"),
    Triple("Serpico", "directed by", "Sidney Lumet"),
    Triple("Serpico", "release year", "1973"),
    Triple("It", "directed by", "Andy Muschietti"),
    Triple("Al Pacino", "born in", "New York"),
    Triple("New York City", "located in", "New York"),
]


def opened(directory: Path | None = None, triples: Sequence[Triple] = (), **changes) -> KnowledgeGraph:
    graph = KnowledgeGraph(directory, **{"encoder": WordEncoder()} | changes)
    if triples:
        graph.add(triples)
    return graph


@pytest.fixture
def films() -> Iterator[KnowledgeGraph]:
    with opened(None, FILMS) as graph:
        yield graph


# --------------------------------------------------------------------------------- import and restart


@pytest.mark.parametrize("stored", [True, False], ids=["directory", "memory"])
def test_import_counts_and_embeds_new_names_alone(stored: bool, tmp_path: Path) -> None:
    encoder = WordEncoder()
    with opened(tmp_path / "new" / "graph" if stored else None, encoder=encoder) as graph:
        assert graph.add([*FILMS, FILMS[0], Alias("Heat", "Heat (film)")]) == 8
        assert (len(graph), graph.entities) == (8, 10)
        encoder.encoded.clear()
        assert graph.add([*FILMS, Triple("Heat", "release year", "1995")]) == 1
        assert encoder.encoded == ["1995"]


def test_a_restart_embeds_nothing_twice(tmp_path: Path) -> None:
    opened(tmp_path, FILMS).close()
    encoder = WordEncoder()
    with opened(tmp_path, encoder=encoder) as graph:
        assert encoder.encoded == []
        assert (len(graph), graph.entities) == (8, 10)
        assert [found.name for found in graph.link("Who directed Serpico?")] == ["Serpico"]
        with pytest.raises(ConfigError, match="another process has it open"):
            opened(tmp_path)


def test_names_of_another_encoder_are_embedded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path, FILMS).close()
    encoder = WordEncoder("other")
    opened(tmp_path, encoder=encoder).close()
    assert len(encoder.encoded) == 10
    assert "another encoder" in caplog.text


def test_a_broken_file_is_one_error(tmp_path: Path) -> None:
    opened(tmp_path, FILMS).close()
    file = tmp_path / "graph.sqlite"
    content = file.read_bytes()
    assert content.count(b"Serpico") > 5
    for changed in (b"not a database, but long enough to look like none", content.replace(b"Serpico", b"Serpica", 1)):
        file.write_bytes(changed)
        with pytest.raises(ConfigError, match=r"graph.sqlite: broken .*delete it and import the facts again"):
            opened(tmp_path)
    file.write_bytes(b"")
    with opened(tmp_path) as graph:
        assert graph.entities == 0


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    file, triple = tmp_path / "graph.sqlite", Triple("a", "b", "c")
    opened(tmp_path, [triple]).close()
    content = bytearray(file.read_bytes())
    content[18] = 3  # SQLite reads files of a later version, and does not write them
    file.write_bytes(content)
    with opened(tmp_path) as graph:
        for change in (lambda: graph.add([Triple("d", "b", "c")]), lambda: graph.delete([triple])):
            with pytest.raises(ConfigError, match=r"graph.sqlite: cannot be written: .*readonly"):
                change()
        assert graph.entities == 2


def test_an_import_that_fails_leaves_nothing(films: KnowledgeGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragjax.retrieval.facts._insert_names", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        films.add([Triple("Heat", "shown in", "Rome")])
    assert len(films) == len(FILMS) and films.link("Rome") == ()
    assert [path.steps[2] for path in films.subgraphs("?", ["Heat"], hops=1)[0].paths] == ["Michael Mann", "Al Pacino"]


def test_what_is_deleted_is_not_found(films: KnowledgeGraph) -> None:
    films.add([Alias("It", "Pennywise")])
    assert films.delete([FILMS[5], Triple("x", "y", "z")]) == 1
    assert films.link("Who directed It, that is Pennywise?") == ()
    assert films.entities == 8
    films.add([FILMS[5]])
    assert [entity.name for entity in films.link("Who is Pennywise?")] == ["It"]


def test_what_is_not_retained_goes(films: KnowledgeGraph) -> None:
    films.add([Triple("Heat", "star (inverse)", "It")])  # stored as It, star, Heat
    kept = {FILMS[0], FILMS[5], Triple("It", "star", "Heat")}
    assert films.retain(kept) == len(FILMS) - 2 and len(films) == 3
    assert films.entities == len({name for head, _, tail in kept for name in (head, tail)})
    assert films.retain(kept) == 0


def test_names_are_embedded_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_TOGETHER", 4)
    store = FactStore(None, WordEncoder())
    store.add_facts([Triple(str(n), "is", str(n)) for n in range(10)])
    store.delete_facts([Triple("3", "is", "3")])
    assert len(store.entities) == 9 and "3" not in [name for name, _ in store.nearest("3", 9)]
    assert len(store.nearest("3", 9)) == 9
    assert store.nearest("7", 1) == [("7", pytest.approx(1.0))]
    assert store.nearest(" ", 3) == [] == store.nearest("7", 0)


# ------------------------------------------------------------------------------------------- linking


@pytest.mark.parametrize(
    ("question", "names"),
    [
        ("Who directed Heat?", ["Heat"]),
        ("who directed HEAT and serpico", ["Heat", "Serpico"]),
        ("Which films did al pacino's agent like?", ["Al Pacino"]),
        ("What is in New York City?", ["New York City"]),  # the longest
        ("Is New York City in New York?", ["New York City", "New York"]),
        ("Who directed It?", ["It"]),
        ("What did it cost in 1973?", ["1973"]),  # "it" is no film
        ("The heating of Heaton's house", []),  # word boundaries
        ("", []),
        ("?!", []),
    ],
)
def test_what_a_question_names(question: str, names: list[str], films: KnowledgeGraph) -> None:
    found = films.link(question)
    assert [entity.name for entity in found if entity.how != "similar"] == names
    assert all(entity.score == 1.0 for entity in found if entity.how == "exact")


def test_aliases_and_entities_that_share_a_name() -> None:
    places = [Triple("Paris", "in", "France"), Triple("PARIS", "is a", "band"), Triple("C", "is a", "language")]
    with opened(None, [*places, Triple("C++", "from", "C"), Triple("東京", "国", "日本")]) as graph:
        graph.add([Alias("France", "l'Hexagone"), Alias("nobody", "Nemo")])
        assert graph.link("Où est l'hexagone ?") == (Entity("France", 1.0, "alias"),)
        assert not [entity for entity in graph.link("Who is Nemo?") if entity.how == "alias"]
        assert {entity.name for entity in graph.link("where is paris")} == {"Paris", "PARIS"}
        assert [entity.name for entity in graph.link("where is PARIS?")] == ["PARIS"]
        assert [entity.name for entity in graph.link("Who made C++?")] == ["C++"]
        assert [entity.name for entity in graph.link("Who made C?")] == ["C"]
        assert [entity.name for entity in graph.link("東京はどこですか")] == ["東京"]
        assert len(graph.link("paris, France, C, C++", limit=2)) == 2


def test_names_of_what_is_no_entity_hide_none(films: KnowledgeGraph) -> None:
    films.add([Alias("starred actors", "star of Heat"), Alias("It", "Serpico the clown")])
    assert [entity.name for entity in films.link("Who was the star of Heat?")] == ["Heat"]
    assert [entity.name for entity in films.link("Who is Serpico the clown?")] == ["It"]
    films.delete([FILMS[5]])  # the last of It
    assert [entity.name for entity in films.link("Who is Serpico the clown?")] == ["Serpico"]


def test_variants_of_unicode_are_one_name() -> None:
    lexicon = Lexicon()
    for name in ("Cafe\u0301 Ｎｏ１", "Straße", "western_africa", "+"):
        lexicon.add_entity(name)
    names = ["Cafe\u0301 Ｎｏ１", "Straße", "western_africa"]
    assert [m.entity for m in lexicon.mentions("the café no1 in STRASSE of Western Africa +", names)] == names
    assert lexicon.named("CAFÉ no1") == ("Cafe\u0301 Ｎｏ１",)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=6, unique=True), st.text())
def test_linking_takes_any_text(names: list[str], text: str) -> None:
    lexicon = Lexicon()
    for name in names:
        lexicon.add_entity(name)
    spans = [range(m.begin, m.end) for m in lexicon.mentions(text, names)]
    assert all(set(a).isdisjoint(b) or a == b for a in spans for b in spans)
    for name in names:
        lexicon.remove_entity(name)
    assert lexicon.mentions(" ".join(names), names) == ()


def test_long_names_cost_a_question_little() -> None:
    """A literal of a graph may be a text of many words."""
    question = " ".join(f"word{n % 97}" for n in range(600)) + " Bourvil"
    longest, literal = (" ".join(f"word{n}" for n in range(words)) for words in (MAX_WORDS, 2_000))

    def cost(name: str) -> int:
        lexicon = Lexicon()
        lexicon.add_entity("Bourvil")
        lexicon.add_entity(name)
        assert [mention.entity for mention in lexicon.mentions(question, ["Bourvil"])] == ["Bourvil"]
        assert lexicon.named(name) == (name,)
        return calls(lambda: lexicon.mentions(question, ["Bourvil"]))

    assert cost(literal) <= cost(longest)


def test_the_longest_name_is_found() -> None:
    lexicon, name = Lexicon(), " ".join(f"word{n}" for n in range(MAX_WORDS))
    for entity in (name, f"{name} and", "word0"):
        lexicon.add_entity(entity)
    found = lexicon.mentions(f"Who wrote {name} and when?", [name, f"{name} and", "word0"])
    assert [mention.entity for mention in found] == [name]


def test_a_question_that_names_none_is_linked_by_meaning(films: KnowledgeGraph) -> None:
    found = films.link("new york state")
    assert found[0].name == "New York"  # named, exactly
    found = films.link("pacino al smith")
    assert (found[0].name, found[0].how) == ("Al Pacino", "similar")
    assert module.SIMILAR <= found[0].score < 1
    assert films.link("completely unrelated words here") == ()


def test_linking_does_not_slow_down_with_the_graph() -> None:
    lexicon, rng = Lexicon(), random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=5)) for _ in range(2_000)]
    for n in range(60_000):
        lexicon.add_entity(f"{rng.choice(words)} {rng.choice(words)} {n}")
    question = " ".join([*rng.choices(words, k=60), "Zappa Frank 7"])
    lexicon.add_entity("Zappa Frank 7")
    begin = time.process_time()
    for _ in range(20):
        assert [m.entity for m in lexicon.mentions(question, ["Zappa Frank 7"])] == ["Zappa Frank 7"]
    assert (time.process_time() - begin) / 20 < 0.02  # seconds; a scan of all names takes ten times that


# --------------------------------------------------------------------------------------------- paths


def by_hand(triples: Sequence[Triple], entity: str, hops: int) -> set[tuple[str, ...]]:
    """All paths of up to `hops` hops from an entity, by trying every triple at every end."""
    found: set[tuple[str, ...]] = set()

    def go(walk: tuple[str, ...]) -> None:
        if len(walk) > 1:
            found.add(walk)
        if len(walk) == 2 * hops + 1:
            return
        for head, relation, tail in triples:
            if head == walk[-1] and tail not in walk[::2]:
                go((*walk, relation, tail))
            if tail == walk[-1] and head not in walk[::2]:
                go((*walk, relation + INVERSE, head))

    go((entity,))
    return found


TRIPLES = st.lists(
    st.builds(Triple, st.sampled_from("abcdef"), st.sampled_from("rs"), st.sampled_from("abcdef")),
    min_size=1, max_size=12, unique=True,
)  # fmt: skip


@given(triples=TRIPLES, hops=st.integers(1, 3))
def test_paths_are_those_found_by_hand(triples: list[Triple], hops: int) -> None:
    with opened(None, triples) as graph:
        for entity in {triple.head for triple in triples}:
            walks = graph._walks(entity, hops, fanout=100)
            assert len(walks) == len(set(walks))
            assert set(walks) == by_hand(triples, entity, hops)
            subgraphs = graph.subgraphs("r b?", [entity], hops, paths=COMPARED)
            told = {path.steps for subgraph in subgraphs for path in subgraph.paths}
            every = by_hand(triples, entity, hops)
            assert told == {a for a in every if not any(a != b and b[: len(a)] == a for b in every)}


def test_the_paths_most_similar_to_the_question_are_kept(films: KnowledgeGraph) -> None:
    (found,) = films.subgraphs("Where was the actor born who starred in Heat?", ["Heat"], paths=1)
    assert [path.text for path in found.paths] == ["Heat -starred actors-> Al Pacino -born in-> New York"]
    query, text = films._encoder.encode(["Where was the actor born who starred in Heat?", found.paths[0].text])
    assert found.paths[0].score == pytest.approx(query @ text, abs=1e-4)
    everything = films.subgraphs("?", ["Heat"])[0].paths
    assert len(everything) == 3 and all(path.steps[0] == "Heat" for path in everything)
    assert len(films.subgraphs("?", ["Heat"], paths=2)[0].paths) == 2
    assert {len(path.entities) for path in films.subgraphs("?", ["Heat"], hops=1)[0].paths} == {2}
    assert {len(path.entities) for path in films.subgraphs("?", ["Heat"], hops=3)[0].paths} == {2, 4}


def best_by_hand(scores: dict[tuple[str, ...], float], limit: int) -> set[tuple[str, ...]]:
    """The best are taken one by one; what begins another one that is taken does not count."""
    taken: list[tuple[str, ...]] = []
    for walk in sorted(scores, key=lambda walk: (-scores[walk], walk)):
        told = {a for a in taken if not any(a != b and b[: len(a)] == a for b in taken)}
        if len(told) == limit:
            return told
        taken.append(walk)
    return {a for a in taken if not any(a != b and b[: len(a)] == a for b in taken)}


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_kept_paths_are_the_best_by_hand(limit: int) -> None:
    rng = random.Random(3)
    triples = [Triple(f"e{rng.randrange(12)}", f"r{rng.randrange(4)}", f"e{rng.randrange(12)}") for _ in range(40)]
    with opened(None, triples) as graph:
        for n in range(12):
            question = f"r{n % 4} e{n} e{(5 * n) % 12}"
            scores = graph._scores(question, sorted(by_hand(triples, f"e{n}", 2)))
            (found,) = graph.subgraphs(question, [f"e{n}"], paths=limit)
            assert {path.steps for path in found.paths} == best_by_hand(scores, limit)


def test_a_hub_is_walked_along_all_its_relations_in_turn() -> None:
    triples = [Triple(f"person {n}", "born in", "Rome") for n in range(3_000)]
    triples += [Triple("Rome", "capital of", "Italy"), Triple("Rome", "lies on", "Tiber")]
    triples += [Triple(f"person {n}", "knows", f"friend {n}.{k}") for n in range(0, 3_000, 10) for k in range(3)]
    steps = module._in_turn("Rome", [*triples[:9], Triple("Lazio", "contains", "Rome"), *triples[3_000:3_002]])
    assert [relation for relation, _ in steps[:5]] == [
        "born in (inverse)", "capital of", "contains (inverse)", "lies on", "born in (inverse)",
    ]  # fmt: skip
    with opened(None, triples) as graph:
        for hops in (1, 2, 3):
            fanout = int(COMPARED ** (1 / hops))
            walks = graph._walks("Rome", hops, fanout)
            assert len(walks) <= COMPARED * 1.2
            assert {("Rome", "capital of", "Italy"), ("Rome", "lies on", "Tiber")} <= set(walks)
            assert sum(len(walk) == 3 for walk in walks) == fanout
            assert walks == graph._walks("Rome", hops, fanout)


def test_embeddings_of_paths_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CACHED", 4)
    encoder = WordEncoder()
    with opened(None, FILMS, encoder=encoder) as graph:
        encoder.encoded.clear()
        first = graph.subgraphs("who?", ["Michael Mann"])
        assert len(encoder.encoded) == 3  # the question and two paths
        assert graph.subgraphs("who?", ["Michael Mann"]) == first and len(encoder.encoded) == 3
        graph.subgraphs("who?", ["Serpico"])
        assert len(graph._encoder._known._held) == 4
        assert graph._encoder._known.get(("Serpico -release year-> 1973", False)) is not None


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"hops": 0}, "rag.graph.hops"),
        ({"hops": 9}, "rag.graph.hops"),
        ({"paths": 0}, "rag.graph.paths"),
        ({"paths": 10_000}, "rag.graph.paths"),
        ({"entities": ["Serpica"]}, "rag.graph.entities"),
        ({"entities": [""]}, "rag.graph.entities"),
    ],
)
def test_what_cannot_be_asked(settings: dict, param: str, films: KnowledgeGraph) -> None:
    with pytest.raises(RequestError) as raised:
        films.subgraphs("Who?", **{"entities": ["Heat"]} | settings)
    assert raised.value.param == param


def test_an_entity_that_is_not_there_is_answered_with_the_nearest(films: KnowledgeGraph) -> None:
    with pytest.raises(RequestError, match=r"'Al Capino' is not in the graph; the nearest are 'Al Pacino'"):
        films.subgraphs("Who?", ["Al Capino"])
    with pytest.raises(RequestError, match="import triples first"):
        opened().subgraphs("Who?", ["Heat"])
    assert [found.entity for found in films.subgraphs("Who?", ["al pacino", "Al Pacino"])] == ["Al Pacino"]


def test_nothing_found_is_an_empty_tuple() -> None:
    with opened() as graph:
        assert graph.link("Who directed Heat?") == () == graph.subgraphs("Who directed Heat?")
        graph.add([Triple("Narcissus", "loves", "Narcissus")])
        assert graph.subgraphs("Whom does Narcissus love?") == ()
        assert graph.subgraphs("", ["Narcissus"]) == ()


def test_reading_while_an_import_runs(films: KnowledgeGraph) -> None:
    def ask() -> None:
        found = films.subgraphs("Who directed Heat?")
        assert "Heat -directed by-> Michael Mann" in {path.text for path in found[0].paths}

    with meanwhile(ask, threads=3):
        for n in range(0, 600, 100):
            films.add(Triple(f"film {k}", "directed by", f"person {k % 7}") for k in range(n, n + 100))
        films.delete([Triple(f"film {k}", "directed by", f"person {k % 7}") for k in range(300)])


def test_the_work_of_each_entity_can_be_stopped(films: KnowledgeGraph) -> None:
    encoded: list[str] = films._encoder._encoder.encoded
    before, checks = len(encoded), 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        films.subgraphs("Who?", ["Serpico", "Heat", "It"], check=check)
    assert encoded[before] == "Who?" and all("Serpico" in text for text in encoded[before + 1 :])
