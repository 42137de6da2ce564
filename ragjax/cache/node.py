"""One node of the knowledge tree, and the digests and edges by which nodes are found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any

import numpy as np

from ragjax.core import Run, Tokens
from ragjax.core.tiers import Copy

PUBLIC = ""
"""The tenant whose nodes everybody reads."""


class Provenance(StrEnum):
    """On what context a node's KV was computed."""

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


class Node:
    """A run of tokens whose KV is kept.

    tenant: whose it is. raw: its tokens, int32, little-endian. start: number of tokens on the path before it.
    local_start: RoPE position at which token 0's K is stored rotated.
    key: digest of all that the KV depends on, 32 bytes.
    behind: digest of neighbours that the KV was computed behind, besides the path (b"": none). meta: a strategy's own.
    run: where the KV lies on the device; host: where in host memory; a root has neither.
    lossy: whether its bytes, or those it was computed on, lost precision at rest.
    shelved: whether it was put on disk, from where it may have left since (`Hierarchy.on_disk`).
    edges: children by their edge, None if there are none. on_device, on_host: how many children are there.
    pins: matches and loads on this node or below it. loading: number of the load that brings it (0: it is here).
    hits: requests that matched it. note: what the replacement policy remembers of it.
    queued: entry in each tier's queue of victims (0: none). dead: out of the tree, kept while it is pinned.
    """

    __slots__ = (
        "behind",
        "dead",
        "edges",
        "hits",
        "host",
        "key",
        "loading",
        "local_start",
        "lossy",
        "meta",
        "method",
        "note",
        "on_device",
        "on_host",
        "parent",
        "pins",
        "provenance",
        "queued",
        "raw",
        "run",
        "shelved",
        "start",
        "tenant",
    )  # fmt: skip

    def __init__(
        self,
        tenant: str,
        raw: bytes,
        parent: Node | None,
        local_start: int,
        provenance: Provenance = Provenance.CAUSAL,
        method: str = "",
        *,
        behind: bytes = b"",
        meta: bytes = b"",
        lossy: bool = False,
    ):
        self.tenant = tenant
        self.raw = raw
        self.parent = parent
        self.start = parent.end if parent is not None else 0
        self.local_start = local_start
        self.provenance = provenance
        self.method = method
        self.behind = behind
        self.meta = meta
        self.lossy = lossy
        self.key = b""
        self.run: Run | None = None
        self.host: Copy | None = None
        self.shelved = False
        self.edges: dict[bytes, Node] | None = None
        self.on_device = 0
        self.on_host = 0
        self.pins = 0
        self.loading = 0
        self.hits = 0
        self.note: Any = None
        self.queued = [0, 0]
        self.dead = False

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
        """Number of tokens on the path up to and with this node."""
        return self.start + len(self.raw) // 4

    @property
    def radix_method(self) -> str | None:
        """The dependency method whose radix edges lead to it; None for causal ones."""
        return self.method if self.provenance is Provenance.DEPENDENCY else None

    @property
    def is_leaf(self) -> bool:
        return not self.edges

    def children(self) -> Iterator[Node]:
        """All nodes whose KV is useless without this one."""
        yield from (self.edges or {}).values()

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, upward to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """This node and all below, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children())


Steps = list[tuple[Node, int]]
"""A path: nodes, and how many of each one's tokens are meant."""


def name(node: Node) -> str:
    """A node as error messages name it."""
    return node.key.hex()[:12] or "root"


def raw_of(tokens: Tokens) -> bytes:
    """Tokens (int32 [n]) as the bytes that nodes keep: int32, little-endian."""
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
    hasher = context_hasher()
    for raw in raws:
        hasher.update(raw)
    return hasher.digest()


def context_hasher() -> hashlib.blake2b:
    """A hasher whose digest is the context of the tokens it was fed."""
    return hashlib.blake2b(digest_size=32, person=b"context")


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


def neighbours_digest(chunks: Iterable[Tokens]) -> bytes:
    """Digest of the ordered chunks that KV was computed behind, 32 bytes; b"" for none."""
    raws = [raw_of(chunk) for chunk in chunks]
    return context_digest(*(len(raw).to_bytes(8, "little") + raw for raw in raws)) if raws else b""


def edge_of(node: Node) -> bytes:
    if node.provenance not in RADIX:
        return node.key
    return node.raw[:4] + radix_tag(node.tenant, node.radix_method)


def radix_tag(tenant: str, method: str | None) -> bytes:
    """Suffix of radix edges, one for each tenant and dependency method (None: causal)."""
    if method is None and tenant == PUBLIC:
        return b""
    return b"\0".join((tenant.encode(), b"" if method is None else b"\1" + method.encode()))
