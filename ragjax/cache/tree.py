"""The knowledge tree (RAGCache, section 5.1) as a compressed radix tree of token runs.

Causal edges: a child continues its parent's tokens and is found by its first token; nodes split at any
token. Keyed edges: a node whose KV was computed on its parent's context under some other mask (isolated,
dependency) or on approximate context; it is found by its key alone, so a walk along causal edges never
meets it. Every tenant has a root of its own.

A node's key is a digest of everything its KV depends on. Its context part covers the tokens before it and
not how they are cut into nodes, so splitting an ancestor changes no key below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from ragjax.cache.pages import AuditError, PagePool
from ragjax.core import Run, Tokens


class Provenance(StrEnum):
    """On what context a node's KV was computed."""

    CAUSAL = "causal"
    """Exactly the tokens of its path, all visible."""
    ISOLATED = "isolated"
    """The context it hangs under and itself, as if no other chunk were there."""
    DEPENDENCY = "dependency"
    """Its ancestors in a dependency tree."""
    APPROXIMATE = "approximate"
    """KV that was itself reused or repaired; never exact."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens whose KV is kept.

    key: digest of all that the KV depends on, 32 bytes. content: digest of tenant and tokens, 32 bytes.
    start: number of tokens on the path before it.
    run: where the KV lives; None for a root.
    local_start: RoPE position at which token 0's K is stored rotated.
    pins: leases on this node or below it.
    last_use: tick of the last access. queued: entry in the queue of victims (0: none).
    """

    tenant: str
    tokens: Tokens
    run: Run | None
    start: int
    local_start: int
    provenance: Provenance = Provenance.CAUSAL
    method: str = ""
    parent: Node | None = None
    key: bytes = b""
    content: bytes = b""
    causal: dict[int, Node] = field(default_factory=dict)
    keyed: dict[bytes, Node] = field(default_factory=dict)
    pins: int = 0
    last_use: int = 0
    queued: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Number of tokens on the path up to and with this node."""
        return self.start + len(self.tokens)

    @property
    def is_leaf(self) -> bool:
        """Whether nothing depends on it."""
        return not self.causal and not self.keyed

    def children(self) -> Iterator[Node]:
        """All nodes whose KV is useless without this one."""
        yield from self.causal.values()
        yield from self.keyed.values()

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, upward to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class KnowledgeTree:
    """Nodes, their keys, and the pages they refer to. Every node holds one reference to each page of its run."""

    def __init__(self, identity: bytes, pool: PagePool):
        self._identity = identity
        self._pool = pool
        self._roots: dict[str, Node] = {}
        self._by_key: dict[bytes, Node] = {}
        self._by_content: dict[bytes, dict[Node, None]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def root(self, tenant: str) -> Node:
        """The tenant's root, made if there is none."""
        if tenant not in self._roots:
            self._roots[tenant] = Node(tenant, np.zeros(0, np.int32), None, 0, 0)
        return self._roots[tenant]

    def drop_root(self, root: Node) -> None:
        """Forget a root that nothing hangs under and nothing pins, so that idle tenants cost nothing."""
        if root.is_leaf and not root.pins:
            del self._roots[root.tenant]

    def walk(self, root: Node, tokens: Tokens) -> list[tuple[Node, int]]:
        """The longest causal path that spells a prefix of `tokens`: nodes, and how much of each matches.

        Only the last node may match in part. O(path length) comparisons of runs.
        """
        steps: list[tuple[Node, int]] = []
        node, at = root, 0
        while at < len(tokens):
            child = node.causal.get(int(tokens[at]))
            if child is None:
                break
            common = _common_prefix(child.tokens, tokens[at:])
            steps.append((child, common))
            at += common
            if common < len(child):
                break
            node = child
        return steps

    def context(self, tokens: Tokens) -> bytes:
        """Digest of a causal context, 32 bytes."""
        return _path_digest(tokens).digest()

    def key(self, tenant: str, provenance: Provenance, method: str, context: bytes, tokens: Tokens) -> bytes:
        """A node's key, 32 bytes; every field is length-prefixed, so no two sets of fields share one."""
        fields = (tenant.encode(), provenance.encode(), method.encode(), context, tokens.tobytes())
        return _digest(b"node", self._identity, *fields)

    def content(self, tenant: str, tokens: Tokens) -> bytes:
        """Digest of what a node says, wherever it stands, 32 bytes; a tenant's own."""
        return _digest(b"content", tenant.encode(), tokens.tobytes())

    def find(self, key: bytes) -> Node | None:
        """The node with this key."""
        return self._by_key.get(key)

    def places(self, content: bytes) -> tuple[Node, ...]:
        """Every node that holds exactly this content, oldest first."""
        return tuple(self._by_content.get(content, ()))

    def extend(self, parent: Node, tokens: Tokens, run: Run, cuts: tuple[int, ...]) -> list[Node]:
        """Hang `tokens` as a chain of causal nodes below `parent`, cut at the ascending offsets `cuts`.

        No child of `parent` may start with the same token.
        """
        hasher = _path_digest(*_path_tokens(parent))
        chain: list[Node] = []
        for begin, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
            part = run.slice(begin, end, self._pool.page_size)
            node = Node(parent.tenant, _frozen(tokens[begin:end]), part, parent.end, parent.end, parent=parent)
            parent.causal[int(node.tokens[0])] = node
            self._insert(node, hasher.digest())
            hasher.update(node.tokens.tobytes())
            chain.append(node)
            parent = node
        return chain

    def attach(
        self, parent: Node, tokens: Tokens, run: Run, local_start: int, provenance: Provenance, method: str
    ) -> Node:
        """Hang a keyed node under the context it was computed on."""
        tokens = _frozen(tokens)
        node = Node(parent.tenant, tokens, run, parent.end, local_start, provenance, method, parent)
        self._insert(node, _path_digest(*_path_tokens(parent)).digest())
        parent.keyed[node.key] = node
        return node

    def _insert(self, node: Node, context: bytes) -> None:
        assert node.run is not None
        self._pool.retain(node.run)
        self._index(node, context)

    def split(self, node: Node, at: int) -> Node:
        """Cut a causal node before its token `at`, and return the new upper half.

        The node itself becomes the lower half: it keeps its children, and leases on it stay good, for they
        pin the whole path upward.
        """
        run = node.run
        if run is None or not 0 < at < len(node) or node.provenance is not Provenance.CAUSAL:
            raise ValueError(f"cannot split a {node.provenance} node of {len(node)} tokens at {at}")
        context = _path_digest(*_path_tokens(node.parent))
        self._unindex(node)
        upper = Node(node.tenant, _frozen(node.tokens[:at]), run.slice(0, at, self._pool.page_size), node.start,
                     node.local_start, parent=node.parent, pins=node.pins, last_use=node.last_use)  # fmt: skip
        assert node.parent is not None and upper.run is not None
        node.parent.causal[int(upper.tokens[0])] = upper
        node.parent = upper
        node.tokens = _frozen(node.tokens[at:])
        node.run = run.slice(at, run.length, self._pool.page_size)
        node.start += at
        node.local_start += at
        upper.causal[int(node.tokens[0])] = node
        self._replace_run(run, (upper.run, node.run), pinned=node.pins > 0)
        self._index(upper, context.digest())
        context.update(upper.tokens.tobytes())
        self._index(node, context.digest())
        return upper

    def _replace_run(self, old: Run, parts: tuple[Run, ...], pinned: bool) -> None:
        for part in parts:
            self._pool.retain(part)
            if pinned:
                self._pool.pin(part)
        if pinned:
            self._pool.unpin(old)
        self._pool.release(old)

    def remove(self, node: Node) -> Node:
        """Take an unpinned leaf out and give its pages back; returns its parent."""
        if node.pins or not node.is_leaf or node.parent is None or node.run is None:
            raise ValueError(f"node {_name(node)} is pinned, has children or is a root")
        parent, node.parent = node.parent, None
        if node.provenance is Provenance.CAUSAL:
            del parent.causal[int(node.tokens[0])]
        else:
            del parent.keyed[node.key]
        self._unindex(node)
        self._pool.release(node.run)
        return parent

    def pin(self, node: Node) -> None:
        """Keep a node and all its ancestors from leaving."""
        for step in node.path():
            step.pins += 1
            if step.pins == 1 and step.run is not None:
                self._pool.pin(step.run)

    def unpin(self, node: Node) -> None:
        """Undo one `pin`."""
        for step in node.path():
            step.pins -= 1
            if step.pins == 0 and step.run is not None:
                self._pool.unpin(step.run)

    def nodes(self) -> Iterator[Node]:
        """Every node and root, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children())

    def audit(self) -> None:
        """Check shape, keys and both indexes; O(tokens on all paths).

        Raises:
            AuditError: naming the first node that is wrong.
        """
        held = 0
        for node in self.nodes():
            self._audit_shape(node)
            if node.run is None:
                continue
            held += 1
            context = _path_digest(*_path_tokens(node.parent)).digest()
            if node.key != self.key(node.tenant, node.provenance, node.method, context, node.tokens):
                raise AuditError(f"node {_name(node)} does not have the key of its path")
            if self._by_key.get(node.key) is not node:
                raise AuditError(f"node {_name(node)} is not found by its key")
            if node.content != self.content(node.tenant, node.tokens) or node not in self.places(node.content):
                raise AuditError(f"node {_name(node)} is not found by its content")
        if held != len(self._by_key) or held != sum(map(len, self._by_content.values())):
            raise AuditError("an index holds a node that no root leads to")

    def _audit_shape(self, node: Node) -> None:
        if (node.run is None) != (node.parent is None) or (node.run is not None and node.run.length != len(node)):
            raise AuditError(f"node {_name(node)} of {len(node)} tokens has the run {node.run}")
        if node.parent is not None and node.start != node.parent.end:
            raise AuditError(f"node {_name(node)} starts at {node.start}, its parent ends at {node.parent.end}")
        if node.provenance is Provenance.CAUSAL and node.local_start != node.start:
            raise AuditError(f"causal node {_name(node)} is rotated from {node.local_start} on, not {node.start}")
        for child in node.children():
            if child.parent is not node or child.tenant != node.tenant or not len(child):
                raise AuditError(f"node {_name(child)} hangs under {_name(node)}, which is not its parent")
        for first, child in node.causal.items():
            if child.provenance is not Provenance.CAUSAL or int(child.tokens[0]) != first:
                raise AuditError(f"node {_name(child)} is on the wrong causal edge")
        for key, child in node.keyed.items():
            if child.provenance is Provenance.CAUSAL or child.key != key:
                raise AuditError(f"node {_name(child)} is on the wrong keyed edge")

    def _index(self, node: Node, context: bytes) -> None:
        node.key = self.key(node.tenant, node.provenance, node.method, context, node.tokens)
        node.content = self.content(node.tenant, node.tokens)
        self._by_key[node.key] = node
        self._by_content.setdefault(node.content, {})[node] = None

    def _unindex(self, node: Node) -> None:
        del self._by_key[node.key]
        places = self._by_content[node.content]
        del places[node]
        if not places:
            del self._by_content[node.content]


def _common_prefix(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def _frozen(tokens: Tokens) -> Tokens:
    """A copy of its own, so that a node never keeps a whole prompt alive nor changes under its key."""
    copy = np.array(tokens, np.int32)
    copy.setflags(write=False)
    return copy


def _path_tokens(node: Node | None) -> list[Tokens]:
    return [] if node is None else [step.tokens for step in node.path()][::-1]


def _path_digest(*tokens: Tokens) -> hashlib.blake2b:
    hasher = hashlib.blake2b(digest_size=32, person=b"context")
    for part in tokens:
        hasher.update(part.tobytes())
    return hasher


def _digest(person: bytes, *fields: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=32, person=person)
    for part in fields:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _name(node: Node) -> str:
    return node.key.hex()[:12] or f"root of {node.tenant!r}"
