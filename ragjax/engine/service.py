"""What the HTTP server asks of an engine, or of a fleet of them (`ragjax/cluster/fleet.py`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

from ragjax.core import Divergence, Embedded, Event, Inventory, Rag, Replicas, Request, Tokens
from ragjax.engine.stats import Stats
from ragjax.quality.report import Setting
from ragjax.retrieval.library import Library


class Service(Protocol):
    """Answers requests, and owns the knowledge that they are answered from. Each member is as `Engine` has it."""

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer."""
        ...

    @property
    def library(self) -> Library:
        """Files that clients uploaded, and their stores."""
        ...

    @property
    def embedding_model(self) -> str:
        """Name of the sentence encoder."""
        ...

    @property
    def knowledge_names(self) -> tuple[str, ...]:
        """Names of the knowledge bases."""
        ...

    @property
    def graph_names(self) -> tuple[str, ...]:
        """Names of the knowledge graphs."""
        ...

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the reuse strategies."""
        ...

    @property
    def selective(self) -> tuple[str, ...]:
        """Names of those that take a recompute ratio."""
        ...

    @property
    def default_strategy(self) -> str:
        """What requests get that name none."""
        ...

    @property
    def default_setting(self) -> Setting:
        """The same with its recompute ratio."""
        ...

    def strategy_of(self, rag: Rag | None) -> str:
        """Name of the strategy that serves a request."""
        ...

    def observe_shadows(self, observer: Callable[[str, Divergence], None]) -> None:
        """Have `observer` called with strategy and divergence of each request replayed."""
        ...

    def submit(self, request: Request) -> AsyncGenerator[Event, None]:
        """Deltas, then one answer; closing the iterator cancels."""
        ...

    def embed(self, texts: Sequence[str], check: Callable[[], None] = ...) -> Embedded:
        """Vectors of texts. check: called before each batch of them."""
        ...

    def pieces(self, tokens: Tokens) -> list[str]:
        """The text of each token."""
        ...

    def figures(self) -> Mapping[str, Stats]:
        """Counters and gauges of each replica by its name; of an engine alone under ""."""
        ...

    def inventory(self, tenant: str = "") -> Inventory:
        """What the cache holds of a tenant's KV. It may wait."""
        ...

    @property
    def shares(self) -> bool | None:
        """Whether the shared cache answers; None: there is none."""
        ...

    def replicas(self) -> Replicas | None:
        """How many replicas serve; None: an engine serves alone."""
        ...

    def close(self) -> None:
        """Stop: running requests end with an error."""
        ...
