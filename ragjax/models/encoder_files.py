"""The way in which a sentence encoder reads texts, from the files that sentence-transformers writes beside its weights.

modules.json names the parts: a transformer, the pooling of its tokens and, as vectors are normalised here anyway, a
normalisation. Without it, tokens are pooled by their mean, as sentence-transformers does.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ragjax.core import ConfigError

FIRST_POSITIONS = {"bert": False, "roberta": True, "xlm-roberta": True}
"""Kinds of models, and whether the positions of a text begin behind the one of the padding."""

PARTS = ("Transformer", "Pooling", "Normalize")
"""Modules that are read; all others change the vectors."""

POOLINGS = ("mean", "cls")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncoderConfig:
    """Shape of the encoder, under the names its config.json uses."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @staticmethod
    def read(folder: Path) -> EncoderConfig:
        given = _json(folder / "config.json")
        return EncoderConfig(**{one.name: given[one.name] for one in fields(EncoderConfig)})


@dataclass(frozen=True)
class EncoderReading:
    """The way from texts to vectors.

    max_tokens: of a text, special ones included; what stands behind them is not read. first_position: of a text, in the
    table of positions. query, passage: what is put before each.
    """

    folder: Path = field(compare=False)
    max_tokens: int
    pooling: Literal["mean", "cls"] = "mean"
    first_position: int = 0
    lower: bool = False
    query: str = ""
    passage: str = ""

    @property
    def unusual(self) -> str:
        """Facts that vectors of passages depend on besides a mean of BERT's tokens; empty where it is just that."""
        usual = EncoderReading(self.folder, self.max_tokens, query=self.query)
        told = f" {self.pooling} {self.first_position} {self.lower} {self.passage!r}"
        return "" if self == usual else told

    @staticmethod
    def read(directory: Path, most_tokens: int) -> EncoderReading:
        parts = _parts(directory)
        folder = directory / parts.get("Transformer", "")
        given = _json(folder / "config.json")
        kind = given.get("model_type", "bert")
        if kind not in FIRST_POSITIONS:
            raise ConfigError(f"{directory}: an encoder of type {kind!r} is not read; {', '.join(FIRST_POSITIONS)} are")
        for name, supported in (("hidden_act", "gelu"), ("position_embedding_type", "absolute"), ("is_decoder", False)):
            if given.get(name, supported) != supported:
                raise ConfigError(f"{directory}: {name} {given[name]!r} is not read; {supported!r} is")
        first = given.get("pad_token_id", 1) + 1 if FIRST_POSITIONS[kind] else 0
        about = _json(folder / "sentence_bert_config.json", {})
        tokens = about.get("max_seq_length") or _json(folder / "tokenizer_config.json", {}).get("model_max_length")
        given_prompts = _json(directory / "config_sentence_transformers.json", {}).get("prompts") or {}
        prompts = {name: text for name, text in given_prompts.items() if text}
        return EncoderReading(
            folder,
            min(tokens or most_tokens, given["max_position_embeddings"] - first, most_tokens),
            _pooling(directory, parts.get("Pooling")),
            first,
            bool(about.get("do_lower_case")),
            prompts.get("query", ""),
            next((prompts[name] for name in ("document", "passage", "corpus") if name in prompts), ""),
        )


def _parts(directory: Path) -> dict[str, str]:
    modules = _json(directory / "modules.json", [])
    if not modules:
        _log.warning("%s has no modules.json: tokens are pooled by their mean", directory)
    parts = {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in modules}
    for name in parts:
        if name not in PARTS:
            raise ConfigError(f"{directory}: a part {name!r} in modules.json is not read; {', '.join(PARTS)} are")
    return parts


def _pooling(directory: Path, folder: str | None) -> Literal["mean", "cls"]:
    if folder is None:
        return "mean"
    place = directory / folder / "config.json"
    given = _json(place)
    if given.get("include_prompt", True) is not True:
        raise ConfigError(f"{place}: pooling without the prompt's tokens (include_prompt) is not read")
    named = given.get("pooling_mode")  # of later versions, which write one name for all the flags
    flags = [name.removeprefix("pooling_mode_") for name, on in given.items() if on is True and "pooling_mode_" in name]
    chosen = [name.removesuffix("_tokens").removesuffix("_token") for name in flags] if named is None else [named]
    if chosen == ["mean"]:
        return "mean"
    if chosen == ["cls"]:
        return "cls"
    raise ConfigError(f"{place}: pooling by {' and '.join(map(str, chosen))} is not read; {', '.join(POOLINGS)} are")


def _json(path: Path, absent: Any = None) -> Any:
    if absent is not None and not path.exists():
        return absent
    return json.loads(path.read_text("utf-8"))
