"""Tokens around passages that no text has: the packets of KV Packet (arXiv 2604.13226), as a prompt sees them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ragjax.core.prompt import Kind, Prompt
from ragjax.core.tokens import Tokens


@dataclass(frozen=True)
class Wrapper:
    """Tokens before and behind a passage, int32 [h] and [t]; ids behind the vocabulary."""

    header: Tokens
    trailer: Tokens

    @staticmethod
    def of(vocabulary: int, header: int, trailer: int) -> Wrapper:
        """Of so many tokens each, which follow a vocabulary of this size."""
        tokens = vocabulary + np.arange(header + trailer, dtype=np.int32)
        return Wrapper(tokens[:header], tokens[header:])

    @property
    def tokens(self) -> Tokens:
        """All of them, int32 [h + t]."""
        return np.concatenate([self.header, self.trailer])

    def around(self, tokens: Tokens) -> Tokens:
        """A passage between header and trailer, int32."""
        return np.concatenate([self.header, tokens, self.trailer]).astype(np.int32)

    def dressed(self, prompt: Prompt) -> Prompt:
        """The prompt with every chunk between header and trailer; KV that chunks have without them is forgotten."""
        return replace(
            prompt,
            segments=tuple(
                replace(segment, tokens=self.around(segment.tokens), behind=b"")
                if segment.kind is Kind.CHUNK
                else segment
                for segment in prompt.segments
            ),
        )
