"""From messages and retrieved chunks to a prompt of segments.

The chat template is rendered once and cut where the chunks go, at the start of each user message that was searched for:

    system = template up to the first user message | chunks | query = question, answer | chunks | query = question, …

so that the system segment, behind which isolated chunks are computed, is the same in every turn, and each turn begins
with all that the one before it read and answered. What users and documents write is encoded as plain text: it can never
become a control token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ragjax.core import Chunk, Hit, Kind, Message, Prompt, RequestError, Segment, Tokens, Tools, invalid
from ragjax.core.depprompt import TreeNode, branches
from ragjax.models.chat_template import CONTEXT, Pieces
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting.tools import for_template, told
from ragjax.retrieval.triples import Subgraph

INSTRUCTION = "Answer the question in one short sentence, using the passages."
"""System message of requests with knowledge that bring none of their own."""

GRAPH_INSTRUCTION = "Answer the question in one short sentence, using the facts."
"""The same of requests with facts of a knowledge graph."""


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    hits: Sequence[Hit] | None,
    *,
    earlier: Mapping[int, Sequence[Hit]] | None = None,
    public: bool = False,
    tools: Tools | None = None,
) -> Prompt:
    """The prompt of a chat; `hits` are the chunks in the order they are to stand in (None: no knowledge is used).

    earlier: chunks of earlier questions, by the index of the message, ascending. public: whether the KV of our own
    instruction may serve every tenant.
    """
    _check(messages, searched=hits is not None)
    if hits is None:
        pieces = _pieces(tokenizer, told(tokenizer, messages, tools), tools)
        return Prompt((Segment("question", Kind.QUERY, _joined(tokenizer.encode_pieces(pieces))),))
    before, behind = _frame(tokenizer, messages, INSTRUCTION, public, tools, earlier)
    return Prompt((*before, *map(chunk_segment, hits), *behind))


def graph_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    subgraphs: Sequence[Subgraph],
    *,
    trees: bool = True,
    public: bool = False,
    share: bool = False,
    tools: Tools | None = None,
) -> Prompt:
    """The prompt of a chat with facts, a line for each relation path (DepCache, section 2.1).

    trees: merge the paths of each entity into a tree of tokens; otherwise they stand one behind the other, as a chunk.
    share: whether the KV of the facts may serve every tenant.
    """
    _check(messages)
    before, behind = _frame(tokenizer, messages, GRAPH_INSTRUCTION, public, tools)
    found = list(before)
    for subgraph in subgraphs:
        lines = [f"{path.text}\n" for path in subgraph.paths]
        score = max((path.score for path in subgraph.paths), default=0.0)
        if trees:
            paths = tuple(tokenizer.encode(line, special=False, continued=True) for line in lines)
            tree = TreeNode(subgraph.entity, paths, subgraph.entity, score=score, public=share)
            found += branches(tree, len(found))
        elif lines:
            text = "".join(lines)
            tokens = tokenizer.encode(text, special=False, continued=True)
            chunk = Chunk(subgraph.entity, subgraph.entity, subgraph.entity, text, tokens)
            found.append(chunk_segment(Hit(chunk, score, share)))
    return Prompt((*found, *behind))


def _check(messages: Sequence[Message], searched: bool = True) -> None:
    """Raise RequestError for messages that there is no answer to; what the system says alone is answered, too.

    searched: there are passages, which stand before a question.
    """
    alone = bool(messages) and not searched and all(message.role == "system" for message in messages)
    if not messages or (messages[-1].role == "system" and not alone) or messages[-1].tool_calls:
        reason = "the last message must be the user's, a tool's, or a text of the assistant's that is continued"
        raise RequestError(reason, param="messages")
    if messages[-1].role == "assistant" and not messages[-1].content.strip():
        raise RequestError("the assistant's last message is empty: give a text to continue", param="messages")
    if alone and not messages[-1].content.strip():
        raise RequestError("the system's message is empty", param="messages")
    if not alone and not messages[_asked(messages)].content.strip():
        raise RequestError("the user's last message is empty", param="messages")
    said = (text for m in messages for text in (m.content, *(call.arguments for call in m.tool_calls)))
    if any(CONTEXT in text for text in said):
        raise RequestError("a message contains reserved private-use characters", param="messages")


def _pieces(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None) -> Pieces:
    """The rendered chat in pieces, up to where the answer begins: behind what the assistant has said of it, if any."""
    continued = messages[-1].role == "assistant"
    pieces = tokenizer.chat_pieces(messages, not continued, tools=for_template(tools))
    return pieces[: max(i for i, (_, is_template) in enumerate(pieces) if not is_template) + 1] if continued else pieces


def _asked(messages: Sequence[Message]) -> int:
    found = [i for i, message in enumerate(messages) if message.role == "user"]
    if not found:
        raise RequestError("no message is the user's", param="messages")
    return found[-1]


def _frame(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    instruction: str,
    public: bool,
    tools: Tools | None,
    earlier: Mapping[int, Sequence[Hit]] | None = None,
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    own = messages[0].role == "system"
    searched = {*(earlier or ()), _asked(messages)}
    framed = [
        replace(message, content=f"{CONTEXT}Question: {message.content.strip()}") if i in searched else message
        for i, message in enumerate(messages)
    ]
    said = told(tokenizer, framed if own else [Message("system", instruction), *framed], tools)
    pieces = _pieces(tokenizer, said, tools)
    *cuts, context = (i for i, piece in enumerate(pieces) if piece == (CONTEXT, False))
    system = _end_of_system(tokenizer, said, pieces, tools)
    runs = tokenizer.encode_pieces(pieces)  # in one go: each piece goes on from the one before it
    head = Segment("system", Kind.SYSTEM, _joined(runs[:system]), public=public and not own and tools is None)
    front, begin = [head], system
    for end, hits in zip((*cuts, context), (*(earlier or {}).values(), ()), strict=True):
        if len(history := _joined(runs[begin:end])):
            front.append(Segment("history", Kind.QUERY, history))
        front += map(chunk_segment, hits)
        begin = end + 1
    return tuple(front), (Segment("question", Kind.QUERY, _joined(runs[context + 1 :])),)


def chunk_segment(hit: Hit) -> Segment:
    chunk = hit.chunk
    return Segment(chunk.id, Kind.CHUNK, chunk.tokens, chunk.title, hit.score, hit.public, chunk.behind)


def text_prompt(tokenizer: Tokenizer, text: str | Sequence[int]) -> Prompt:
    """The prompt of a raw completion: one query segment. Token ids stand as they are; in front of a text comes BOS."""
    if isinstance(text, str):
        tokens = tokenizer.encode(text, special=False)
        if tokenizer.add_bos and tokenizer.bos_id is not None:
            tokens = np.concatenate([np.array([tokenizer.bos_id], np.int32), tokens])
    else:
        unknown = next((token for token in text if not tokenizer.has_token(token)), None)
        if unknown is not None:
            highest = f"its highest is {tokenizer.vocab_size - 1}"
            raise invalid("prompt", f"the model has no token {unknown}, which is in the prompt; {highest}")
        tokens = np.array(text, np.int32)
    if not len(tokens):
        raise RequestError("the prompt is empty", param="prompt")
    return Prompt((Segment("prompt", Kind.QUERY, tokens),))


def _end_of_system(tokenizer: Tokenizer, messages: Sequence[Message], pieces: Pieces, tools: Tools | None) -> int:
    """Number of pieces before what the first user says: those that the first turn began with."""
    first = next(i for i, message in enumerate(messages) if message.role == "user")
    opening = tokenizer.chat_pieces((*messages[:first], Message("user", CONTEXT)), tools=for_template(tools))
    opening = opening[: opening.index((CONTEXT, False))]
    return next((i for i, (a, b) in enumerate(zip(opening, pieces, strict=False)) if a != b), len(opening))


def _joined(runs: Sequence[Tokens]) -> Tokens:
    return np.concatenate([np.zeros(0, np.int32), *runs])
