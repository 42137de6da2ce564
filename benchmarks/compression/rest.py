"""Chunks encoded at rest: what each encoding costs in divergence, bytes and time."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import thread_time
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.common.report import Row
from benchmarks.quality import dataset
from benchmarks.quality.evaluation import FULL, Evaluation, Setting, Style, sample
from benchmarks.quality.score import Bootstrap
from benchmarks.quality.similarity import packaged_encoder
from ragjax.core import Answer, AtRest, Kind, Prompt, StorageOptions
from ragjax.engine import Engine
from ragjax.engine.preprocessing import fuse_all
from ragjax.reuse import strategies
from ragjax.store.codec import Codec, rest_dtype

RATIO = 0.15
COLUMNS = (
    "set", "n", "strategy", "ratio", "at_rest", "bytes_share", "kl", "kl_lo", "kl_hi", "over_blend", "over_blend_lo",
    "over_blend_hi", "over_raw", "over_raw_lo", "over_raw_hi", "top1", "f1", "answered", "recomputed_share",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How chunks are held and reused."""

    strategy: str
    ratio: float | None = None
    at_rest: AtRest = "raw"


RESTS: tuple[AtRest, ...] = ("raw", "int8", "int4")
BLEND = Way("blend", RATIO)
WAYS = (
    BLEND,
    *(Way(name, ratio, rest) for rest in RESTS for name, ratio in
      (("naive", None), ("fusion", RATIO), ("anchor", RATIO))),
)  # fmt: skip

Figures = Mapping[str, float]


def rows(chosen: Namespace, name: str, ways: Sequence[Way] = WAYS) -> Iterator[Row]:
    found: dict[Way, Sequence[Figures]] = {}
    full: dict[str, Answer] = {}
    for at_rest in dict.fromkeys(way.at_rest for way in ways):
        found |= _figures(chosen, name, [way for way in ways if way.at_rest == at_rest], full)
        gc.collect()  # an engine's programs take memory maps, and two engines more of them than a process may have
    bootstrap = Bootstrap([name] * len(found[BLEND]))
    for way in ways:
        column = {key: [figures[key] for figures in found[way]] for key in found[way][0]}
        made: dict[str, Any] = {
            "set": name, "n": len(found[way]), "strategy": way.strategy, "ratio": way.ratio, "at_rest": way.at_rest,
            **bootstrap.mean(column["kl"]).columns("kl"),
        }  # fmt: skip
        for label, other in (("over_blend", BLEND), ("over_raw", replace(way, at_rest="raw"))):
            if way != other and other in found:
                base = [figures["kl"] for figures in found[other]]
                made |= bootstrap.difference(column["kl"], base).columns(label)
        yield made | {key: float(np.mean(values)) for key, values in column.items() if key != "kl"}


def _figures(
    chosen: Namespace, name: str, ways: Sequence[Way], full: dict[str, Answer]
) -> Mapping[Way, Sequence[Figures]]:
    """Figures of all questions, by way; all ways have the same encoding at rest. full: answers kept for the next."""
    found: dict[Way, list[Figures]] = defaultdict(list)
    at_rest = ways[0].at_rest
    with Engine.load(
        chosen.model, strategy="anchor", dtype=chosen.dtype, device_cache_gb=1.0, lookup=0,
        storage=StorageOptions(host_gb=2.0, at_rest=at_rest), compile=False,  # nothing is timed
    ) as engine:  # fmt: skip
        work = Evaluation(
            engine, dataset.load(chosen.data, name), chosen.limit, packaged_encoder(),
            Style(max_tokens=chosen.tokens), strategies(), fuse_all, whole_corpus=False,
        )  # fmt: skip
        for question in tqdm(work.questions, desc=f"{name}, {at_rest}", unit="question"):
            prompt = work.prompt(question)
            engine.answer_prompt(prompt, strategy="naive", max_tokens=1)
            if question.id not in full:
                full[question.id] = work.ask(question, FULL)
            for way in ways:
                if at_rest != "raw":
                    engine.vacate_device()
                answer = work.ask(question, Setting(way.strategy, way.ratio))
                seen = sample(question, answer, full[question.id])
                kept = {key: float(seen[key]) for key in ("kl", "top1", "f1", "answered", "recomputed_share")}
                found[way].append({**kept, "bytes_share": share(engine, prompt, at_rest)})
    return found


def share(engine: Engine, prompt: Prompt, at_rest: AtRest) -> float:
    config, dtype = engine._runner.config, rest_dtype(np.dtype(engine._runner.storage_dtype))
    kept, raw = (
        Codec(kind, config.num_layers, config.num_kv_heads, config.head_dim, dtype) for kind in (at_rest, "raw")
    )
    lengths = [len(segment) for segment in prompt.segments if segment.kind is Kind.CHUNK]
    return sum(map(kept.size, lengths)) / sum(map(raw.size, lengths))


CODEC_COLUMNS = ("at_rest", "layers", "heads", "dim", "tokens", "bytes_share", "error", "encode_mb_s", "decode_mb_s")
SHAPES = ((30, 3, 64, 100), (30, 3, 64, 500), (32, 8, 128, 100))
"""Layers, KV heads, head dimension, tokens: SmolLM2-135M's, and those of models of 8B parameters."""
ROUNDS = 30


def codec_rows() -> Iterator[Row]:
    """Each shape in each encoding. Normal numbers in bfloat16: what they are does not change the work.

    Times are of the thread, the least of `ROUNDS` in turns; MB (10^6 bytes) are of bfloat16, whatever is kept.
    """
    kinds: tuple[AtRest, ...] = get_args(AtRest)
    for layers, heads, dim, tokens in SHAPES:
        pair = _normal((2, layers, heads, tokens, dim))
        codecs = {kind: Codec(kind, layers, heads, dim, pair.dtype) for kind in kinds}
        kept = {kind: codec.encode(*pair) for kind, codec in codecs.items()}
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind, codec in codecs.items():
                start = thread_time()
                codec.encode(*pair)
                middle = thread_time()
                codec.decode(kept[kind][0])
                times[kind].append((middle - start, thread_time() - middle))
        for kind in kinds:
            encode, decode = (pair.nbytes / 1e6 / min(part) for part in zip(*times[kind], strict=True))
            lossy = kind != "raw"  # raw does nothing
            yield {
                "at_rest": kind, "layers": layers, "heads": heads, "dim": dim, "tokens": tokens,
                "bytes_share": codecs[kind].size(tokens) / pair.nbytes, "error": kept[kind][1],
                "encode_mb_s": encode if lossy else None, "decode_mb_s": decode if lossy else None,
            }  # fmt: skip


def _normal(shape: tuple[int, ...]) -> NDArray[Any]:
    """bfloat16 bits."""
    floats = np.random.default_rng(0).standard_normal(shape, np.float32)
    return (floats.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
