"""Digests and edges by which nodes are found: they name what KV depends on. Functions without state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from ragjax.cache.node import PUBLIC, RADIX, Node, Provenance
from ragjax.core import Tokens


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
    """The edge that leads to a node from its parent."""
    if node.provenance not in RADIX:
        return node.key
    return node.raw[:4] + radix_tag(node.tenant, node.radix_method)


def radix_tag(tenant: str, method: str | None) -> bytes:
    """What distinguishes the radix edges of a tenant and of a dependency method (None: causal)."""
    if method is None and tenant == PUBLIC:
        return b""
    return b"\0".join((tenant.encode(), b"" if method is None else b"\1" + method.encode()))
