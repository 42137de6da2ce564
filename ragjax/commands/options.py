"""Flags of commands that load an engine: one for each field of `EngineOptions` that an operator sets."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from ragjax.commands.flags import from_zero, graph, integer, knowledge, positive, share
from ragjax.core import DTYPES, INDEXES, RETRIEVE, AtRest, EngineOptions, StorageOptions

STORAGE = "storage."

FLAGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "model": ("--model", {"help": "name, folder, .gguf, adapter or hub id (%(default)s)"}),
    "knowledge": ("--knowledge", {"help": "folder or .jsonl of documents, 'demo' (default) or 'none'"}),
    "index": ("--index", {"choices": INDEXES, "help": "kind of the vector index (%(default)s)"}),
    "index_dir": ("--index-dir", {"metavar": "DIR", "help": "where chunks and index are kept (default: in memory)"}),
    "file_quota_gb": (
        "--file-quota-gb",
        {"type": positive, "help": "files of each tenant, and in its stores, 2^30 B (%(default)s)"},
    ),
    "graph": (
        "--graph",
        {
            "metavar": "FILE",
            "help": "facts: .tsv, .jsonl or .nt, or 'demo' (docs/graph.md)",
        },
    ),
    "graph_dir": ("--graph-dir", {"metavar": "DIR", "help": "where the graph is kept (default: in memory)"}),
    "strategy": ("--strategy", {"help": "how KV is reused unless a request says otherwise (prefix)"}),
    "recompute_ratio": (
        "--recompute-ratio",
        {"type": share, "help": "share of chunk tokens it recomputes (default: its own choice)"},
    ),
    "quality_budget": (
        "--quality-budget",
        {"help": 'have the quality report pick: "KL=0.05" or "TOP1=0.95" (docs/reuse.md)'},
    ),
    "quality_fallback": (
        "--quality-fallback",
        {"choices": ("refuse", "full"), "help": "if no setting is inside the budget (%(default)s)"},
    ),
    "shadow_rate": (
        "--shadow-rate",
        {"type": share, "help": "requests replayed in full attention (share, %(default)s)"},
    ),
    "top_k": (
        "--top-k",
        {"type": integer(1), "help": "chunks retrieved, if a request says nothing (%(default)s)"},
    ),
    "retrieve": (
        "--retrieve",
        {
            "choices": RETRIEVE,
            "help": "when requests that name no knowledge get passages (%(default)s; docs/recognition.md)",
        },
    ),
    "recognise": (
        "--recognise",
        {"action": "store_true", "help": "reuse passages in messages at any place (docs/recognition.md)"},
    ),
    "separators": (
        "--separator",
        {
            "action": "append",
            "default": [],
            "metavar": "TEXT",
            "help": "parts passages in messages, besides blank lines; repeatable",
        },
    ),
    "dtype": ("--dtype", {"choices": DTYPES, "help": "weights and KV; auto suits the device (%(default)s)"}),
    "device_cache_gb": (
        "--device-cache-gb",
        {"type": positive, "help": "KV pool on the device, units of 2^30 B (%(default)s)"},
    ),
    "tensor_parallel": (
        "--tensor-parallel",
        {
            "type": integer(1),
            "metavar": "N",
            "help": "devices that share out the model (%(default)s; docs/scale.md)",
        },
    ),
    "storage.host_gb": (
        "--host-cache-gb",
        {"type": from_zero, "help": "host memory for KV, units of 2^30 B (%(default)s)"},
    ),
    "storage.disk": (
        "--disk-cache",
        {"metavar": "DIR", "help": "folder where KV outlives the process; may be shared (default: none)"},
    ),
    "storage.disk_gb": (
        "--disk-cache-gb",
        {"type": positive, "help": "limit of the disk cache, units of 2^30 B (%(default)s)"},
    ),
    "storage.remote": (
        "--remote-cache",
        {
            "metavar": "URL",
            "help": "server that others share: redis://host/0?gb=8&days=7 (docs/scale.md)",
        },
    ),
    "storage.at_rest": (
        "--at-rest",
        {"choices": get_args(AtRest), "help": "KV below the device; only raw is exact (%(default)s)"},
    ),
    "storage.load_timeout": (
        "--load-timeout",
        {"type": positive, "help": "seconds before KV is computed, not loaded (%(default)s)"},
    ),
    "storage.policy": ("--policy", {"help": "which KV is evicted first (%(default)s; docs/cache.md)"}),
    "storage.cost_profile": (
        "--cost-profile",
        {"metavar": "FILE", "help": "prefill times of this device, by benchmarks.cost; for --policy pgdsf"},
    ),
    "storage.variants": (
        "--variants",
        {"type": integer(1), "help": "variants of chunks that craft keeps, in all (%(default)s)"},
    ),
    "storage.share_knowledge": (
        "--share-knowledge",
        {"action": "store_true", "help": "let tenants share the KV of the knowledge (docs/security.md)"},
    ),
    "record_trace": ("--record-trace", {"metavar": "FILE", "help": "add every request to FILE, as hashes and sizes"}),
    "max_context": (
        "--max-context",
        {"type": integer(1), "help": "tokens of prompt and answer (the model's)"},
    ),
    "max_queue": ("--max-queue", {"type": integer(1), "help": "requests that may wait; more get 429 (%(default)s)"}),
    "request_timeout": (
        "--request-timeout",
        {"type": from_zero, "help": "seconds without progress until 504, 0: no limit (%(default)s)"},
    ),
    "max_running": (
        "--max-running",
        {"type": integer(0), "help": "requests that run at a time, 0: as many as have room (%(default)s)"},
    ),
    "order": (
        "--order",
        {"help": "which waiting request starts next: fcfs or ratio (%(default)s; docs/serving.md)"},
    ),
    "lookup": (
        "--lookup",
        {
            "type": integer(0),
            "help": "tokens that prompt lookup proposes a step, 0: none (%(default)s; docs/serving.md)",
        },
    ),
    "compression": (
        "--compress",
        {
            "metavar": "METHOD:TOKENS",
            "help": "tokens of a prompt that its answer sees: snapkv+graph:512 (default: all; docs/compression.md)",
        },
    ),
    "step_tokens": (
        "--step-tokens",
        {"type": integer(0), "help": "tokens of a step while requests decode, 0: measured at start (docs/serving.md)"},
    ),
    "speculate": (
        "--speculate",
        {
            "type": integer(0),
            "metavar": "N",
            "help": "stages of a search, after each of which an answer may begin; 0: none (docs/serving.md)",
        },
    ),
}
"""Flag and its settings by field; fields of `StorageOptions` begin with "storage."."""

DEFAULTS = EngineOptions("smollm2-135m-instruct", knowledge="demo")


def add_engine_flags(
    parser: argparse.ArgumentParser, fields: Iterable[str] = FLAGS, **changes: Mapping[str, Any]
) -> None:
    """Add the flags of these fields. changes: other settings for some fields, `required` or `default` for instance."""
    for field in fields:
        flag, settings = FLAGS[field]
        changed = {"default": _default(field), **settings, **changes.get(field.removeprefix(STORAGE), {})}
        if changed.get("required"):
            del changed["default"]
        parser.add_argument(flag, **changed)


def engine_options(options: argparse.Namespace) -> EngineOptions:
    """The engine's options, as far as the command line has their flags; the others keep their defaults.

    Raises:
        ConfigError: for knowledge or a graph that does not exist, and for what contradicts itself.
    """
    values = vars(options)
    names = {field: flag.removeprefix("--").replace("-", "_") for field, (flag, _) in FLAGS.items()}
    given = {field: values[name] for field, name in names.items() if name in values}
    storage = {f.removeprefix(STORAGE): v for f, v in given.items() if f.startswith(STORAGE)}
    plain = {field: value for field, value in given.items() if not field.startswith(STORAGE)}
    named = plain.get("knowledge", "none")
    plain["knowledge"] = None if named == "none" else knowledge(named)
    plain["separators"] = tuple(plain.get("separators", ()))
    plain["graph"] = None if plain.get("graph") is None else graph(plain["graph"])
    return EngineOptions(**plain, storage=StorageOptions(**storage))


def _default(field: str) -> Any:
    owner: object = DEFAULTS.storage if field.startswith(STORAGE) else DEFAULTS
    return getattr(owner, field.removeprefix(STORAGE))
