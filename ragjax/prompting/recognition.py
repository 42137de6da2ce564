"""Segments of what messages bring along: each passage a chunk, what stands between them query segments.

A passage is encoded by itself, as text that goes on, so its tokens are the same wherever it stands, and no token
reaches over its ends; in this alone a prompt differs from the whole text encoded in one go, as it does around retrieved
chunks. Text of messages is encoded as plain text, and a piece of the template is a passage only if it has no control
token, as a list of tools has none.

A text is cut at blank lines, at lines that only separate (rules, tags), around labels ("Context:", "[2]",
"Document 3:"), and at separators of one's own. A piece that is long enough is a passage; everything else, separators
and labels included, is text between passages. So a passage is the same wherever it stands, and whatever stands beside
it. A piece that is too long is cut where its content says so (content-defined chunking: Muthitacharoen et al., SOSP
2001; the hash is FastCDC's gear, Xia et al., ATC 2016, over words), so that words are cut alike behind other words.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from ragjax.core import ConfigError, Kind, Message, Segment, Tokens
from ragjax.models.chat_template import Pieces
from ragjax.models.tokenizer import Tokenizer

LEAST = 160
"""Characters of the shortest passage: about 40 tokens of English, for which pages and a look-up pay."""

MOST = 4096
"""Characters of the longest one; longer pieces are cut by content."""

_NAMED = (
    "context|documents?|docs?|passages?|sources?|chunks?|results?|texts?|snippets?|references?|question|query|answer"
)
# Runs of blanks are possessive (*+): two neighbouring ones would be tried in all ways, in quadratic time.
_LABEL = rf"(?:\[\d+\]:?|(?:helpful +)?(?:{_NAMED})[ \t]*+(?:(?:#?\d+|\[\d+\])[ \t]*+)?:)[ \t]*\n?"
_BREAKS = (
    r"\r?\n(?:[ \t]*\r?\n)+",  # blank lines
    r"(?:^|(?<=\n))[ \t]*+(?:([-=*_#])\1{2,}+[ \t]*+|(?:</?[A-Za-z][^<>\n]*>[ \t]*+)+)(?:\r?\n|$)",  # rules, tags
    rf"(?:^|(?<=\n))[ \t]*+(?i:{_LABEL})",
)
_ORDINAL = re.compile(r"\(?\d+[.)]\s+")
_WORD = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]\s*|[^\s\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]+\s*")
_SENTENCE_END = re.compile(r"""[.!?\u3002\uff01\uff1f]["')\]\u201d]*\s*$""")


@dataclass(frozen=True)
class Part:
    """A run of a text: a passage, or what stands between passages. special: as in `Pieces`."""

    text: str
    passage: bool
    special: bool = False


@dataclass(frozen=True)
class Cutter:
    """Cuts texts into parts. Deterministic: what is cut depends on the text alone.

    separators: texts at which it cuts besides. least, most: characters of a passage.
    """

    separators: tuple[str, ...] = ()
    least: int = LEAST
    most: int = MOST

    def __post_init__(self) -> None:
        if not all(separator.strip() or "\n" in separator for separator in self.separators):
            raise ConfigError("a separator of passages needs a line break, or more than white space")
        if not 1 <= self.least <= self.most // 2:
            raise ConfigError(f"passages of {self.least} to {self.most} characters: the least is at most half the most")

    def parts(self, text: str, spared: Collection[str] = ()) -> list[Part]:
        """The text in parts, which spell it. spared: stripped pieces that are no passages, the question for one."""
        parts: list[Part] = []
        for piece in self._pieces(text):
            body = piece.strip()
            ordinal = _ORDINAL.match(body)
            if ordinal is not None and body not in spared:  # "2. " says where it stands, not what it is
                body = body[ordinal.end() :]
            if len(body) < self.least or body in spared:
                parts.append(Part(piece, False))
                continue
            begin = piece.index(body)
            parts.append(Part(piece[:begin], False))
            for run in self._by_content(body):
                core = run.rstrip()
                parts += [Part(core, True), Part(run[len(core) :], False)]
            parts.append(Part(piece[begin + len(body) :], False))
        return [*_merged(parts)]

    def last(self, text: str) -> str:
        """The last piece that is not blank, stripped; where texts end with it, it is the question."""
        bodies = (piece.strip() for piece in self._pieces(text))
        return next((body for body in reversed([*bodies]) if body), "")

    @cached_property
    def _break(self) -> re.Pattern[str]:
        literal = map(re.escape, sorted(self.separators, key=len, reverse=True))
        return re.compile("|".join((*literal, *_BREAKS)))

    def _pieces(self, text: str) -> Iterator[str]:
        at = 0
        for found in self._break.finditer(text):
            yield text[at : found.start()]
            yield text[found.start() : found.end()]
            at = found.end()
        yield text[at:]

    def _by_content(self, body: str) -> Iterator[str]:
        """Cut behind words whose hash, of them and the words before, says so; at ends of sentences more readily."""
        if len(body) <= self.most:
            yield body
            return
        begin, end, gear = 0, 0, 0
        for found in _WORD.finditer(body):
            word = found[0]
            if found.end() - begin > self.most and end > begin:  # no place was found in time
                yield body[begin:end]
                begin = end
            end = found.end()
            gear = (2 * gear + zlib.crc32(word.encode("utf-8", "replace"))) & 0xFFFFFFFF
            chance = 8 if _SENTENCE_END.search(word) else 256
            if end - begin >= self.least and (gear >> 16) % chance == 0 and len(body) - end >= self.least:
                yield body[begin:end]
                begin = end
        yield body[begin:]


def brings_passages(cutter: Cutter, messages: Sequence[Message]) -> bool:
    """True if a message of the user or of a tool has a passage besides its last piece: the client has retrieved."""
    said = (message.content for message in messages if message.role in ("user", "tool"))
    return any(part.passage for text in said for part in cutter.parts(text, {cutter.last(text)}))


def _merged(parts: Sequence[Part]) -> Iterator[Part]:
    for passage, run in groupby(parts, lambda part: part.passage):
        if passage:
            yield from run
        elif text := "".join(part.text for part in run):
            yield Part(text, False)


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
    cuts = [[Part(text, False, special)] for text, special in pieces[:opening]]
    found = [_cut(tokenizer, piece, recognition.cutter, spared) for piece in pieces[opening:]]
    kept = _longest([part for cut in found for part in cut], recognition.most)
    cuts += [[replace(part, passage=part.passage and part.text in kept) for part in cut] for cut in found]
    runs = _alone(tokenizer, cuts, continued)
    system = np.concatenate([np.zeros(0, np.int32), *(tokens for tokens, _ in runs[:opening])])
    head = (Segment("system", Kind.SYSTEM, system, public=public),) if len(system) else ()
    return (*head, *_segments(runs[opening:]))


def questions(cutter: Cutter, texts: Iterable[str]) -> frozenset[str]:
    """The last piece of each text: it asks, and has to see everything."""
    return frozenset(filter(None, map(cutter.last, texts)))


def _cut(tokenizer: Tokenizer, piece: tuple[str, bool], cutter: Cutter, spared: Collection[str]) -> list[Part]:
    text, special = piece
    return [
        replace(part, special=special, passage=part.passage and not (special and tokenizer.names_control(part.text)))
        for part in cutter.parts(text, spared)
    ]


def _longest(parts: Sequence[Part], most: int) -> frozenset[str]:
    """Texts of the longest passages, `most` of them at most, however often each stands there."""
    passages = sorted((part.text for part in parts if part.passage), key=len, reverse=True)
    if len(passages) <= most:
        return frozenset(passages)
    return frozenset(text for text in passages if most > 0 and len(text) > len(passages[most]))


Runs = list[tuple[Tokens, str | None]]
"""Tokens in order, and what each run spells if it is a passage."""


def _alone(tokenizer: Tokenizer, cuts: Sequence[Sequence[Part]], continued: bool) -> Runs:
    runs: Runs = []
    for part in (part for cut in cuts for part in cut):
        tokens = tokenizer.encode(part.text, part.special, continued=continued or part.passage)
        continued = not tokenizer.is_control(int(tokens[-1])) if len(tokens) else continued
        runs.append((tokens, part.text if part.passage else None))
    return runs


def _segments(runs: Runs) -> Iterator[Segment]:
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
