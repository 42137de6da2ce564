"""The noun of compression: its short form and its refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ragjax.core import ConfigError, RequestError
from ragjax.core.compression import METHODS, MOST_WINDOW, Compression, GraphKV


@pytest.mark.parametrize("method", METHODS)
def test_the_short_form_says_method_graph_and_budget(method: str) -> None:
    assert Compression.parse(f"{method}:512") == Compression(method, 512)
    assert Compression.parse(f" {method}+graph:64 ") == Compression(method, 64, GraphKV())
    assert str(Compression.parse(f"{method}+graph:64")) == f"{method}+graph:64"
    assert str(Compression.parse(f"{method}:64")) == f"{method}:64"
    published = Compression.parse(f"{method}+graphkv:64")
    assert published == Compression(method, 64, GraphKV(order="mutual", adaptive=True), heads="each")
    assert str(published) == f"{method}+graphkv:64"


@pytest.mark.parametrize("text", ["", "snapkv", "snapkv:", "snapkv:-3", "snapkv+tree:512", "SnapKV:512", "snapkv:5e2"])
def test_a_short_form_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r'cannot read .*; write "snapkv:512"'):
        Compression.parse(text)


@pytest.mark.parametrize(
    ("text", "message"), [("lru:512", "method must be 'snapkv', "), ("snapkv:32", r"budget must be above window")]
)
def test_a_short_form_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Compression.parse(text)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"method": "lru"}, "method", "method must be 'snapkv', .*, not 'lru'"),
        ({"budget": 8}, "budget", r"budget must be above window \(32\), not 8"),
        ({"window": 0}, "window", "window must be greater than or equal to 1, not 0"),
        ({"budget": 8192, "window": 257}, "window", "window must be less than or equal to 256, not 257"),
        ({"heads": "some"}, "heads", "heads must be 'all' or 'each'"),
    ],
)
def test_a_value_out_of_its_range_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Compression(**{"method": "snapkv", "budget": 64, **fields})
    assert (caught.value.param, caught.value.code) == (f"rag.compression.{param}", "invalid_value")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sources": 0}, "graph.sources must be greater than 0"),
        ({"sources": math.nan}, "graph.sources must be less than or equal to 1, not nan"),
        ({"neighbours": 0}, "must be greater than or equal to 1, not 0"),
        ({"neighbours": 1025}, "must be less than or equal to 1024, not 1025"),
        ({"rounds": 4}, "must be less than or equal to 3"),
        ({"order": "random"}, "must be 'mutual' or 'ordered'"),
    ],
)
def test_a_value_of_the_graph_out_of_its_range_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        GraphKV(**fields)
    assert caught.value.param == f"rag.compression.graph.{next(iter(fields))}"


def test_a_window_may_be_as_long_as_its_limit() -> None:
    assert Compression("snapkv", 257, window=256).window == MOST_WINDOW


def test_a_short_form_that_a_request_has_wrong_is_the_requests_error() -> None:
    assert Compression.asked("none") == "none" and Compression.asked("snapkv:512") == Compression("snapkv", 512)
    with pytest.raises(RequestError, match="snapkv:512") as error:
        Compression.asked("snapkv")
    assert error.value.param == "rag.compression"
