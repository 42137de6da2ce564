"""Options of an engine and of its tiers. Types, bounds and help are written here alone: Python callers are checked by
them, and the flags of the commands and the table of docs/flags.md are made from them (`ragjax/commands/flags.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, TypeAdapter, ValidationError

from ragjax.core.check import check_fields, put
from ragjax.core.compression import Compression
from ragjax.core.errors import ConfigError
from ragjax.core.library import CHUNK_TOKENS
from ragjax.core.prompt import Keep
from ragjax.core.registry import name_of, settings_of, strategy_named

AtRest = Literal["raw", "int8", "int4"]
"""How KV is encoded below the device."""

WeightBits = Literal["stored", "int8", "int4"]

Dtype = Literal["auto", "bfloat16", "float32"]
DTYPES = get_args(Dtype)
"""Of weights and KV; "auto" suits the device (`runner.device.storage_dtype`)."""

Retrieve = Literal["auto", "always", "asked"]
"""When requests that say nothing of it get passages of the default knowledge base."""

ENCODER = "all-minilm-l6-v2"
"""The packaged sentence encoder."""

INDEXES = ("flat", "ivf", "hnsw")
"""How vectors are searched."""

MAX_PREFILL = 4
"""Requests whose prompts are not computed, below which a speculation may start (RAGCache's `max_prefill_bs`)."""

GRACE = 30
"""Seconds that running requests get when a server stops."""

MOST_LOOKUP = 6
"""Tokens that prompt lookup proposes in a step, at most."""

FIRST, RETRIEVAL, REUSE, CACHE, LOAD = "Start here", "Retrieval", "Reuse and quality", "Cache", "Many requests"
"""Sections of `ragjax serve --help`; the server adds one on access (`ragjax/serve/command.py`)."""

Count = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0), Le(1e9)]
FromZero = Annotated[float, Ge(0), Le(1e9)]
Share = Annotated[float, Ge(0), Le(1)]
Place = str | Path
Sources = Place | Mapping[str, Place] | None
"""A source of knowledge, or several by name; the first is the default one."""


@dataclass(frozen=True)
class Flag:
    """Presentation of a field as a flag. A page of docs/ that tells more is named in the help, as "(docs/cache.md)"."""

    section: str
    help: str
    metavar: str | None = None
    name: str | None = None  # without its dashes; None: the field's


@dataclass(frozen=True)
class Guesses:
    """Generations that begin before their search has ended (RAGCache, section 5.3).

    stages: of a search, after which one may begin; 0: none. max_prefill: one begins while fewer requests than this have
    prompts to be computed.
    """

    stages: Count = 0
    max_prefill: AtLeastOne = MAX_PREFILL

    @staticmethod
    def parse(given: int | str) -> Guesses:
        """From "STAGES:max_prefill=N", or the stages alone."""
        text = str(given)
        if not name_of(text).isdecimal():
            raise ConfigError("must be STAGES or STAGES:max_prefill=N")
        settings = settings_of("speculate", text, Guesses)
        return Guesses(**{"stages": int(name_of(text)), **settings})


VariantMode = Literal["off", "above", "fill"]


@dataclass(frozen=True)
class CraftVariants:
    """Variants of chunks (Cache-Craft, section 3.3): when one is computed for a new prefix, and the focus.

    when: off: never; above: if mending the best variant takes more than tau, before alpha; fill: always until there are
    as many variants as are kept, from then on as above. focus: whether `craft` stops early too (Algorithm 1). window:
    layers in a row that must agree on the focus; the paper names no value.
    """

    when: VariantMode
    tau: Share = 0.5
    focus: bool = False
    window: AtLeastOne = 3

    @staticmethod
    def parse(text: str) -> CraftVariants:
        """From "WHEN:tau=SHARE,focus=on,window=N", where "above=SHARE" is short for "above:tau=SHARE"."""
        text = text.replace("above=", "above:tau=", 1)
        when = TypeAdapter[VariantMode](VariantMode)
        try:
            known = when.validate_python(name_of(text))
        except ValidationError:
            raise ConfigError("must be off, fill or above=TAU, with tau=, focus= or window=") from None
        return CraftVariants(known, **settings_of("craft-variants", text, CraftVariants))


NO_VARIANTS = CraftVariants("off")


def _reads(parse: Callable[[str], object]) -> AfterValidator:
    """Checks that an option can be parsed, and keeps it as it was given."""

    def check(given: int | str) -> int | str:
        try:
            parse(str(given))
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return given

    return AfterValidator(check)


def _known_index(text: str) -> str:
    if name_of(text) not in INDEXES:
        raise ValueError(f"must be one of {', '.join(INDEXES)}")
    return text


@dataclass(frozen=True)
class StorageOptions:
    """Where KV is kept below the device, and what leaves first."""

    policy: Annotated[
        str, Flag(CACHE, "which KV is evicted first, with settings (docs/cache.md)", "NAME[:FIELD=VALUE,...]")
    ] = "lacr"
    host_gb: Annotated[
        FromZero | None,
        Flag(CACHE, "host memory for KV, units of 2^30 B (default: a quarter of what is free)", name="host-cache-gb"),
    ] = None
    disk: Annotated[
        Place | None,
        Flag(FIRST, "folder where KV outlives the process; servers may share it (docs/cache.md)", "DIR", "disk-cache"),
    ] = None
    disk_gb: Annotated[Positive, Flag(CACHE, "limit of the disk cache, units of 2^30 B", name="disk-cache-gb")] = 8.0
    remote: Annotated[
        str | None,
        Flag(CACHE, "server that others share: redis://host/0?days=7 (docs/scale.md)", "URL", "remote-cache"),
    ] = None
    at_rest: Annotated[AtRest, Flag(CACHE, "KV below the device; only raw is exact (docs/cache.md)")] = "raw"
    keep: Annotated[Keep, Flag(CACHE, "what prefix keeps of a prompt (docs/cache.md)")] = "all"
    load_timeout: Positive = 10.0  # seconds after which a request computes KV rather than wait for it
    quotas: Mapping[str, Positive] = field(default_factory=dict)  # 2^30 bytes of KV of a tenant, on device and in host
    variants: AtLeastOne = 500  # of chunks, kept by Cache-Craft's strategies in all: N = 100 with M = 5 (section 5)
    # How fast an answer comes then tells one tenant which documents others asked for.
    share_knowledge: Annotated[
        bool, Flag(CACHE, "let tenants share the KV of the knowledge bases (docs/security.md)")
    ] = False

    def __post_init__(self) -> None:
        check_fields(self, lambda _, reason: ConfigError(reason))


@dataclass(frozen=True)
class EngineOptions:
    model: Annotated[Place, Flag(FIRST, "packaged name, folder, .gguf, adapter or Hugging Face id (docs/models.md)")]
    knowledge: Annotated[Sources, Flag(FIRST, "folder or .jsonl of documents, 'demo' or 'none'", "PATH")] = None
    graph: Annotated[
        Sources, Flag(RETRIEVAL, "facts: .tsv, .jsonl, .nt, .nq or .ttl, or 'demo' (docs/graph.md)", "FILE")
    ] = None
    strategy: Annotated[
        str, Flag(FIRST, "how KV is reused unless a request says otherwise; prefix is exact (docs/reuse.md)")
    ] = "auto"
    recompute_ratio: Annotated[
        Share | None, Flag(REUSE, "share of chunk tokens that it recomputes (default: its own choice)")
    ] = None
    quality_budget: Annotated[
        str, Flag(REUSE, 'what auto may be off: "KL=0.05", "TOP1=0.95" or both (docs/reuse.md)', "BOUND")
    ] = "KL=0.05"
    shadow_rate: Annotated[Share, Flag(REUSE, "share of requests replayed in full attention (docs/reuse.md)")] = 0.0
    craft_variants: Annotated[
        str,
        _reads(CraftVariants.parse),
        Flag(REUSE, "when craft keeps a chunk anew: off, fill, above=TAU (docs/reuse.md)", "WHEN"),
    ] = "off"
    dtype: Annotated[Dtype, Flag(REUSE, "weights and KV; auto suits the device (docs/kernels.md)")] = "auto"
    weights: Annotated[
        WeightBits,
        Flag(REUSE, "of floating-point checkpoints on CPUs: stored, or packed to int8 or int4 (docs/kernels.md)"),
    ] = "stored"
    top_k: Annotated[Count, Flag(FIRST, "chunks retrieved, if a request says nothing of it")] = 3
    retrieve: Annotated[
        Retrieve, Flag(RETRIEVAL, "when requests that name no knowledge get passages (docs/clients.md)")
    ] = "auto"
    deterministic: Annotated[
        bool, Flag(REUSE, "the same bits for a request alone, beside others, cold, and from any tier (docs/kernels.md)")
    ] = False
    device_cache_gb: Annotated[
        Positive, Flag(FIRST, "KV pool on the device, on all its devices together, units of 2^30 B")
    ] = 0.5
    tensor_parallel: Annotated[AtLeastOne, Flag(LOAD, "devices that share out the model (docs/scale.md)")] = 1
    max_queue: Annotated[Count, Flag(LOAD, "requests that may wait; more get 429 (docs/serving.md)")] = 64
    max_running: Annotated[Count, Flag(LOAD, "requests that run at a time; 0: as many as have room")] = 0
    order: Annotated[
        str, Flag(LOAD, "which waiting request starts next: fcfs, ratio or ratio:window=N (docs/serving.md)")
    ] = "fcfs"
    lookup: Annotated[int, Ge(0), Le(MOST_LOOKUP)] = MOST_LOOKUP  # tokens that prompt lookup proposes a step; 0: none
    compression: Annotated[
        str | None,
        Flag(
            REUSE,
            "tokens of a prompt that its answer sees: snapkv+graph:512 (default: all; docs/compression.md)",
            "METHOD:TOKENS",
            "compress",
        ),
    ] = None
    # the server's default is True; KV that comes by itself would make tests and notebooks differ from run to run
    preprocess: Annotated[
        bool, Flag(REUSE, "leave an idle server idle: prepare no passages (docs/reuse.md)", name="no-preprocess")
    ] = False
    speculate: Annotated[
        int | str,
        _reads(Guesses.parse),
        Flag(RETRIEVAL, "stages of a search after which an answer may begin; 0: none (docs/serving.md)", "N"),
    ] = 0
    max_context: Annotated[
        AtLeastOne | None, Flag(CACHE, "tokens of prompt and answer together (default: the model's)")
    ] = None
    encoder: Annotated[
        Place,
        Flag(RETRIEVAL, "of passages: packaged name, folder, Hugging Face id or URL#MODEL (docs/documents.md)", "NAME"),
    ] = ENCODER
    chunk_tokens: Annotated[
        int, Ge(100), Le(4096), Flag(RETRIEVAL, "tokens of a chunk, at most; as many as the encoder reads")
    ] = CHUNK_TOKENS
    index: Annotated[
        str,
        AfterValidator(_known_index),
        Flag(RETRIEVAL, f"kind of the vector index: {', '.join(INDEXES)} or ivf:lists=N,probe=SHARE", "KIND"),
    ] = "flat"
    index_dir: Annotated[
        Place | None,
        Flag(FIRST, "where chunks, index, facts and uploads are kept (default: $RAGJAX_CACHE, chunks alone)", "DIR"),
    ] = None
    watch: Annotated[bool, Flag(RETRIEVAL, "read files of --knowledge that come or change while it serves")] = False
    strict_documents: Annotated[
        bool, Flag(RETRIEVAL, "end the start if a document or fact cannot be read, instead of leaving it out")
    ] = False
    storage: StorageOptions = field(default_factory=StorageOptions)
    progress: bool = True  # show progress bars
    compile: bool = True  # compile what the default strategy needs now; False: each program at its first use

    def __post_init__(self) -> None:
        check_fields(self, lambda _, reason: ConfigError(reason))
        put(self, "strategy", strategy_named(self.strategy))
        if self.compression is not None:
            Compression.parse(self.compression)
