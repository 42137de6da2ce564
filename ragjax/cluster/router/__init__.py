"""Which replica gets a request: one file for each way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ragjax.cluster.router.base import Router
from ragjax.cluster.router.knowledge import Knowledge
from ragjax.cluster.router.prefix import Prefix
from ragjax.cluster.router.round_robin import RoundRobin
from ragjax.cluster.router.two_choices import TwoChoices

ROUTERS: Mapping[str, Callable[[], Router]] = {
    "knowledge": Knowledge,
    "prefix": Prefix,
    "two-choices": TwoChoices,
    "round-robin": RoundRobin,
}
"""Routers by name."""
DEFAULT_ROUTER = "knowledge"

__all__ = ["DEFAULT_ROUTER", "ROUTERS", "Router"]
