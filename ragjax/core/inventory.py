"""The cache and what happened to it lately, as one tenant may see it: `Engine.inventory`, `GET /v1/cache`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SHARED_FIELDS = ("address", "on", "error", "entries", "bytes")
"""Of the shared tier, what the body of an inventory tells."""

TEXT_CHARS = 80
"""Of a text that tells which KV is meant."""


@dataclass(frozen=True)
class Holding:
    id: str  # key in hexadecimal, shortened
    parent: str | None  # None: a root of what is shown
    tokens: int
    below: int  # tokens of it and of all nodes under it
    tiers: tuple[str, ...]  # where its KV lies
    hits: int  # requests that matched it
    in_use: bool  # whether a request reads it now
    provenance: str
    method: str
    text: str  # how it begins


@dataclass(frozen=True)
class Preprocessed:
    """Passages of knowledge bases, and those whose KV was computed behind similar ones ahead.

    beyond: of those that are not, what the cache has no room for. running: more are computed while no request runs.
    """

    passages: int
    prepared: int
    beyond: int
    running: bool


@dataclass(frozen=True)
class Departure:
    age: float  # seconds since
    tokens: int
    left: str  # the tier
    kept: str | None  # the next tier that has it; None: none has
    text: str  # how it begins


@dataclass(frozen=True)
class Served:
    age: float  # seconds since
    strategy: str
    prompt_tokens: int
    reused: int  # prompt tokens that came from the cache
    ttft: float  # milliseconds


@dataclass(frozen=True)
class SharedTierState:
    address: str
    on: bool  # whether it is used
    error: str | None  # why it is not
    entries: int  # of the whole server, as last heard
    bytes: int
    max_bytes: int = 0  # 0: it has no bound
    counts: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)  # entries that were not written, by reason


@dataclass(frozen=True)
class Inventory:
    policy: str  # of replacement
    tokens: Mapping[str, int]  # the tenant's own KV, by tier; of the disk it is not known
    used: Mapping[str, float]  # share of each tier's room that is taken, by all; without tenant only
    nodes: int  # of the tenant
    holdings: tuple[Holding, ...]  # nodes of most tokens, parents first
    whole: bool  # whether all nodes were looked at
    departures: tuple[Departure, ...]  # the latest, newest first
    requests: tuple[Served, ...]  # likewise
    shared: SharedTierState | None = None  # if there is such a tier; without tenant only
    replicas: Mapping[str, Inventory] = field(default_factory=dict)  # by name, where several serve

    def body(self) -> dict[str, Any]:
        """The JSON body. Nodes, departures and requests are told of all replicas together alone."""
        return {
            **self._sums(),
            "holdings": [_short(asdict(one)) for one in self.holdings],
            "departures": [_short(asdict(one)) for one in self.departures],
            "requests": [_short(asdict(one)) for one in self.requests],
            **({"replicas": {name: one._sums() for name, one in self.replicas.items()}} if self.replicas else {}),
        }

    def _sums(self) -> dict[str, Any]:
        shared = self.shared
        return {
            "object": "cache",
            "policy": self.policy,
            "tiers": {
                name: {"tokens": self.tokens.get(name), "used": _rounded(self.used.get(name))}
                for name in dict.fromkeys((*self.tokens, *self.used))
            },
            "nodes": self.nodes,
            "whole": self.whole,
            **({} if shared is None else {"shared": {name: getattr(shared, name) for name in SHARED_FIELDS}}),
        }


@dataclass(frozen=True)
class Replicas:
    up: int
    wanted: int


def _short(entry: dict[str, Any]) -> dict[str, Any]:
    if "text" in entry:
        entry["text"] = " ".join(entry["text"].split())[:TEXT_CHARS]
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in entry.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
