"""Chunks of which a part of the KV is kept once, reused by many: divergence beside other ways to hold fewer bytes."""

from __future__ import annotations

import argparse
import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.common.report import Row
from benchmarks.quality import dataset
from benchmarks.quality.dataset import Question
from benchmarks.quality.evaluation import FULL, Evaluation, Setting, Style, sample
from benchmarks.quality.score import Bootstrap
from benchmarks.quality.similarity import packaged_encoder
from ragjax.core import Answer, AtRest, Kind, Prompt, Segment, StorageOptions, Tokens
from ragjax.engine import Engine
from ragjax.engine.condensing import Probe, condense_all
from ragjax.engine.preprocessing import fuse_all
from ragjax.reuse import strategies
from ragjax.reuse.condense import Condense
from ragjax.store.codec import Codec, rest_dtype

RATIO = 0.15
SHARES = (0.5, 1 / 3, 0.25)
COLUMNS = (
    "set", "n", "strategy", "ratio", "chosen_by", "kept_share", "at_rest", "bytes_share", "kl", "kl_lo", "kl_hi",
    "over_blend", "over_blend_lo", "over_blend_hi", "over_raw", "over_raw_lo", "over_raw_hi", "top1", "f1", "answered",
    "recomputed_share",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How chunks are held and reused. probe: what chose the tokens that are kept (None: all are)."""

    strategy: str
    ratio: float | None = None
    probe: Probe | str | None = None
    share: float = 1.0
    at_rest: AtRest = "raw"


BLEND = Way("blend", RATIO)
WAYS = (
    Way("naive"),
    BLEND,
    Way("ragjax", RATIO),
    *(Way("naive", None, probe, share) for probe in ("repeat", "questions", "random") for share in SHARES),
    *(Way("ragjax", RATIO, probe, share) for probe in ("repeat", "random") for share in SHARES),
    *(Way("fusion", RATIO, "repeat", share) for share in SHARES),
    Way("naive", at_rest="int8"),
    Way("ragjax", RATIO, at_rest="int8"),
    Way("naive", None, "repeat", 0.5, "int8"),
    Way("ragjax", RATIO, "repeat", 0.5, "int8"),
    Way("ragjax", RATIO, "repeat", 2 / 3, "int8"),
)
"""What `--part condense` measures. With two thirds of the tokens in int8 a chunk takes a third of its bytes."""

RESTS: tuple[AtRest, ...] = ("raw", "int8", "int4")
WHOLE = (
    BLEND,
    *(Way(name, ratio, at_rest=rest) for rest in RESTS for name, ratio in
      (("naive", None), ("fusion", RATIO), ("ragjax", RATIO))),
)  # fmt: skip
"""What `--part rest` measures: whole chunks, encoded at rest."""


class Blind(Condense):
    """Chooses at random: what any choice must beat."""

    name = "condense-random"

    def choose(self, score_LN: NDArray[np.float32], count: int) -> Tokens:
        """Places without a look at the scores."""
        tokens = score_LN.shape[1]
        return np.sort(np.random.default_rng(tokens).permutation(tokens)[:count]).astype(np.int32)


def rows(chosen: argparse.Namespace, name: str, ways: Sequence[Way] = WAYS) -> Iterator[Row]:
    """The table's lines of a set of DIR; `BLEND` must be among the ways."""
    found: dict[Way, Sequence[Mapping[str, float]]] = {}
    full: dict[str, Answer] = {}
    for at_rest in dict.fromkeys(way.at_rest for way in ways):
        found |= _figures(chosen, name, [way for way in ways if way.at_rest == at_rest], full)
        gc.collect()  # an engine's programs take memory maps, and two engines more of them than a process may have
    bootstrap = Bootstrap([name] * len(found[BLEND]))
    for way in ways:
        column = {key: [figures[key] for figures in found[way]] for key in found[way][0]}
        means = {key: float(np.mean(values)) for key, values in column.items() if key != "kl"}
        yield {
            "set": name, "n": len(found[way]), "strategy": way.strategy, "ratio": way.ratio,
            "chosen_by": way.probe or "all", "kept_share": way.share, "at_rest": way.at_rest,
            **bootstrap.mean(column["kl"]).columns("kl"),
            **_over(bootstrap, "over_blend", found, way, BLEND),
            **_over(bootstrap, "over_raw", found, way, replace(way, at_rest="raw")), **means,
        }  # fmt: skip


def _over(
    bootstrap: Bootstrap, column: str, found: Mapping[Way, Sequence[Mapping[str, float]]], way: Way, other: Way
) -> Row:
    """The paired difference in KL of a way from another; nothing if there is no other."""
    if way == other or other not in found:
        return {}
    return bootstrap.difference(*([figures["kl"] for figures in found[one]] for one in (way, other))).columns(column)


def _figures(
    chosen: argparse.Namespace, name: str, ways: Sequence[Way], full: dict[str, Answer]
) -> Mapping[Way, Sequence[Mapping[str, float]]]:
    """Figures of all questions, by way; all ways have the same encoding at rest. full: answers kept for the next."""
    found: dict[Way, list[Mapping[str, float]]] = defaultdict(list)
    at_rest = ways[0].at_rest
    storage = StorageOptions(host_gb=2.0, at_rest=at_rest)
    with Engine.load(
        chosen.model, strategy="ragjax", dtype=chosen.dtype, device_cache_gb=1.0, storage=storage, lookup=0,
        compile=False,  # nothing is timed
    ) as engine:  # fmt: skip
        work = _Work(engine, Evaluation(
            engine, dataset.load(chosen.data, name), chosen.limit, packaged_encoder(),
            Style(max_tokens=chosen.tokens), strategies(), fuse_all, whole_corpus=False,
        ), full)  # fmt: skip
        for question in tqdm(work.evaluation.questions, desc=f"{name}, {at_rest}", unit="question"):
            for way, figures in work.measure(question, ways):
                found[way].append(figures)
    return found


@dataclass
class _Work:
    engine: Engine
    evaluation: Evaluation
    full: dict[str, Answer]

    def measure(self, question: Question, ways: Sequence[Way]) -> Iterator[tuple[Way, dict[str, float]]]:
        """Figures of a question, every way's."""
        prompt = self.evaluation.prompt(question)
        self.engine.answer_prompt(prompt, strategy="naive", max_tokens=1)
        marked = {
            (way.probe, way.share): self._condensed(prompt, way.probe, way.share)
            for way in ways
            if way.probe is not None
        }
        if question.id not in self.full:
            self.full[question.id] = self.evaluation.ask(question, FULL)
        for way in ways:
            asked = prompt if way.probe is None else marked[way.probe, way.share]
            if way.at_rest != "raw":
                self.engine.vacate_device()
            setting = Setting(way.strategy, way.ratio)
            answer = self.evaluation._ask(question, asked, setting, tenant=f"{way.probe}{way.share}/")
            seen = sample(question, answer, self.full[question.id])
            kept = ("kl", "top1", "f1", "answered", "recomputed_share")
            yield way, {**{key: float(seen[key]) for key in kept}, "bytes_share": self._share(asked, way)}

    def _condensed(self, prompt: Prompt, probe: str, share: float) -> Prompt:
        strategy = Blind(share) if probe == "random" else Condense(share)
        chunks = [segment for segment in prompt.segments if segment.kind is Kind.CHUNK]
        asking: Probe = "questions" if probe == "questions" else "repeat"
        places = iter(condense_all(self.engine, prompt.segments[0], chunks, strategy, asking))

        def marked(segment: Segment) -> Segment:
            return replace(segment, condensed=next(places)) if segment.kind is Kind.CHUNK else segment

        return replace(prompt, segments=tuple(map(marked, prompt.segments)))

    def _share(self, prompt: Prompt, way: Way) -> float:
        """Bytes of the chunks at rest, over those of all their KV as it is."""
        chunks = [segment for segment in prompt.segments if segment.kind is Kind.CHUNK]
        held = sum(self._codec(way.at_rest).size(len(segment.condensed) or len(segment)) for segment in chunks)
        return held / sum(self._codec("raw").size(len(segment)) for segment in chunks)

    def _codec(self, kind: AtRest) -> Codec:
        config = self._config
        return Codec(kind, config.num_layers, config.num_kv_heads, config.head_dim, rest_dtype(self._dtype))

    @cached_property
    def _config(self) -> Any:
        return self.engine._runner.config

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self.engine._runner.storage_dtype)
