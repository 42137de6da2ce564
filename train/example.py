"""A sample as the model sees it: tokens, positions, who sees whom, and which next tokens are learned.

The prompt is the one that serving makes (DepCache, section 3.1, Algorithm 1); behind it stand the answer and the token
that ends a turn, which see all of it. The control arm is the same paths written out whole, one a line, in one chain.

Of passages, each is seen by itself and by what stands behind all of them: a tree of depth one (Block-Attention, arXiv
2409.15355). It is computed right behind the system prompt, as serving does, and then moved to its place. Several
questions may follow the same passages; each sees these and itself alone, at the same positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragjax.core import NEVER, ConfigError, Document, Hit, Kind, Message, Prompt, Tokens, Wrapper
from ragjax.core.depprompt import Positions, layout
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting.chat import chat_prompt, graph_prompt
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.triples import RelationPath, subgraphs_of
from ragjax.reuse.head import system_length
from ragjax.reuse.stitch import alone
from train.sample import Passage, Sample

Attention = Literal["dependency", "self"]
"""Paths as trees under dependency attention, or written out whole under causal self-attention."""

ANSWER = "\U000f8ff4answer\U000f8ff5"


class View(NamedTuple):
    """Positions, and intervals as `Example` has them: int32 [n] each."""

    position: Tokens
    hide_from: Tokens
    hide_until: Tokens


@dataclass(frozen=True)
class Example:
    """A sample token by token, int32 [n] each. A token's index is its place in them.

    hide_from, hide_until: half-open interval of indexes that it is hidden from. target: the next token where it is
    learned, -1 elsewhere. teacher: how the model that is learned from sees the same tokens, if there is one.
    """

    id: str
    token: Tokens
    position: Tokens
    hide_from: Tokens
    hide_until: Tokens
    target: Tokens
    teacher: View | None = None

    def __len__(self) -> int:
        return len(self.token)

    @property
    def targets(self) -> int:
        return int((self.target >= 0).sum())

    @property
    def answers(self) -> int:
        """Number of answers that are learned: runs of targets."""
        learned = self.target >= 0
        return int((learned & ~np.append(False, learned[:-1])).sum())


@dataclass(frozen=True)
class Coder:
    """Turns samples into examples. attention, positions: of those with paths; plain chat is a causal chain.

    wrapper: tokens around each passage, which the teacher does not see.
    """

    tokenizer: Tokenizer
    attention: Attention = "dependency"
    positions: Positions = "path"
    wrapper: Wrapper | None = None

    @cached_property
    def closing(self) -> Closing:
        return Closing.of(self.tokenizer)

    def example(self, sample: Sample, *, plain: bool = False) -> Example:
        """A sample as the model sees it; plain: as a causal chain, whatever `attention` says."""
        if sample.passages:
            return self._reading(sample, apart=self.attention == "dependency" and not plain)
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

    def _reading(self, sample: Sample, *, apart: bool) -> Example:
        """Passages and all questions on them. apart: each passage is hidden from the others."""
        hits = hits_of(self.tokenizer, sample.passages)
        prompts = [
            chat_prompt(self.tokenizer, (*sample.history, Message("user", asked.question)), hits)
            for asked in sample.asked
        ]
        *shared, _ = prompts[0].segments
        bare = Prompt(tuple(shared))
        dressed = bare if self.wrapper is None or not apart or alone(bare) else self.wrapper.dressed(bare)
        context = _isolated(dressed) if apart else Context.causal(dressed)
        answers = [
            self.closing.answer(self.tokenizer, asked.answer, int(prompt.tokens[-1]))
            for asked, prompt in zip(sample.asked, prompts, strict=True)
        ]
        blocks = [
            np.concatenate([prompt.segments[-1].tokens, answer[:-1]])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        begins = len(context.token) + np.cumsum([0, *map(len, blocks)])
        n = int(begins[-1])
        view = View(*(np.zeros(n, np.int32) for _ in range(3)))
        target = np.full(n, -1, np.int32)
        for begin, end, answer in zip(begins[:-1], begins[1:], answers, strict=True):
            view.position[begin:end] = len(dressed) + np.arange(end - begin)
            view.hide_from[begin:end], view.hide_until[begin:end] = end, n
            target[end - len(answer) : end] = answer
        teacher = _taught(view, context, len(dressed), [] if self.wrapper is None else self.wrapper.tokens)
        for whole, part in zip(view, context.view(n), strict=True):
            whole[: len(part)] = part
        token = np.concatenate([context.token, *blocks]).astype(np.int32)
        return Example(sample.id, token, *view, target, teacher)


class Context(NamedTuple):
    """The tokens before the questions, int32 [c]; copy: bool [c].

    copy: of the system prompt, for a passage; hidden from all behind the passage. Others as in `Example`, where
    hide_until of a copy is `NEVER`.
    """

    token: Tokens
    position: Tokens
    hide_from: Tokens
    hide_until: Tokens
    copy: NDArray[np.bool_]

    @staticmethod
    def causal(prompt: Prompt) -> Context:
        """Each token sees all before it."""
        n = len(prompt)
        nothing = np.zeros(n, np.int32)
        return Context(prompt.tokens, np.arange(n, dtype=np.int32), nothing, nothing.copy(), np.zeros(n, np.bool_))

    def view(self, n: int) -> View:
        """Positions and intervals in a sample of n tokens."""
        return View(self.position, self.hide_from, np.minimum(self.hide_until, n))


def _isolated(prompt: Prompt) -> Context:
    """Each passage as serving computes it: behind the system prompt alone, right behind it (`reuse.stitch.missing`).

    A passage that stands elsewhere gets a copy of the system prompt before it, at the positions right before its own.
    Rotation makes attention depend on distances alone, so the passage's KV is that of serving, moved to its place.
    """
    system = system_length(prompt)
    token, position, end_of, copy = [], [], [], []
    length = 0
    first: int | None = None  # where the first copy is
    for i, segment in enumerate(prompt.segments):
        begin = prompt.starts[i]
        copied = system if segment.kind is Kind.CHUNK and begin != system else 0
        first = length if copied and first is None else first
        n = copied + len(segment)
        length += n
        token += [prompt.tokens[:copied], segment.tokens]
        position.append(np.arange(begin - copied, begin - copied + n))
        end_of.append(np.full(n, length if segment.kind is Kind.CHUNK else -1))
        copy.append(np.arange(n) < copied)
    end, copies = np.concatenate(end_of), np.concatenate(copy)
    # what stands before the passages is hidden from copies, and from passages that have one
    hide_from = np.where(end < 0, length if first is None else first, end)
    return Context(
        np.concatenate(token).astype(np.int32),
        np.concatenate(position).astype(np.int32),
        hide_from.astype(np.int32),
        np.where(copies, NEVER, length).astype(np.int32),
        copies,
    )


def _taught(view: View, context: Context, length: int, soft: Sequence[int] | Tokens) -> View:
    """The teacher's view of a sample: everything before it, without copies and soft tokens.

    view: of the questions; what it has of the context is not read. length: of the context as the model that learns
    counts it.
    """
    n, size = len(view.position), len(context.token)
    left_out = context.copy | np.isin(context.token, soft)
    before = np.concatenate([[0], np.cumsum(left_out)])
    position, hide_from, hide_until = (x.copy() for x in view)
    position[:size] = np.arange(size) - before[:-1]
    position[size:] += size - before[-1] - length
    hidden = np.flatnonzero(left_out)
    hide_from[hidden], hide_until[hidden] = hidden + 1, n
    return View(position.astype(np.int32), hide_from, hide_until)


def hits_of(tokenizer: Tokenizer, passages: Sequence[Passage]) -> list[Hit]:
    """The chunks that serving makes of passages."""
    chunker = Chunker(partial(tokenizer.encode, special=False, continued=True))
    documents = [Document(str(i), passage.text, passage.title) for i, passage in enumerate(passages)]
    return [Hit(chunk, 0.0) for document in documents for chunk in chunker.chunks(document)]


def _example(name: str, prompt: Prompt, answer: Tokens, positions: Positions) -> Example:
    """All but the last token of prompt and answer go in, and the last segment goes on into the answer."""
    *before, last = prompt.segments
    whole = Prompt((*before, replace(last, tokens=np.concatenate([last.tokens, answer[:-1]]))))
    view = layout(whole, positions)
    target = np.concatenate([np.full(len(whole) - len(answer), -1, np.int32), answer])
    teacher = View(view.position, view.hide_from, view.hide_until) if _causal(whole) else None
    return Example(name, view.token, view.position, view.hide_from, view.hide_until, target, teacher)


def _causal(prompt: Prompt) -> bool:
    """True if each token sees all tokens before it, as in full attention."""
    return all(segment.kind in (Kind.SYSTEM, Kind.QUERY) for segment in prompt.segments)


def _chained(prompt: Prompt) -> Prompt:
    """The same prompt as one causal chain, in which everything depends on all before it."""
    return Prompt(tuple(replace(s, kind=Kind.QUERY) if s.kind is Kind.CHUNK else s for s in prompt.segments))


@dataclass(frozen=True)
class Closing:
    """The continuation of a chat template at generation: text before the answer, and the token behind it."""

    gap: str
    end: int

    @staticmethod
    def of(tokenizer: Tokenizer) -> Closing:
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
        continued = not tokenizer.is_control(last)
        # the gap is the template's own text, and may name control tokens
        runs = tokenizer.encode_pieces([(self.gap, True), (text, False)], continued=continued)
        return np.concatenate([*runs, [self.end]]).astype(np.int32)
