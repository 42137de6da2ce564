"""The work that one request asks for grows linearly with what it sends, in every loop over it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from ragjax.core import Chosen, Chunk, Document, Hit, Message, Sampling
from ragjax.core.depprompt import merge
from ragjax.prompting.chat import chat_prompt, graph_prompt
from ragjax.prompting.facts import ground
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.lexicon import Lexicon
from ragjax.retrieval.triples import RelationPath, maximal, subgraphs_of
from ragjax.schedule.generation import AnswerText
from ragjax.serve.schema.chat import ChatBody
from tests.support import tiny
from tests.support.growth import assert_linear, calls
from tests.support.serving import CHAT

TOKENIZER = tiny.byte_tokenizer()
USER = Message("user", "Who keeps the lighthouse?")
Work = Callable[[], object]


def encode(text: str) -> np.ndarray:
    return TOKENIZER.encode(text, special=False, continued=True)


CHUNKER = Chunker(encode)


def paths(size: int) -> list[RelationPath]:
    return [RelationPath(("A", f"r{i % 7}", f"B{i}", "r", f"C{i}")) for i in range(size)]


def messages(size: int) -> Work:
    said = [Message("user" if i % 2 == 0 else "assistant", f"word {i} ") for i in range(size)]
    hits = [Hit(Chunk("d#0", "d", "", "words", encode("words")), 1.0)]
    return lambda: chat_prompt(TOKENIZER, [*said, USER], hits)


def bodies(size: int) -> Work:
    rag = {"documents": [{"id": f"{i}", "text": "words"} for i in range(size)]}
    body = {**CHAT, "messages": CHAT["messages"] * size, "rag": rag}
    return lambda: ChatBody.model_validate(body).to_core()


def documents_in_number(size: int) -> Work:
    return lambda: [CHUNKER.chunks(Document(f"{i}", "some words", "Title")) for i in range(size)]


def maximal_paths(size: int) -> Work:
    given = paths(size)
    return lambda: subgraphs_of(maximal(given))


def paths_that_share_their_beginning(size: int) -> Work:
    runs = [np.array([1, 2, 3, i], np.int32) for i in range(size)]
    return lambda: merge(runs)


def words_of_a_question(size: int) -> Work:
    lexicon, name = Lexicon(), "the old keeper of the lighthouse"
    lexicon.add_entity(name)
    return lambda: lexicon.mentions("the old keeper of " * size, {name})


def length_of_a_stop_string(size: int) -> Work:
    """Each token is held against every beginning of it that the text could end with."""
    generation = AnswerText(Sampling(max_tokens=40, stop=("a" * size + "b",)), TOKENIZER, (), 40)
    return lambda: [generation.push(Chosen(ord("a"))) for _ in range(20)]


@pytest.mark.parametrize(
    ("work", "size"),
    [
        (messages, 50),
        (bodies, 50),
        (documents_in_number, 20),
        (maximal_paths, 50),
        (paths_that_share_their_beginning, 50),
        (words_of_a_question, 20),
        (length_of_a_stop_string, 20),
    ],
)
def test_work_grows_with_what_is_sent(work: Callable[[int], Work], size: int) -> None:
    assert_linear(lambda size: calls(work(size)), size)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["Some words of a sentence. ", "x", "\n\n", "word\n"], ids=repr)
def test_length_of_a_document(text: str) -> None:
    def cost(size: int) -> int:
        return calls(lambda: CHUNKER.chunks(Document("d", text * (size // len(text)), "Title")))

    assert_linear(cost, 20_000, slack=1.5)


def test_a_text_is_read_no_further_than_its_limit() -> None:
    once, four = (calls(lambda n=n: CHUNKER.exceeds("some words " * n, 1000)) for n in (10_000, 40_000))
    assert once == four


@pytest.mark.parametrize("trees", [True, False])
def test_relation_paths(trees: bool) -> None:
    """All are encoded to see how many fit, which is then sought by halving."""

    def cost(size: int) -> int:
        found = subgraphs_of(maximal(paths(size)))
        return calls(lambda: ground(found, lambda kept: graph_prompt(TOKENIZER, [USER], kept, trees=trees), 700))

    assert_linear(cost, 50, slack=1.5)


def test_the_meter_sees_a_loop_that_is_quadratic() -> None:
    def cost(size: int) -> int:
        names = [str(i) for i in range(size)]
        return calls(lambda: [names.index(name) for name in names for _ in map(str, names)])

    with pytest.raises(AssertionError, match="operations"):
        assert_linear(cost, 20)
    assert sys.getprofile() is None
