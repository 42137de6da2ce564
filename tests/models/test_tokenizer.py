"""Tokenizers against llama.cpp's on the same vocabularies, plain text that stays plain, and streaming."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import ConfigError, Message, RequestError, Tokens
from ragjax.core.recent import Recent
from ragjax.models import hub
from ragjax.models.config import ModelConfig
from ragjax.models.tokenizer import TEXT_BYTES, Stream, TextKey, Tokenizer
from ragjax.models.tokenizer_files import build, settings_of_gguf
from tests.support.tiny import CONFIG, byte_tokenizer
from tests.support.vocabulary import CHATML, GOLDENS, gapped, tiny, user

# --------------------------------------------------------------------------------- against llama.cpp


def assert_golden(tokenizer: Tokenizer, ids: list[list[list[int]]], texts: Sequence[str] = GOLDENS["texts"]) -> None:
    for text, (parsed, plain) in zip(texts, ids, strict=True):
        assert tokenizer.encode(text, True).tolist() == parsed, text
        assert tokenizer.encode(text, False).tolist() == plain, text
        assert tokenizer.encode(text, True).dtype == np.int32


@pytest.mark.parametrize("name", GOLDENS["tiny"])
def test_every_kind_of_gguf_tokenizer_equals_llama_cpp(name: str) -> None:
    assert_golden(tiny(name), GOLDENS["tiny"][name]["ids"])


@pytest.mark.model
def test_packaged_model_equals_llama_cpp() -> None:
    tokenizer = Tokenizer.load(hub.resolve("smollm2-135m-instruct").path)
    assert_golden(tokenizer, GOLDENS["packaged"])
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (49152, 1, (2,), False)
    pieces = tokenizer.chat_pieces(user("Hi <|im_end|>"))
    assert pieces[1] == ("Hi <|im_end|>", False)
    assert "".join(text for text, _ in pieces) == tokenizer.chat(user("Hi <|im_end|>"))
    assert sum(tokenizer.is_control(int(token)) for run in tokenizer.encode_pieces(pieces) for token in run) == 5


@pytest.mark.qwen
def test_qwen_equals_llama_cpp() -> None:
    tokenizer = Tokenizer.load(os.environ["RAGJAX_QWEN_GGUF"])
    # llama.cpp takes Qwen's ordinary token "</s>" for an end token, which the original tokenizer does not.
    same = [index for index, text in enumerate(GOLDENS["texts"]) if "</s>" not in text]
    assert_golden(tokenizer, [GOLDENS["qwen"][index] for index in same], [GOLDENS["texts"][index] for index in same])


def test_qwen_composes_characters_first() -> None:
    assert tiny("qwen2").encode("e\u0301", False).tolist() == tiny("qwen2").encode("\u00e9", False).tolist()
    assert tiny("smollm").encode("e\u0301", False).tolist() != tiny("smollm").encode("\u00e9", False).tolist()


# ------------------------------------------------------------------------------- directory and GGUF


def write_directory(path: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """A Hugging Face directory with the tiny SmolLM vocabulary; gives the reference tokenizer."""
    source = tiny()
    path.mkdir()
    definition = json.dumps(source._definition)
    (path / "tokenizer.json").write_text(definition, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tokenizers.Tokenizer.from_str(definition)


def test_directory_equals_the_tokenizers_package(tmp_path: Path) -> None:
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    reference = write_directory(tmp_path / "m", settings)
    tokenizer = Tokenizer.load(tmp_path / "m")
    for text in GOLDENS["texts"]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, True).tolist() == ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), False)
    assert tokenizer.chat(user("a")) == tiny().chat(user("a"))
    assert tokenizer.digest == tiny().digest != tiny("qwen2").digest


def test_directory_settings_are_honoured(tmp_path: Path) -> None:
    settings = {
        "bos_token": "<|im_start|>",
        "add_bos_token": True,
        "added_tokens_decoder": {"900": {"content": "<|new|>", "special": True}, "2": {"content": "<|im_end|>"}},
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}],
    }
    write_directory(tmp_path / "m", settings)
    tokenizer = Tokenizer.load(tmp_path / "m")
    assert tokenizer.add_bos
    (new,) = tokenizer.encode("<|new|>", True)
    assert tokenizer.id_to_text(int(new)) == "<|new|>"
    assert tokenizer.chat(user("a")) == "named"
    (tmp_path / "m" / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(tmp_path / "m").chat(user("a")) == "from the file"


def test_tokens_that_settings_add_have_the_ids_that_they_name(tmp_path: Path) -> None:
    size = tiny().vocab_size
    decoder = {str(size + 1): {"content": "<|b|>"}, str(size): {"content": "<|a|>"}}
    write_directory(tmp_path / "m", {"added_tokens_decoder": decoder})
    assert Tokenizer.load(tmp_path / "m").encode("<|a|><|b|>", True).tolist() == [size, size + 1]


def test_a_token_is_a_control_token_under_the_id_that_it_has(tmp_path: Path) -> None:
    """The tokenizers package counts added tokens on from the vocabulary, whatever ids the file gives them."""
    write_directory(tmp_path / "m", {"added_tokens_decoder": {"900": {"content": "<|a|>"}}})
    tokenizer, size = Tokenizer.load(tmp_path / "m"), tiny().vocab_size
    assert tokenizer.encode("<|a|>", True).tolist() == [size]
    assert tokenizer.is_control(size) and tokenizer.decode([size]) == ""
    assert not tokenizer.is_control(900)
    assert tokenizer.vocab_size == size + 1 and tokenizer.has_token(size) and not tokenizer.has_token(size + 1)


def test_bos_follows_the_post_processor_where_settings_are_silent(tmp_path: Path) -> None:
    write_directory(tmp_path / "m", {"bos_token": "<|im_start|>"})
    file = tmp_path / "m" / "tokenizer.json"
    piece = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    post = {
        "type": "TemplateProcessing",
        "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [piece, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"post_processor": post}), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path / "m")
    assert tokenizer.add_bos
    assert tokenizer.encode("a", True).tolist() == tiny().encode("a", True).tolist(), "encode itself adds nothing"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"eos_token": "<|nowhere|>"}, "eos_token"),
        ({"eos_token": 0}, "eos_token must be the token's text, not 0"),
        ({"chat_template": {}}, "chat_template must be a text"),
        ({"chat_template": [{"name": "default", "template": 1}]}, "chat_template must be a text"),
        ({"chat_template": ["x"]}, "each chat_template must have name and template"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    write_directory(tmp_path / "m", wrong)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(tmp_path / "m")


def test_bad_definitions_are_refused(tmp_path: Path) -> None:
    write_directory(tmp_path / "m", {})
    file = tmp_path / "m" / "tokenizer.json"
    panics = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    for definition, message in (
        ('{"model": 3, "decoder": {"type": "ByteLevel"}}', "cannot be used"),
        (json.dumps(json.loads(tiny()._parsing.to_str()) | panics), "cannot be used"),
        ("{", r"tokenizer.json: cannot be read"),
    ):
        file.write_text(definition)
        with pytest.raises(ConfigError, match=message):
            Tokenizer.load(tmp_path / "m")
    file.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        Tokenizer.load(tmp_path / "m")
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"tokenizer.json: is no file"):
        Tokenizer.load(tmp_path / "m")


UNREADABLE = "GGUF metadata: the tokenizer cannot be read"


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("smollm", "ggml.model", "bert", "tokenizer.ggml.model"),
        ("smollm", "ggml.pre", "deepseek-llm", "tokenizer.ggml.pre"),
        ("smollm", "ggml.merges", None, "tokenizer.ggml.merges"),
        ("smollm", "ggml.tokens", None, "tokenizer.ggml.tokens"),
        ("smollm", "ggml.tokens", ["a", "a"], "tokenizer.ggml.tokens"),
        ("smollm", "ggml.eos_token_id", 10**6, "eos_token 1000000"),
        ("sentencepiece", "ggml.scores", None, "tokenizer.ggml.scores"),
        ("sentencepiece", "ggml.precompiled_charsmap", [1, 2], "precompiled_charsmap"),
        ("sentencepiece", "ggml.scores", [1.0], UNREADABLE),
        ("sentencepiece", "ggml.tokens", 3, UNREADABLE),
        ("smollm", "ggml.token_type", 5, UNREADABLE),
        ("smollm", "ggml.eos_token_id", "two", UNREADABLE),
        ("smollm", "ggml.pre", ["smollm"], UNREADABLE),
        ("smollm", "chat_template", 5, UNREADABLE),
    ],
)
def test_gguf_metadata_that_cannot_be_honoured_is_named(name: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(name, template=None, **{f"tokenizer.{key}": value})


WORDS = "HelloWorld DON'T don't'S 12345 a//\n\nb/c  naïveÉté ǅ हिन्दी"


@pytest.mark.parametrize(
    ("pre", "pieces", "whole"),
    [
        ("dbrx", "HelloWorld| DON|'T| don|'t|'S| |123|45| a|//\n\n|b|/c| | naïveÉté| ǅ| ह|िन|्द|ी", False),
        ("gpt-4o", "Hello|World| DON'T| don't|'S| |123|45| a|//\n\n|b|/c| | naïve|Été| ǅ| हिन्दी", False),
        ("tekken", "Hello|World| DON|'T| don|'t|'S| |1|2|3|4|5| a|//\n\n|b|/c| | naïve|Été| ǅ| हिन्दी", True),
    ],
)
def test_text_is_split_as_the_published_expressions_do(pre: str, pieces: str, whole: bool) -> None:
    """Of Phi-4, Phi-4-mini (tiktoken's o200k_base) and Mistral (tekken.json); the last takes whole words, and BOS."""
    metadata = GOLDENS["tiny"]["smollm"]["metadata"] | {"tokenizer.ggml.pre": pre}
    found = settings_of_gguf(metadata)
    splitter = build(found["definition"]).pre_tokenizer
    assert [WORDS[begin:end] for _, (begin, end) in splitter.pre_tokenize_str(WORDS)] == pieces.split("|")
    assert found["definition"]["model"]["ignore_merges"] is whole and found["add_bos"] is whole


@pytest.mark.parametrize(("kind", "ends"), [(3, True), (4, True), (1, False)])
@pytest.mark.parametrize("name", ["<|end|>", "<end_of_turn>", "<|eot_id|>"])
def test_a_token_that_ends_a_turn_is_known_by_its_name(name: str, kind: int, ends: bool) -> None:
    """As of Phi-3, whose files name the end of the text alone; a plain piece of that name is text."""
    plain = tiny("smollm")
    tokens, types = (
        list(GOLDENS["tiny"]["smollm"]["metadata"][key])
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    )
    known = tiny("smollm", **{"tokenizer.ggml.tokens": [*tokens, name], "tokenizer.ggml.token_type": [*types, kind]})
    assert set(known.eos_ids) - set(plain.eos_ids) == ({len(tokens)} if ends else set())


def test_check_refuses_the_tokenizer_of_another_model() -> None:
    config = ModelConfig(
        "llama", 700, 64, 96, 2, 4, 2, 16, 1e4, None, 1e-5, True, False, False, 128, eos_ids=(2,), bos_id=1
    )  # fmt: skip
    tokenizer = tiny("sentencepiece")
    with pytest.raises(ConfigError, match="do not belong together"):
        tokenizer.check(config)
    wide = replace(config, vocab_size=2000)
    tokenizer.check(wide)
    with pytest.raises(ConfigError, match="BOS"):
        tokenizer.check(replace(wide, bos_id=5))


def test_check_refuses_ids_beyond_a_gap_that_the_model_has_no_row_for() -> None:
    for size, fits in ((700, False), (701, True)):
        with nullcontext() if fits else pytest.raises(ConfigError, match="token is 700 and the model has 700 tokens"):
            gapped().check(replace(CONFIG, vocab_size=size))


def test_an_id_in_a_gap_has_no_token_and_those_beyond_it_do() -> None:
    tokenizer = gapped()
    assert tokenizer.vocab_size == 701
    assert [token for token in (-1, 0, 1, 2, 699, 700, 701, 2**40) if tokenizer.has_token(token)] == [0, 1, 700]


# ------------------------------------------------------------------------------- plain text, decoding


SPECIAL = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "[INST]", "<unk>", "<0x0A>"])
TEXT = st.lists(SPECIAL | st.text(max_size=8), max_size=8).map("".join).filter(lambda t: t.isprintable())


@pytest.mark.parametrize("name", ["smollm", "llama-bpe", "sentencepiece"])
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_plain_text_never_becomes_a_control_token_and_survives_the_round_trip(name: str, text: str) -> None:
    tokenizer = _SHARED[name]
    ids = tokenizer.encode(text, False)
    assert not [token for token in ids.tolist() if tokenizer.is_control(token)]
    assert tokenizer.decode(ids) == text


_SHARED = {name: tiny(name) for name in ("smollm", "llama-bpe", "sentencepiece")}


@pytest.mark.parametrize("one_character", [False, True])
def test_a_special_token_that_the_vocabulary_spells_out_is_still_cut(one_character: bool) -> None:
    """Merges that build a control token's own name must not let plain text reach it, however often it comes."""
    metadata = GOLDENS["tiny"]["smollm"]["metadata"]
    added = {"tokens": ["qx", "qxq"], "token_type": [1, 3], "merges": ["q x", "qx q"]}
    changed = {f"tokenizer.ggml.{key}": [*metadata[f"tokenizer.ggml.{key}"], *new] for key, new in added.items()}
    names = changed["tokenizer.ggml.tokens"]
    if one_character:
        changed["tokenizer.ggml.token_type"][names.index("z")] = 4
    tokenizer = tiny(**changed)
    for text in ("qxq", "a qxq b", "qxqqxq", "qxq" * 2000, "a z zqxqz"):
        ids = tokenizer.encode(text, False).tolist()
        assert not [token for token in ids if tokenizer.is_control(token)]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("qxq", True).tolist() == [len(names) - 1]


def test_plain_text_is_split_as_if_there_were_no_special_tokens() -> None:
    first = _SHARED["smollm"].encode("<|im_start|>", False)[0]
    assert _SHARED["smollm"].id_to_text(int(first)) == "<|"


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_streamed_text_is_the_decoded_text_for_any_tokens(name: str, seed: int) -> None:
    tokenizer = _SHARED[name]
    ids = np.random.default_rng(seed).integers(0, tokenizer.vocab_size, 30)
    stream = Stream(tokenizer)
    pushed = [stream.push(int(token)) for token in ids]
    text = "".join([*pushed, stream.finish()])
    kept = b"".join(tokenizer.token_bytes(int(token)) for token in ids if not tokenizer.is_control(int(token)))
    expected = kept.decode("utf-8", "replace")
    if name == "sentencepiece":
        expected = expected.removeprefix(" ")
    else:
        assert expected == tokenizer._parsing.decode(ids.tolist(), skip_special_tokens=True)
    assert text == expected == tokenizer.decode(ids)


def test_stream_holds_back_unfinished_characters() -> None:
    tokenizer = _SHARED["smollm"]
    ids = tokenizer.encode("a🦙b", False).tolist()
    assert len(ids) > 4, "the emoji takes several tokens"
    stream = Stream(tokenizer)
    assert [text for token in ids if (text := stream.push(token))] == ["a", "🦙", "b"]
    assert stream.finish() == ""
    stream = Stream(tokenizer)
    assert "".join(stream.push(token) for token in ids[:3]) == "a"
    assert stream.finish() == "\ufffd"


def test_an_answer_that_goes_on_from_a_text_keeps_its_first_space() -> None:
    tokenizer = _SHARED["sentencepiece"]
    ids = tokenizer.encode(" the cat", False, continued=True).tolist()
    alone, continued = Stream(tokenizer), Stream(tokenizer, continued=True)
    assert "".join(map(alone.push, ids)) == "the cat"
    assert "".join(map(continued.push, ids)) == " the cat"


def test_stream_cost_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _SHARED["smollm"]
    ids = tokenizer.encode("the quick brown fox " * 500, False).tolist()

    looked_at = []

    def token_bytes(token: int) -> bytes:
        looked_at.append(token)
        return Tokenizer.token_bytes(tokenizer, token)

    monkeypatch.setattr(tokenizer, "token_bytes", token_bytes)
    monkeypatch.setattr(tokenizer, "decode", None)  # which would read all that was said
    stream = Stream(tokenizer)
    text = "".join(stream.push(token) for token in ids)
    assert looked_at == ids and text.strip() == ("the quick brown fox " * 500).strip()


def test_ids_without_a_token_are_empty_text() -> None:
    assert _SHARED["smollm"].id_to_text(10**6) == ""
    assert _SHARED["smollm"].decode([10**6]) == ""
    assert _SHARED["smollm"].id_to_text(1) == "<|im_start|>"
    assert _SHARED["smollm"].decode([1, 2]) == ""


def test_texts_are_encoded_once_for_each_tenant_while_they_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encoded = byte_tokenizer(), list[str]()
    plain = Tokenizer._encode_plain
    monkeypatch.setattr(
        Tokenizer, "_encode_plain", lambda self, text, continued: encoded.append(text) or plain(self, text, continued)
    )
    texts = Recent[TextKey, Tokens](2 * (TEXT_BYTES + 5 * 4))
    anna, ben = (tokenizer.remembering(texts, tenant) for tenant in ("anna", "ben"))
    for who in (anna, anna, ben, ben):
        tokens = who.encode("abcd", special=False)
        assert tokens.tolist() == tokenizer.encode("abcd", special=False).tolist() and not tokens.flags.writeable
    assert encoded == ["abcd"] * 6, "two remembered, four of the tokenizer itself"
    anna.encode("efgh", special=False)
    ben.encode("abcd", special=False)
    assert encoded[6:] == ["efgh"]
    anna.encode("abcd", special=False)
    assert encoded[7:] == ["abcd"], "what was not asked for again left first"
    anna.encode("x" * 1000, special=False)
    anna.encode("x" * 1000, special=False)
    assert encoded[8:] == ["x" * 1000] * 2, "what is larger than all that there is to be is not kept"
    assert texts._weight == 2 * (TEXT_BYTES + 20) and len(texts._held) == 2


def test_lone_surrogates_are_a_request_error() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        _SHARED["smollm"].encode("a\ud800", False)


def test_continued_text_gets_no_space_in_front() -> None:
    tokenizer = _SHARED["sentencepiece"]
    whole = tokenizer.encode("the cat and the dog", False).tolist()
    start = tokenizer.encode("the cat", False).tolist()
    assert start + tokenizer.encode(" and the dog", False, continued=True).tolist() == whole
    assert start + tokenizer.encode(" and the dog", False).tolist() != whole


# ------------------------------------------------------------------------------------------- Gemma

GEMMA_TEMPLATE = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


def gemma() -> Tokenizer:
    """BPE over whole texts with spaces written as in SentencePiece, bytes for the rest, as tokenizer.json of Gemma."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], ["▁", "w"], ["▁", "▁"]]
    names = [
        *special,
        *(f"<0x{b:02X}>" for b in range(256)),
        *"▁\nabcdefghijklmnopqrstuvwxyzBH.,",
        *map("".join, merges),
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": name, **flags} for i, name in enumerate(special)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": {name: i for i, name in enumerate(names)}, "merges": merges,
        },
    }  # fmt: skip
    ids = {"bos_token": 2, "eos_token": 1, "unk_token": 3, "pad_token": 0}
    return Tokenizer(definition, special=ids, eos_ids=(1,), add_bos=None, chat_template=GEMMA_TEMPLATE)


@pytest.mark.parametrize("text", ["hello world", " hello  world", "x", "Grüße\n  <end_of_turn> 🦙", "", "▁"])
def test_gemma_keeps_spaces_and_bytes(text: str) -> None:
    """No space is put in front; what spells a control token stays text."""
    tokenizer = gemma()
    ids = tokenizer.encode(text, special=False)
    assert not any(tokenizer.is_control(int(token)) for token in ids)
    assert tokenizer.decode(ids) == text.replace("▁", " ")
    assert [tokenizer.id_to_text(int(t)) for t in tokenizer.encode("hello world", special=False)][:2] == ["hello", " w"]


def test_gemma_has_no_place_for_a_system_message() -> None:
    tokenizer = gemma()
    chat = [
        Message("system", "Be brief."),
        Message("user", "hello"),
        Message("assistant", "hell"),
        Message("user", "x"),
    ]
    assert tokenizer.add_bos
    assert tokenizer.chat(chat) == (
        "<bos><start_of_turn>user\nBe brief.\n\nhello<end_of_turn>\n<start_of_turn>model\nhell<end_of_turn>\n"
        "<start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n"
    )
    assert "".join(text for text, _ in tokenizer.chat_pieces(chat)) == tokenizer.chat(chat)


def test_added_white_space_is_plain_text_and_other_added_tokens_are_not() -> None:
    """Gemma's vocabulary lists line breaks as added tokens; in a document they are what they are in the template."""
    given = gemma()
    definition = json.loads(json.dumps(given._definition))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    breaks, note = (len(definition["model"]["vocab"]) + i for i in range(2))
    for token, name in ((breaks, "\n\n"), (note, "<note>")):
        definition["model"]["vocab"][name] = token
        definition["added_tokens"].append({"id": token, "content": name, **flags})
    tokenizer = Tokenizer(definition, special={"bos_token": 2}, eos_ids=(1,), add_bos=None, chat_template=None)
    text = "hello\n\nhello<note>"
    plain = tokenizer.encode(text, False).tolist()
    assert plain.count(breaks) == 1 and note not in plain
    assert tokenizer.encode(text, True).tolist() == [*plain[: plain.index(breaks) + 2], note]
    assert tokenizer.decode(plain) == text
