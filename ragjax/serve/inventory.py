"""Body of GET /v1/cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict

from ragjax import core
from ragjax.serve.response import Json

TEXT_CHARS = 80
"""Of a text that tells what KV is about."""


FRESH = 1.0
"""Seconds for which what was seen is told again: a look holds up the engine's thread."""


class Looks:
    """What each tenant may see of the cache; now: the time in seconds."""

    def __init__(self, look: Callable[[str], core.Inventory], now: Callable[[], float] = time.monotonic):
        self._look = look
        self._now = now
        self._seen: dict[str, tuple[float, Json]] = {}
        self._lock = asyncio.Lock()

    async def of(self, tenant: str) -> Json:
        """The body for one tenant."""
        async with self._lock:
            at, body = self._seen.get(tenant, (-FRESH, {}))
            if not body or self._now() - at >= FRESH:
                body = await asyncio.to_thread(self._body, tenant)
                self._seen[tenant] = self._now(), body
            return body

    def _body(self, tenant: str) -> Json:
        return inventory(self._look(tenant))


def inventory(seen: core.Inventory) -> Json:
    """What one tenant may see of the cache; of each replica too, where there are several, but for what there is many
    of: nodes, departures and requests are those of all together.
    """
    replicas = {"replicas": {name: _sums(one) for name, one in seen.replicas.items()}} if seen.replicas else {}
    return {
        **_sums(seen),
        "holdings": [_short(asdict(one)) for one in seen.holdings],
        "departures": [_short(asdict(one)) for one in seen.departures],
        "requests": [_short(asdict(one)) for one in seen.requests],
        **replicas,
    }


def _sums(seen: core.Inventory) -> Json:
    shared = {} if seen.shared is None else {"shared": asdict(seen.shared)}
    return {
        "object": "cache",
        "policy": seen.policy,
        "tiers": {
            name: {"tokens": seen.tokens.get(name), "used": _rounded(seen.used.get(name))}
            for name in dict.fromkeys((*seen.tokens, *seen.used))
        },
        "nodes": seen.nodes,
        "whole": seen.whole,
        **shared,
    }


def _short(entry: Json) -> Json:
    """Numbers as they are read, and a text of one line."""
    if "text" in entry:
        entry["text"] = " ".join(entry["text"].split())[:TEXT_CHARS]
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in entry.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
