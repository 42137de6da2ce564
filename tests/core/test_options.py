"""Options of engines as Python callers give them: what cannot work is refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ragjax.core import INDEXES, ConfigError, EngineOptions, StorageOptions
from ragjax.retrieval.index import IndexKind

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model must be a name or a path, not None"),
        ({"knowledge": ["a", "b"]}, "knowledge must be a path, or paths by name"),
        ({"graph": 5}, "graph must be a path, or paths by name"),
        ({"max_context": 0.5}, "max_context must be a whole number, not 0.5"),
        ({"max_context": 1000.5}, "max_context must be a whole number"),
        ({"max_context": "1024"}, "max_context must be a whole number"),
        ({"max_context": 0}, "max_context must be at least 1"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_k": "3"}, "top_k must be a whole number"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"lookup": 2.5}, "lookup must be a whole number"),
        ({"lookup": 7}, "lookup must be at most 6"),
        ({"step_tokens": 1.5}, "step_tokens must be a whole number"),
        ({"max_queue": NAN}, "max_queue must be a whole number, not nan"),
        ({"max_running": True}, "max_running must be a whole number"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1"),
        ({"request_timeout": NAN}, "request_timeout must be a number from 0 to 1e9, not nan"),
        ({"request_timeout": -1}, "request_timeout must be a number from 0 to 1e9"),
        ({"device_cache_gb": NAN}, "device_cache_gb must be a number above 0"),
        ({"device_cache_gb": INF}, "device_cache_gb must be a number above 0"),
        ({"device_cache_gb": "1"}, "device_cache_gb must be a number above 0"),
        ({"device_cache_gb": 0}, "device_cache_gb must be a number above 0"),
        ({"file_quota_gb": "1"}, "file_quota_gb must be a number above 0"),
        ({"shadow_rate": "1"}, r"shadow_rate must lie in \[0, 1\]"),
        ({"shadow_rate": NAN}, r"shadow_rate must lie in \[0, 1\]"),
        ({"recompute_ratio": "0.5"}, r"recompute_ratio must lie in \[0, 1\], not '0.5'"),
        ({"recompute_ratio": 1.5}, r"recompute_ratio must lie in \[0, 1\]"),
        ({"index": "hnws"}, "unknown index 'hnws'; choose one of flat, ivf, hnsw"),
        ({"separators": "---"}, r"separators must be a list of texts: give \['---'\]"),
        ({"separators": [5]}, "separators must be a list of texts"),
        ({"strategy": 5}, "strategy must be a text"),
        ({"quality_budget": 0.05}, "quality_budget must be a text"),
        ({"compression": 512}, "compression must be a text"),
        ({"storage": {"host_gb": 1}}, "storage must be StorageOptions"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**{"model": "m"} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_gb": "1"}, "host_gb must be a number from 0 to 1e9"),
        ({"disk_gb": "1"}, "disk_gb must be a number above 0"),
        ({"quotas": {"a": None}}, r"quotas\['a'\] must be a number above 0"),
        ({"variants": 2.5}, "variants must be a whole number"),
    ],
)
def test_tiers_that_cannot_work_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StorageOptions(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    made = EngineOptions("m", top_k=np.int64(2), max_context=np.int32(64), device_cache_gb=np.float32(0.5))
    assert made == EngineOptions("m", top_k=2, max_context=64) and type(made.top_k) is int
    assert EngineOptions("m", separators=["---"]).separators == ("---",)  # type: ignore[arg-type]


def test_every_index_can_be_chosen() -> None:
    assert tuple(IndexKind) == INDEXES


def test_every_option_is_described() -> None:
    assert EngineOptions.__doc__ is not None
    assert [name for name in EngineOptions.__dataclass_fields__ if f"{name}:" not in EngineOptions.__doc__] == []
