"""How a request's KV is compressed before it decodes: a scorer, a budget of tokens, and a graph between scores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from ragjax.core.check import is_number, put, whole
from ragjax.core.errors import ConfigError, RequestError

Signal = Literal["decay", "enhance", "evict"]
Edges = Literal["kk", "vv", "kv", "qk", "qq"]
Order = Literal["mutual", "ordered"]
Heads = Literal["all", "each"]
Keys = Literal["rotated", "unrotated", "centred"]

METHODS = ("snapkv", "pyramidkv", "h2o", "knorm", "cake", "streaming", "keydiff")
"""Scorers of tokens; `ragjax/compress/` has one file for each (docs/compression.md)."""

BY_QUERIES = frozenset({"snapkv", "pyramidkv", "cake"})
"""Scorers that look at the queries of the prompt's last tokens."""

BY_MASS = frozenset({"h2o"})
"""Scorers that look at the attention which each token received from all rows."""

BY_LAYER = frozenset({"pyramidkv", "cake"})
"""Scorers that keep other numbers of tokens in each layer."""

ROOM = 64
"""Room for kept tokens that a program has, at least. More room is its doubles: few programs serve all budgets."""

MOST_WINDOW = 256
"""Tokens of a window, at most: their queries and their attention to every token of the prompt are held at once."""

MOST_NEIGHBOURS = 1024
"""Neighbours of a source, at most."""

MOST_ROUNDS = 3
"""Rounds of propagation, at most: GraphKV's Fig. 6 ends there."""


@dataclass(frozen=True)
class Graph:
    """How scores of similar tokens change each other before the best are kept: GraphKV (arXiv 2509.00388, section 4).

    sources: how many tokens send a signal, as a share of the budget, in (0, 1].
    neighbours: most similar tokens that a source sends to (m of eq. 3). rounds: how often (T of eq. 5; 0: never).
    signal: what becomes of the score of a token with a similarity e to a source: "decay" s (1 - e), "enhance"
    s (1 + e), "evict": it is kept only if there are too few others.
    edges: the vectors that are compared: keys, values, or the tokens' queries; the first letter is the source's.
    Those with "q" need the queries of all tokens, which only a full prefill has.
    order: "mutual" as printed: two similar sources lower each other's score. "ordered": the lower one's alone, which is
    nearer to the whole prompt (docs/compression.md).
    strength: factor of e (eq. 4 has room for one), in [0, 1].
    keys: how edges see keys: as attention does ("rotated"), before RoPE ("unrotated"), or so and without the prompt's
    mean key, which all have in common ("centred").

    Raises:
        RequestError: for a value out of its range.
    """

    sources: float = 0.3
    neighbours: int = 32
    rounds: int = 1
    signal: Signal = "decay"
    edges: Edges = "kk"
    order: Order = "ordered"
    strength: float = 1.0
    keys: Keys = "rotated"

    def __post_init__(self) -> None:
        _number(self, "sources", "graph.sources")
        _check(0.0 < self.sources <= 1.0, "graph.sources", "must lie in (0, 1]", self.sources)
        _whole(self, "neighbours", "graph.neighbours", 1)
        _check(
            self.neighbours <= MOST_NEIGHBOURS,
            "graph.neighbours",
            f"must be at most {MOST_NEIGHBOURS}",
            self.neighbours,
        )
        _whole(self, "rounds", "graph.rounds", 0)
        _check(self.rounds <= MOST_ROUNDS, "graph.rounds", f"must be at most {MOST_ROUNDS}", self.rounds)
        _choice(self.signal, "graph.signal", get_args(Signal))
        _choice(self.edges, "graph.edges", get_args(Edges))
        _choice(self.order, "graph.order", get_args(Order))
        _choice(self.keys, "graph.keys", get_args(Keys))
        _number(self, "strength", "graph.strength")
        _check(0.0 <= self.strength <= 1.0, "graph.strength", "must lie in [0, 1]", self.strength)

    @property
    def needs_queries(self) -> bool:
        """Whether the queries of all tokens are compared, not only their keys and values."""
        return "q" in self.edges

    @property
    def needs_plain(self) -> bool:
        """Whether keys are compared as they were before RoPE."""
        return self.keys != "rotated" and "k" in self.edges

    @staticmethod
    def of(given: Mapping[str, object]) -> Graph:
        """From its JSON form; fields left out, or null, have their defaults.

        Raises:
            RequestError: for an unknown field, or a value that cannot be.
        """
        return Graph(**_fields(Graph, given, "graph."))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Compression:
    """How many tokens of a prompt decoding sees, and which: the rest of its KV is dropped after the prompt's last pass.

    method: the scorer, one of `METHODS`. budget: tokens kept, as the mean over layers; a prompt that is not longer
    is left as it is. graph: what happens to the scores before the best tokens are kept (None: nothing).
    heads: "all" scores and keeps a token for all KV heads together, "each" for every KV head by itself.
    window: the prompt's last tokens, at most `MOST_WINDOW`. They are always kept, count in the budget, and their
    queries score the others.

    Raises:
        RequestError: for a value out of its range.
    """

    method: str
    budget: int
    graph: Graph | None = None
    heads: Heads = "all"
    window: int = 32

    def __post_init__(self) -> None:
        _choice(self.method, "method", METHODS)
        _whole(self, "window", "window", 1)
        _check(self.window <= MOST_WINDOW, "window", f"must be at most {MOST_WINDOW}", self.window)
        _whole(self, "budget", "budget", 1)
        _check(self.budget > self.window, "budget", f"must be above window ({self.window})", self.budget)
        _choice(self.heads, "heads", get_args(Heads))
        ok = self.graph is None or isinstance(self.graph, Graph)
        _check(ok, "graph", "must be an object", self.graph)

    @property
    def program(self) -> Compression:
        """What a program is compiled for: the same, with room for all budgets up to its own."""
        return replace(self, budget=max(ROOM, 1 << (self.budget - 1).bit_length()))

    @staticmethod
    def of(given: Mapping[str, object]) -> Compression:
        """From its JSON form, `{"method": "snapkv", "budget": 512, "graph": {"rounds": 2}}`.

        Fields left out, or null, have their defaults.

        Raises:
            RequestError: for an unknown field, a value that cannot be, or where method or budget is missing.
        """
        values = _fields(Compression, given, "")
        for name in ("method", "budget"):
            _check(name in values, name, "is missing")
        graph = values.get("graph")
        if isinstance(graph, Mapping):
            values["graph"] = Graph.of(graph)
        return Compression(**values)  # type: ignore[arg-type]

    @staticmethod
    def parse(text: str) -> Compression:
        """From its short form, "snapkv:512", or "snapkv+graph:512" with GraphKV's defaults.

        Raises:
            ConfigError: saying what may be written.
        """
        form = re.fullmatch(r"([a-z0-9]+)(\+graph)?:([0-9]{1,9})", text.strip())
        if form is None:
            raise ConfigError(
                f'compression: cannot read {text!r}; write "snapkv:512" or "snapkv+graph:512": one of '
                f"{', '.join(METHODS)}, and the tokens that are kept"
            )
        try:
            return Compression(form[1], int(form[3]), Graph() if form[2] else None)
        except RequestError as error:
            raise ConfigError(str(error)) from None

    @staticmethod
    def asked(text: str) -> Compression | Literal["none"]:
        """As a request says it: the short form, or "none".

        Raises:
            RequestError: saying what may be written.
        """
        if text == "none":
            return "none"
        try:
            return Compression.parse(text)
        except ConfigError as error:
            raise RequestError(str(error), param="rag.compression", code="invalid_value") from None

    def __str__(self) -> str:
        """The short form; what it cannot say is left out."""
        return f"{self.method}{'+graph' if self.graph else ''}:{self.budget}"


def _fields(kind: type[Graph | Compression], given: Mapping[str, object], prefix: str) -> dict[str, object]:
    known = {field.name for field in fields(kind)}
    for name in given:
        if name not in known:
            path = f"rag.compression.{prefix}{name}"
            raise RequestError(f"unknown field {path!r}", param=path, code="unknown_parameter")
    return {name: value for name, value in given.items() if value is not None}


def _check(ok: bool, name: str, what: str, value: object = None) -> None:
    if not ok:
        shown = "" if value is None else f", not {value!r}"
        path = f"rag.compression.{name}"
        raise RequestError(f"compression: {name} {what}{shown}", param=path, code="invalid_value")


def _choice(value: object, name: str, choices: tuple[str, ...]) -> None:
    _check(value in choices, name, f"must be one of {', '.join(choices)}", value)


def _whole(of: object, field: str, name: str, least: int) -> None:
    given = getattr(of, field)
    value = whole(given)
    _check(value is not None and value >= least, name, f"must be a whole number of at least {least}", given)
    put(of, field, value)


def _number(of: object, field: str, name: str) -> None:
    value = getattr(of, field)
    _check(is_number(value), name, "must be a number", value)
    put(of, field, float(value))
