"""The command `scale` on a small tree."""

from __future__ import annotations

import pytest

from benchmarks import scale
from tests.support.audit import audit_cache


@pytest.mark.parametrize("policy", ["lru", "lacr"])
def test_scale_keeps_the_cache_full_and_evicts(policy: str) -> None:
    cache, documents = scale.filled(policy, 200)
    assert len(documents) == 20 and len(cache.tree) == 200
    for tokens in scale.requests(documents, 30):
        marks = scale.compute(cache, tokens)
        assert list(marks) == sorted(marks)
    assert cache.metrics.evicted_tokens >= 30 * 16 and cache.pool.free_pages <= scale.SEGMENTS
    audit_cache(cache, live=())
    assert scale.measure(policy, 200, 5)["nodes"] == 200
