"""The tokenizer of a .gguf file, rebuilt from its metadata in the form of a tokenizer.json.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragjax.core import ConfigError
from ragjax.models.tokenizer_definition import SPACE, TOKEN_FLAGS, TokenizerSettings

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
    "qwen2": (_WORDS + r"\p{N}" + _REST,),
    "gpt-4o": ("|".join(words + _SUFFIX for words in _CASED) + r"|\p{N}{1,3}" + _REST_AND_SLASHES,),
    "tekken": ("|".join(_CASED) + r"|\p{N}" + _REST_AND_SLASHES,),
}
_PRE_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}

_WHOLE_WORDS = frozenset({"llama-bpe", "tekken"})
"""Those that take a whole word that is in the vocabulary as it is, and begin a prompt with BOS by default."""

# Many files name no `eot_token_id`: llama.cpp, too, knows these by name.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type


def settings_of_gguf(metadata: Mapping[str, Any]) -> TokenizerSettings:
    """Rebuild a tokenizer's settings from GGUF metadata.

    Raises:
        ConfigError: naming the key.
        TypeError, ValueError: for a value of the wrong kind.
    """
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
