"""`--paper`: the settings of five papers, and that a server with each of them answers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from ragjax.core import ConfigError, Document, EngineOptions, StorageOptions
from ragjax.core.papers import PAPERS, PaperName, paper_options
from ragjax.retrieval.index import IndexShape
from ragjax.serve.command import parse_options, told
from tests.support import tiny
from tests.support.serving import MESSAGES, serving

TABLE: dict[PaperName, dict[str, tuple[Any, str]]] = {
    "ragcache": {
        "strategy": ("prefix", "5.1"), "policy": ("pgdsf", "5.1"), "keep": ("documents", "4"),
        "order": ("ratio:window=32", "5.2, 7.3"), "speculate": ("4:max_prefill=4", "5.3, 7.1"),
        "index": ("ivf:lists=1024", "7"), "top_k": (2, "7"), "max_running": (4, "7.1"),
    },
    "cachecraft": {
        "strategy": ("craft-focus", "3.2"), "craft_variants": ("fill", "3.3"), "policy": ("craft", "3.3"),
        "top_k": (5, "5"),
    },
    "fusionrag": {"strategy": ("fusion", "3.2, 4.1"), "recompute_ratio": (0.15, "5"), "preprocess": (True, "3.1")},
    "depcache": {
        "strategy": ("dependency-preorder", "3.1"), "policy": ("lacr:alpha=0.2,half_life=inf", "4.2.2"),
        "max_running": (4, "6.2"),
    },
    "graphkv": {"strategy": ("full", "5.1"), "compression": ("snapkv+graphkv:512", "4, 5.2, 6")},
}  # fmt: skip
"""As read from the papers, by hand."""

STORED = {one.name for one in fields(StorageOptions)}


def value_of(options: EngineOptions, option: str) -> Any:
    return getattr(options.storage if option in STORED else options, option)


@pytest.mark.parametrize("name", TABLE)
def test_a_papers_options_are_those_of_its_table(name: PaperName) -> None:
    assert set(TABLE) == set(PAPERS)
    assert {one.option: (one.value, one.section) for one in PAPERS[name]} == TABLE[name]
    options = parse_options(["--paper", name, "--knowledge", "none"])
    assert all(value_of(options.engine, option) == value for option, (value, _) in TABLE[name].items())
    assert told(options) == [f"{option} {value} (section {s})" for option, (value, s) in TABLE[name].items()]
    plain = parse_options(["--knowledge", "none"]).engine
    others = {one.name for one in fields(EngineOptions)} - {*TABLE[name], "storage"}
    assert all(getattr(options.engine, other) == getattr(plain, other) for other in others)
    assert paper_options(name, model=options.engine.model, preprocess=True) == options.engine


@pytest.mark.parametrize(
    "flags", [["--paper", "ragcache", "--policy", "lru"], ["--policy", "lru", "--paper", "ragcache"]]
)
def test_a_flag_overrides_a_paper(flags: list[str]) -> None:
    options = parse_options([*flags, "--top-k", "3"])
    assert (options.engine.storage.policy, options.engine.top_k, options.engine.strategy) == ("lru", 3, "prefix")
    assert told(options)[1:3] == ["policy lru (not the paper's pgdsf)", "keep documents (section 4)"]
    assert paper_options("ragcache", model="m", policy="lru").storage.policy == "lru"


@pytest.mark.parametrize("name", TABLE)
def test_a_server_with_a_papers_options_answers(name: PaperName) -> None:
    given = {one.option: one.value for one in PAPERS[name]}
    texts = [Document(f"d{i}", f"Isle {i} sells {'salt and ' * i}fish.") for i in range(5)]
    with tiny.engine(**given) as engine, serving(engine) as served:
        engine.add_documents(texts)
        for _ in range(2):
            asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "rag": {"knowledge": "default"}}
            response = served.post(json=asked)
            assert response.status_code == 200, response.text
            body = response.json()
            assert body["choices"][0]["message"]["content"] and body["rag"]["strategy"] == given["strategy"]


def test_facts_are_laid_out_as_the_paper_has_them() -> None:
    """In pre-order; without `--paper` a graph's default is `dependency`, by depth of the path."""
    graph = {"relation_paths": [["Isle 1", "sells", "salt"], ["Isle 1", "sells", "fish"]]}
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "rag": {"graph": graph}}
    for given, served_by in (("dependency-preorder", "dependency-preorder"), ("prefix", "dependency")):
        with tiny.engine(strategy=given) as engine, serving(engine) as served:
            assert served.post(json=asked).json()["rag"]["strategy"] == served_by


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "lacr:alpa=0.2"}, "policy lacr: cannot read 'alpa=0.2'; it takes alpha=, half_life="),
        ({"policy": "lacr:alpha=2"}, "alpha: 2.0 is not between 0 and 1"),
        ({"policy": "lru:window=3"}, "policy lru: cannot read 'window=3'; it takes no settings"),
        ({"policy": "gdsf:window=few"}, "policy gdsf: window must be a valid integer"),
        ({"order": "ratio:window=-1"}, "order ratio: window must be greater than or equal to 0"),
        ({"index": "flat:lists=4"}, "index flat: it takes no settings; ivf does"),
        ({"index": "ivf:lists=0"}, "index ivf: lists must be greater than or equal to 1"),
        ({"speculate": "4:max_prefill=0"}, "speculate 4: max_prefill must"),
        ({"speculate": "many"}, "must be STAGES or STAGES:max_prefill=N"),
    ],
)
def test_a_setting_that_there_is_not_is_one_error(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as raised, tiny.engine(**options):
        IndexShape.parse(options["index"])  # as a start does, before it loads weights
    assert said in str(raised.value)
