"""Replacement policies; importing the package registers them in `POLICIES`."""

from ragjax.cache.policy import gdsf, lacr, lfu
from ragjax.cache.policy.base import POLICIES

__all__ = ["POLICIES", "gdsf", "lacr", "lfu"]
