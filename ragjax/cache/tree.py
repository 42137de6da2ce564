"""The knowledge tree (RAGCache, section 5.1; DepCache, section 4.2.1) as a compressed radix tree of token runs.

Radix edges: a child continues its parent's tokens and is found by its first token; nodes split at any token, and merge
again where a path no longer branches. Causal edges are one kind, the edges of each dependency method another. Keyed
edges: a node whose KV was computed under some other mask (isolated) or on approximate context is found by its key
alone. Below a tenant's node there are only nodes of the same tenant; the public corpus is the tenant "".

A node's key is a digest of everything its KV depends on. Its context part covers the tokens before it and not how they
are cut into nodes, so splitting an ancestor changes no key below.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator

from ragjax.cache.node import PUBLIC as PUBLIC
from ragjax.cache.node import RADIX, Steps, context_of, digest, edge_of, radix_tag
from ragjax.cache.node import Node as Node
from ragjax.cache.node import Provenance as Provenance
from ragjax.cache.node import common_prefix as common_prefix
from ragjax.cache.pool import PagePool
from ragjax.cache.stretches import Stretches
from ragjax.core import Run
from ragjax.core.tiers import Copy, Tier

WALKS = 16
"""Walks that are remembered: a prompt's policy, queue and match ask for the same one."""


class KnowledgeTree:
    """Nodes, their keys, and the pages they refer to. A node on the device holds one reference to each page of its run.

    `identity` covers all that KV depends on besides tokens and context. `held` counts tokens on the device and in host
    memory, by tenant; `pages` the nodes that touch each page of the device, by tenant: two halves of a node share one.
    `generation` changes whenever a node comes or goes.
    """

    def __init__(self, identity: bytes, pool: PagePool):
        self._identity = identity
        self._pool = pool
        self.root = Node(PUBLIC, b"", None, 0)
        self.held: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self.pages: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.generation = 0
        self.stretches = Stretches()
        self._walks: dict[tuple[bytes, str, Node, str | None], Steps] = {}  # of the tree's present shape
        self._by_key: dict[bytes, Node] = {}
        self._by_content: dict[Hashable, Node | dict[Node, None]] = {}  # one node, or several in order of arrival

    def __len__(self) -> int:
        return len(self._by_key)

    def key(
        self, tenant: str, provenance: Provenance, method: str, context: bytes, raw: bytes, behind: bytes = b""
    ) -> bytes:
        """A node's key, 32 bytes; every field is length-prefixed, so no two sets of fields share one."""
        fields = (tenant.encode(), provenance.encode(), method.encode(), context, behind, raw)
        return digest(b"node", self._identity, *fields)

    def place(self, tenant: str, context: bytes, method: str | None = None) -> bytes:
        """Digest under which KV that continues `context` is looked for on disk; a tenant's own, 32 bytes."""
        return digest(b"place", self._identity, radix_tag(tenant, method), context)

    def chunk_place(self, tenant: str, method: str, context: bytes, raw: bytes) -> bytes:
        """Digest under which approximate KV is looked for on disk, whatever else it was computed behind; 32 bytes."""
        return digest(b"chunk", self._identity, tenant.encode(), method.encode(), context, raw)

    def content(self, tenant: str, raw: bytes) -> Hashable:
        """Key of a tenant's tokens, wherever they stand. Public tokens are their own key, without a copy."""
        return raw if tenant == PUBLIC else (tenant, raw)

    def walk(self, raw: bytes, tenant: str = PUBLIC, start: Node | None = None, method: str | None = None) -> Steps:
        """The longest path below `start` (the root) that spells a prefix of the tokens: nodes, and how many of each.

        It takes causal edges, or those of a dependency method, to nodes of the tenant or of the public corpus. Only
        the last node may match in part. O(path length) comparisons of runs.
        """
        asked = (raw, tenant, start or self.root, method)
        steps = self._walks.get(asked)
        if steps is None:
            while len(self._walks) >= WALKS:
                del self._walks[next(iter(self._walks))]
            steps = self._walks[asked] = _walked(*asked)
        return list(steps)

    def find(self, key: bytes) -> Node | None:
        return self._by_key.get(key)

    def places(self, tenant: str, raw: bytes) -> tuple[Node, ...]:
        found = self._by_content.get(self.content(tenant, raw))
        if found is None:
            return ()
        return tuple(found) if isinstance(found, dict) else (found,)

    def nodes(self) -> Iterator[Node]:
        nodes = self.root.subtree()
        next(nodes)
        return nodes

    def attach(self, node: Node, context: bytes, run: Run | None) -> Node:
        """Hang a new node under its parent; `context` is the parent's (`context_of`). It takes references to `run`.

        No radix child of the parent may start with the same token (of the same tenant and method).
        """
        assert node.parent is not None
        self._walks.clear()
        node.key = self.key(node.tenant, node.provenance, node.method, context, node.raw, node.behind)
        if node.parent.edges is None:
            node.parent.edges = {}
        node.parent.edges[edge_of(node)] = node
        self._index(node)
        self.generation += 1
        if run is not None:
            self.land(node, run)
        return node

    def land(self, node: Node, run: Run) -> None:
        assert node.run is None and node.parent is not None
        self._retain(node, run)
        node.run = run
        node.parent.on_device += 1
        self.held[Tier.DEVICE][node.tenant] += len(node)
        if node.pins:
            self._pool.pin(run)

    def lift(self, node: Node) -> None:
        assert node.run is not None and node.parent is not None
        if node.pins:
            self._pool.unpin(node.run)
        self._release(node, node.run)
        node.run = None
        node.parent.on_device -= not node.dead  # `detach` took it off the count
        self.held[Tier.DEVICE][node.tenant] -= len(node)

    def store(self, node: Node, copy: Copy | None) -> None:
        assert node.parent is not None
        change = (copy is not None) - (node.host is not None)
        node.parent.on_host += change if not node.dead else 0
        self.held[Tier.HOST][node.tenant] += change * len(node)
        node.host = copy

    def split(self, node: Node, at: int) -> Node:
        """Cut a radix node before its token `at`, and return the new upper half.

        The node itself becomes the lower half: matches on it stay good, for they pin the whole path upward.
        """
        if node.provenance not in RADIX or not 0 < at < len(node):
            raise ValueError(f"cannot split a {node.provenance} node of {len(node)} tokens at {at}")
        parent, page_size = node.parent, self._pool.page_size
        assert parent is not None and parent.edges is not None
        self._walks.clear()
        self._unindex(node)
        upper = Node(node.tenant, node.raw[: 4 * at], parent, node.local_start, node.provenance, node.method,
                     behind=node.behind, meta=node.meta, lossy=node.lossy)  # fmt: skip
        upper.pins, upper.loading, upper.hits, upper.note = node.pins, node.loading, node.hits, node.note
        upper.shelved = node.shelved = False  # the entry on disk has neither's key: it would age, and leave, unseen
        parent.edges[edge_of(upper)] = upper
        node.parent, node.raw = upper, node.raw[4 * at :]
        node.start += at
        node.local_start += at
        upper.edges = {edge_of(node): node}
        if (run := node.run) is not None:
            upper.run, node.run = run.slice(0, at, page_size), run.slice(at, run.length, page_size)
            upper.on_device = 1
            for part in (upper.run, node.run):
                self._retain(node, part)
                if node.pins:
                    self._pool.pin(part)
            if node.pins:
                self._pool.unpin(run)
            self._release(node, run)
        if node.host is not None:
            upper.host, node.host = node.host.slice(0, at), node.host.slice(at, node.host.length)
            upper.on_host = 1
        upper.key, node.key = self.key_of(upper), self.key_of(node)
        self._index(upper)
        self._index(node)
        return upper

    def _retain(self, node: Node, run: Run) -> None:
        self._pool.retain(run)
        self.pages[node.tenant].update(run.pages)

    def _release(self, node: Node, run: Run) -> None:
        self._pool.release(run)
        pages = self.pages[node.tenant]
        for page in run.pages:
            pages[page] -= 1
            if not pages[page]:
                del pages[page]

    def merge(self, lower: Node) -> bool:
        """Undo a split: the node takes in its parent, if neither branches, is in use, or lies elsewhere.

        DepCache compresses non-branching paths so (section 4.2.1); pages and host entries must follow each other.
        """
        upper = lower.parent
        if upper is None or upper.parent is None or len(upper.edges or ()) != 1 or not _alike(upper, lower):
            return False
        run, host = None, None
        if upper.run is not None and lower.run is not None:
            run = join_runs(upper.run, lower.run, self._pool.page_size)
            if run is None:
                return False
        if (a := upper.host) is not None and (b := lower.host) is not None:
            if a.entry != b.entry or a.begin + a.length != b.begin:
                return False
            host = Copy(a.entry, a.begin, a.length + b.length)
        self._walks.clear()
        self._unindex(upper)
        self._unindex(lower)
        parent = upper.parent
        assert parent.edges is not None
        if run is not None and upper.run is not None and lower.run is not None:
            self._retain(lower, run)
            self._release(upper, upper.run)
            self._release(lower, lower.run)
        lower.run, lower.host, lower.parent = run, host, parent
        lower.raw = upper.raw + lower.raw
        lower.start, lower.local_start = upper.start, upper.local_start
        lower.lossy, lower.shelved = lower.lossy or upper.lossy, False
        lower.key = self.key_of(lower)
        parent.edges[edge_of(lower)] = lower
        self._index(lower)
        upper.dead = True
        return True

    def detach(self, node: Node) -> Node:
        """Take a node with all that is below it out of the tree, where no look-up finds them; returns its parent.

        Runs, pins and copies are left as they are: the caller gives them back, at once or when nobody reads them.
        """
        parent = node.parent
        assert parent is not None and parent.edges is not None
        del parent.edges[edge_of(node)]
        self.generation += 1
        self._walks.clear()
        if not parent.edges:
            parent.edges = None
        parent.on_device -= node.run is not None
        parent.on_host -= node.host is not None
        for below in node.subtree():
            self._unindex(below)
            below.dead = True
        return parent

    def pin(self, node: Node) -> None:
        for step in node.path():
            step.pins += 1
            if step.pins == 1 and step.run is not None:
                self._pool.pin(step.run)

    def unpin(self, node: Node) -> None:
        for step in node.path():
            step.pins -= 1
            if step.pins == 0 and step.run is not None:
                self._pool.unpin(step.run)

    def _index(self, node: Node) -> None:
        self._by_key[node.key] = node
        self.stretches.keep(node)
        content = self.content(node.tenant, node.raw)
        found = self._by_content.setdefault(content, node)
        if isinstance(found, dict):
            found[node] = None
        elif found is not node:
            self._by_content[content] = {found: None, node: None}

    def _unindex(self, node: Node) -> None:
        del self._by_key[node.key]
        self.stretches.drop(node)
        content = self.content(node.tenant, node.raw)
        found = self._by_content[content]
        if not isinstance(found, dict):
            del self._by_content[content]
            return
        del found[node]
        if len(found) == 1:
            self._by_content[content] = next(iter(found))

    def key_of(self, node: Node) -> bytes:
        return self.key(node.tenant, node.provenance, node.method, context_of(node.parent), node.raw, node.behind)


def join_runs(first: Run, second: Run, page_size: int) -> Run | None:
    """The two runs as one, if the second begins in the slot (or at the top of a page) after the first."""
    slot = (first.start + first.length) % page_size
    if second.start != slot or (slot and first.pages[-1] != second.pages[0]):
        return None
    return Run(first.pages + second.pages[bool(slot) :], first.start, first.length + second.length)


def _walked(raw: bytes, tenant: str, top: Node, method: str | None) -> Steps:
    public = _follow(top, raw, 0, radix_tag(PUBLIC, method)) if top.tenant == PUBLIC else []
    if tenant == PUBLIC:
        return public
    # The tenant's own nodes hang below public ones in any number of places: the longest path wins, and of equals
    # that which turns off first, so that what was found once is found as long as it is kept.
    tag = radix_tag(tenant, method)
    best = _follow(top, raw, 0, tag)
    longest, at = sum(used for _, used in best), 0
    for i, (node, used) in enumerate(public):
        at += used
        own = _follow(node, raw, 4 * at, tag) if used == len(node) else []
        length = at + sum(used for _, used in own)
        if length > longest:
            best, longest = [*public[: i + 1], *own], length
    return best


def _follow(node: Node, raw: bytes, at: int, tag: bytes) -> Steps:
    steps: Steps = []
    while at < len(raw) and node.edges and (child := node.edges.get(raw[at : at + 4] + tag)) is not None:
        if not raw.startswith(child.raw, at):
            steps.append((child, common_prefix(child.raw, raw[at : at + len(child.raw)])))
            break
        steps.append((child, len(child)))
        at += len(child.raw)
        node = child
    return steps


def _alike(upper: Node, lower: Node) -> bool:
    same = ("tenant", "provenance", "method", "behind", "meta")
    return (
        upper.provenance in RADIX
        and all(getattr(upper, field) == getattr(lower, field) for field in same)
        and not (upper.pins or lower.pins or upper.loading or lower.loading)
        and (upper.run is None) == (lower.run is None)
        and (upper.host is None) == (lower.host is None)
        and lower.local_start == upper.local_start + len(upper)
    )
