"""Workloads of the policy benchmarks: their trees, their requests, and what their files must look like."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.questions import read_lines
from benchmarks.policies import source
from benchmarks.policies.source import PATTERNS, Corpus, Forest, Pattern, Workload
from ragjax.core import ConfigError
from tests.support.files import write_lines

TRIPLES = [
    ("Rome", "is in", "Italy"),
    ("Rome", "has river", "Tiber"),
    ("Italy", "is in", "Europe"),
    ("Italy", "has capital", "Rome"),
    ("Rome Street", "is in", "London"),
    ("Turin", "is in", "Italy"),
]


def corpus(documents: int = 12, questions: int = 6) -> Corpus:
    texts = {f"d{i}": f"thing{i} " * (i + 1) + "and a common word" for i in range(documents)}
    asked = tuple(f"what is thing{i} to thing{i + 1}?" for i in range(questions))
    return Corpus("set", texts, asked)


def check(work: Workload) -> None:
    """What every workload promises."""
    assert len(work.parents) == len(work.sizes) == len(work.documents)
    assert all(parent < node for node, parent in enumerate(work.parents))
    assert all(size > 0 for size in work.sizes)
    for request in work.requests:
        assert len(set(request.nodes)) == len(request.nodes)
        for at, node in enumerate(request.nodes):
            assert work.parents[node] == -1 or work.parents[node] in request.nodes[:at]
        assert request.documents >= sum(work.documents[n] for n in request.nodes)


# ----------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))
def test_patterns_draw_distinct_items_reproducibly(pattern: Pattern) -> None:
    drawn = pattern.draw(items=50, per_request=10, requests=40, seed=3)
    assert [len(set(items)) for items in drawn] == [10] * 40
    assert drawn == pattern.draw(50, 10, 40, seed=3)
    assert drawn != pattern.draw(50, 10, 40, seed=4)


def test_patterns_differ_as_their_names_say() -> None:
    drawn = {name: pattern.draw(200, 5, 600, seed=0) for name, pattern in PATTERNS.items()}

    def top(name: str) -> float:
        counts = sorted(Counter(i for items in drawn[name] for i in items).values(), reverse=True)
        return sum(counts[:20]) / sum(counts)

    def repeated(name: str) -> float:
        shared = [
            len(set(drawn[name][at]) & {item for items in drawn[name][at - 5 : at] for item in items})
            for at in range(5, 600)
        ]
        return float(np.mean(shared))

    assert top("zipf") > 2.5 * top("uniform")
    assert repeated("temporal") > 2 * repeated("uniform")
    assert abs(top("uniform") - 0.1) < 0.05


@pytest.mark.parametrize("per_request", [0, 6])
def test_a_request_cannot_draw_more_than_there_is(per_request: int) -> None:
    with pytest.raises(ValueError, match="per_request must be 1 to 5"):
        Pattern().draw(5, per_request, 1, 0)


# ----------------------------------------------------------------------------------------- entities


def test_two_hop_paths_stop_where_a_tail_leads_nowhere_and_at_the_limit() -> None:
    graph = source.graph_of([*TRIPLES, TRIPLES[0]])
    assert source.two_hop_paths(graph, "Rome") == [
        ("Rome", "is in", "Italy", "is in", "Europe"),
        ("Rome", "is in", "Italy", "has capital", "Rome"),
        ("Rome", "has river", "Tiber"),
    ]
    assert len(source.two_hop_paths(graph, "Rome", limit=2)) == 2
    assert source.two_hop_paths(graph, "Europe") == []


def test_entities_hang_as_one_compressed_prefix_tree() -> None:
    graph = source.graph_of(TRIPLES)
    work = source.entities(graph, "uniform", count=4, queries=30, per_query=2)
    check(work)
    paths = {tuple(w for part in p for w in source.words(part)) for e in graph for p in source.two_hop_paths(graph, e)}
    prefixes = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    assert work.distinct == len(prefixes) + source.SYSTEM_TOKENS == sum(work.sizes)
    # compressed: a node with one child ends a path of its own, and "Rome" is shared with "Rome Street"
    children = Counter(work.parents)
    ends = len(paths)
    assert sum(children[n] == 0 for n in range(len(work.sizes))) <= ends
    assert len(work.sizes) < len(prefixes)
    assert len({request.nodes for request in work.requests}) > 1


def test_an_entity_is_asked_for_whole_and_nothing_else() -> None:
    graph = source.graph_of(TRIPLES)
    work = source.entities(graph, "uniform", count=4, queries=50, per_query=1)
    lengths = set()
    for entity in graph:
        paths = source.two_hop_paths(graph, entity)
        spelt_paths = [tuple(w for part in p for w in source.words(part)) for p in paths]
        lengths.add(len({p[:end] for p in spelt_paths for end in range(1, len(p) + 1)}) + source.SYSTEM_TOKENS)
    assert set(work.totals) == lengths


def test_triples_are_read_from_both_forms(tmp_path: Path) -> None:
    tsv = tmp_path / "kg.tsv"
    tsv.write_text("".join("\t".join(t) + "\n" for t in TRIPLES))
    questions = write_lines(tmp_path / "questions.jsonl", [{"triples": TRIPLES[:3]}, {"triples": TRIPLES[2:]}])
    assert source.read_triples(tsv) == TRIPLES
    assert source.read_triples(questions) == sorted(TRIPLES)
    tsv.write_text("a\tb\tc\nd\te\n")
    with pytest.raises(ConfigError, match=r"kg\.tsv:2: 2 fields"):
        source.read_triples(tsv)


# ---------------------------------------------------------------------------------------- documents


def test_bm25_finds_what_the_question_names() -> None:
    found = source.bm25(corpus(), 3)
    assert [set(ids[:2]) for ids in found] == [{f"d{i}", f"d{i + 1}"} for i in range(6)]
    assert all(len(ids) == 3 for ids in found)


def test_documents_are_exact_prefix_chains() -> None:
    texts = corpus()
    retrieved = source.bm25(texts, 5)
    work = source.documents(texts, retrieved, 3, requests=40)
    check(work)
    assert work.top_k == 3 and work.keep is None
    for request in work.requests:
        assert [work.parents[n] for n in request.nodes] == [-1, *request.nodes[:-1]]
        assert request.documents == 3 == sum(work.documents[n] for n in request.nodes)
        assert request.other > 0
    used = {key for ids in retrieved for key in ids[:3]}
    expected = sum(len(source.words(texts.documents[key])) for key in used)
    assert work.distinct == expected + source.SYSTEM_TOKENS


def test_documents_beyond_those_kept_are_computed_each_time() -> None:
    texts = corpus()
    retrieved = source.bm25(texts, 5)
    whole = source.documents(texts, retrieved, 5, requests=40)
    kept = source.documents(texts, retrieved, 5, keep=3, requests=40)
    check(kept)
    assert kept.totals == whole.totals
    assert {len(r.nodes) for r in kept.requests} == {1 + 3}
    assert {r.documents for r in kept.requests} == {5}


def test_corpora_are_read_from_a_data_folder(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_lines(tmp_path / "text" / name / "corpus.jsonl", [{"id": f"{name}1", "title": "T", "text": "x y"}])
        write_lines(tmp_path / "text" / name / "questions.jsonl", [{"question": "q?"}] * 3)
    write_lines(tmp_path / "text" / "none" / "questions.jsonl", [])
    found = source.corpora(tmp_path, limit=2)
    assert [c.name for c in found] == ["a", "b"]
    assert found[0].documents == {"a1": "T x y"}
    assert found[0].questions == ("q?", "q?")
    union = Corpus.union(found)
    assert set(union.documents) == {"a1", "b1"} and len(union.questions) == 4


def test_a_line_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(ConfigError, match=r"x\.jsonl:3: not JSON"):
        list(read_lines(path))
    write_lines(path, [{"a": 1, "b": 2}, {"a": 1}])
    with pytest.raises(ConfigError, match=r"x\.jsonl:2: no field 'b'"):
        list(read_lines(path, "a", "b"))


# ------------------------------------------------------------------------------------------- traces


def test_mooncake_blocks_are_chains_with_a_partial_end(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 9, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 9, "input_length": 600, "output_length": 5, "hash_ids": [0, 3]},
    ]
    work = source.mooncake(write_lines(tmp_path / "mooncake_small_trace.jsonl", lines))
    check(work)
    assert work.name == "mooncake_small"
    assert work.sizes == (512, 512, 76, 88) and work.parents == (-1, 0, 1, 0)
    assert [r.nodes for r in work.requests] == [(0, 1, 2), (0, 1), (0, 3)]
    assert work.totals == (1100, 1024, 600)
    assert work.limited(1).requests == work.requests[:1] and work.limited(1).distinct == 1100
    assert work.limited(None) == work


def test_nodes_hold_at_least_one_token() -> None:
    forest = Forest()
    assert forest.child(-1, "a", 3) == forest.child(-1, "a", 3) == 0
    with pytest.raises(ValueError, match="at least one token, not 0"):
        forest.child(0, "b", 0)
