"""The definition that a tokenizer is built from: a tokenizer.json, or the same form rebuilt from GGUF metadata.

Two kinds of BPE exist among the supported models: byte-level (Llama 3, Qwen, SmolLM) and SentencePiece-style with byte
fallback (Llama 2, Mistral). Format: https://huggingface.co/docs/tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import tokenizers

from ragjax.core import ConfigError
from ragjax.models.huggingface import read_json

SPACE = "\u2581"
"""How SentencePiece writes a space."""

TOKEN_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
"""Flags of an added token that says nothing else."""


class TokenizerSettings(TypedDict):
    definition: Mapping[str, Any]
    special: Mapping[str, int]
    eos_ids: tuple[int, ...]
    add_bos: bool | None
    chat_template: str | None


def build(definition: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(definition))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the package raises nothing more specific, and panics
        raise ConfigError(f"the tokenizer's definition cannot be used: {error}") from error


def without_added(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer without added tokens. It shares the vocabulary, which takes a sixth of a second to read."""
    plain = tokenizers.Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (own := getattr(tokenizer, part)) is not None:
            setattr(plain, part, own)
    return plain


def vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    """One past the highest id of a token, added ones included; where ids have gaps there are fewer tokens."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class ByteForm:
    """The form in which a tokenizer writes bytes and spaces into tokens. ConfigError: the decoder is of another."""

    def __init__(self, definition: Mapping[str, Any]):
        decoders = _parts(definition.get("decoder"), "decoders")
        kinds = {part["type"] for part in decoders}
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        if self._alphabet is None and not kinds & {"ByteFallback", "Metaspace"}:
            raise ConfigError(
                f"tokenizer.json: decoder {sorted(kinds)} is not supported, only ByteLevel and ByteFallback"
            )
        before = _parts(definition.get("normalizer"), "normalizers")
        before += _parts(definition.get("pre_tokenizer"), "pretokenizers")
        self.prefixes_space = any(map(_is_prefix, before))
        self.strips_space = self._alphabet is None and any(
            (part["type"] == "Strip" and part.get("start", 0) > 0) or _is_prefix(part) for part in decoders
        )

    def bytes_of(self, name: str) -> bytes:
        if self._alphabet is not None:
            if all(char in self._alphabet for char in name):
                return bytes(self._alphabet[char] for char in name)
            return name.encode()
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace(SPACE, " ").encode()

    @staticmethod
    def without_prefix(definition: Mapping[str, Any]) -> dict[str, Any]:
        changed = dict(definition)
        for key, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
            parts = [_unprefixed(part) for part in _parts(definition.get(key), inner)]
            changed[key] = {"type": "Sequence", inner: [part for part in parts if part]} if any(parts) else None
        return changed


def _parts(component: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Members of a component of tokenizer.json, which is one thing or a sequence of them."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [part for member in component[inner] for part in _parts(member, inner)]
    return [component]


def _is_prefix(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return bool(part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never") != "never")
    return part["type"] == "Prepend" or (part["type"] == "ByteLevel" and bool(part.get("add_prefix_space")))


def _unprefixed(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if not _is_prefix(part):
        return part
    if part["type"] == "Prepend":
        return None
    without = {key: value for key, value in part.items() if key != "add_prefix_space"}
    return without | ({"prepend_scheme": "never"} if part["type"] == "Metaspace" else {"add_prefix_space": False})


def settings_of_directory(path: Path) -> TokenizerSettings:
    definition = read_json(path / "tokenizer.json")
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    known = {token["content"] for token in definition.get("added_tokens") or []}
    extra = [
        {"id": int(token), **TOKEN_FLAGS, **flags}
        for token, flags in (settings.get("added_tokens_decoder") or {}).items()
        if flags["content"] not in known
    ]
    extra.sort(key=lambda token: token["id"])  # as they are numbered on from the vocabulary
    definition["added_tokens"] = [*(definition.get("added_tokens") or []), *extra]
    engine = build(definition)
    special: dict[str, int] = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str):
            raise ConfigError(f"{path / 'tokenizer_config.json'}: {role} must be the token's text, not {text!r}")
        token = engine.token_to_id(text)
        if token is None:
            raise ConfigError(f"{path / 'tokenizer_config.json'}: {role} {text!r} is not in the vocabulary")
        special[role] = token
    return TokenizerSettings(
        definition=definition,
        special=special,
        eos_ids=(special["eos_token"],) if "eos_token" in special else (),
        add_bos=settings.get("add_bos_token"),
        chat_template=_directory_template(path, settings),
    )


def _directory_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template, from its own file or from tokenizer_config.json (one, or several by name)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    try:
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{path / 'tokenizer_config.json'}: each chat_template must have name and template"
        ) from error
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path / 'tokenizer_config.json'}: chat_template must be a text, not {template!r}")
    return template


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Letters of tekken.json and of tiktoken's o200k_base, whose words begin anew at a capital behind a small letter.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST_AND_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Each expression splits what the one before it left; the names are those of tokenizer.ggml.pre.
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _REST,),
    "dbrx": (_WORDS + r"\p{N}{1,3}" + _REST,),
    "chatglm-bpe": (_WORDS + r"\p{N}{1,3}" + _REST,),
    "qwen2": (_WORDS + r"\p{N}" + _REST,),
    "gpt-4o": ("|".join(words + _SUFFIX for words in _CASED) + r"|\p{N}{1,3}" + _REST_AND_SLASHES,),
    "tekken": ("|".join(_CASED) + r"|\p{N}" + _REST_AND_SLASHES,),
}
_PRE_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "glm4": "chatglm-bpe"}

_WHOLE_WORDS = frozenset({"llama-bpe", "tekken"})
"""Those that take a whole word that is in the vocabulary as it is, and begin a prompt with BOS by default."""

# Many files name no `eot_token_id`: llama.cpp, too, knows these by name.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type


def settings_of_gguf(metadata: Mapping[str, Any]) -> TokenizerSettings:
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ConfigError(f"tokenizer.ggml.model is {model!r}; supported are gpt2 and llama")
    names = _required(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(names)
    vocab = {name: token for token, name in enumerate(names)}
    if len(vocab) != len(names) or len(types) != len(names):
        raise ConfigError("tokenizer.ggml.tokens: a token is listed twice, or token_type differs in length")
    added = [
        {"id": token, "content": names[token], **TOKEN_FLAGS, "special": kind != _USER_DEFINED}
        for token, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    special = {
        f"{role}_token": int(metadata[key])
        for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata
    }
    for role, token in special.items():
        if not 0 <= token < len(names):
            raise ConfigError(f"GGUF metadata: {role} {token} is not in the vocabulary")
    shape = _byte_level(metadata, vocab) if model == "gpt2" else _sentencepiece(metadata, vocab, types, special)
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends += [vocab[name] for name in _TURN_ENDS if name in vocab and types[vocab[name]] in (_CONTROL, _USER_DEFINED)]
    pre = _PRE_ALIASES.get(metadata.get("tokenizer.ggml.pre", ""), metadata.get("tokenizer.ggml.pre"))
    return TokenizerSettings(
        definition={"version": "1.0", "added_tokens": added, "post_processor": None, **shape},
        special=special,
        eos_ids=tuple(dict.fromkeys(int(token) for token in ends if token is not None)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in _WHOLE_WORDS)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _required(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(key)
    if not value:
        raise ConfigError(f"GGUF metadata: {key} is missing")
    return list(value)


def _byte_level(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = _PRE_ALIASES.get(name, name)
    if pre not in _SPLITS:
        supported = ", ".join([*_SPLITS, *_PRE_ALIASES])
        raise ConfigError(f"tokenizer.ggml.pre is {name!r}; supported are {supported}")
    splits = [{"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False} for r in _SPLITS[pre]]
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        # Qwen's own tokenizer composes characters first, which GGUF has no key for.
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytewise]},
        "decoder": bytewise,
        "model": {
            **_BPE,
            "vocab": vocab,
            "merges": _required(metadata, "tokenizer.ggml.merges"),
            "ignore_merges": pre in _WHOLE_WORDS,
        },
    }


_BPE: Mapping[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], types: Sequence[int], special: Mapping[str, int]
) -> dict[str, Any]:
    if metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise ConfigError("tokenizer.ggml.precompiled_charsmap is not supported")
    scores = _required(metadata, "tokenizer.ggml.scores")
    names = list(vocab)
    prefix = [{"type": "Prepend", "prepend": SPACE}] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            **_BPE,
            "unk_token": names[special["unk_token"]] if "unk_token" in special else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": _merges(names, scores, types),
        },
    }


def _merges(names: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Merge rules that SentencePiece's scores stand for: the best piece first, made from any two pieces."""
    pieces = {name: score for name, score, kind in zip(names, scores, types, strict=True) if kind == _NORMAL}
    rules: list[tuple[float, str, str]] = []
    for name, score in pieces.items():
        halves = ((name[:cut], name[cut:]) for cut in range(len(name) - 1, 0, -1))
        rules += [(score, left, right) for left, right in halves if left in pieces and right in pieces]
    rules.sort(key=lambda rule: -rule[0])
    return [(left, right) for _, left, right in rules]
