"""The compression of a request's KV before it decodes: a scorer, a budget of tokens, and a graph between scores."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

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
class GraphKV:
    """Propagation of scores among similar tokens before the best are kept (GraphKV, arXiv 2509.00388, section 4).

    Raises:
        RequestError: for a value out of its range.
    """

    sources: float = 0.3  # tokens that send a signal, as a share of the budget, in (0, 1]
    neighbours: int = 32  # most similar tokens that a source sends to (m of eq. 3)
    rounds: int = 1  # T of eq. 5; 0: none
    signal: Signal = "decay"  # score s at similarity e: s (1 - e); "enhance" s (1 + e); "evict": kept only to fill up
    edges: Edges = "kk"  # vectors compared, the source's first; "q" needs all queries, which a full prefill alone has
    order: Order = "ordered"  # of two similar sources the lower one's score falls; "mutual": both, as printed
    strength: float = 1.0  # factor of e (eq. 4 has room for one), in [0, 1]
    keys: Keys = "rotated"  # "unrotated": before RoPE; "centred": and without the prompt's mean key

    def __post_init__(self) -> None:
        _require("graph.sources", 0.0 < self.sources <= 1.0, "must lie in (0, 1]", self.sources)
        _require(
            "graph.neighbours",
            1 <= self.neighbours <= MOST_NEIGHBOURS,
            f"must lie in [1, {MOST_NEIGHBOURS}]",
            self.neighbours,
        )
        _require("graph.rounds", 0 <= self.rounds <= MOST_ROUNDS, f"must lie in [0, {MOST_ROUNDS}]", self.rounds)
        _require("graph.strength", 0.0 <= self.strength <= 1.0, "must lie in [0, 1]", self.strength)
        for name, kind in (("signal", Signal), ("edges", Edges), ("order", Order), ("keys", Keys)):
            _require_one_of(f"graph.{name}", getattr(self, name), get_args(kind))

    @property
    def needs_queries(self) -> bool:
        """True if the queries of all tokens are compared, not only their keys and values."""
        return "q" in self.edges

    @property
    def needs_plain(self) -> bool:
        """True if keys are compared as they were before RoPE."""
        return self.keys != "rotated" and "k" in self.edges


@dataclass(frozen=True)
class Compression:
    """Choice of the tokens that decoding sees: the rest of the prompt's KV is dropped after its last pass.

    Raises:
        RequestError: for a value out of its range.
    """

    method: str  # the scorer, one of `METHODS`
    budget: int  # tokens kept, as the mean over layers; a prompt that is not longer is left as it is
    graph: GraphKV | None = None  # what happens to the scores before the best tokens are kept
    heads: Heads = "all"  # KV heads keep the same tokens; "each": its own
    window: int = 32  # last tokens: always kept, within the budget, and their queries score the others

    def __post_init__(self) -> None:
        _require_one_of("method", self.method, METHODS)
        _require_one_of("heads", self.heads, get_args(Heads))
        _require("window", 1 <= self.window <= MOST_WINDOW, f"must lie in [1, {MOST_WINDOW}]", self.window)
        _require("budget", self.budget > self.window, f"must be above window ({self.window})", self.budget)

    @property
    def program(self) -> Compression:
        return replace(self, budget=max(ROOM, 1 << (self.budget - 1).bit_length()))

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
            return Compression(form[1], int(form[3]), GraphKV() if form[2] else None)
        except RequestError as error:
            raise ConfigError(str(error)) from None

    @staticmethod
    def asked(text: str) -> Compression | Literal["none"]:
        """From the short form in a request, or "none".

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


def _require(name: str, ok: bool, what: str, value: object) -> None:
    if not ok:
        reason = f"compression: {name} {what}, not {value!r}"
        raise RequestError(reason, param=f"rag.compression.{name}", code="invalid_value")


def _require_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(name, value in choices, f"must be one of {', '.join(choices)}", value)
