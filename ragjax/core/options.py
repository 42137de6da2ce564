"""Settings of an engine and of its tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ragjax.core.compression import Compression
from ragjax.core.errors import ConfigError

AtRest = Literal["raw", "int8", "float8", "int4"]
"""How KV is encoded below the device."""


MOST_LOOKUP = 6
"""Tokens that prompt lookup proposes in a step, at most."""

DTYPES = ("auto", "bfloat16", "float32")
"""Of weights and KV; "auto" suits the device (`runner.device.precision`)."""

RETRIEVE = ("auto", "always", "asked")
"""When requests that say nothing of it get passages of the default knowledge base."""

ORDERS = ("fcfs", "ratio", "lpm", "lsp", "joint")
"""In which waiting requests may start."""


@dataclass(frozen=True)
class StorageOptions:
    """Where KV is kept below the device, and what leaves first.

    Raises:
        ConfigError: naming the field that cannot work.

    policy: name of the replacement policy. cost_profile: JSON of measured prefill times, which "pgdsf" needs.
    host_gb: host memory for KV, in 2^30 bytes (0: none). disk: folder of the disk tier (None: none), shared by any
    number of processes; disk_gb: its limit.
    remote: address of the shared tier, redis:// or rediss:// (None: none). remote_gb: limit of what it holds of this
    model and encoding, of all processes together; remote_days: after so many without a use an entry expires;
    remote_timeout: seconds that a request waits for it, and that it may take to answer.
    at_rest: "raw" (exact), or "int8", "float8" or "int4": smaller, and all that comes back is labelled approximate.
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
    remote_gb: float = 8.0
    remote_days: float = 7.0
    remote_timeout: float = 0.25
    at_rest: AtRest = "raw"
    load_timeout: float = 10.0
    quotas: Mapping[str, float] = field(default_factory=dict)
    variants: int = 500
    share_knowledge: bool = False

    def __post_init__(self) -> None:
        if self.at_rest not in get_args(AtRest):
            raise ConfigError(f"unknown at_rest {self.at_rest!r}; choose one of {', '.join(get_args(AtRest))}")
        if not 0 <= self.host_gb <= 1e9:
            raise ConfigError(f"host_gb must be a number from 0 to 1e9, not {self.host_gb!r}")
        if self.variants < 1:
            raise ConfigError(f"variants must be at least 1, not {self.variants!r}")
        limits = {"disk_gb": self.disk_gb, "load_timeout": self.load_timeout, "remote_gb": self.remote_gb}
        limits |= {"remote_days": self.remote_days, "remote_timeout": self.remote_timeout}
        for name, value in limits.items() | {(f"quotas[{tenant!r}]", gb) for tenant, gb in self.quotas.items()}:
            if not 0 < value <= 1e9:
                raise ConfigError(f"{name} must be a number above 0, up to 1e9, not {value!r}")


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is loaded with: from Python, from flags, and in tests.

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
    keep_top: of a prompt's chunks, in order, how many the strategy "prefix" keeps KV of (None: all).
    device_cache_gb: size of the page pool, in 2^30 bytes, on all devices together.
    tensor_parallel: devices that share out the model and the pool, by heads, MLP and vocabulary (docs/scale.md).
    max_queue: requests that may wait. max_running: requests that run at a time (0: as many as have room).
    order: which waiting request starts next, one of `ORDERS` (docs/http.md).
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
    keep_top: int | None = None
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
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if self.retrieve not in RETRIEVE:
            raise ConfigError(f"unknown retrieve {self.retrieve!r}; choose one of {', '.join(RETRIEVE)}")
        if self.recognise and self.quality_budget is not None:
            raise ConfigError(
                "a quality budget holds for retrieved chunks, not for passages recognised in messages: "
                "give --recognise or --quality-budget, not both"
            )
        if self.order not in ORDERS:
            raise ConfigError(f"unknown order {self.order!r}; choose one of {', '.join(ORDERS)}")
        if self.quality_fallback not in ("refuse", "full"):
            raise ConfigError(f"unknown quality_fallback {self.quality_fallback!r}; choose refuse or full")
        fewest = {
            "tensor_parallel": 1,
            "top_k": 0,
            "max_queue": 0,
            "max_running": 0,
            "request_timeout": 0,
            "step_tokens": 0,
            "speculate": 0,
            "lookup": 0,
        }
        for name, least in fewest.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)!r}")
        if not 0 < self.file_quota_gb <= 1e9:
            raise ConfigError(f"file_quota_gb must be a number above 0, up to 1e9, not {self.file_quota_gb!r}")
        if self.keep_top is not None and self.keep_top < 0:
            raise ConfigError(f"keep_top must be at least 0, not {self.keep_top!r}")
        if self.compression is not None:
            Compression.parse(self.compression)
        if self.lookup > MOST_LOOKUP:
            raise ConfigError(f"lookup must be at most {MOST_LOOKUP}, not {self.lookup!r}")
        if not 0.0 <= self.shadow_rate <= 1.0:
            raise ConfigError(f"shadow_rate must lie in [0, 1], not {self.shadow_rate!r}")
        if self.quality_budget is not None and (self.strategy is not None or self.recompute_ratio is not None):
            raise ConfigError(
                "a quality budget picks strategy and recompute ratio: give no --strategy, no --recompute-ratio"
            )
