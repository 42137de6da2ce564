"""Host-side cache of KV: which tokens are kept where, who is using them, and what leaves first. No jax."""

from ragjax.cache.cache import KnowledgeCache as KnowledgeCache
from ragjax.cache.hierarchy import Storage as Storage
from ragjax.cache.match import CacheMetrics as CacheMetrics
from ragjax.cache.match import Candidate as Candidate
from ragjax.cache.match import Match as Match
from ragjax.cache.match import Totals as Totals
from ragjax.cache.policy.base import LRU as LRU
from ragjax.cache.pool import PagePool as PagePool
from ragjax.cache.tree import KnowledgeTree as KnowledgeTree
from ragjax.cache.tree import Node as Node
from ragjax.cache.tree import Provenance as Provenance
