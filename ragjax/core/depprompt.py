"""Prompts with a structure: chains of text and trees of knowledge-graph paths (DepCache, doi 10.1145/3769778).

Algorithm 1 in two halves: relation paths are merged into a prefix tree of tokens, whose nodes in pre-order are segments
of the prompt (`merge`); who sees whom follows from what a segment depends on (`core.Visibility.dependency`). In a
`DepPrompt` (section 5) the context depends on the system, the task on the context, and any node may name others
instead. Positions are the paper's, `preorder`, or `path`: depth on the own path, so that the KV of a node can be reused
beside any siblings. The positions of a query segment are its indexes under both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Kind, Prompt, RequestError, Segment, Tokens, Visibility

Positions = Literal["path", "preorder"]
"""RoPE positions of a tree's tokens: their depth on their own path, or their index in the sequence."""


@dataclass(frozen=True)
class Branch:
    """Tokens of a prefix tree between two forks, int32 [n]; parent: index of the branch before it, None at a root."""

    tokens: Tokens
    parent: int | None


_Trie = dict[int, "_Trie"]
"""What follows each token."""


def merge(paths: Sequence[Tokens]) -> tuple[Branch, ...]:
    """The prefix tree of token runs, its branches in pre-order, siblings as they first came.

    A run that is the beginning of another adds nothing, nor does one that is there already.
    """
    top: _Trie = {}
    for path in paths:
        below = top
        for token in path.tolist():
            below = below.setdefault(token, {})
    branches: list[Branch] = []
    waiting: list[tuple[int, _Trie, int | None]] = [(token, below, None) for token, below in reversed(top.items())]
    while waiting:
        token, below, parent = waiting.pop()
        tokens = [token]
        while len(below) == 1:
            [(token, below)] = below.items()
            tokens.append(token)
        waiting += [(token, child, len(branches)) for token, child in reversed(below.items())]
        branches.append(Branch(np.array(tokens, np.int32), parent))
    return tuple(branches)


# ------------------------------------------------------------------------------------------ prompts


@dataclass(frozen=True)
class LinearNode:
    """Text as a chain of tokens, int32 [n]. depends: ids of earlier nodes (None: all of them)."""

    id: str
    tokens: Tokens
    depends: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TreeNode:
    """Paths from one root, each int32 [n], merged where they begin alike.

    depends: ids of earlier nodes (None: the linear nodes that the prompt begins with).
    """

    id: str
    paths: tuple[Tokens, ...]
    title: str = ""
    depends: tuple[str, ...] | None = None
    score: float | None = None
    public: bool = False


@dataclass(frozen=True)
class DepPrompt:
    """Nodes in the order they are read. Linear nodes before the first tree are the system, those after it the task."""

    nodes: tuple[LinearNode | TreeNode, ...]

    def prompt(self) -> Prompt:
        segments: list[Segment] = []
        places: dict[str, range] = {}
        for node in self.nodes:
            begin = len(segments)
            on = None if node.depends is None else _named(node, places)
            if isinstance(node, LinearNode):
                early = on is None and all(s.kind is Kind.SYSTEM for s in segments) and node is not self.nodes[-1]
                segments.append(Segment(node.id, Kind.SYSTEM if early else Kind.QUERY, node.tokens, depends=on))
            else:
                segments += branches(node, begin, on)
            if node.id in places or begin == len(segments):
                reason = "given twice" if node.id in places else "empty"
                raise RequestError(f"node {node.id!r} of the prompt is {reason}", param="rag.graph")
            places[node.id] = range(begin, len(segments))
        return Prompt(tuple(segments))


def _named(node: LinearNode | TreeNode, places: dict[str, range]) -> tuple[int, ...]:
    for name in node.depends or ():
        if name not in places:
            raise RequestError(
                f"node {node.id!r} depends on {name!r}, which does not come before it", param="rag.graph"
            )
    return tuple(i for name in node.depends or () for i in places[name])


def branches(node: TreeNode, begin: int, on: tuple[int, ...] | None = None) -> Iterator[Segment]:
    for branch in merge(node.paths):
        depends = on if branch.parent is None else (begin + branch.parent,)
        yield Segment(node.id, Kind.NODE, branch.tokens, node.title, node.score, node.public, depends=depends)


# ------------------------------------------------------------------------------------------ layout


@dataclass(frozen=True)
class Layout:
    """A prompt token by token, int32 [n] each: position, and the half-open interval of indexes it is hidden from."""

    token: Tokens
    position: Tokens
    hide_from: Tokens
    hide_until: Tokens

    def visible(self) -> NDArray[np.bool_]:
        index = np.arange(len(self.token))[:, None]
        return (index >= index.T) & ~((self.hide_from <= index) & (index < self.hide_until))


def layout(prompt: Prompt, positions: Positions) -> Layout:
    lengths = [len(segment) for segment in prompt.segments]
    hidden = np.array(Visibility.dependency(prompt).hidden, np.int32)
    hide_from, hide_until = (np.repeat(column, lengths) for column in hidden.T)
    begins = begins_of(prompt, positions)
    position = np.concatenate([np.arange(b, b + n, dtype=np.int32) for b, n in zip(begins, lengths, strict=True)])
    return Layout(prompt.tokens, position, hide_from, hide_until)


def paths_of(prompt: Prompt) -> dict[int, tuple[int, ...]]:
    """Each node's root path: indices of its ancestors in its tree and its own, by its index."""
    paths: dict[int, tuple[int, ...]] = {}
    for i, segment in enumerate(prompt.segments):
        if segment.kind is Kind.NODE:
            above = [paths[j] for j in segment.depends or () if j in paths]
            paths[i] = (*(above[0] if len(above) == 1 else ()), i)
    return paths


def begins_of(prompt: Prompt, positions: Positions) -> tuple[int, ...]:
    """RoPE position of each segment's first token. Under `path` a tree's branch follows what it depends on."""
    begins: list[int] = []
    for i, segment in enumerate(prompt.segments):
        if positions == "preorder" or segment.kind is not Kind.NODE:
            begins.append(prompt.starts[i])
        else:
            before = prompt.dependencies[i] if segment.depends is None else segment.depends
            begins.append(max((begins[j] + len(prompt.segments[j]) for j in before), default=0))
    return tuple(begins)
