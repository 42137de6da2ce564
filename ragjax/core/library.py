"""Files that clients upload, and the stores that make them searchable (OpenAI's files and vector stores)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ragjax.core.filter import Scalar
from ragjax.core.prompt import Chunk
from ragjax.core.request import Notice

State = Literal["in_progress", "completed", "failed", "cancelled"]
"""What has become of a file in a store."""

PURPOSES = ("assistants", "user_data")
"""What files may be for: both mean that they are searched."""

CHUNK_TOKENS = 192
"""Most tokens of a chunk unless somebody asks for others; the packaged encoder reads 256 of its own."""


@dataclass(frozen=True)
class File:
    id: str
    name: str
    purpose: str
    size: int
    created: int
    expires: int | None = None


@dataclass(frozen=True)
class Skipped:
    """A file of the server's own documents that is left out.

    name: its path inside the folder, with ":" and the number if it is a line of it. reason: with what to do about it.
    empty: nothing is wrong but that it has no text.
    """

    name: str
    reason: str
    empty: bool = False


@dataclass(frozen=True)
class Indexing:
    """Progress of reading the server's own documents and facts: files that are searchable or left out, and megabytes.

    running: some are still to be read. seconds_left: until all are, about. facts: of a graph, which has no chunks.
    """

    knowledge: str
    files: int
    files_total: int
    mb: float
    mb_total: float
    chunks: int
    seconds_left: float
    skipped: tuple[Skipped, ...]
    running: bool
    facts: int = 0

    @classmethod
    def together(cls, several: Sequence[Indexing]) -> Indexing:
        counts = ("files", "files_total", "mb", "mb_total", "chunks", "seconds_left", "facts")
        return cls(
            ", ".join(one.knowledge for one in several),
            **{name: sum(getattr(one, name) for one in several) for name in counts},
            skipped=tuple(skipped for one in several for skipped in one.skipped),
            running=any(one.running for one in several),
        )

    def body(self, names: int) -> dict[str, Any]:
        return {
            **{
                name: getattr(self, name)
                for name in ("knowledge", "files", "files_total", "chunks", "facts", "running")
            },
            "mb": round(self.mb, 1),
            "mb_total": round(self.mb_total, 1),
            "seconds_left": round(self.seconds_left),
            "skipped_total": len(self.skipped),
            "skipped": [{"name": one.name[:200], "reason": one.reason[:300]} for one in self.skipped[:names]],
        }

    @property
    def notice(self) -> str | None:
        told = Notice(f"{self.share} are indexed so far: the others were not searched", "indexing")
        return told if self.running else None

    @property
    def held(self) -> str:
        return f"{self.facts} facts" if self.facts else f"{self.chunks} chunks"

    @property
    def share(self) -> str:
        return f"{self.files:,} of {self.files_total:,} files of {self.knowledge}"


@dataclass(frozen=True)
class Attachment:
    store: str
    file: str
    created: int
    state: State = "in_progress"
    usage: int = 0  # bytes of its chunks
    error: tuple[str, str] = ("", "")  # code and message; empty unless it failed
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
    chunk_tokens: int | None = None  # most tokens of a chunk; None: the knowledge base's own choice


@dataclass(frozen=True)
class Counts:
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def total(self) -> int:
        return self.in_progress + self.completed + self.failed + self.cancelled


@dataclass(frozen=True)
class KeptResponse:
    """A response that is kept, and what it was asked. previous: the response that it goes on from.

    items, body: as JSON text.
    """

    id: str
    previous: str | None
    items: str
    body: str


@dataclass(frozen=True)
class Store:
    id: str
    name: str
    created: int
    active: int
    days: int | None = None  # it expires so long after its last use; None: never
    metadata: Mapping[str, str] = field(default_factory=dict)
    description: str | None = None
    expired: bool = False
    own: bool = False  # one of the server's, filled from `--knowledge`

    @property
    def expires(self) -> int | None:
        return None if self.days is None else self.active + self.days * 86400


@dataclass(frozen=True)
class Slice:
    count: int = -1  # entries, at most; -1: all
    after: str | None = None  # the id that they stand behind
    before: str | None = None
    last: bool = False  # the last ones within these bounds, else the first


WHOLE = Slice()
"""The part that is the whole list."""


@dataclass(frozen=True)
class Passage:
    """A chunk that a search found: of which file, its name and attributes, and the cosine similarity."""

    chunk: Chunk
    score: float
    name: str
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
