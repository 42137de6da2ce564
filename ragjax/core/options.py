"""Settings of an engine and of its tiers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ragjax.core.check import is_list, is_number, put, whole
from ragjax.core.compression import Compression
from ragjax.core.errors import ConfigError

AtRest = Literal["raw", "int8", "int4"]
"""How KV is encoded below the device."""


MOST_LOOKUP = 6
"""Tokens that prompt lookup proposes in a step, at most."""

DTYPES = ("auto", "bfloat16", "float32")
"""Of weights and KV; "auto" suits the device (`runner.device.precision`)."""

RETRIEVE = ("auto", "always", "asked")
"""When requests that say nothing of it get passages of the default knowledge base."""

INDEXES = ("flat", "ivf", "hnsw")
"""How vectors are searched."""


@dataclass(frozen=True)
class StorageOptions:
    """Where KV is kept below the device, and what leaves first.

    Raises:
        ConfigError: naming the field that cannot work.

    policy: name of the replacement policy. cost_profile: JSON of measured prefill times, which "pgdsf" needs.
    host_gb: host memory for KV, in 2^30 bytes (0: none). disk: folder of the disk tier (None: none), shared by any
    number of processes; disk_gb: its limit.
    remote: address of the shared tier (None: none). For Redis, which `ragjax.cluster.remote` registers,
    "redis://host/0?gb=8&days=7&timeout=0.25" (docs/scale.md).
    at_rest: "raw" (exact), or "int8" or "int4": smaller, and all that comes back is labelled approximate.
    load_timeout: seconds after which a request computes KV rather than wait for it.
    quotas: most 2^30 bytes of KV that a tenant may hold on the device, and as much in host memory.
    variants: most variants of chunks that Cache-Craft's strategies keep, of all chunks together (its N times M).
    share_knowledge: whether tenants share the KV of the knowledge bases. What a request brings along stays its own; but
        how fast an answer comes then tells one tenant which documents others asked for.
    """

    policy: str = "lru"
    cost_profile: str | Path | None = None
    host_gb: float = 0.0
    disk: str | Path | None = None
    disk_gb: float = 8.0
    remote: str | None = None
    at_rest: AtRest = "raw"
    load_timeout: float = 10.0
    quotas: Mapping[str, float] = field(default_factory=dict)
    variants: int = 500
    share_knowledge: bool = False

    def __post_init__(self) -> None:
        if self.at_rest not in get_args(AtRest):
            raise ConfigError(f"unknown at_rest {self.at_rest!r}; choose one of {', '.join(get_args(AtRest))}")
        _check_from_zero("host_gb", self.host_gb)
        _take_whole(self, "variants", 1)
        limits = {"disk_gb": self.disk_gb, "load_timeout": self.load_timeout}
        for name, value in limits.items() | {(f"quotas[{tenant!r}]", gb) for tenant, gb in self.quotas.items()}:
            _check_positive(name, value)


@dataclass(frozen=True)
class EngineOptions:
    """Options that an engine is loaded with: from Python, from flags, and in tests.

    Raises:
        ConfigError: naming the field that cannot work.

    model: a packaged name, a directory, a .gguf file, an adapter of one of these, or a Hugging Face id.
    knowledge: a folder or JSONL file, or several by name; the first is the default one. graph: triples in a .tsv,
    .jsonl or .nt file, likewise.
    strategy: reuse strategy of requests that name none (None: "prefix", if there is no budget).
    recompute_ratio: its share of recomputed chunk tokens, if it is selective (None: its own choice).
    quality_budget: "KL=0.05" and the like: requests that name no strategy get the cheapest setting inside it, by the
    report that `python -m ragjax.reuse.gate` made of this model. quality_fallback: what to do if none is inside:
    "refuse" to load, or run "full".
    shadow_rate: share of requests that are replayed in `full`, when nothing else runs, and compared.
    dtype: "bfloat16" or "float32", of weights and KV; "auto": bfloat16, with products that suit the CPU
    (docs/kernels.md, "CPUs").
    top_k: chunks retrieved for requests that say nothing else.
    retrieve: when requests that name neither a knowledge base nor `top_k` get passages of the default one: "always",
    "asked" (never), or "auto", which leaves those alone whose messages bring passages (docs/recognition.md).
    recognise: whether passages in messages are recognised and reused at any place, for requests that say nothing else;
    separators: texts that part passages, besides blank lines, rules, tags and labels.
    device_cache_gb: size of the page pool, in 2^30 bytes, on all devices together.
    tensor_parallel: devices that share out the model and the pool, by heads, MLP and vocabulary (docs/scale.md).
    max_queue: requests that may wait. max_running: requests that run at a time (0: as many as have room).
    request_timeout: seconds without progress after which a request is started again, and then ended (0: never).
    order: which waiting request starts next, a name of `ragjax.schedule.order.ORDERS` (docs/http.md).
    step_tokens: rows of a step, prefill and decoding tokens together, while requests decode (0: measured at start).
    speculate: stages of a search, after each of which a generation may begin with the chunks known so far (0: none
    begins before the search has ended).
    lookup: tokens that prompt lookup proposes in a step (0: none).
    compression: which tokens of a prompt its answer sees, in its short form ("snapkv+graph:512"; docs/compression.md),
    unless a request says otherwise (None: all).
    max_context: longest prompt and answer together, in tokens (None: the model's context length).
    index: "flat", "ivf" or "hnsw". index_dir: where chunks and index are kept (None: in memory). graph_dir: where
    graphs are kept between starts (None: in memory). file_quota_gb: 2^30 bytes of uploaded files that a
    tenant may keep.
    storage: the replacement policy, and the tiers below the device.
    record_trace: file to which every request is added, as hashes and sizes (`ragjax.engine.trace`).
    progress: show progress bars. compile: compile all programs now, so that no request waits for one; False for short
    experiments.
    """

    model: str | Path
    knowledge: str | Path | Mapping[str, str | Path] | None = None
    graph: str | Path | Mapping[str, str | Path] | None = None
    strategy: str | None = None
    recompute_ratio: float | None = None
    quality_budget: str | None = None
    quality_fallback: str = "refuse"
    shadow_rate: float = 0.0
    dtype: str = "auto"
    top_k: int = 3
    retrieve: str = "auto"
    recognise: bool = False
    separators: tuple[str, ...] = ()
    device_cache_gb: float = 0.5
    tensor_parallel: int = 1
    max_queue: int = 64
    max_running: int = 0
    request_timeout: float = 0.0
    order: str = "fcfs"
    step_tokens: int = 0
    lookup: int = 6
    compression: str | None = None
    speculate: int = 0
    max_context: int | None = None
    index: str = "flat"
    index_dir: str | Path | None = None
    file_quota_gb: float = 1.0
    graph_dir: str | Path | None = None
    storage: StorageOptions = field(default_factory=StorageOptions)
    record_trace: str | Path | None = None
    progress: bool = True
    compile: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        self._check_numbers()
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("retrieve", self.retrieve, RETRIEVE)
        _check_choice("index", self.index, INDEXES)
        if self.recognise and self.quality_budget is not None:
            raise ConfigError(
                "a quality budget holds for retrieved chunks, not for passages recognised in messages: "
                "give --recognise or --quality-budget, not both"
            )
        if self.quality_fallback not in ("refuse", "full"):
            raise ConfigError(f"unknown quality_fallback {self.quality_fallback!r}; choose refuse or full")
        if self.compression is not None:
            Compression.parse(self.compression)
        if self.quality_budget is not None and (self.strategy is not None or self.recompute_ratio is not None):
            raise ConfigError(
                "a quality budget picks strategy and recompute ratio: give no --strategy, no --recompute-ratio"
            )

    def _check_types(self) -> None:
        if not isinstance(self.model, (str, os.PathLike)):
            raise ConfigError(f"model must be a name or a path, not {self.model!r}")
        for name in ("knowledge", "graph"):
            if not isinstance(given := getattr(self, name), (str, os.PathLike, Mapping, type(None))):
                raise ConfigError(f"{name} must be a path, or paths by name, not {given!r}")
        for name in ("strategy", "quality_budget", "compression"):
            if not isinstance(given := getattr(self, name), str | None):
                raise ConfigError(f"{name} must be a text, not {given!r}")
        if isinstance(self.separators, str):
            raise ConfigError(f"separators must be a list of texts: give [{self.separators!r}]")
        if not is_list(self.separators, str):
            raise ConfigError(f"separators must be a list of texts, not {self.separators!r}")
        put(self, "separators", tuple(self.separators))
        if not isinstance(self.storage, StorageOptions):
            raise ConfigError(f"storage must be StorageOptions, not {self.storage!r}")

    def _check_numbers(self) -> None:
        fewest = {"tensor_parallel": 1, "top_k": 0, "max_queue": 0, "max_running": 0}
        fewest |= {"step_tokens": 0, "speculate": 0, "lookup": 0, "max_context": 1}
        for name, least in fewest.items():
            if getattr(self, name) is not None or name != "max_context":
                _take_whole(self, name, least)
        if self.lookup > MOST_LOOKUP:
            raise ConfigError(f"lookup must be at most {MOST_LOOKUP}, not {self.lookup!r}")
        _check_from_zero("request_timeout", self.request_timeout)
        for name in ("device_cache_gb", "file_quota_gb"):
            _check_positive(name, getattr(self, name))
        _check_share("shadow_rate", self.shadow_rate)
        if self.recompute_ratio is not None:
            _check_share("recompute_ratio", self.recompute_ratio)


def _take_whole(of: object, name: str, least: int) -> None:
    given = getattr(of, name)
    taken = whole(given)
    if taken is None:
        raise ConfigError(f"{name} must be a whole number, not {given!r}")
    if taken < least:
        raise ConfigError(f"{name} must be at least {least}, not {given!r}")
    put(of, name, taken)


def _check_from_zero(name: str, value: object) -> None:
    if not is_number(value) or not 0 <= value <= 1e9:  # type: ignore[operator]
        raise ConfigError(f"{name} must be a number from 0 to 1e9, not {value!r}")


def _check_positive(name: str, value: object) -> None:
    if not is_number(value) or not 0 < value <= 1e9:  # type: ignore[operator]
        raise ConfigError(f"{name} must be a number above 0, up to 1e9, not {value!r}")


def _check_share(name: str, value: object) -> None:
    if not is_number(value) or not 0 <= value <= 1:  # type: ignore[operator]
        raise ConfigError(f"{name} must lie in [0, 1], not {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(choices)}")
