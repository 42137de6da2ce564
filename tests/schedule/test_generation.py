"""Text of generated tokens, with stop strings, against its naive definition."""

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import Chosen, Sampling
from ragjax.schedule.generation import AnswerText
from tests.support import tiny

EOS, PAD, VOCAB = 257, 258, 260
TOKENIZER = tiny.byte_tokenizer()


def generation(limit=10**6, eos=(EOS,), **sampling):
    return AnswerText(Sampling(**{"max_tokens": 10**6, **sampling}), TOKENIZER, eos, limit)


def push(made, token):
    """The delta that is out with a token, or None."""
    made.push(Chosen(token, -0.5, ((token, -0.5), (5, -1.0))))
    deltas = made.deltas()
    assert len(deltas) <= 1 and made.over == (made.finish_reason is not None)
    return deltas[0] if deltas else None


def feed(tokens, **options):
    """Push tokens until the generation ends; the generation and its deltas, None where there was none."""
    made = generation(**options)
    deltas = []
    for token in tokens:
        deltas.append(push(made, token))
        if made.finish_reason is not None:
            break
    return made, deltas


def texts(deltas):
    return [delta.text if delta else "" for delta in deltas]


# ------------------------------------------------------------------------------- log-probabilities


def test_as_many_alternatives_as_asked_for_are_reported():
    for most in range(3):
        (found,) = push(generation(logprobs=most), 65).logprobs
        assert (found.id, found.token, found.logprob) == (65, "A", -0.5)
        assert found.top == ((("A", 65, -0.5), (TOKENIZER.id_to_text(5), 5, -1.0))[:most])


def test_no_logprobs_unless_asked_for():
    made, deltas = feed(b"ab")
    assert made.logprobs == [] and all(delta.logprobs == () for delta in deltas)
    made, _ = feed(b"ab", logprobs=0)
    assert [(found.id, found.top) for found in made.logprobs] == [(97, ()), (98, ())]


# --------------------------------------------------------------------------------------- the end


def test_any_of_several_eos_tokens_ends():
    for token in (PAD, EOS):
        made, deltas = feed([97, token], eos=(EOS, PAD))
        assert (made.finish_reason, made.text, made.tokens, deltas[-1]) == ("stop", "a", [97], None)


@pytest.mark.parametrize(("max_tokens", "limit"), [(3, 100), (100, 3), (3, 3)])
def test_the_smaller_limit_ends_with_length(max_tokens, limit):
    made, _ = feed(b"abcdef", max_tokens=max_tokens, limit=limit)
    assert (made.finish_reason, made.text) == ("length", "abc")


# ---------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("data", "stops", "text", "deltas"),
    [
        (b"abXYcd", ("XY",), "ab", ["a", "b", "", ""]),  # across token boundaries
        (b"XYab", ("X",), "", [""]),  # the first token
        (b"XYab", ("XY",), "", ["", ""]),
        (b"abXcYd", ("Y", "X"), "ab", ["a", "b", ""]),  # several: the earliest
        (b"abcd", ("d", "bcd"), "a", ["a", "", "", ""]),  # two end together: the one that begins earlier
        (b"abcd", ("cd", "abcz"), "ab", ["", "", "", "ab"]),  # text held for another stop comes out
        (b"aab", ("ab",), "a", ["", "a", ""]),  # the overlap slides
        (b"ababac", ("abac",), "ab", ["", "", "", "ab", "", ""]),
        (b"aaab", ("aab",), "a", ["", "", "a", ""]),
        (b"axay", ("ay",), "ax", ["", "ax", "", ""]),  # held back, then shown to be no stop
    ],
)
def test_stop_strings(data, stops, text, deltas):
    made, found = feed(data, stop=stops, logprobs=0)
    assert (made.finish_reason, made.text) == ("stop", text) and made.stop in stops
    assert texts(found) == deltas
    assert [item.id for item in made.logprobs] == list(text.encode())
    assert len(made.tokens) == len(found), "the stop's tokens were generated, and count"


def test_a_stop_inside_one_token_cuts_its_text():
    """PAD, were it no control token, would be the seven bytes <|pad|> in one token."""
    definition_free = tiny.byte_tokenizer()
    definition_free._control = frozenset()
    made = AnswerText(Sampling(stop=("pad",), logprobs=0), definition_free, (EOS,), 100)
    push(made, 97)
    push(made, PAD)
    assert (made.text, made.finish_reason) == ("a<|", "stop")
    assert [found.id for found in made.logprobs] == [97, PAD], "a token that is in the answer in part is reported"


def test_each_token_says_where_its_text_begins():
    made, _ = feed([*"aé€".encode(), PAD, *b"b", EOS], logprobs=0)
    assert made.text == "aé€b"
    assert [found.begin for found in made.logprobs] == [0, 1, 1, 2, 2, 2, 3, 3]


def test_a_character_comes_out_whole_with_the_logprobs_of_its_tokens():
    _, deltas = feed("aé€😀".encode(), max_tokens=10, logprobs=0)
    assert texts(deltas) == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    found = [bytes(one.id for one in delta.logprobs) if delta else b"" for delta in deltas]
    assert [one.decode() for one in found] == texts(deltas)


# ------------------------------------------------------------------------------------- properties

ALPHABET = "abé€"
_bytes_of_alphabet = sorted(set(ALPHABET.encode()))
any_tokens = st.lists(st.sampled_from([*_bytes_of_alphabet, *_bytes_of_alphabet, 0xFF, PAD, EOS]), max_size=24)
stop_strings = st.lists(st.text(ALPHABET + "\ufffd", min_size=1, max_size=4), max_size=4).map(tuple)


def decoded(tokens, final):
    """Text of byte tokens all at once; without `final`, an unfinished character at the end is left out."""
    data = bytes(token for token in tokens if token < 256)
    return codecs.utf_8_decode(data, "replace", final)[0]


def first_stop(text, stops):
    return min((text.index(stop) for stop in stops if stop in text), default=None)


def naive(tokens, stops, limit):
    """(text, reason, tokens used): decode everything there is so far, and cut at the first stop in it."""
    for n in range(len(tokens) + 1):
        ended = "length" if n == limit else "stop" if n < len(tokens) and tokens[n] == EOS else None
        text = decoded(tokens[:n], final=ended is not None)
        cut = first_stop(text, stops)
        if cut is not None:
            return text[:cut], "stop", n
        if ended:
            return text, ended, n
    return None, None, len(tokens)


@settings(max_examples=400, deadline=None)
@given(any_tokens, stop_strings, st.integers(1, 24))
def test_text_is_the_naive_definition_s(tokens, stops, limit):
    text, reason, used = naive(tokens, stops, limit)
    made, deltas = feed(tokens, stop=stops, max_tokens=limit, logprobs=0)
    assert made.finish_reason == reason
    assert made.text == "".join(texts(deltas))
    assert tuple(made.logprobs) == tuple(found for delta in deltas if delta for found in delta.logprobs)
    assert made.tokens == tokens[:used]
    if reason is not None:
        assert made.text == text
    if reason == "length":
        assert [found.id for found in made.logprobs] == tokens[:used]


@settings(max_examples=100, deadline=None)
@given(any_tokens, stop_strings)
def test_as_much_text_is_out_as_no_later_token_can_take_back(tokens, stops):
    made = generation(stop=stops)
    for n, token in enumerate(tokens, 1):
        push(made, token)
        if made.finish_reason is not None:
            return
        text = decoded(tokens[:n], final=False)
        begins = [i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)]
        assert made.text == text[: min(begins, default=len(text))]


@settings(max_examples=100, deadline=None)
@given(st.text(ALPHABET, max_size=12), stop_strings, st.integers(1, 24), st.booleans())
def test_every_reported_token_is_in_the_answer(text, stops, limit, ends):
    tokens = [*text.encode(), *([EOS] if ends else [])]
    made, _ = feed(tokens, stop=stops, max_tokens=limit, logprobs=0)
    reported = [found.id for found in made.logprobs]
    if made.finish_reason is None:
        assert made.text.encode() == bytes(reported)
    elif made.text == decoded(made.tokens, final=True):
        assert reported == made.tokens
    else:  # cut at a stop
        assert made.text.encode() == bytes(reported)


@pytest.mark.parametrize("length", [1, 13, 32, 64])
def test_an_answer_without_a_limit_ends_when_it_goes_round_in_circles(length):
    before, passage = [*b"It is said that "], [(7 * i + i // 9) % 90 + 33 for i in range(length)]
    tokens = [*before, *passage * 1000]
    made, _ = feed(tokens, max_tokens=None)
    covered = max(256, 8 * length)
    assert made.finish_reason == "length" and made.round == length
    assert covered + len(before) <= len(made.tokens) < covered + len(before) + length + 32
    assert made.tokens == tokens[: len(made.tokens)] and made.text == bytes(made.tokens).decode()
    limited, _ = feed(tokens[:4000], max_tokens=5000)
    assert limited.finish_reason is None and limited.round == 0, "who asks for so many tokens gets them"


def test_rows_of_a_table_and_counted_numbers_are_no_circle():
    text = "".join(f"| item {i} | price {i % 7} | yes | no | no | no | no |\n" for i in range(300))
    made, _ = feed([*text.encode()], max_tokens=None)
    assert made.finish_reason is None and made.round == 0


@settings(max_examples=100, deadline=None)
@given(any_tokens, stop_strings, st.integers(1, 24), st.lists(st.booleans(), min_size=24, max_size=24))
def test_text_may_be_made_later(tokens, stops, limit, when):
    """Whoever computes tokens knows of the end at once; the text and its deltas are those made token by token."""
    whole, deltas = feed(tokens, stop=stops, max_tokens=limit, logprobs=0)
    made, found = generation(stop=stops, max_tokens=limit, logprobs=0), []
    for token, now in zip(tokens, when, strict=False):
        made.push(Chosen(token, -0.5, ((token, -0.5), (5, -1.0))))
        if now:
            found += made.deltas()
        if made.over:
            break
    found += made.deltas()
    assert found == [delta for delta in deltas if delta]
    assert (made.text, made.tokens, made.finish_reason) == (whole.text, whole.tokens, whole.finish_reason)
    assert made.over == (whole.finish_reason is not None)
