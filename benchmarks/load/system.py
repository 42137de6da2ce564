"""Systems under load: ragjax in process, with the settings of each name."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import benchmarks.baseline  # noqa: F401 (registers its names)
from benchmarks.common.report import MODEL
from benchmarks.common.samples import STORE
from benchmarks.load.client import Delivery
from benchmarks.load.workload import Ask, Workload
from ragjax.core import Answer, ConfigError, EngineOptions, Graph, Message, Rag, Request, Sampling, StorageOptions
from ragjax.core.papers import PAPERS
from ragjax.engine import Engine
from ragjax.engine.preprocessing import preprocess
from ragjax.quality.contract import AUTO
from ragjax.reuse import strategies

Settings = Mapping[str, Any]  # fields of `EngineOptions`, and of its `storage`, by name
TIERS: Settings = {"policy": "lacr", "host_gb": 4.0}

OWN: Mapping[str, Settings] = {
    "full": {"strategy": "full"}, "prefix-lru": {"strategy": "prefix", "policy": "lru", "host_gb": 0.0},
    "prefix-tiers": {"strategy": "prefix", **TIERS, "order": "ratio", "speculate": "4"},
    "naive": {"strategy": "naive", **TIERS}, "fusion": {"strategy": "fusion", **TIERS},
    "blend": {"strategy": "blend", "recompute_ratio": 0.15, **TIERS},
    "anchor": {"strategy": "anchor", **TIERS}, "craft": {"strategy": "craft", **TIERS},
    "dependency": {"strategy": "dependency", **TIERS}, "contract": {"quality_budget": "KL=0.1", **TIERS},
    **{name: {one.option: one.value for one in options} for name, options in PAPERS.items()},
}  # fmt: skip
"""Settings by name. `prefix-lru` is what vLLM and SGLang do: a prefix tree on the device, and no tier below."""

STORAGE_FIELDS = frozenset(f.name for f in dataclasses.fields(StorageOptions))


def parse_setting(text: str) -> tuple[str, Any]:
    """`FIELD=VALUE` → field, value.

    Raises:
        ConfigError: for a field that there is not, and a value of another type.
    """
    option, sep, value = text.partition("=")
    kinds = {**typing.get_type_hints(EngineOptions), **typing.get_type_hints(StorageOptions)}
    if not sep or option not in kinds:
        raise ConfigError(f"{text!r} is no FIELD=VALUE of the engine; its fields are {', '.join(sorted(kinds))}")
    return option, _valued(text, value, kinds[option])


def parse_system(text: str) -> tuple[str, Settings]:
    """`NAME` or `NAME:FIELD=VALUE:FIELD=VALUE` → name, settings of this one alone.

    Raises:
        ConfigError: as `parse_setting`.
    """
    name, *settings = re.split(r":(?=\w+=)", text)
    if name not in OWN:
        raise ConfigError(f"unknown system {name!r}; choose among {', '.join(OWN)}, or a rival")
    return name, dict(map(parse_setting, settings))


def _valued(text: str, value: str, kind: Any) -> Any:
    kinds = typing.get_args(kind) or (kind,)
    if value.lower() == "none" and type(None) in kinds:
        return None
    for one in (bool, int, float):
        if one in kinds:
            try:
                return {"true": True, "false": False}[value.lower()] if one is bool else one(value)
            except (KeyError, ValueError):
                break
    else:
        return value
    raise ConfigError(f"{text!r}: {value!r} is no {one.__name__}")


def options_of(system: str, given: Settings, base: Settings) -> EngineOptions:
    """The engine's options of a system: what all have, its name's, the command line's (`given`), its own.

    Raises:
        ConfigError: if they cannot work together.
    """
    name, own = parse_system(system)
    settings = {**base, **OWN[name], **given, **own}
    storage = {option: value for option, value in settings.items() if option in STORAGE_FIELDS}
    engine = {option: value for option, value in settings.items() if option not in STORAGE_FIELDS}
    return EngineOptions(**engine, storage=StorageOptions(**storage))


def served(options: EngineOptions, strategy: str) -> dict[str, Any]:
    more = {"order": options.order, "speculate": options.speculate}
    return {"strategy": strategy, "policy": options.storage.policy, **more}


def base_settings(*, model: str = MODEL, dtype: str, gigabytes: float, context: int) -> Settings:
    return {
        "model": model,
        "dtype": dtype,
        "device_cache_gb": gigabytes,
        "max_context": context,
        "max_queue": 100_000,  # an overloaded system is to be slow and not to refuse
        "top_k": 2,
        "index_dir": index_folder(model),
    }


def index_folder(model: str | Path) -> Path:
    """Where indexes are kept: chunks are cut in tokens, so each model has its own."""
    return STORE / "index" / Path(model).name.removesuffix(".gguf")


@dataclass
class Own:
    """ragjax in this process. fixed: answers do not end before their last token, so that systems do the same work."""

    name: str
    options: EngineOptions
    workload: Workload
    fixed: bool = True
    versions: dict[str, str] = field(default_factory=dict)
    engine: Engine | None = field(default=None, repr=False)

    async def open(self) -> None:
        """Load the engine, fill its knowledge base, and preprocess it for strategies that want so."""
        self.engine = Engine.load(self.options, progress=False)
        if self.workload.documents:
            self.engine.add_documents(self.workload.documents, self.workload.knowledge)
            if self.options.strategy == AUTO or strategies()[self.options.strategy].preprocessed:
                preprocess(self.engine, self.workload.knowledge, progress=False)
        if self.fixed:
            self.engine._preparation = replace(self.engine._preparation, eos_ids=frozenset())

    @property
    def served(self) -> dict[str, Any]:
        assert self.engine is not None
        return served(self.options, self.engine.default_strategy)

    async def answer(self, ask: Ask) -> AsyncIterator[Delivery]:
        assert self.engine is not None
        named = self.workload.knowledge if self.workload.documents else None
        async for event in self.engine.submit(request_of(ask, named, self.options.strategy)):
            if isinstance(event, Answer):
                found = event.cached_tokens
                yield Delivery(True, len(event.tokens), event.prompt_tokens, found, cfo=event.figures.get("cfo"))
            else:
                yield Delivery()

    async def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


def request_of(ask: Ask, knowledge: str | None, strategy: str | None = None) -> Request:
    """What is asked of the engine. strategy: for facts, which have a default of their own."""
    sampling, messages = Sampling(max_tokens=ask.output), (Message("user", ask.question),)
    if ask.paths is not None:
        rag = Rag(graph=Graph(relation_paths=ask.paths), strategy=strategy)
    elif ask.documents is not None:
        rag = Rag(knowledge, documents=ask.documents)
    else:
        rag = Rag(knowledge, top_k=ask.top_k)
    return Request(messages, sampling=sampling, rag=rag)
