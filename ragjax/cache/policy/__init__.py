"""Replacement policies, one file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from ragjax.cache.policy.base import Policy
from ragjax.cache.policy.craft import Craft
from ragjax.cache.policy.gdsf import GDSF
from ragjax.cache.policy.lacr import LACR
from ragjax.cache.policy.lfu import LFU, PerfectLFU
from ragjax.cache.policy.lru import LRU
from ragjax.cache.policy.none import FIFO
from ragjax.cache.policy.pgdsf import PGDSF
from ragjax.cache.policy.s3fifo import S3FIFO
from ragjax.cache.policy.sieve import SIEVE
from ragjax.cache.profile import Profile

POLICIES: Mapping[str, Callable[[Profile], Policy]] = {
    "none": lambda _: FIFO(),
    "lru": lambda _: LRU(),
    "lfu": lambda _: LFU(),
    "lfu-perfect": lambda _: PerfectLFU(),
    "gdsf": lambda _: GDSF(),
    "pgdsf": PGDSF,
    "lacr": lambda _: LACR(),
    "lacr-paper": lambda _: LACR(half_life=inf),
    "craft": lambda _: Craft(),
    "s3fifo": lambda _: S3FIFO(),
    "sieve": lambda _: SIEVE(),
}
"""Policies by name; each is made from the device's cost profile, whether it looks at it or not."""
