"""One node of the knowledge tree, and the digests and edges by which nodes are found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from ragjax.core import Run, Tokens
from ragjax.core.tiers import Copy

PUBLIC = ""
"""The tenant whose nodes everybody reads."""


class Provenance(StrEnum):
    CAUSAL = "causal"
    """Exactly the tokens of its path, all visible."""
    ISOLATED = "isolated"
    """The context it hangs under and itself, as if no other chunk were there."""
    DEPENDENCY = "dependency"
    """Its ancestors in a dependency tree."""
    APPROXIMATE = "approximate"
    """KV that was itself reused or repaired, or computed behind neighbours; never exact."""


RADIX = frozenset({Provenance.CAUSAL, Provenance.DEPENDENCY})
"""Provenances whose nodes continue their parent's tokens and may be split."""


@dataclass(slots=True, eq=False, repr=False)
class Node:
    tenant: str  # whose it is
    raw: bytes  # its tokens, int32, little-endian
    parent: Node | None
    local_start: int  # RoPE position at which token 0's K is stored rotated
    provenance: Provenance = Provenance.CAUSAL
    method: str = ""
    behind: bytes = b""  # digest of neighbours that the KV was computed behind, besides the path (b"": none)
    meta: bytes = b""  # a strategy's own
    lossy: bool = False  # its bytes, or those it was computed on, lost precision at rest
    start: int = field(init=False)  # number of tokens on the path before it
    key: bytes = b""  # digest of all that the KV depends on, 32 bytes
    run: Run | None = None  # where the KV lies on the device; a root has none
    host: Copy | None = None  # where it lies in host memory; a root has none
    shelved: bool = False  # it was put on disk, from where it may have left since (`Hierarchy.on_disk`)
    edges: dict[bytes, Node] | None = None  # children by their edge, None if there are none
    on_device: int = 0  # children that are there
    on_host: int = 0
    pins: int = 0  # matches and loads on this node or below it
    loading: int = 0  # number of the load that brings it (0: it is here)
    hits: int = 0  # requests that matched it
    kept: float = 0.0  # it leaves last until then, by `time.monotonic()`
    note: Any = None  # what the replacement policy remembers of it
    queued: list[int] = field(default_factory=lambda: [0, 0])  # entry in each tier's queue of victims (0: none)
    dead: bool = False  # out of the tree, kept while it is pinned

    def __post_init__(self) -> None:
        self.start = self.parent.end if self.parent is not None else 0

    def __len__(self) -> int:
        return len(self.raw) // 4

    def __repr__(self) -> str:
        return f"<{self.provenance} node {name(self)} of {len(self)} tokens>"

    @property
    def tokens(self) -> Tokens:
        """Token ids, int32 [n], read-only."""
        return np.frombuffer(self.raw, "<i4")

    @property
    def end(self) -> int:
        return self.start + len(self.raw) // 4

    @property
    def radix_method(self) -> str | None:
        """The dependency method whose radix edges lead to it; None for causal ones."""
        return self.method if self.provenance is Provenance.DEPENDENCY else None

    def children(self) -> Iterator[Node]:
        yield from (self.edges or {}).values()

    def path(self) -> Iterator[Node]:
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children())


Steps = list[tuple[Node, int]]
"""A path: nodes, and how many of each one's tokens are meant."""


def name(node: Node) -> str:
    return node.key.hex()[:12] or "root"


def raw_of(tokens: Tokens) -> bytes:
    return np.ascontiguousarray(tokens, "<i4").tobytes()


def digest(person: bytes, *fields: bytes) -> bytes:
    """Digest of length-prefixed fields, 32 bytes, for one use (`person`, up to 16 bytes)."""
    hasher = hashlib.blake2b(digest_size=32, person=person)
    for part in fields:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def context_digest(*raws: bytes) -> bytes:
    """Digest of a context: the tokens before a node, however they are cut; 32 bytes."""
    return context_hasher(*raws).digest()


def context_hasher(*raws: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(b"".join(raws), digest_size=32, person=b"context")


def context_of(node: Node | None) -> bytes:
    """Context digest of what hangs under the node: the tokens of its path.

    A dependency path's own tokens follow the digest of those before the path, since where it begins makes a difference.
    """
    steps = [] if node is None else list(node.path())[::-1]
    path = [step.raw for step in steps if step.provenance is Provenance.DEPENDENCY]
    before = context_digest(*(step.raw for step in steps[: len(steps) - len(path)]))
    return context_digest(before, *path) if path else before


def context_behind(node: Node, raw: bytes, method: str | None) -> bytes:
    """Context digest of what continues tokens behind a causal node: causally (None), or as a dependency path."""
    steps = [step.raw for step in node.path()][::-1]
    if method is None:
        return context_digest(*steps, raw)
    before = context_digest(*steps)
    return context_digest(before, raw) if raw else before


def common_prefix(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b)) // 4
    differs = np.frombuffer(a, "<i4", n) != np.frombuffer(b, "<i4", n)
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def neighbours_digest(chunks: Iterable[Tokens]) -> bytes:
    """Digest of the ordered chunks that KV was computed behind, 32 bytes; b"" for none."""
    raws = [raw_of(chunk) for chunk in chunks]
    return context_digest(*(len(raw).to_bytes(8, "little") + raw for raw in raws)) if raws else b""


def edge_of(node: Node) -> bytes:
    if node.provenance not in RADIX:
        return node.key
    return node.raw[:4] + radix_tag(node.tenant, node.radix_method)


def radix_tag(tenant: str, method: str | None) -> bytes:
    if method is None and tenant == PUBLIC:
        return b""
    return b"\0".join((tenant.encode(), b"" if method is None else b"\1" + method.encode()))
