"""Replacement policies; importing the package registers them in `POLICIES`."""

from ragjax.cache.policy import craft, gdsf, lacr, lfu
from ragjax.cache.policy.base import POLICIES

__all__ = ["POLICIES", "craft", "gdsf", "lacr", "lfu"]
