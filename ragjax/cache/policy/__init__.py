"""Replacement policies; importing the package registers them in `POLICIES`."""

from ragjax.cache.policy import craft, gdsf, lacr
from ragjax.cache.policy.base import POLICIES

__all__ = ["POLICIES", "craft", "gdsf", "lacr"]
