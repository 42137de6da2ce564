"""Passages are found by content alone: the same wherever they stand."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import ConfigError, Message
from ragjax.prompting.recognition import LEAST, MOST, Cutter, brings_passages
from tests.support.stuffed import BAKERY, DOCUMENTS, HARBOUR, PROMPTS

CUTTER = Cutter()


def passages(text, cutter=CUTTER):
    return [part.text for part in cutter.parts(text, {cutter.last(text)}) if part.passage]


@pytest.mark.parametrize("shape", PROMPTS)
def test_every_order_has_the_same_passages(shape):
    for docs in itertools.permutations(DOCUMENTS):
        assert passages(PROMPTS[shape](docs)) == list(docs)


def test_separators_of_ones_own():
    text = " ;; ".join(DOCUMENTS) + " ;; Who?"
    assert passages(text) == []  # it is one piece, the last
    assert passages(text, Cutter((";;",))) == DOCUMENTS
    for separators in (("",), ("  ",)):
        with pytest.raises(ConfigError, match="separator"):
            Cutter(separators)
    with pytest.raises(ConfigError, match="at most half"):
        Cutter(least=9, most=17)


def test_short_pieces_and_spared_ones_are_no_passages():
    short = HARBOUR[: LEAST - 1].rstrip()
    assert passages(f"{short}\n\nWho?") == []
    assert [part.passage for part in CUTTER.parts(f"{HARBOUR}\n\n{BAKERY}", {HARBOUR.strip()})] == [False, True, False]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["a ", "\n", "\n\n", " \n", "---\n", "<p>", "[1] ", "1. ", "Context: ", "word. " * 40]))
)
def test_parts_spell_the_text_and_passages_are_whole(texts):
    text = "".join(texts)
    parts = CUTTER.parts(text)
    assert "".join(part.text for part in parts) == text
    for part in parts:
        if part.passage:
            assert part.text == part.text.strip() and LEAST <= len(part.text) <= MOST
    assert all(a.passage or b.passage for a, b in itertools.pairwise(parts))


def long_text(seed):
    choose = random.Random(seed)
    words = ["the", "of", "to", "in", "is", "it", "sea", "harbour", "ferry", "lamp", "ship", "keeper", "storm", "tide"]
    return " ".join(choose.choice(words) + choose.choice(["", "", "", "", "."]) for _ in range(5000))


def test_a_long_piece_is_cut_alike_behind_other_words():
    text = long_text(0)
    alone, behind = passages(text + "\n\nWho?"), passages("Quite another beginning. " * 9 + text + "\n\nWho?")
    assert len(alone) > 20 and all(LEAST <= len(passage) <= MOST for passage in (*alone, *behind))
    assert len(set(alone) - set(behind)) <= 2
    assert set(passages(long_text(1) + "\n\nWho?")).isdisjoint(alone)


def test_a_long_piece_without_spaces_or_ends_is_cut_too():
    for text in ("好" * 9000, "word " * 3000, "x" * 3 * MOST):
        parts = CUTTER.parts(text)
        assert "".join(part.text for part in parts) == text
        assert max(len(part.text) for part in parts) <= (MOST if " " in text or "好" in text else 3 * MOST)


def test_hostile_white_space_is_cut_in_linear_time():
    for text in (" " * 200_000, "\n" * 200_000, "\n " * 100_000, "<a" * 100_000, "[1] " * 50_000, "- " * 90_000):
        assert "".join(part.text for part in CUTTER.parts(text)) == text


def test_which_chats_bring_passages():
    stuffed = PROMPTS["stuff"](DOCUMENTS)
    assert brings_passages(CUTTER, (Message("user", stuffed),))
    assert brings_passages(CUTTER, (Message("user", stuffed), Message("assistant", "Ida."), Message("user", "When?")))
    assert brings_passages(CUTTER, (Message("user", "Who?"), Message("tool", f"{HARBOUR}\n\nEnd.")))
    assert not brings_passages(CUTTER, (Message("system", stuffed), Message("user", HARBOUR)))


@pytest.mark.parametrize("begin", ["context", "[1]", "<a>", "helpful ", "---", "context 1", "<a> <b>", "\n"])
def test_many_blanks_take_no_time_of_their_own(begin):
    """As patterns that try all ways to share out blanks would: hours for this."""
    text = begin + 300_000 * " " + "x"
    assert [part.text for part in CUTTER.parts(text, {text.strip()})] == [text]
    assert not brings_passages(CUTTER, [Message("user", text)])


@pytest.mark.slow
def test_many_short_pieces_are_one_text():
    """In one go: to append piece by piece copies all that stands before, minutes for this."""
    text = "a\n\n" * 500_000
    assert [part.text for part in CUTTER.parts(text)] == [text]
