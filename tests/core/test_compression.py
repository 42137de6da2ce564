"""The noun of compression: its short form, its JSON form and its refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ragjax.core import ConfigError, RequestError
from ragjax.core.compression import METHODS, MOST_WINDOW, Compression, Graph


@pytest.mark.parametrize("method", METHODS)
def test_the_short_form_says_method_graph_and_budget(method: str) -> None:
    assert Compression.parse(f"{method}:512") == Compression(method, 512)
    assert Compression.parse(f" {method}+graph:64 ") == Compression(method, 64, Graph())
    assert str(Compression.parse(f"{method}+graph:64")) == f"{method}+graph:64"
    assert str(Compression.parse(f"{method}:64")) == f"{method}:64"


@pytest.mark.parametrize("text", ["", "snapkv", "snapkv:", "snapkv:-3", "snapkv+tree:512", "SnapKV:512", "snapkv:5e2"])
def test_a_short_form_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r'cannot read .*; write "snapkv:512"'):
        Compression.parse(text)


@pytest.mark.parametrize(
    ("text", "message"), [("lru:512", "method must be one of snapkv, "), ("snapkv:32", r"budget must be above window")]
)
def test_a_short_form_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Compression.parse(text)


def test_the_json_form_gives_every_field() -> None:
    graph = {
        "sources": 0.5,
        "neighbours": 8,
        "rounds": 3,
        "signal": "evict",
        "edges": "vv",
        "order": "ordered",
        "strength": 0,
    }
    body = {"method": "cake", "budget": 128, "graph": graph, "heads": "each", "window": 8}
    expected = Graph(0.5, 8, 3, "evict", "vv", "ordered", 0)
    assert Compression.of(body) == Compression("cake", 128, expected, "each", 8)


def test_what_is_left_out_or_null_has_its_default() -> None:
    body = {"method": "snapkv", "budget": 64, "graph": None, "window": None}
    assert Compression.of(body) == Compression("snapkv", 64)
    assert Compression.of({**body, "graph": {"rounds": None}}).graph == Graph()


GOOD = {"method": "snapkv", "budget": 64}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"budget": 64}, "method", "method is missing"),
        ({"method": "snapkv"}, "budget", "budget is missing"),
        ({**GOOD, "method": "lru"}, "method", "method must be one of snapkv, .*, not 'lru'"),
        ({**GOOD, "method": ["snapkv"]}, "method", "method must be one of"),
        ({**GOOD, "budget": "64"}, "budget", "budget must be a whole number"),
        ({**GOOD, "budget": True, "window": 1}, "budget", "budget must be a whole number"),
        ({**GOOD, "budget": 64.0}, "budget", "budget must be a whole number"),
        ({**GOOD, "budget": 8}, "budget", r"budget must be above window \(32\), not 8"),
        ({**GOOD, "window": 0}, "window", "window must be a whole number of at least 1, not 0"),
        ({**GOOD, "budget": 8192, "window": 257}, "window", "window must be at most 256, not 257"),
        ({**GOOD, "heads": "some"}, "heads", "heads must be one of all, each"),
        ({**GOOD, "graph": True}, "graph", "graph must be an object"),
        ({**GOOD, "graph": {"sources": 0}}, "graph.sources", r"must lie in \(0, 1\]"),
        ({**GOOD, "graph": {"sources": math.nan}}, "graph.sources", r"must lie in \(0, 1\]"),
        ({**GOOD, "graph": {"sources": "0.3"}}, "graph.sources", "must be a number"),
        ({**GOOD, "graph": {"neighbours": 0}}, "graph.neighbours", "must be a whole number of at least 1"),
        ({**GOOD, "graph": {"neighbours": 1025}}, "graph.neighbours", "must be at most 1024, not 1025"),
        ({**GOOD, "graph": {"rounds": 4}}, "graph.rounds", "must be at most 3"),
        ({**GOOD, "graph": {"signal": "boost"}}, "graph.signal", "must be one of decay, enhance, evict"),
        ({**GOOD, "graph": {"edges": "vk"}}, "graph.edges", "must be one of kk, vv, kv, qk, qq"),
        ({**GOOD, "graph": {"order": "random"}}, "graph.order", "must be one of mutual, ordered"),
        ({**GOOD, "graph": {"keys": "plain"}}, "graph.keys", "must be one of rotated, unrotated, centred"),
        ({**GOOD, "graph": {"strength": 1.5}}, "graph.strength", r"must lie in \[0, 1\]"),
    ],
)
def test_a_value_that_cannot_be_is_named(body: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Compression.of(body)
    assert (caught.value.param, caught.value.code) == (f"rag.compression.{param}", "invalid_value")


def test_a_window_may_be_as_long_as_its_limit() -> None:
    assert Compression.of({"method": "snapkv", "budget": 257, "window": 256}).window == MOST_WINDOW


@pytest.mark.parametrize(("body", "path"), [({"size": 3}, "size"), ({"graph": {"edge": "kk"}}, "graph.edge")])
def test_an_unknown_field_is_named(body: dict[str, object], path: str) -> None:
    with pytest.raises(RequestError, match=f"unknown field 'rag.compression.{path}'") as caught:
        Compression.of({**GOOD, **body})
    assert caught.value.code == "unknown_parameter"


def test_edges_say_whether_they_need_queries() -> None:
    assert [Graph(edges=e).needs_queries for e in ("kk", "vv", "kv", "qk", "qq")] == [False, False, False, True, True]


def test_numbers_of_numpy_are_taken() -> None:
    made = Compression("snapkv", np.int64(512), Graph(strength=np.float32(0.5)))
    assert made == Compression("snapkv", 512, Graph(strength=0.5)) and type(made.budget) is int
    with pytest.raises(RequestError, match="whole number"):
        Compression("snapkv", True)


def test_a_short_form_that_a_request_has_wrong_is_the_requests_error() -> None:
    assert Compression.asked("none") == "none" and Compression.asked("snapkv:512") == Compression("snapkv", 512)
    with pytest.raises(RequestError, match="snapkv:512") as error:
        Compression.asked("snapkv")
    assert error.value.param == "rag.compression"
