"""A sample as the model sees it: tokens, positions, who sees whom, and which next tokens are learned.

The prompt is the one that serving makes (DepCache, section 3.1, Algorithm 1); behind it stand the answer and the token
that ends a turn, which see all of it. The control arm is the same paths written out whole, one a line, in one chain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ragjax.core import ConfigError, Kind, Message, Prompt, Tokens
from ragjax.core.depprompt import Positions, layout
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting.chat import chat_prompt, graph_prompt
from ragjax.retrieval.path import RelationPath, subgraphs_of
from train.sample import Sample

Attention = Literal["dependency", "self"]
"""Paths as trees under dependency attention, or written out whole under causal self-attention."""

ANSWER = "\U000f8ff4answer\U000f8ff5"


@dataclass(frozen=True)
class Example:
    """A sample token by token, int32 [n] each. A token's order is its index.

    hide_from, hide_until: half-open interval of orders that it is hidden from. target: the next token where it is
    learned, -1 elsewhere.
    """

    id: str
    token: Tokens
    position: Tokens
    hide_from: Tokens
    hide_until: Tokens
    target: Tokens

    def __len__(self) -> int:
        return len(self.token)

    @property
    def targets(self) -> int:
        """How many tokens are learned."""
        return int((self.target >= 0).sum())


@dataclass(frozen=True)
class Coder:
    """Turns samples into examples. attention, positions: of those with paths; plain chat is a causal chain."""

    tokenizer: Tokenizer
    closing: Closing
    attention: Attention = "dependency"
    positions: Positions = "path"

    @staticmethod
    def of(tokenizer: Tokenizer, attention: Attention = "dependency", positions: Positions = "path") -> Coder:
        """For a model's tokenizer.

        Raises:
            ConfigError: if its chat template cannot be used.
        """
        return Coder(tokenizer, Closing.of(tokenizer), attention, positions)

    def example(self, sample: Sample, *, plain: bool = False) -> Example:
        """A sample as the model sees it; plain: as a causal chain, whatever `attention` says.

        Raises:
            RequestError: if the chat template refuses the messages.
        """
        messages = (*sample.history, Message("user", sample.question))
        subgraphs = subgraphs_of(map(RelationPath, sample.paths))
        trees = self.attention == "dependency" and not plain
        if not subgraphs:
            prompt = chat_prompt(self.tokenizer, messages, None)
        elif trees:
            prompt = graph_prompt(self.tokenizer, messages, subgraphs)
        else:
            prompt = _chained(graph_prompt(self.tokenizer, messages, subgraphs, trees=False))
        answer = self.closing.answer(self.tokenizer, sample.answer, int(prompt.tokens[-1]))
        return _example(sample.id, prompt, answer, self.positions)


def _example(name: str, prompt: Prompt, answer: Tokens, positions: Positions) -> Example:
    """All but the last token of prompt and answer go in, and the last segment goes on into the answer."""
    *before, last = prompt.segments
    whole = Prompt((*before, replace(last, tokens=np.concatenate([last.tokens, answer[:-1]]))))
    view = layout(whole, positions)
    target = np.concatenate([np.full(len(whole) - len(answer), -1, np.int32), answer])
    return Example(name, view.token, view.position, view.hide_from, view.hide_until, target)


# ------------------------------------------------------------------------------------------ prompts


def _chained(prompt: Prompt) -> Prompt:
    """The same prompt as one causal chain, in which everything depends on all before it."""
    return Prompt(tuple(replace(s, kind=Kind.QUERY) if s.kind is Kind.CHUNK else s for s in prompt.segments))


@dataclass(frozen=True)
class Closing:
    """How a chat template goes on from where generation starts: text before the answer, and the token behind it."""

    gap: str
    end: int

    @staticmethod
    def of(tokenizer: Tokenizer) -> Closing:
        """Ask the template.

        Raises:
            ConfigError: if it drops the answer, or no token ends a turn.
        """
        asked = (Message("user", "?"),)
        head = tokenizer.chat(asked)
        whole = tokenizer.chat((*asked, Message("assistant", ANSWER)), add_generation_prompt=False)
        before, found, after = whole.partition(ANSWER)
        if not found:
            raise ConfigError("the model's chat template drops what the assistant says: it cannot be trained on")
        ends = [int(token) for token in tokenizer.encode(after, special=True)[:1] if tokenizer.is_control(int(token))]
        if not (ends or tokenizer.eos_ids):
            raise ConfigError("neither the chat template nor the tokenizer has a token that ends a turn")
        return Closing(before.removeprefix(head) if before.startswith(head) else "", [*ends, *tokenizer.eos_ids][0])

    def answer(self, tokenizer: Tokenizer, text: str, last: int) -> Tokens:
        """Tokens of an answer and the end of its turn, int32 [n]; last: the token before it."""
        run = tokenizer.encode(self.gap + text, special=False, continued=not tokenizer.is_control(last))
        return np.append(run, np.int32(self.end))
