"""Look-ups for requests that wait: the pieces they would find now, and the keys of the nodes they will use.

Nothing is pinned, loaded or counted.

A piece is KV that is kept as a unit: a segment of a causal prompt or of a dependency path, a chunk on its context. Its
name says what the KV depends on, however the tree is cut, so two requests that would compute the same name the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Protocol

from ragjax.cache.node import PUBLIC, Node, Provenance, Steps, context_digest, context_hasher, digest, radix_tag
from ragjax.cache.tree import KnowledgeTree


@dataclass(frozen=True)
class Look:
    """Pieces of a request that are kept on the device or in host memory, and those it would compute and keep.

    kept, missing: tokens by the name of their piece; a piece that is kept in part is in both.
    """

    kept: Mapping[bytes, int] = field(default_factory=dict)
    missing: Mapping[bytes, int] = field(default_factory=dict)

    @cached_property
    def found(self) -> int:
        return sum(self.kept.values())

    @classmethod
    def joined(cls, looks: Iterable[Look]) -> Look:
        """Several as one; what two of them name alike is one piece."""
        kept, missing = dict[bytes, int](), dict[bytes, int]()
        for look in looks:
            kept |= look.kept
            missing |= look.missing
        return cls(kept, missing)


class LookaheadPart(Protocol):
    """Pieces that one look-up finds, and keys of the nodes that it uses: of kept ones, then of those it would add."""

    def look(self, tree: KnowledgeTree) -> Look: ...

    def keys(self, tree: KnowledgeTree) -> Iterable[bytes]: ...


class Outlook:
    def __init__(self, parts: Iterable[LookaheadPart] = ()):
        self._parts = tuple(parts)
        self._seen: tuple[int, Look] = (-1, Look())

    def look(self, tree: KnowledgeTree) -> Look:
        if self._seen[0] != tree.generation:
            self._seen = tree.generation, Look.joined(part.look(tree) for part in self._parts)
        return self._seen[1]

    def keys(self, tree: KnowledgeTree) -> tuple[bytes, ...]:
        return tuple(dict.fromkeys(key for part in self._parts for key in part.keys(tree)))


class Causal:
    """A causal prompt, or its beginning. cuts: where pieces end. public: leading tokens that go to all tenants."""

    def __init__(self, raw: bytes, cuts: Sequence[int], tenant: str = PUBLIC, public: int = 0):
        self._raw, self._cuts, self._tenant, self._public = raw, cuts, tenant, public
        self._pieces = _Pieces(raw, cuts, tenant, public)

    def look(self, tree: KnowledgeTree) -> Look:
        return self._pieces.look(sum(used for _, used in tree.walk(self._raw, self._tenant)))

    def keys(self, tree: KnowledgeTree) -> list[bytes]:
        raw, steps = self._raw, tree.walk(self._raw, self._tenant)
        keys = [node.key for node, _ in steps]
        at = sum(used for _, used in steps)
        public = 0 if steps and steps[-1][0].tenant != PUBLIC else self._public
        hasher = context_hasher(raw[: 4 * at])
        for stop in stops((*self._cuts, public), at, len(raw) // 4):
            part = raw[4 * at : 4 * stop]
            owner = PUBLIC if stop <= public else self._tenant
            keys.append(tree.key(owner, Provenance.CAUSAL, "", hasher.digest(), part))
            hasher.update(part)
            at = stop
        return keys


class Keyed:
    """A chunk that is found by its keys alone. keys: the best first. name: of what is computed if none is kept."""

    def __init__(self, keys: Sequence[bytes], name: bytes, tokens: int):
        self._keys, self._name = tuple(keys), name
        self._have, self._lack = Look({name: tokens}), Look({}, {name: tokens})

    def look(self, tree: KnowledgeTree) -> Look:
        return self._have if any(tree.find(key) is not None for key in self._keys) else self._lack

    def keys(self, tree: KnowledgeTree) -> tuple[bytes, ...]:
        return (*self._keys[:1], self._name)


class Paths:
    """Dependency paths behind a causal context, each with the offsets at which its branches end."""

    def __init__(self, context: bytes, paths: Iterable[tuple[bytes, Sequence[int], int]], method: str, tenant: str):
        self._context = context
        self._method = method
        self._tenant = tenant
        self._paths, head = tuple(paths), context_digest(context)
        self._pieces = [_Pieces(raw, ends, tenant, public, method, head) for raw, ends, public in self._paths]

    def look(self, tree: KnowledgeTree) -> Look:
        _, walk = self._behind(tree)
        found = [sum(used for _, used in walk(raw)) for raw, *_ in self._paths]
        return Look.joined(pieces.look(at) for pieces, at in zip(self._pieces, found, strict=True))

    def keys(self, tree: KnowledgeTree) -> Iterator[bytes]:
        before = context_digest(self._context)
        end, walk = self._behind(tree)
        for raw, ends, public in self._paths:
            steps = walk(raw)
            yield from (node.key for node, _ in steps)
            at = sum(used for _, used in steps)
            shared = public if (steps[-1][0] if steps else end).tenant == PUBLIC else 0
            for stop in stops(ends, at, len(raw) // 4):
                on = context_digest(before, raw[: 4 * at]) if at else before
                owner = PUBLIC if stop <= shared else self._tenant
                yield tree.key(owner, Provenance.DEPENDENCY, self._method, on, raw[4 * at : 4 * stop])
                at = stop

    def _behind(self, tree: KnowledgeTree) -> tuple[Node, Callable[[bytes], Steps]]:
        top = tree.walk(self._context, self._tenant)
        end = top[-1][0] if top else tree.root
        # behind a node that goes on beyond the context are the paths of another one
        whole = sum(used for _, used in top) == len(self._context) // 4 and (not top or top[-1][1] == len(end))
        return end, lambda raw: tree.walk(raw, self._tenant, end, self._method) if whole else []


class _Pieces:
    """Names and lengths along one path of tokens. head: digest of what stands before the path."""

    def __init__(
        self, raw: bytes, cuts: Iterable[int], tenant: str, public: int, method: str | None = None, head: bytes = b""
    ):
        stops = sorted({cut for cut in (*cuts, len(raw) // 4) if cut > 0})
        hasher = context_hasher(head)
        self._pieces: list[tuple[bytes, int]] = []
        for begin, stop in pairwise((0, *stops)):
            hasher.update(raw[4 * begin : 4 * stop])
            tag = radix_tag(PUBLIC if stop <= public else tenant, method)
            self._pieces.append((digest(b"piece", tag, hasher.digest()), stop - begin))

    def look(self, at: int) -> Look:
        kept, missing = dict[bytes, int](), dict[bytes, int]()
        for name, tokens in self._pieces:
            if have := min(at, tokens):
                kept[name] = have
            if have < tokens:
                missing[name] = tokens - have
            at -= have
        return Look(kept, missing)


def stops(cuts: Iterable[int], at: int, end: int) -> list[int]:
    """Where the nodes of tokens [at, end) end that are cut at `cuts`, ascending; `end` is the last."""
    return sorted({cut for cut in (*cuts, end) if at < cut <= end})
