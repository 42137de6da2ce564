"""The sentence encoder against reference embeddings (data/make_encoder_goldens.py), and what it refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Encoding, Tokenizer

from ragjax.core import ConfigError, RequestError
from ragjax.models import encoder as module
from ragjax.models.encoder import GRID, Encoder
from ragjax.models.hub import resolve
from tests.support.devices import without_compilation_cache
from tests.support.encoders import PROMPTS, Style, encoder_shapes, write_encoder

GOLDENS = Path(__file__).parents[1] / "data" / "encoder_goldens.npz"
STYLES = GOLDENS.with_name("encoder_styles.npz")
CONFIG = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


@pytest.fixture(scope="module")
def directory() -> Path:
    return Path(resolve("all-minilm-l6-v2").path)


@pytest.fixture(scope="module")
def encoder(directory: Path) -> Encoder:
    return Encoder.load(directory)


@pytest.fixture
def tiny(directory: Path, tmp_path: Path) -> Path:
    """A random encoder of two narrow layers with the real tokenizer."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in encoder_shapes(CONFIG).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shutil.copy(directory / "tokenizer.json", tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------------- embeddings


@pytest.mark.slow
@pytest.mark.smoke
def test_embeddings_equal_the_reference(encoder: Encoder) -> None:
    with np.load(GOLDENS) as goldens:
        texts, wanted = goldens["texts"].tolist(), goldens["embeddings"]
    got = encoder.encode(texts)
    assert got.dtype == np.float32 and got.shape == (len(texts), 384)
    assert (got * wanted).sum(axis=1).min() >= 0.9999
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("style", ["bert", "xlm-roberta"])
def test_encoders_equal_sentence_transformers(tmp_path: Path, style: Style, pooling: str) -> None:
    """Mean and CLS, BERT and XLM-R, with the prefixes of questions and passages and with none."""
    made = Encoder.load(write_encoder(tmp_path, style, pooling, prompts=True))
    with np.load(STYLES) as goldens:
        texts = goldens["texts"].tolist()
        wanted = {how: goldens[f"{style} {pooling} {how}"] for how in ("encode", "encode_query", "encode_document")}
    whole = [i for i, text in enumerate(texts) if not made.embed([text]).cut]
    assert len(whole) > 1
    np.testing.assert_allclose(made.embed(texts).vectors[whole], wanted["encode"][whole], atol=1e-6)
    np.testing.assert_allclose(made.encode(texts, query=True), wanted["encode_query"], atol=1e-6)
    np.testing.assert_allclose(made.encode(texts), wanted["encode_document"], atol=1e-6)


def test_the_end_of_a_long_text_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Encoder.load(write_encoder(tmp_path, "bert"))
    for _ in range(2):
        made.encode(["short", "river " * 50])
    (record,) = (one for one in caplog.records if one.name == module.__name__)
    assert record.getMessage() == "the end of a text is not found: the encoder reads 40 tokens"


def test_batched_equals_single(tiny: Path) -> None:
    encoder = Encoder.load(tiny)
    assert encoder.encode([]).shape == (0, 24)
    texts = [f"The keeper of lamp {i} wrote {'many words ' * (i % 13)}in the ledger." for i in range(40)]
    batched = encoder.encode(texts)
    for i in (0, 1, 5, 12, 39):
        np.testing.assert_allclose(encoder.encode([texts[i]])[0], batched[i], atol=1e-6)


@pytest.mark.slow
def test_padding_beyond_the_positions_changes_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 positions and texts that are padded to 64 tokens: beyond its table an embedding is NaN."""
    texts = ["river " * 33, "river " * 38, "a short one"]
    padded = Encoder.load(tiny).encode(texts)
    assert np.isfinite(padded).all()
    monkeypatch.setattr(module, "GRID", {40: (1, 4)})
    np.testing.assert_allclose(Encoder.load(tiny).encode(texts), padded, atol=1e-6)


def test_long_texts_are_cut_at_the_limit(tiny: Path) -> None:
    encoder = Encoder.load(tiny)
    assert encoder.max_tokens == 40  # as many as there are positions
    words = "river " * 38
    np.testing.assert_array_equal(*encoder.encode([words, words + "mountain " * 500]))
    assert not np.allclose(*encoder.encode([words, "river " * 37]))


def test_a_long_text_is_the_mean_of_its_parts(tiny: Path) -> None:
    encoder = Encoder.load(tiny)
    parts = ["river " * 38, "mountain " * 38, "salt " * 10]
    made = encoder.embed(["".join(parts), "river"])
    wanted = encoder.embed(parts).vectors * np.array([[40], [40], [12]], np.float32)
    mean = wanted.sum(axis=0)
    np.testing.assert_allclose(made.vectors[0], mean / np.linalg.norm(mean), atol=1e-5)
    np.testing.assert_allclose(made.vectors[1], encoder.embed(["river"]).vectors[0], atol=1e-5)
    assert (made.cut, made.tokens) == (1, 95)
    encoder.check(["river " * 38 * 32])
    with pytest.raises(RequestError, match="cut it into chunks"):
        encoder.check(["river " * (38 * 32 + 1)])


def test_token_ids_are_those_that_the_encoder_would_make(tiny: Path) -> None:
    encoder = Encoder.load(tiny)
    ((encoding, _),) = encoder._tokenize(["river mountain river"])
    for tokens in (encoding.ids, encoding.ids[1:-1]):
        assert encoder.text_of(tokens) == "river mountain river"
    for wrong in ([10**6], [encoding.ids[0]] * 3, [*encoding.ids[1:-1], 0]):
        with pytest.raises(RequestError, match="check_embedding_ctx_length"):
            encoder.text_of(wrong)


class Recorder:
    """Notes the characters that a tokenizer is given."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.calls = list[int]()

    def encode_batch_fast(self, texts: list[str]) -> list[Encoding]:
        self.calls.append(sum(map(len, texts)))
        return self.tokenizer.encode_batch_fast(texts)


@pytest.mark.parametrize("piece", ["a ", ".", "水", "x", "word, ", "e\u0301"])
def test_no_more_of_a_text_is_tokenized_than_its_tokens_can_take_up(tiny: Path, piece: str) -> None:
    """The tokenizer keeps every window of a text that is too long: a query of 7.8 MB took 2.3 GB."""
    encoder = Encoder.load(tiny)
    long, whole = piece * (800_000 // len(piece)), encoder.encode([piece * 5_000])
    encoder._tokenizer = recorder = Recorder(encoder._tokenizer)
    np.testing.assert_array_equal(encoder.encode([long]), whole)
    encoder.encode([long] * 17)
    assert max(recorder.calls) <= module.CHARS_PER_TOKEN * encoder.max_tokens * 16
    with pytest.raises(RequestError, match="text 0 has more tokens than are embedded"):
        encoder.check([long] * 50)
    most = module.MOST_CHARS
    assert recorder.calls[0] <= most and max(recorder.calls) <= most * 16 and len(recorder.calls) == 4


@pytest.mark.parametrize(
    "text",
    [
        " " * 50_000 + "a river" + "\n" * 50_000 + "of salt\r\n" + "\t " * 50_000,
        ("w" * 100 + "  \n") * 37 + " " * 5_000 + "end",
        "word " * 2_000,
        "word\u00a0" * 2_000 + "\x0bword\x1fword",
    ],
)
def test_a_text_of_many_blanks_is_read_as_it_is(tiny: Path, text: str) -> None:
    encoder = Encoder.load(tiny)
    (encoding, _) = next(encoder._tokenize([text]))
    wanted = encoder._tokenizer.encode(text)
    assert encoding.ids == wanted.ids
    if not wanted.overflowing:
        encoder.check([text])
        assert encoder.embed([text]).tokens == len(wanted.ids)


@pytest.mark.slow
def test_texts_of_any_number_and_length_take_the_programs_of_the_grid(tiny: Path) -> None:
    encoder = Encoder.load(tiny)
    for n in (1, 2, 7, 70):
        encoder.encode(["word"] * n)
        encoder.encode(["word " * 60] * n)
    assert len(encoder._programs) == 4  # lengths 32 and 64 hold its 40 tokens


def test_a_later_encoder_traces_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tiny / "cache"))
    with without_compilation_cache():
        expected = Encoder.load(tiny).encode(["word"])
        encoder = Encoder.load(tiny)
        monkeypatch.setattr(encoder, "_embed", None)
        np.testing.assert_array_equal(encoder.encode(["word"]), expected)


def test_grid_offers_one_text_or_many() -> None:
    assert list(GRID) == sorted(GRID)
    assert all(batches[0] == 1 < batches[1] for batches in GRID.values())


def test_a_lone_surrogate_is_refused(tiny: Path) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        Encoder.load(tiny).encode(["fine", "not \ud83d fine"])


# ---------------------------------------------------------------------------------------------- loading


def test_the_packaged_encoder_keeps_its_identity(encoder: Encoder) -> None:
    """Folders of earlier versions are made with it."""
    assert encoder.identity == "d55f84d7669865ba3f1a73a8fb3bc0a5"


def test_later_versions_write_their_files_otherwise(tmp_path: Path) -> None:
    """sentence-transformers 6 names the pooling by one field, and the length is the tokenizer's."""
    before = Encoder.load(write_encoder(tmp_path, "xlm-roberta", "cls", prompts=True))
    (tmp_path / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}')
    _change_json(tmp_path / "tokenizer_config.json", model_max_length=30)
    pooling = {"embedding_dimension": 24, "pooling_mode": "cls", "include_prompt": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    parts = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([parts[0] | {"type": kind}, *parts[1:]]))
    later = Encoder.load(tmp_path)
    assert (before.max_tokens, later.max_tokens) == (40, 30)
    np.testing.assert_array_equal(later.encode(["the keeper"]), before.encode(["the keeper"]))


def test_identity_is_of_what_passages_become(tmp_path: Path) -> None:
    made = [Encoder.load(write_encoder(tmp_path / "mean", "bert")).identity]
    made += [Encoder.load(write_encoder(tmp_path / "cls", "bert", "cls")).identity]
    folder = write_encoder(tmp_path / "prompts", "bert", prompts=True)
    made += [Encoder.load(folder).identity]
    assert len({*made}) == 3
    _change_json(folder / "config_sentence_transformers.json", prompts=PROMPTS | {"query": "another: "})
    assert Encoder.load(folder).identity == made[-1]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"model_type": "deberta"}, "an encoder of type 'deberta' is not read; bert, roberta, xlm"),
        ("config.json", {"hidden_act": "relu"}, "hidden_act 'relu' is not read; 'gelu' is"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling by cls and mean is not read; mean, cls"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pooling by lasttoken is not read"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, file: str, change: dict, message: str) -> None:
    folder = write_encoder(tmp_path, "bert")
    _change_json(folder / file, **change)
    with pytest.raises(ConfigError, match=message):
        Encoder.load(folder)


def test_a_part_that_changes_vectors_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert")
    parts = json.loads((folder / "modules.json").read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*parts, dense]))
    with pytest.raises(ConfigError, match=r"a part 'Dense' in modules.json is not read"):
        Encoder.load(folder)


def test_weights_beside_a_head_are_found(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "xlm-roberta")
    before = Encoder.load(folder).encode(["the river"])
    tensors = {f"roberta.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"lm_head.bias": np.zeros(3, np.float32)}, folder / "model.safetensors")
    np.testing.assert_array_equal(Encoder.load(folder).encode(["the river"]), before)


def test_identity_tells_weights_apart(tiny: Path) -> None:
    before = Encoder.load(tiny).identity
    assert Encoder.load(tiny).identity == before
    tensors = load_file(tiny / "model.safetensors")
    tensors["embeddings.LayerNorm.bias"] += 1
    save_file(tensors, tiny / "model.safetensors")
    assert Encoder.load(tiny).identity != before


@pytest.mark.slow
def test_every_config_field_matters(tiny: Path) -> None:
    """The fields that no shape tells are read: heads and epsilon change the embedding."""
    before = Encoder.load(tiny).encode(["a question"])
    for change in ({"num_attention_heads": 6}, {"layer_norm_eps": 0.5}):
        (tiny / "config.json").write_text(json.dumps(CONFIG | change))
        assert not np.allclose(Encoder.load(tiny).encode(["a question"]), before, atol=1e-3)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_and_truncated_files_are_refused(tiny: Path, name: str) -> None:
    data = (tiny / name).read_bytes()
    for damage in (lambda file: file.write_bytes(data[: len(data) // 2]), Path.unlink):
        damage(tiny / name)
        with pytest.raises(ConfigError, match=r"not a whole encoder: .*; delete it to download it again"):
            Encoder.load(tiny)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "has shape"),
        ({"num_hidden_layers": 3}, r"encoder\.layer\.2\..* is missing"),
        ({"num_hidden_layers": 1}, r"encoder\.layer\.1\..* has no place"),
    ],
)
def test_weights_of_another_shape_are_refused(tiny: Path, change: dict, message: str) -> None:
    (tiny / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ConfigError, match=message):
        Encoder.load(tiny)


def _change_json(path: Path, **change) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_products_of_bfloat16_give_comparable_vectors(directory: Path, encoder: Encoder) -> None:
    narrow = Encoder.load(directory, narrow=True)
    texts = ["When does the ferry leave?", "The ferry to Tolva leaves at nine from the northern quay. " * 8]
    vectors = narrow.encode(texts)
    assert vectors.dtype == np.float32 and narrow.identity == encoder.identity
    cosines = (vectors * encoder.encode(texts)).sum(axis=1)
    assert (cosines > 0.9999).all() and (cosines < 1).any()
