"""Segments of what messages bring along: each passage a chunk, what stands between them query segments.

A passage is encoded by itself, as text that goes on, so its tokens are the same wherever it stands, and no token
reaches over its ends; in this alone a prompt differs from the whole text encoded in one go, as it does around retrieved
chunks. Text of messages is encoded as plain text, and a piece of the template is a passage only if it has no control
token, as a list of tools has none.

Exact strategies gain nothing from such cuts. For them the tokens stay those of the whole, and passages are told apart
along the tokens, for the account alone (`along`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np

from ragjax.core import Kind, Segment, Tokens
from ragjax.models.chat_template import Pieces
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting.passage import Cutter

TITLE = 60
"""Characters of a passage that name it."""


@dataclass(frozen=True)
class Recognition:
    """Settings of the recognition of passages.

    most: passages of a prompt, the longest ones, since a step of attention reads a limited number of pieces. exact:
    whether the tokens are to stay those of the whole text.
    """

    cutter: Cutter
    most: int
    exact: bool = False


@dataclass(frozen=True)
class _Part:
    """A run of one piece. special: as in `Pieces`."""

    text: str
    special: bool
    passage: bool


def recognise(
    tokenizer: Tokenizer,
    pieces: Pieces,
    recognition: Recognition,
    spared: Collection[str],
    *,
    opening: int = 0,
    public: bool = False,
    continued: bool = False,
) -> tuple[Segment, ...]:
    """The pieces of one prompt as segments, passages as chunks.

    spared: stripped pieces of text that are no passages. opening: pieces in front that are the system segment, behind
    which passages are computed (0: there is none); public: whether its KV may serve every tenant. continued: whether
    the pieces go on from text before them.
    """
    cuts = [[_Part(text, special, False)] for text, special in pieces[:opening]]
    found = [_cut(tokenizer, piece, recognition.cutter, spared) for piece in pieces[opening:]]
    kept = _longest([part for cut in found for part in cut], recognition.most)
    cuts += [[replace(part, passage=part.passage and part.text in kept) for part in cut] for cut in found]
    encode = _whole if recognition.exact else _alone
    runs = encode(tokenizer, cuts, continued)
    system = np.concatenate([np.zeros(0, np.int32), *(tokens for tokens, _ in runs[:opening])])
    head = (Segment("system", Kind.SYSTEM, system, public=public),) if len(system) else ()
    return (*head, *_segments(runs[opening:]))


def questions(cutter: Cutter, texts: Iterable[str]) -> frozenset[str]:
    """The last piece of each text: it asks, and has to see everything."""
    return frozenset(filter(None, map(cutter.last, texts)))


def _cut(tokenizer: Tokenizer, piece: tuple[str, bool], cutter: Cutter, spared: Collection[str]) -> list[_Part]:
    text, special = piece
    parts = [_Part(part.text, special, part.passage) for part in cutter.parts(text, spared)]
    if not special:
        return parts
    return [_Part(p.text, True, p.passage and tokenizer.names_control(p.text) is None) for p in parts]


def _longest(parts: Sequence[_Part], most: int) -> frozenset[str]:
    """Texts of the longest passages, `most` of them at most, however often each stands there."""
    passages = sorted((part.text for part in parts if part.passage), key=len, reverse=True)
    if len(passages) <= most:
        return frozenset(passages)
    return frozenset(text for text in passages if most > 0 and len(text) > len(passages[most]))


Runs = list[tuple[Tokens, str | None]]
"""Tokens in order, and what each run spells if it is a passage."""


def _alone(tokenizer: Tokenizer, cuts: Sequence[Sequence[_Part]], continued: bool) -> Runs:
    """Every passage encoded by itself."""
    runs: Runs = []
    for part in (part for cut in cuts for part in cut):
        tokens = tokenizer.encode(part.text, part.special, continued=continued or part.passage)
        continued = not tokenizer.is_control(int(tokens[-1])) if len(tokens) else continued
        runs.append((tokens, part.text if part.passage else None))
    return runs


def _whole(tokenizer: Tokenizer, cuts: Sequence[Sequence[_Part]], continued: bool) -> Runs:
    """Every piece encoded in one go, its passages told apart along its tokens."""
    whole = [("".join(part.text for part in cut), cut[0].special) for cut in cuts]
    runs: Runs = []
    for tokens, cut in zip(tokenizer.encode_pieces(whole, continued=continued), cuts, strict=True):
        runs += along(tokenizer, tokens, cut)
    return runs


def along(tokenizer: Tokenizer, tokens: Tokens, cut: Sequence[_Part]) -> Iterator[tuple[Tokens, str | None]]:
    """The tokens (int32 [n]) of a text at its parts; a token that reaches over an end belongs to the part before."""
    ends_N = np.cumsum([len(tokenizer.token_bytes(int(token))) for token in tokens])
    lengths = [len(part.text.encode()) for part in cut]
    added = int(ends_N[-1]) - sum(lengths) if len(tokens) else 0  # a space that the tokenizer put in front
    if added not in (0, 1):  # the tokenizer rewrote the text: nothing says where a part ends
        yield tokens, None
        return
    stops = [int(np.searchsorted(ends_N, end + added)) + 1 for end in accumulate(lengths)]
    at = 0
    for part, stop in zip(cut, stops, strict=True):
        yield tokens[at:stop], part.text if part.passage else None
        at = max(at, stop)


def _segments(runs: Runs) -> Iterator[Segment]:
    """Passages as chunks, and the runs between them as one query segment each."""
    last = sum(1 for _ in groupby(runs, key=lambda run: run[1] is None)) - 1
    for n, (_, group) in enumerate(groupby(runs, key=lambda run: run[1] is None)):
        found = [(tokens, text) for tokens, text in group if len(tokens)]
        if not found:
            continue
        if found[0][1] is None:
            tokens = np.concatenate([tokens for tokens, _ in found])
            yield Segment("question" if n == last else "text", Kind.QUERY, tokens)
            continue
        for tokens, text in found:
            assert text is not None
            name = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
            title = " ".join(text.split())[:TITLE].rstrip()
            yield Segment(f"passage-{name}", Kind.CHUNK, tokens, title, recognised=True)
