"""What the cache holds and what happened to it lately, as one tenant may see it: `Engine.inventory`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Holding:
    """A node of the knowledge tree.

    id, parent: keys in hexadecimal, shortened; parent None: a root of what is shown. tokens: its own; below: its own
    and those of all nodes under it. tiers: where its KV lies. hits: requests that matched it. in_use: whether one reads
    it now. provenance, method: on what context its KV was computed, and by what. text: how it begins.
    """

    id: str
    parent: str | None
    tokens: int
    below: int
    tiers: tuple[str, ...]
    hits: int
    in_use: bool
    provenance: str
    method: str
    text: str


@dataclass(frozen=True)
class Departure:
    """KV that the replacement policy had leave a tier.

    age: seconds since. tokens: how many. left: the tier. kept: the next tier that has it; None: none has. text: how it
    begins.
    """

    age: float
    tokens: int
    left: str
    kept: str | None
    text: str


@dataclass(frozen=True)
class Served:
    """A request that was answered.

    age: seconds since. prompt_tokens: of which `reused` came from the cache. ttft: milliseconds.
    """

    age: float
    strategy: str
    prompt_tokens: int
    reused: int
    ttft: float


@dataclass(frozen=True)
class Sharing:
    """The shared tier. on: whether its server answers; error: why it does not. entries, bytes: of this model there."""

    address: str
    on: bool
    error: str | None
    entries: int
    bytes: int


@dataclass(frozen=True)
class Inventory:
    """What one tenant may see of the cache.

    policy: the replacement policy. tokens: KV that is the tenant's own, by tier; of the disk they are not known.
    used: share of each tier's room that is taken, by all; without tenant only. nodes: of the tenant. holdings: those of
    most tokens, parents first. whole: whether all nodes were looked at. departures, requests: the latest, newest first.
    replicas: the same of each replica, by name, where several serve; the rest is then of all together.
    shared: the shared tier, if there is one; without tenant only.
    """

    policy: str
    tokens: Mapping[str, int]
    used: Mapping[str, float]
    nodes: int
    holdings: tuple[Holding, ...]
    whole: bool
    departures: tuple[Departure, ...]
    requests: tuple[Served, ...]
    shared: Sharing | None = None
    replicas: Mapping[str, Inventory] = field(default_factory=dict)


@dataclass(frozen=True)
class Replicas:
    """How many replicas of a model serve, and how many should."""

    up: int
    wanted: int
