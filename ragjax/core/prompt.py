"""Knowledge and prompts: documents, chunks, segments in order, and what each segment depends on."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray
from pydantic import InstanceOf

from ragjax.core.check import check_fields, put
from ragjax.core.errors import RequestError, invalid

Tokens = NDArray[np.int32]
"""Token ids, int32 [n]."""


Keep = Literal["all", "documents"]
"""The part of a prompt whose exact KV is kept: all, or up to the last chunk."""

NEVER = np.int32(2**30)
"""An index that no row has: the index of unused slots, and the end of an interval that never closes."""

Intervals = tuple[tuple[int, int], ...]
"""Half-open intervals [begin, end) of places, ascending and apart."""


def intervals(places: Tokens) -> Intervals:
    """The places, ascending and distinct, as the fewest intervals."""
    if not len(places):
        return ()
    cuts = np.flatnonzero(np.diff(places) > 1)
    begins, ends = places[[0, *(cuts + 1)]], places[[*cuts, len(places) - 1]] + 1
    return tuple(zip(begins.tolist(), ends.tolist(), strict=True))


def is_unicode(text: str) -> bool:
    """Tell if a text can be written as UTF-8; JSON and file names can hold halves of surrogate pairs, which cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def readable(text: str) -> str:
    """The text, with "?" for halves of surrogate pairs: what a client wrote can then be told in an error."""
    return text.encode("utf-8", "replace").decode("utf-8")


def has_controls(text: str) -> bool:
    """Tell if a text holds control characters (line ends, escapes): in a name they would forge lines of a log."""
    return any(unicodedata.category(char) == "Cc" for char in text)


@dataclass(frozen=True)
class Place:
    """Where a part of a document stands in its source; it ends where the next one begins."""

    begin: Annotated[int, Ge(0)]
    page: Annotated[int, Ge(1)] | None = None
    heading: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, lambda _, reason: invalid("documents", f"a place's {reason}"))


@dataclass(frozen=True)
class Document:
    id: str
    text: str
    title: str = ""
    places: tuple[InstanceOf[Place], ...] = ()
    filename: str = ""
    unread: str = ""  # what of its file cannot be read

    def __post_init__(self) -> None:
        check_fields(self, lambda _, reason: invalid("documents", f"a document's {reason}"))
        begins = [place.begin for place in self.places]
        if begins != sorted(begins) or (begins and begins[-1] > len(self.text)):
            raise invalid("documents", "a document's places must be ascending by begin, and within its text")

    def place_at(self, offset: int) -> Place | None:
        found = bisect_right(self.places, offset, key=lambda place: place.begin)
        return self.places[found - 1] if found else None


@dataclass(frozen=True)
class Chunk:
    id: str
    document_id: str
    title: str
    text: str
    tokens: Tokens  # exactly those of the text
    behind: bytes = b""  # digest of the neighbours that its fused KV was computed behind; empty if not preprocessed
    filename: str = ""  # of its document
    page: int | None = None  # that it begins on
    heading: str | None = None  # that it begins under

    @property
    def source_name(self) -> str:
        return self.filename or self.title or self.document_id


@dataclass(frozen=True)
class Hit:
    chunk: Chunk
    score: float  # cosine similarity to the question
    public: bool = False  # its KV may serve every tenant
    knowledge: str | None = None  # the base that it was found in; None: the request brought it
    earlier: bool = False  # an earlier question of the conversation alone found it


class Kind(StrEnum):
    SYSTEM = "system"
    """Depends on everything before it (it comes first)."""
    CHUNK = "chunk"
    """Knowledge: depends on the system segments alone when isolated."""
    NODE = "node"
    """A run of a dependency tree, of a knowledge-graph path for instance: depends on its ancestors (DepCache, 3.1)."""
    QUERY = "join"
    """Depends on everything before it: a question, or a finished turn."""
    JOIN = "join"
    """The name that QUERY had first, and has in traces."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of tokens whose KV is made and kept as a unit (int32 [n]). Two are equal only if they are the same object.

    kind: a `Kind`, or its name.
    public: whether its KV may serve every tenant, as long as all before it may.
    behind: as `Chunk` has it.
    depends: indices of the earlier segments that it depends on directly, where its kind does not say (None: it does; a
        node without an ancestor depends on the leading system segments).
    """

    id: str
    kind: Kind
    tokens: Tokens
    title: str = ""
    score: float | None = None
    public: bool = False
    behind: bytes = b""
    depends: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        kind = self.kind if isinstance(self.kind, Kind) else Kind.__members__.get(str(self.kind).upper())
        if kind is None:
            known = ", ".join(each.name.lower() for each in Kind)
            raise invalid("prompt", f"segment {self.id!r} has no kind {self.kind!r}: give one of {known}")
        put(self, "kind", kind)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Prompt:
    """Segments in pre-order. A token's index is its place in the concatenation. Two are equal only if they are the same
    object.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise RequestError("the prompt is empty", param="messages")
        if any(len(s) == 0 for s in self.segments):
            raise RequestError("a segment of the prompt has no tokens", param="messages")
        for i, segment in enumerate(self.segments):
            if any(not 0 <= j < i for j in segment.depends or ()):
                raise ValueError(f"segment {i} depends on {segment.depends}: only on earlier ones can it")

    def __len__(self) -> int:
        return sum(len(s) for s in self.segments)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index of each segment's first token, and the prompt's length as a last entry."""
        return tuple(int(n) for n in np.cumsum([0, *(len(s) for s in self.segments)]))

    def bounds(self, i: int) -> tuple[int, int]:
        return self.starts[i], self.starts[i + 1]

    @cached_property
    def dependencies(self) -> tuple[frozenset[int], ...]:
        """Indices of all segments that each one depends on, directly or not (DepCache, Algorithm 1, lines 8 and 9)."""
        system = frozenset(
            range(next((i for i, s in enumerate(self.segments) if s.kind is not Kind.SYSTEM), len(self.segments)))
        )
        found: list[frozenset[int]] = []
        for i, segment in enumerate(self.segments):
            if segment.depends is not None:
                found.append(frozenset(segment.depends).union(*(found[j] for j in segment.depends)))
            else:
                found.append(system if segment.kind is Kind.NODE else frozenset(range(i)))
        return tuple(found)

    @cached_property
    def chunks(self) -> int:
        return sum(segment.kind is Kind.CHUNK for segment in self.segments)

    @cached_property
    def public(self) -> int:
        """Number of leading tokens whose KV may serve every tenant."""
        private = (i for i, segment in enumerate(self.segments) if not segment.public)
        return self.starts[next(private, len(self.segments))]

    def kept(self, keep: Keep) -> int:
        """Number of leading tokens whose exact KV is kept; all, if there is no chunk."""
        ends = [self.starts[i + 1] for i, segment in enumerate(self.segments) if segment.kind is Kind.CHUNK]
        if keep == "all" or not ends:
            return len(self)
        return ends[-1]

    @property
    def preprocessed(self) -> bool:
        """True if every chunk has KV that was computed behind its neighbours, or there are no chunks."""
        return all(s.behind for s in self.segments if s.kind is Kind.CHUNK)

    def followed_by(self, said: Tokens) -> Prompt:
        """The prompt, and after it tokens that were generated, int32 [n], if there are any."""
        if not len(said):
            return self
        return Prompt((*self.segments, Segment("continued", Kind.QUERY, said)))

    @cached_property
    def tokens(self) -> Tokens:
        return np.concatenate([s.tokens for s in self.segments])


@dataclass(frozen=True)
class Wrapper:
    """Tokens before and behind a passage, int32 [h] and [t]; ids behind the vocabulary."""

    header: Tokens
    trailer: Tokens

    @staticmethod
    def of(vocabulary: int, header: int, trailer: int) -> Wrapper:
        tokens = vocabulary + np.arange(header + trailer, dtype=np.int32)
        return Wrapper(tokens[:header], tokens[header:])

    @property
    def tokens(self) -> Tokens:
        return np.concatenate([self.header, self.trailer])

    def dressed(self, prompt: Prompt) -> Prompt:
        """The prompt with every chunk between header and trailer; KV that chunks have without them is forgotten."""
        segments = list(prompt.segments)
        for i, segment in enumerate(segments):
            if segment.kind is Kind.CHUNK:
                tokens = np.concatenate([self.header, segment.tokens, self.trailer]).astype(np.int32)
                segments[i] = replace(segment, tokens=tokens, behind=b"")
        return replace(prompt, segments=tuple(segments))
