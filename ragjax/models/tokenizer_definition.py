"""What a tokenizer.json says: the definition that every tokenizer is built from, and how it writes bytes and spaces.

Two kinds of BPE exist among the supported models: byte-level (Llama 3, Qwen, SmolLM) and SentencePiece-style with byte
fallback (Llama 2, Mistral). Format: https://huggingface.co/docs/tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict

import tokenizers

from ragjax.core import ConfigError

SPACE = "\u2581"
"""How SentencePiece writes a space."""

TOKEN_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
"""Flags of an added token that says nothing else."""


class TokenizerSettings(TypedDict):
    """What a model's files say of its tokenizer: the arguments of `Tokenizer`."""

    definition: Mapping[str, Any]
    special: Mapping[str, int]
    eos_ids: tuple[int, ...]
    add_bos: bool | None
    chat_template: str | None


def build(definition: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a definition. Raises ConfigError if it cannot be used."""
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the package raises nothing more specific
        raise ConfigError(f"the tokenizer's definition cannot be used: {error}") from error


def vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    """One past the highest id of a token, added ones included; where ids have gaps there are fewer tokens."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class ByteForm:
    """How a tokenizer writes bytes and spaces into its tokens.

    prefixes_space: a space is put in front of a text. strips_space: decoding takes it away again.

    Raises:
        ConfigError: if the decoder is of neither kind.
    """

    def __init__(self, definition: Mapping[str, Any]):
        decoders = _parts(definition.get("decoder"), "decoders")
        kinds = {part["type"] for part in decoders}
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        if self._alphabet is None and not kinds & {"ByteFallback", "Metaspace"}:
            raise ConfigError(
                f"tokenizer.json: decoder {sorted(kinds)} is not supported, only ByteLevel and ByteFallback"
            )
        self.prefixes_space = any(_is_prefix(part) for part in _prefix_parts(definition))
        self.strips_space = self._alphabet is None and any(
            (part["type"] == "Strip" and part.get("start", 0) > 0) or _is_prefix(part) for part in decoders
        )

    def bytes_of(self, name: str) -> bytes:
        """The bytes that a token of this name stands for."""
        if self._alphabet is not None:
            if all(char in self._alphabet for char in name):
                return bytes(self._alphabet[char] for char in name)
            return name.encode()
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace(SPACE, " ").encode()

    @staticmethod
    def without_prefix(definition: Mapping[str, Any]) -> dict[str, Any]:
        """The same definition without the space that is put in front of a text."""
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


def _prefix_parts(definition: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return _parts(definition.get("normalizer"), "normalizers") + _parts(
        definition.get("pre_tokenizer"), "pretokenizers"
    )


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
