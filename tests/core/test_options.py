"""Options of engines as Python callers give them: what cannot work is refused before anything is loaded."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest

from ragjax.commands.flags import flags_of
from ragjax.core import INDEXES, ConfigError, EngineOptions, StorageOptions, options
from ragjax.retrieval.index import IndexKind

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": None}, "model must be a valid string, or must be an instance of Path, not None"),
        (
            {"knowledge": ["a", "b"]},
            "knowledge must be a valid string, or must be an instance of Path, or must be a valid dictionary",
        ),
        ({"graph": 5}, "graph must be a valid string, or must be an instance of Path, or"),
        ({"max_context": 0.5}, "max_context must be a valid integer, not 0.5"),
        ({"max_context": 0}, "max_context must be greater than or equal to 1"),
        ({"top_k": "3"}, "top_k must be a valid integer"),
        ({"top_k": -1}, "top_k must be greater than or equal to 0"),
        ({"lookup": 7}, "lookup must be less than or equal to 6"),
        ({"max_queue": NAN}, "max_queue must be a valid integer, not nan"),
        ({"max_running": True}, "max_running must be a valid integer"),
        ({"tensor_parallel": 0}, "tensor_parallel must be greater than or equal to 1"),
        ({"device_cache_gb": NAN}, "device_cache_gb must be .*, not nan"),
        ({"device_cache_gb": INF}, "device_cache_gb must be less than or equal to 1000000000, not inf"),
        ({"device_cache_gb": "1"}, "device_cache_gb must be a valid number, not"),
        ({"device_cache_gb": 0}, "device_cache_gb must be greater than 0, not 0"),
        ({"shadow_rate": "1"}, "shadow_rate must be a valid number, not"),
        ({"shadow_rate": NAN}, "shadow_rate must be .*, not nan"),
        ({"recompute_ratio": "0.5"}, "recompute_ratio must be a valid number, not"),
        ({"recompute_ratio": 1.5}, "recompute_ratio must be less than or equal to 1, not 1.5"),
        ({"index": "hnws"}, "index must be one of flat, ivf, hnsw, not 'hnws'"),
        ({"strategy": 5}, "strategy must be a valid string"),
        ({"quality_budget": 0.05}, "quality_budget must be a valid string"),
        ({"compression": 512}, "compression must be a valid string"),
        ({"storage": {"host_gb": 1}}, "storage must be an instance of StorageOptions"),
    ],
)
def test_what_cannot_work_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**{"model": "m"} | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host_gb": "1"}, "host_gb must be a valid number, not"),
        ({"disk_gb": "1"}, "disk_gb must be a valid number, not"),
        ({"quotas": {"a": None}}, r"quotas\['a'\] must be a valid number, not None"),
        ({"variants": 2.5}, "variants must be a valid integer"),
        *(({"host_gb": -1}, "host_gb"), ({"disk_gb": 0}, "disk_gb"), ({"at_rest": "int3"}, "at_rest")),
        *(({"load_timeout": float("nan")}, "load_timeout"), ({"quotas": {"a": 1e305}}, "quotas")),
    ],
)
def test_tiers_that_cannot_work_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StorageOptions(**given)


def test_numbers_of_numpy_are_numbers() -> None:
    made = EngineOptions("m", top_k=np.int64(2), max_context=np.int32(64), device_cache_gb=np.float32(0.5))
    assert made == EngineOptions("m", top_k=2, max_context=64) and type(made.top_k) is int


def test_every_index_can_be_chosen() -> None:
    assert tuple(IndexKind) == INDEXES


def test_every_option_says_what_it_is() -> None:
    """By a flag with its help, or by a comment at the field."""
    source = inspect.getsource(options)
    for kind in (EngineOptions, StorageOptions):
        with_flags = {name for name, _, _ in flags_of(kind)}
        for name in kind.__dataclass_fields__.keys() - with_flags - {"storage"}:
            assert re.search(rf"^    {name}: .*  # \w", source, re.MULTILINE), name
