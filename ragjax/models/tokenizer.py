"""Text to tokens and back.

The tokenizer comes from a Hugging Face directory or from GGUF metadata, in the form of a tokenizer.json; the package
`tokenizers` does the work.
"""

from __future__ import annotations

import codecs
import copy
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ragjax.core import CallForm, ConfigError, Message, RequestError, Tokens
from ragjax.core.recent import Recent
from ragjax.models.chat_template import ChatTemplate, Pieces
from ragjax.models.config import ModelConfig
from ragjax.models.gguf import read_gguf
from ragjax.models.tokenizer_files import (
    SPACE,
    ByteForm,
    build,
    settings_of_directory,
    settings_of_gguf,
    vocab_size,
    without_added,
)

TextKey = tuple[str, str, bool, bool]
"""A tenant, a text, and how `Tokenizer.encode` takes it. By tenant, so that time tells nobody of others' texts."""

TEXT_BYTES = 300
"""Memory of a remembered text besides its letters and tokens, about."""

HERMES = CallForm(
    '<tool_call>\n{"name": "',
    tail="}\n</tool_call>",
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    mark="<tool_call>",
)


def _is_blank(token: Mapping[str, Any]) -> bool:
    """True for an added token of white space, which any text may contain."""
    return not token.get("special") and not str(token["content"]).strip(f" \t\r\n{SPACE}")


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
        """definition: contents of a tokenizer.json, which says what add_bos leaves open. special: ids by role."""
        definition = {**definition, "truncation": None, "padding": None}
        self._form = ByteForm(definition)
        self._parsing = build(definition)
        added: list[dict[str, Any]] = definition.get("added_tokens") or []
        blank = [token for token in added if _is_blank(token)]
        self._plain = build({**definition, "added_tokens": blank}) if blank else without_added(self._parsing)
        self._plain_continued = self._plain
        if self._form.prefixes_space:
            self._plain_continued = build({**self._form.without_prefix(definition), "added_tokens": blank})
        # the ids that the package gives them, which need not be those that the definition states
        numbered = [(self._parsing.token_to_id(str(token["content"])), token) for token in added]
        self._added = {i: str(token["content"]) for i, token in numbered if i is not None}
        self._control = frozenset(i for i, token in numbered if i is not None and token.get("special"))
        self._blank = frozenset(i for i, token in numbered if i is not None and _is_blank(token))
        self._definition = definition
        self._check: Callable[[], None] | None = None
        self._texts: Recent[TextKey, Tokens] | None = None
        self._tenant = ""
        self.bos_id = special.get("bos_token")
        self.eos_ids = eos_ids
        probe = self._parsing.encode("", add_special_tokens=True).ids
        self.add_bos = self.bos_id is not None and (probe[:1] == [self.bos_id] if add_bos is None else add_bos)
        names = {role: self.id_to_text(token) for role, token in special.items()}
        control = [self._added[token] for token in self._control if self._added[token]]
        self._template = None if chat_template is None else ChatTemplate(chat_template, names, control)
        self._variables: Mapping[str, object] = {}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        path = Path(path)
        if path.is_dir():
            try:
                return cls(**settings_of_directory(path))
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise ConfigError(f"{path}: the tokenizer cannot be read: {error!r}") from error
        return cls.from_gguf(read_gguf(path)[0])

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        try:
            return cls(**settings_of_gguf(metadata))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ConfigError(f"GGUF metadata: the tokenizer cannot be read: {error}") from error

    @cached_property
    def vocab_size(self) -> int:
        """One past the highest id of a token, special ones included. Ids may have gaps, and the model more rows."""
        return vocab_size(self._parsing)

    def has_token(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and self._parsing.id_to_token(token) is not None

    def checked(self, check: Callable[[], None]) -> Tokenizer:
        """The same tokenizer, which calls `check` before each text that it encodes; an error of it ends the work."""
        other = copy.copy(self)
        other._check = check
        return other

    def speaking(self, variables: Mapping[str, object]) -> Tokenizer:
        other = copy.copy(self)
        other._variables = variables
        return other

    def remembering(self, texts: Recent[TextKey, Tokens], tenant: str) -> Tokenizer:
        """The same tokenizer, which encodes a text of the tenant's once as long as the tokens are among `texts`."""
        other = copy.copy(self)
        other._texts, other._tenant = texts, tenant
        return other

    def check(self, config: ModelConfig) -> None:
        if self.vocab_size > config.vocab_size:
            raise ConfigError(
                f"the tokenizer's highest token is {self.vocab_size - 1} and the model has {config.vocab_size} tokens; "
                "they do not belong together"
            )
        if self.add_bos and config.bos_id not in (None, self.bos_id):
            raise ConfigError(f"BOS is token {self.bos_id} to the tokenizer and {config.bos_id} to the model")

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(self._definition, sort_keys=True).encode()).digest()

    def encode(self, text: str, special: bool, *, continued: bool = False) -> Tokens:
        """Turn text into tokens, int32 [n]; no BOS is added.

        special: special tokens in the text are parsed; otherwise they are encoded as plain text, whatever the text
        says. Added tokens that are white space (Gemma's line breaks) are found in both. continued: the text goes on
        from text before it, so that no space is put in front.
        """
        if self._check is not None:
            self._check()
        key = self._tenant, text, special, continued
        if self._texts is not None and (known := self._texts.get(key)) is not None:
            return known
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "the text is not valid Unicode (it has a lone surrogate)", code="invalid_value"
            ) from error
        ids = self._encode_parsed(text, continued) if special else self._encode_plain(text, continued)
        tokens = np.asarray(ids, np.int32)
        if self._texts is not None:
            tokens.setflags(write=False)
            self._texts.keep(key, tokens, weight=TEXT_BYTES + len(text) + tokens.nbytes)
        return tokens

    def _encode_parsed(self, text: str, continued: bool) -> list[int]:
        if not continued or not self._form.prefixes_space:
            return list(self._parsing.encode(text, add_special_tokens=False).ids)
        # Only the run before the first special token goes on from earlier text.
        cut = min((at for name in self._added.values() if (at := text.find(name)) >= 0), default=len(text))
        head = self._plain_continued.encode(text[:cut], add_special_tokens=False).ids
        return [*head, *self._parsing.encode(text[cut:], add_special_tokens=False).ids]

    def _encode_plain(self, text: str, continued: bool) -> list[int]:
        engine = self._plain_continued if continued else self._plain
        ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        # A vocabulary may spell a special token as an ordinary one would be; such text is cut inside the token.
        named = dict.fromkeys(self._added[token] for token in ids if token in self._added and token not in self._blank)
        name = next((name for name in named if len(name) > 1 and name in text), None)
        if name is None:
            return ids
        first, *others, last = text.split(name)
        runs = [first + name[0], *(name[1:] + other + name[0] for other in others), name[1:] + last]
        return [token for i, run in enumerate(runs) for token in self._encode_plain(run, continued or i > 0)]

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]], *, continued: bool = False) -> list[Tokens]:
        """Encode runs of one prompt, each int32 [n]: one goes on from the last, unless a special token ended that."""
        runs: list[Tokens] = []
        for text, special in pieces:
            run = self.encode(text, special, continued=continued)
            continued = int(run[-1]) not in self._control if len(run) else continued
            runs.append(run)
        return runs

    def decode(self, ids: Iterable[int]) -> str:
        """Text of tokens: control tokens give nothing, bytes that are not UTF-8 give U+FFFD."""
        stream = Stream(self)
        return "".join([*(stream.push(int(token)) for token in ids), stream.finish()])

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text that each token completes, control tokens by name; the last one also what it leaves unfinished."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        found = [utf8.decode(self.token_bytes(int(token))) for token in ids]
        if found:
            found[-1] += utf8.decode(b"", final=True)
        return found

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token stands for: the UTF-8 of its name for special tokens, none for ids without a token."""
        if token in self._added:
            return self._added[token].encode()
        name = self._parsing.id_to_token(token)
        return b"" if name is None else self._form.bytes_of(name)

    def id_to_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def names_control(self, text: str) -> str | None:
        """A control token that the text spells, if any."""
        return next((name for token, name in self._added.items() if token in self._control and name in text), None)

    def controls(self, text: str) -> list[str | int]:
        """A text that may name control tokens, as texts and the ids of these."""
        ids = {self._added[token]: token for token in self._control if self._added[token]}
        runs = re.split(f"({'|'.join(map(re.escape, sorted(ids, key=len, reverse=True))) or '(?!)'})", text)
        return [ids.get(run, run) for run in runs if run]

    @cached_property
    def shows_calls(self) -> bool:
        return self.knows_tools and self._template is not None and self._template.call_form is not None

    @cached_property
    def call_form(self) -> CallForm:
        """The form of calls of tools: the template's, or that of Hermes models if it lists tools alone."""
        found = self._template.call_form if self._template is not None and self.knows_tools else None
        return found or (HERMES if self.knows_tools else CallForm())

    @property
    def knows_tools(self) -> bool:
        return self._template is not None and self._template.knows_tools

    def is_control(self, token: int) -> bool:
        return token in self._control

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: object) -> str:
        return self._chat_template().render(messages, add_generation_prompt, {**self._variables, **variables})

    def chat_pieces(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: object
    ) -> Pieces:
        """Render messages as `chat` does, cut into template (True) and message content (False).

        Encoded piece by piece, content can never become a control token.
        """
        return self._chat_template().pieces(messages, add_generation_prompt, {**self._variables, **variables})

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise RequestError(
                "the model has no chat template; send a raw prompt to /v1/completions instead", param="messages"
            )
        return self._template


class Stream:
    """Decodes a running generation token by token, at a cost that does not grow with its length."""

    def __init__(self, tokenizer: Tokenizer, *, continued: bool = False, shown: Collection[int] = ()):
        """continued: it goes on from a text, so a space in front counts. shown: control tokens that give names."""
        self._shown = frozenset(shown)
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer._form.strips_space and not continued

    def push(self, token: int) -> str:
        """Text that is complete with this token; the bytes of an unfinished character are held back."""
        if self._tokenizer.is_control(token) and token not in self._shown:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    @property
    def unfinished(self) -> bool:
        """True while the bytes of an incomplete character are held back."""
        return bool(self._utf8.getstate()[0])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)
