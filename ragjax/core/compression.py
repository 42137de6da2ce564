"""The compression of a request's KV before it decodes: a scorer, a budget of tokens, and a graph between scores."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le
from pydantic import InstanceOf

from ragjax.core.check import check_fields
from ragjax.core.errors import ConfigError, RequestError, invalid

Order = Literal["mutual", "ordered"]
Heads = Literal["all", "each"]

Method = Literal["snapkv", "h2o", "knorm"]
METHODS = get_args(Method)
"""Scorers of tokens, in `ragjax/compress/scorers.py` (docs/compression.md)."""

BY_QUERIES = frozenset({"snapkv"})
"""Scorers that look at the queries of the prompt's last tokens."""

BY_MASS = frozenset({"h2o"})
"""Scorers that look at the attention which each token received from all rows."""

ROOM = 64
"""Room for kept tokens that a program has, at least. More room is its doubles: few programs serve all budgets."""

MOST_WINDOW = 256
"""Tokens of a window, at most: their queries and their attention to every token of the prompt are held at once."""

MOST_NEIGHBOURS = 1024
"""Neighbours of a source, at most."""

ADAPTIVE = 32
"""Neighbours that a program of an adaptive graph has room for, or else `MOST_NEIGHBOURS`."""

MOST_ROUNDS = 3
"""Rounds of propagation, at most: GraphKV's Fig. 6 ends there."""


@dataclass(frozen=True)
class GraphKV:
    """Propagation of scores among similar tokens before the best are kept (GraphKV, arXiv 2509.00388, section 4)."""

    sources: Annotated[float, Gt(0), Le(1)] = 0.3  # tokens that send a signal, as a share of the budget, in (0, 1]
    neighbours: Annotated[int, Ge(1), Le(MOST_NEIGHBOURS)] = (
        32  # most similar tokens that a source sends to (m of eq. 3)
    )
    adaptive: bool = False  # m is at most the tokens of the prompt's last query segment (section 6.2)
    rounds: Annotated[int, Ge(0), Le(MOST_ROUNDS)] = 1  # T of eq. 5; 0: none
    order: Order = "ordered"  # of two similar sources the lower one's score falls; "mutual": both, as printed

    def __post_init__(self) -> None:
        check_fields(self, lambda name, reason: _invalid(f"graph.{name}", f"graph.{reason}"))


PAPER = GraphKV(order="mutual", adaptive=True)
"""GraphKV as published: mutual order, one round, no more neighbours than the question has tokens (section 6.2)."""


@dataclass(frozen=True)
class Compression:
    """Choice of the tokens that decoding sees: the rest of the prompt's KV is dropped after its last pass."""

    method: Method  # the scorer, one of `METHODS`
    budget: int  # tokens kept in each layer; a prompt that is not longer is left as it is
    graph: InstanceOf[GraphKV] | None = None  # what happens to the scores before the best tokens are kept
    heads: Heads = "all"  # KV heads keep the same tokens; "each": its own
    window: Annotated[int, Ge(1), Le(MOST_WINDOW)] = (
        32  # last tokens: always kept, within the budget, and their queries score the others
    )

    def __post_init__(self) -> None:
        check_fields(self, _invalid)
        if self.budget <= self.window:
            raise _invalid("budget", f"budget must be above window ({self.window}), not {self.budget}")

    @property
    def program(self) -> Compression:
        graph = self.graph
        if graph is not None and graph.adaptive:
            graph = replace(graph, neighbours=ADAPTIVE if graph.neighbours <= ADAPTIVE else MOST_NEIGHBOURS)
        return replace(self, budget=max(ROOM, 1 << (self.budget - 1).bit_length()), graph=graph)

    def asked_by(self, question: int) -> Compression:
        """For a question of so many tokens: with an adaptive graph, sources have no more neighbours than it has."""
        graph = self.graph
        if graph is None or not graph.adaptive:
            return self
        return replace(self, graph=replace(graph, neighbours=max(1, min(graph.neighbours, question))))

    @staticmethod
    def parse(text: str) -> Compression:
        """From its short form, "snapkv:512"; "snapkv+graph:512" with `GraphKV`'s defaults, "snapkv+graphkv:512" with
        the paper's setting (`PAPER`).
        """
        form = re.fullmatch(r"([a-z0-9]+)(?:\+(graph|graphkv))?:([0-9]{1,9})", text.strip())
        if form is None:
            raise ConfigError(
                f'compression: cannot read {text!r}; write "snapkv:512" or "snapkv+graph:512": one of '
                f"{', '.join(METHODS)}, and the tokens that are kept"
            )
        try:
            if form[2] == "graphkv":
                return Compression(form[1], int(form[3]), PAPER, heads="each")  # type: ignore[arg-type] # it is checked
            return Compression(form[1], int(form[3]), GraphKV() if form[2] else None)  # type: ignore[arg-type] # it is checked
        except RequestError as error:
            raise ConfigError(str(error)) from None

    @staticmethod
    def asked(text: str) -> Compression | Literal["none"]:
        if text == "none":
            return "none"
        try:
            return Compression.parse(text)
        except ConfigError as error:
            raise invalid("rag.compression", str(error)) from None

    def __str__(self) -> str:
        graph = "+graphkv" if self.graph == PAPER else "+graph" if self.graph else ""
        return f"{self.method}{graph}:{self.budget}"


def _invalid(name: str, reason: str) -> RequestError:
    return invalid(f"rag.compression.{name}", f"compression: {reason}")
