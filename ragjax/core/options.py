"""Settings of an engine and of its tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ragjax.core.errors import ConfigError

AtRest = Literal["raw", "int8", "float8"]
"""How KV is encoded below the device."""


@dataclass(frozen=True)
class StorageOptions:
    """Where KV is kept below the device, and what leaves first.

    Raises:
        ConfigError: naming the field that cannot work.

    policy: name of the replacement policy. cost_profile: JSON of measured prefill times, which "pgdsf" needs.
    host_gb: host memory for KV, in 2^30 bytes (0: none). disk: folder of the disk tier (None: none), shared by any
    number of processes; disk_gb: its limit.
    at_rest: "raw" (exact), or "int8" or "float8": smaller, and all that comes back is labelled approximate.
    load_timeout: seconds after which a request computes KV rather than wait for it.
    quotas: most 2^30 bytes of KV that a tenant may hold on the device, and as much in host memory.
    variants: most variants of chunks that Cache-Craft's strategies keep, of all chunks together (its N times M).
    share_knowledge: whether tenants share the KV of the knowledge bases. What a request brings along stays its own; but
        how fast an answer comes then tells one tenant which documents others asked for.
    """

    policy: str = "lru"
    cost_profile: str | Path | None = None
    host_gb: float = 0.0
    disk: str | Path | None = None
    disk_gb: float = 8.0
    at_rest: AtRest = "raw"
    load_timeout: float = 10.0
    quotas: Mapping[str, float] = field(default_factory=dict)
    variants: int = 500
    share_knowledge: bool = False

    def __post_init__(self) -> None:
        if self.at_rest not in get_args(AtRest):
            raise ConfigError(f"unknown at_rest {self.at_rest!r}; choose one of {', '.join(get_args(AtRest))}")
        if not 0 <= self.host_gb <= 1e9:
            raise ConfigError(f"host_gb must be a number from 0 to 1e9, not {self.host_gb!r}")
        if self.variants < 1:
            raise ConfigError(f"variants must be at least 1, not {self.variants!r}")
        limits = {"disk_gb": self.disk_gb, "load_timeout": self.load_timeout}
        for name, value in limits.items() | {(f"quotas[{tenant!r}]", gb) for tenant, gb in self.quotas.items()}:
            if not 0 < value <= 1e9:
                raise ConfigError(f"{name} must be a number above 0, up to 1e9, not {value!r}")
