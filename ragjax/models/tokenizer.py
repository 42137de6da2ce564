"""Text to tokens and back, and chat templates.

The tokenizer comes from a Hugging Face directory (tokenizer.json) or is rebuilt from GGUF metadata in that same
form; the `tokenizers` package does the work. Two kinds exist among the supported models: byte-level BPE (Llama 3,
Qwen, SmolLM) and SentencePiece-style BPE with byte fallback (Llama 2, Mistral).
Formats: https://huggingface.co/docs/tokenizers, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ragjax.core import ConfigError, Message, RequestError, Tokens
from ragjax.models.config import ModelConfig
from ragjax.models.weights import read_json

CONTEXT = "\U000f8ff0context\U000f8ff1"
"""Stands in a message's content for the retrieved chunks; `chat_pieces` cuts there. Text that users send must not
contain it."""

Pieces = list[tuple[str, bool]]
"""Runs of text in order, each with whether special tokens in it count (template) or are plain text (content)."""

_SPACE = "\u2581"  # how SentencePiece writes a space


class Tokenizer:
    """Encodes, decodes and renders chats for one model. Safe to use from several threads."""

    def __init__(
        self,
        definition: Mapping[str, Any],
        *,
        special: Mapping[str, int],
        eos_ids: tuple[int, ...],
        add_bos: bool | None,
        chat_template: str | None,
    ):
        """`definition`: contents of a tokenizer.json; `special`: ids by role, such as `bos_token`.

        add_bos: whether a prompt starts with the BOS token; None follows the definition's post-processor.
        """
        definition = {**definition, "truncation": None, "padding": None}
        self._kind = _Kind(definition)
        self._parsing = _build(definition)
        self._plain = _build({**definition, "added_tokens": []})
        self._plain_continued = self._plain
        if self._kind.prefixes_space:
            self._plain_continued = _build({**self._kind.without_prefix(definition), "added_tokens": []})
        added: list[dict[str, Any]] = definition.get("added_tokens") or []
        # the ids that the package gives them, which need not be those that the definition states
        numbered = [(self._parsing.token_to_id(str(token["content"])), token) for token in added]
        self._added = {i: str(token["content"]) for i, token in numbered if i is not None}
        self._control = frozenset(i for i, token in numbered if i is not None and token.get("special"))
        self._definition = definition
        self.bos_id = special.get("bos_token")
        self.eos_ids = eos_ids
        probe = self._parsing.encode("", add_special_tokens=True).ids
        self.add_bos = self.bos_id is not None and (probe[:1] == [self.bos_id] if add_bos is None else add_bos)
        self._template = None if chat_template is None else _compile(chat_template)
        self._special_text = {role: self.id_to_text(token) for role, token in special.items()}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face directory or .gguf file. Raises ConfigError."""
        path = Path(path)
        if path.is_dir():
            return _from_directory(path)
        from ragjax.models.weights import read_gguf

        return cls.from_gguf(read_gguf(path)[0])

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild the tokenizer from GGUF metadata. Raises ConfigError that names the key or says what is damaged."""
        try:
            return _from_gguf(metadata)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"GGUF metadata: the tokenizer cannot be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included (the model may have more rows)."""
        return int(self._parsing.get_vocab_size(with_added_tokens=True))

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError unless this tokenizer can belong to a model of this configuration."""
        tokens = 1 + max(self._parsing.get_vocab(with_added_tokens=True).values(), default=-1)  # ids may have gaps
        if tokens > config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokens} tokens and the model {config.vocab_size}; they do not belong together"
            )
        if self.add_bos and config.bos_id not in (None, self.bos_id):
            raise ConfigError(f"BOS is token {self.bos_id} to the tokenizer and {config.bos_id} to the model")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over everything that decides which tokens a text becomes, 32 bytes."""
        return hashlib.sha256(json.dumps(self._definition, sort_keys=True).encode()).digest()

    def encode(self, text: str, special: bool, *, continued: bool = False) -> Tokens:
        """Turn text into tokens, int32 [n]; no BOS is added.

        special: special tokens in the text are parsed; otherwise they are encoded as plain text, whatever the
        text says. continued: the text goes on from text before it, so that no space is put in front by those
        tokenizers that put one at the start of a prompt.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "the text is not valid Unicode (it has a lone surrogate)", code="invalid_value"
            ) from error
        ids = self._encode_parsed(text, continued) if special else self._encode_plain(text, continued)
        return np.asarray(ids, np.int32)

    def _encode_parsed(self, text: str, continued: bool) -> list[int]:
        if not continued or not self._kind.prefixes_space:
            return list(self._parsing.encode(text, add_special_tokens=False).ids)
        # Only the run before the first special token goes on from earlier text.
        cut = min((at for name in self._added.values() if (at := text.find(name)) >= 0), default=len(text))
        head = self._plain_continued.encode(text[:cut], add_special_tokens=False).ids
        return [*head, *self._parsing.encode(text[cut:], add_special_tokens=False).ids]

    def _encode_plain(self, text: str, continued: bool) -> list[int]:
        engine = self._plain_continued if continued else self._plain
        ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        # A vocabulary may spell a special token as an ordinary one would be; such text is cut inside the token.
        named = (self._added[token] for token in ids if token in self._added)
        name = next((name for name in named if len(name) > 1 and name in text), None)
        if name is None:
            return ids
        first, *others, last = text.split(name)
        runs = [first + name[0], *(name[1:] + other + name[0] for other in others), name[1:] + last]
        return [token for i, run in enumerate(runs) for token in self._encode_plain(run, continued or i > 0)]

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[Tokens]:
        """Encode runs of one prompt, each int32 [n]: one goes on from the last, unless a special token ended that."""
        runs: list[Tokens] = []
        continued = False
        for text, special in pieces:
            run = self.encode(text, special, continued=continued)
            continued = int(run[-1]) not in self._control if len(run) else continued
            runs.append(run)
        return runs

    def decode(self, ids: Iterable[int]) -> str:
        """Text of tokens: control tokens give nothing, bytes that are not UTF-8 give U+FFFD."""
        stream = Stream(self)
        return "".join([*(stream.push(int(token)) for token in ids), stream.finish()])

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token stands for: the UTF-8 of its name for special tokens, none for ids without a token."""
        if token in self._added:
            return self._added[token].encode()
        name = self._parsing.id_to_token(token)
        return b"" if name is None else self._kind.bytes_of(name)

    def id_to_text(self, token: int) -> str:
        """Text of one token on its own; parts of a character show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def is_control(self, token: int) -> bool:
        """Whether a token is a control token, which decoded text leaves out."""
        return token in self._control

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: object) -> str:
        """Render messages with the model's own chat template; `variables` are passed to it.

        A system message for which the template has no place heads what the user says first. Raises RequestError when
        the model has no template or its template refuses the messages.
        """
        messages, _ = self._seated(messages)
        content = [message.content for message in messages]
        return self._render(messages, content, add_generation_prompt, variables)

    def chat_pieces(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: object
    ) -> Pieces:
        """Render messages as `chat` does, cut into template (True) and message content (False).

        Encoded piece by piece, content can never become a control token. Content is cut at CONTEXT, and each
        CONTEXT is a piece of its own, as is a system message that heads the user's. Raises RequestError as `chat`
        does, and when the template repeats, drops or rewrites the content of a message, so that the two cannot be
        told apart.
        """
        messages, head = self._seated(messages)
        whole = self.chat(messages, add_generation_prompt, **variables)
        sentinels = [f"\U000f8ff2{index}\U000f8ff3" for index in range(len(messages))]
        frame = self._render(messages, sentinels, add_generation_prompt, variables)
        pieces: Pieces = []
        for text, is_template in _align(whole, frame, sentinels, [message.content for message in messages]):
            if is_template:
                pieces.append((text, True))
                continue
            if head and text.startswith(head):
                pieces.append((head, False))
                text, head = text[len(head) :], ""
            pieces += [(run, False) for run in _cut(text, CONTEXT)]
        return [piece for piece in pieces if piece[0]]

    @cached_property
    def _seats_system(self) -> bool:
        """Whether the chat template has a place for a system message; some refuse it, some drop it."""
        probe, content = (Message("system", ""), Message("user", "")), ("\U000f8ff2", "\U000f8ff3")
        try:
            return content[0] in self._render(probe, content, True, {})
        except RequestError:
            return False

    def _seated(self, messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
        """The messages as the template takes them, and what heads the first user's, if the system message must."""
        first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
        if first is None or messages[0].role != "system" or self._seats_system:
            return messages, ""
        system = messages[0].content.strip()
        head = f"{system}\n\n" if system else ""
        asked = Message("user", head + messages[first].content)
        return (*messages[1:first], asked, *messages[first + 1 :]), head

    def _render(
        self, messages: Sequence[Message], content: Sequence[str], prompt: bool, variables: Mapping[str, object]
    ) -> str:
        if self._template is None:
            raise RequestError(
                "the model has no chat template; send a raw prompt to /v1/completions instead", param="messages"
            )
        given = [{"role": m.role, "content": text} for m, text in zip(messages, content, strict=True)]
        defaults: dict[str, object] = {"tools": None, "documents": None, **self._special_text}
        try:
            return self._template.render({**defaults, **variables, "messages": given, "add_generation_prompt": prompt})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise RequestError(f"the model's chat template refuses the messages: {error}", param="messages") from error


class Stream:
    """Decodes a running generation token by token, at a cost that does not grow with its length."""

    def __init__(self, tokenizer: Tokenizer, *, continued: bool = False):
        """Start at the first generated token; continued: it goes on from a text, so that a space in front counts."""
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer._kind.strips_space and not continued

    def push(self, token: int) -> str:
        """Text that is complete with this token; the bytes of an unfinished character are held back."""
        if self._tokenizer.is_control(token):
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    @property
    def unfinished(self) -> bool:
        """Whether the bytes of an unfinished character are held back."""
        return bool(self._utf8.getstate()[0])

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        return self._utf8.decode(b"", final=True)


def _build(definition: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the package raises nothing more specific
        raise ConfigError(f"the tokenizer's definition cannot be used: {error}") from error


# ------------------------------------------------------------------------------------ kinds of BPE


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class _Kind:
    """How a tokenizer writes bytes and spaces into its tokens."""

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
        if self._alphabet is not None:
            if all(char in self._alphabet for char in name):
                return bytes(self._alphabet[char] for char in name)
            return name.encode()
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace(_SPACE, " ").encode()

    @staticmethod
    def without_prefix(definition: Mapping[str, Any]) -> dict[str, Any]:
        """The same definition, putting no space in front of a text."""
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


# ------------------------------------------------------------------------------------ Hugging Face


def _from_directory(path: Path) -> Tokenizer:
    definition = read_json(path / "tokenizer.json")
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    known = {token["content"] for token in definition.get("added_tokens") or []}
    extra = [
        {"id": int(token), **_TOKEN_FLAGS, **flags}
        for token, flags in (settings.get("added_tokens_decoder") or {}).items()
        if flags["content"] not in known
    ]
    extra.sort(key=lambda token: token["id"])  # as they are numbered on from the vocabulary
    definition["added_tokens"] = [*(definition.get("added_tokens") or []), *extra]
    engine = _build(definition)
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
    return Tokenizer(
        definition,
        special=special,
        eos_ids=(special["eos_token"],) if "eos_token" in special else (),
        add_bos=settings.get("add_bos_token"),
        chat_template=_directory_template(path, settings),
    )


_TOKEN_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _directory_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template, from its own file or from tokenizer_config.json (one, or several by name)."""
    file = path / "chat_template.jinja"
    if file.exists():
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


# -------------------------------------------------------------------------------------------- GGUF

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Each expression splits what the one before it left; the names are those of tokenizer.ggml.pre.
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _REST,),
    "qwen2": (_WORDS + r"\p{N}" + _REST,),
}
_PRE_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ConfigError(f"tokenizer.ggml.model is {model!r}; supported are gpt2 and llama")
    names = _required(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(names)
    vocab = {name: token for token, name in enumerate(names)}
    if len(vocab) != len(names) or len(types) != len(names):
        raise ConfigError("tokenizer.ggml.tokens: a token is listed twice, or token_type differs in length")
    added = [
        {"id": token, "content": names[token], **_TOKEN_FLAGS, "special": kind != _USER_DEFINED}
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
    pre = _PRE_ALIASES.get(metadata.get("tokenizer.ggml.pre", ""), metadata.get("tokenizer.ggml.pre"))
    return Tokenizer(
        {"version": "1.0", "added_tokens": added, "post_processor": None, **shape},
        special=special,
        eos_ids=tuple(dict.fromkeys(int(token) for token in ends if token is not None)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre == "llama-bpe")),
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
            # Llama 3 takes a whole word that is in the vocabulary as it is.
            "ignore_merges": pre == "llama-bpe",
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
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
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


# ---------------------------------------------------------------------------------- chat templates


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; rendering it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the model's chat template cannot be parsed: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _align(whole: str, frame: str, sentinels: Sequence[str], content: Sequence[str]) -> Pieces:
    """Find in `whole` the template text that `frame` has around its sentinels.

    What stands between must be a part of the message's own content: templates may trim it, or leave out an
    earlier answer's reasoning. The longest fit is taken, so content that imitates the template stays content.
    """
    order = sorted(range(len(sentinels)), key=lambda index: frame.find(sentinels[index]))
    for index, sentinel in enumerate(sentinels):
        if frame.count(sentinel) != 1:
            raise _misfit(index)
    pieces: Pieces = []
    rest, at = frame, 0
    for index in order:
        before, _, rest = rest.partition(sentinels[index])
        pieces.append((before, True))
        at += len(before)
        after = rest[: min((rest.find(s) for s in sentinels if s in rest), default=len(rest))]
        end = _content_end(whole, at, content[index], after, last=index == order[-1])
        if end is None:
            raise _misfit(index)
        pieces.append((whole[at:end], False))
        at = end
    pieces.append((rest, True))
    if "".join(text for text, _ in pieces) != whole:
        raise _misfit(order[-1] if order else 0)
    return pieces


def _content_end(whole: str, at: int, content: str, after: str, *, last: bool) -> int | None:
    if last:
        end = len(whole) - len(after)
        return end if end >= at and whole[at:end] in content else None
    for end in range(min(at + len(content), len(whole)), at - 1, -1):
        if whole.startswith(after, end) and whole[at:end] in content:
            return end
    return None


def _misfit(index: int) -> RequestError:
    return RequestError(
        f"the model's chat template does not take over the content of message {index} as it is; "
        "content and template cannot be told apart",
        param="messages",
    )


def _cut(text: str, mark: str) -> list[str]:
    """Cut at every mark and keep the marks."""
    parts = text.split(mark)
    return [piece for part in parts[:-1] for piece in (part, mark)] + parts[-1:]
