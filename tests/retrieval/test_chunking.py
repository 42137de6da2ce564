"""Chunks: within the budget, losing nothing, their tokens exactly those of their text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ragjax.core import ConfigError, Document, Place, Tokens
from ragjax.retrieval.chunking import MIN_TOKENS, Chunker

PROSE = "The keeper climbed the stairs. He trimmed the wick, and wrote the weather down!\n\nThen he slept.\n" * 20


def _byte_pairs() -> Tokenizer:
    """A small byte-level tokenizer whose pieces merge across the places where texts are joined."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([PROSE, "\n\n\n  \n\n" * 50], trainer)
    return tokenizer


TOKENIZER = _byte_pairs()


def encode(text: str) -> Tokens:
    return np.array(TOKENIZER.encode(text).ids, np.int32)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def test_one_chunk_is_title_text_and_blank_line() -> None:
    (chunk,) = Chunker(encode).chunks(Document("d", "  He slept. ", "The keeper"))
    assert chunk.text == "The keeper\nHe slept.\n\n"
    assert (chunk.id, chunk.document_id, chunk.title) == ("d#0", "d", "The keeper")
    assert Chunker(encode).chunks(Document("d", "He slept."))[0].text == "He slept.\n\n"


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=400), title=st.text(max_size=60), budget=st.integers(MIN_TOKENS, 80))
def test_any_text_fits_and_is_kept(text: str, title: str, budget: int) -> None:
    chunks = Chunker(encode, budget).chunks(Document("d", text, title))
    assert all(len(chunk.tokens) <= budget for chunk in chunks)
    assert [chunk.tokens.tolist() for chunk in chunks] == [encode(chunk.text).tolist() for chunk in chunks]
    if not title.strip():
        assert _squeezed("".join(chunk.text for chunk in chunks)) == _squeezed(text)


@pytest.mark.parametrize("title", ["", "The log of the keeper"])
def test_sentences_stay_whole_where_they_fit(title: str) -> None:
    for chunk in Chunker(encode, 96).chunks(Document("d", PROSE, title)):
        assert chunk.text.removesuffix("\n\n")[-1] in ".!"


def test_pieces_are_of_like_size() -> None:
    """A text a little over the budget is halved, not cut into a full chunk and a scrap."""
    text = "He trimmed the wick. " * 25
    budget = len(encode(text)) - 10
    sizes = [len(chunk.tokens) for chunk in Chunker(encode, budget).chunks(Document("d", text))]
    assert len(sizes) == 2 and min(sizes) > 0.8 * max(sizes)


def test_long_title_leaves_room_for_text() -> None:
    document = Document("d", PROSE, "A very long title of the keeper's log " * 20)
    chunks = Chunker(encode, 60).chunks(document)
    heading = chunks[0].text.partition("\n")[0]
    assert len(encode(heading)) <= 20 and document.title.startswith(heading)
    assert all(chunk.title == document.title and len(chunk.tokens) <= 60 for chunk in chunks)


def test_title_stays_on_one_line() -> None:
    (chunk,) = Chunker(encode).chunks(Document("d", "text", "two\n\nlines"))
    assert chunk.text == "two lines\ntext\n\n"


@pytest.mark.parametrize("text", ["", " \n\t ", "\u3000\u00a0"])
def test_blank_text_has_no_chunks(text: str) -> None:
    assert Chunker(encode).chunks(Document("d", text, "title")) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["a" * 100_000, "word " * 60_000, "e" + "\u0301" * 2_000, "👩\u200d👩\u200d👧" * 300, "\n" * 100_000 + "x"],
    ids=["one word", "many words", "combining marks", "emoji", "blank lines"],
)
def test_huge_and_odd_texts(text: str) -> None:
    chunks = Chunker(encode).chunks(Document("d", text))
    assert all(len(chunk.tokens) <= 192 for chunk in chunks)
    assert _squeezed("".join(chunk.text for chunk in chunks)) == _squeezed(text)


def test_little_is_encoded_of_what_is_too_long() -> None:
    encoded: list[int] = []
    chunker = Chunker(lambda text: encoded.append(len(text)) or encode(text))
    assert chunker.exceeds("word " * 1_000_000, 4_000) and sum(encoded) <= 20_000
    assert not chunker.exceeds(PROSE, len(encode(PROSE))) and chunker.exceeds(PROSE, len(encode(PROSE)) - 1)
    assert not chunker.exceeds("", 0)
    encoded.clear()
    (chunk,) = chunker.chunks(Document("d", "text", "title " * 1_000_000))
    assert len(chunk.tokens) <= 192 and sum(encoded) < 1_000_000


def test_tiny_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"use at least {MIN_TOKENS}"):
        Chunker(encode, MIN_TOKENS - 1)


def test_a_chunk_has_the_page_and_heading_that_it_begins_in() -> None:
    pages = [" ".join(f"{page}é:{word}" for word in range(30)) + "\n\n" for page in range(1, 70)]
    pages[30] = "x" * 3000 + "\n\n"  # is cut between its characters
    begins = np.cumsum([0, *map(len, pages)])[1:-1].tolist()
    places = tuple(Place(begin, page, f"Part {page // 10}") for page, begin in enumerate(begins, 2))
    for more in ("", "word " * 3000):  # one that is cut into blocks first
        document = Document("d", "".join(pages) + more, "Log", places, "log.pdf")
        at, seen = 0, set()
        for chunk in Chunker(encode, 40).chunks(document):
            body = chunk.text.removeprefix("Log\n").removesuffix("\n\n")
            at = document.text.index(body, at)
            expected = max(
                (place for place in places if place.begin <= at), key=lambda place: place.begin, default=None
            )
            assert (chunk.page, chunk.heading) == ((expected.page, expected.heading) if expected else (None, None))
            assert chunk.filename == "log.pdf"
            at, seen = at + len(body), seen | {chunk.page}
        assert len(seen) > 60
