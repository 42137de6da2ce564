"""Passages in a text: what a RAG program has put into its message, found by content alone.

A text is cut at blank lines, at lines that only separate (rules, tags), around labels ("Context:", "[2]",
"Document 3:"), and at separators of one's own. A piece that is long enough is a passage; everything else, separators
and labels included, is text between passages. So a passage is the same wherever it stands, and whatever stands beside
it. A piece that is too long is cut where its content says so (content-defined chunking: Muthitacharoen et al., SOSP
2001; the hash is FastCDC's gear, Xia et al., ATC 2016, over words), so that words are cut alike behind other words.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ragjax.core import ConfigError, Message

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
    """A run of a text: a passage, or what stands between passages."""

    text: str
    passage: bool


@dataclass(frozen=True)
class Cutter:
    """Cuts texts into parts. Deterministic: what is cut depends on the text alone.

    separators: texts at which it cuts besides. least, most: characters of a passage.

    Raises:
        ConfigError: for a separator that is empty, or sizes that cannot be.
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
            parts += [Part(piece[:begin], False), *self._sized(body), Part(piece[begin + len(body) :], False)]
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
        """Pieces and what separates them, in turn; they spell the text."""
        at = 0
        for found in self._break.finditer(text):
            yield text[at : found.start()]
            yield text[found.start() : found.end()]
            at = found.end()
        yield text[at:]

    def _sized(self, body: str) -> Iterator[Part]:
        """A piece as passages of at most `most` characters, with the white space between them."""
        for part in self._by_content(body):
            core = part.rstrip()
            yield Part(core, True)
            if len(core) < len(part):
                yield Part(part[len(core) :], False)

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
    """The same, with text between passages in one part."""
    for passage, run in groupby(parts, lambda part: part.passage):
        if passage:
            yield from run
        elif text := "".join(part.text for part in run):
            yield Part(text, False)
