"""The sentence encoder: BERT or RoBERTa in float32, or with products of bfloat16 (`narrow`).

Sources: Devlin et al. 2019, arXiv:1810.04805; Liu et al. 2019, arXiv:1907.11692, and Conneau et al. 2020,
arXiv:1911.02116 (XLM-R; their positions begin behind the padding's); Reimers and Gurevych 2019, arXiv:1908.10084
(pooling); Wang et al. 2020, arXiv:2002.10957 (MiniLM, the packaged weights).

Texts are padded to a small fixed grid of (batch, length) shapes, so that a handful of programs serves everything.

Dimensions: B batch, T tokens, H heads, D head dim, E hidden, F mlp.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ragjax.core import ConfigError, Embedded, RequestError
from ragjax.models.encoder_files import EncoderConfig, EncoderReading
from ragjax.models.executables import Executables, key_of
from ragjax.models.hub import cache_dir
from ragjax.models.weights import mapped

GRID: Mapping[int, tuple[int, ...]] = {
    32: (1, 32), 64: (1, 16), 128: (1, 8), 192: (1, 6), 256: (1, 4), 384: (1, 3), 512: (1, 2)
}  # fmt: skip
"""Compiled lengths, and the batch sizes of each: one text, or about a thousand tokens."""

CHARS_PER_TOKEN = 128
"""Characters read of a text for each token it may have. A word is at most 100 characters; a longer one is unknown to
BERT's tokenizer as a whole."""

_WORD = re.compile(r"[^ \t\r\n]+")  # between blanks that BERT's tokenizer takes for one, however many there are
PARTS = 32
"""Parts of a text that are embedded, at most: 8,192 tokens for an encoder that reads 256."""
MOST_CHARS = 2**16
"""Characters of such a text, at most, if that is more than what the tokens of a part may take up."""
_TOKENIZED_AT_ONCE = 16  # texts: an encoding of CHARS_PER_TOKEN * MAX_TOKENS characters takes some megabytes

_UNUSED_TENSORS = (
    "embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.weight", "pooler.dense.bias"
)  # fmt: skip
_PREFIXES = ("bert.", "roberta.")
"""Of the encoder's tensors in a file that has heads for other tasks too."""

_EMBEDDINGS, _LAYER = "embeddings.", "encoder.layer."  # what names of tensors begin with
_WORDS = f"{_EMBEDDINGS}word_embeddings.weight"

_log = logging.getLogger(__name__)


def _read_weights(
    config: EncoderConfig, tensors: Mapping[str, NDArray[Any]], narrow: bool
) -> tuple[NDArray[Any], dict[str, jax.Array]]:
    """The table of words as it is, and the other weights by name, float32; matrices are turned to [in, out], and
    bfloat16 if `narrow`.

    Raises ValueError for a tensor that is missing, of another shape, or unknown.
    """
    prefix = next((prefix for prefix in _PREFIXES if any(name.startswith(prefix) for name in tensors)), "")
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    shapes = _shapes(config)
    if missing := shapes.keys() - own.keys():
        raise ValueError(f"{min(missing)} is missing")
    if left := own.keys() - shapes.keys() - set(_UNUSED_TENSORS):
        raise ValueError(f"{min(left)} has no place in the encoder")
    weights = {}
    for name, shape in shapes.items():
        value, is_matrix = own[name], len(shape) == 2 and not name.startswith(_EMBEDDINGS)
        if value.shape != shape:
            raise ValueError(f"{name} has shape {value.shape}, which does not fit")
        if name != _WORDS:
            value = value.astype(jnp.bfloat16 if is_matrix and narrow else np.float32)
            # jnp.asarray compiles a program for each shape
            weights[name] = jax.device_put(value.T if is_matrix else value)
    return own[_WORDS], weights


def _shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)
    tables = zip(("word_embeddings", "position_embeddings", "token_type_embeddings"), rows, strict=True)
    shapes: dict[str, tuple[int, ...]] = {f"{_EMBEDDINGS}{name}.weight": (n, hidden) for name, n in tables}
    linears = {
        f"attention.{name}": (hidden, hidden) for name in ("self.query", "self.key", "self.value", "output.dense")
    }
    linears |= {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}
    norms = [f"{_EMBEDDINGS}LayerNorm"]
    for i in range(config.num_hidden_layers):
        for name, shape in linears.items():
            shapes |= {f"{_LAYER}{i}.{name}.weight": shape, f"{_LAYER}{i}.{name}.bias": shape[:1]}
        norms += [f"{_LAYER}{i}.attention.output.LayerNorm", f"{_LAYER}{i}.output.LayerNorm"]
    return shapes | {f"{norm}.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}


def _embed(
    config: EncoderConfig,
    reading: EncoderReading,
    weights: Mapping[str, jax.Array],
    word_BTE: jax.Array,
    lengths_B: jax.Array,
) -> jax.Array:
    """Embedded tokens float32 [B, T, E] and lengths int32 [B] → normalised sentence embeddings float32 [B, E]."""

    def table(name: str) -> jax.Array:
        return weights[f"{_EMBEDDINGS}{name}.weight"]

    def linear(name: str, x_BTE: jax.Array) -> jax.Array:
        kernel_EF = weights[f"{name}.weight"]
        x_BTE = x_BTE.astype(kernel_EF.dtype)
        made_BTF = jnp.matmul(x_BTE, kernel_EF, precision="highest", preferred_element_type=jnp.float32)
        return made_BTF + weights[f"{name}.bias"]

    def norm(name: str, x_BTE: jax.Array) -> jax.Array:
        x_BTE = x_BTE - x_BTE.mean(-1, keepdims=True)
        factor_BTE = lax.rsqrt(jnp.square(x_BTE).mean(-1, keepdims=True) + config.layer_norm_eps)
        return x_BTE * (factor_BTE * weights[f"{name}.weight"]) + weights[f"{name}.bias"]

    def heads(name: str, x_BTE: jax.Array) -> jax.Array:
        y_BTE = linear(name, x_BTE).astype(weights[f"{name}.weight"].dtype)
        return y_BTE.reshape(*y_BTE.shape[:2], config.num_attention_heads, -1).swapaxes(1, 2)

    # a bucket may be longer than the table, and beyond a table there is NaN; only padding stands there
    last = config.max_position_embeddings - 1
    position_T = jnp.minimum(reading.first_position + jnp.arange(word_BTE.shape[1], dtype=jnp.int32), last)
    valid_BT = jnp.arange(word_BTE.shape[1], dtype=jnp.int32) < lengths_B[:, None]
    x_BTE = word_BTE + jnp.take(table("position_embeddings"), position_T, axis=0)
    x_BTE = norm(f"{_EMBEDDINGS}LayerNorm", x_BTE + table("token_type_embeddings")[0])
    mask_B11T = valid_BT[:, None, None, :]
    for i in range(config.num_hidden_layers):
        layer = f"{_LAYER}{i}"
        q_BHTD, k_BHTD, v_BHTD = (heads(f"{layer}.attention.self.{part}", x_BTE) for part in ("query", "key", "value"))
        score_BHTT = jnp.matmul(q_BHTD, k_BHTD.swapaxes(2, 3), precision="highest", preferred_element_type=jnp.float32)
        score_BHTT = jnp.where(mask_B11T, score_BHTT * q_BHTD.shape[-1] ** -0.5, -jnp.inf)
        share_BHTT = jax.nn.softmax(score_BHTT).astype(v_BHTD.dtype)
        seen_BHTD = jnp.matmul(share_BHTT, v_BHTD, precision="highest", preferred_element_type=jnp.float32)
        attended_BTE = linear(f"{layer}.attention.output.dense", seen_BHTD.swapaxes(1, 2).reshape(x_BTE.shape))
        x_BTE = norm(f"{layer}.attention.output.LayerNorm", x_BTE + attended_BTE)
        inner_BTF = linear(f"{layer}.intermediate.dense", x_BTE)
        inner_BTF = inner_BTF * 0.5 * (1.0 + lax.erf(inner_BTF * 2**-0.5))  # jax.nn.gelu takes erfc, which is slower
        x_BTE = norm(f"{layer}.output.LayerNorm", x_BTE + linear(f"{layer}.output.dense", inner_BTF))
    # the mean's 1/n cancels
    pooled_BE = x_BTE[:, 0] if reading.pooling == "cls" else jnp.where(valid_BT[..., None], x_BTE, 0.0).sum(axis=1)
    embeddings_BE: jax.Array = pooled_BE / jnp.linalg.norm(pooled_BE, axis=-1, keepdims=True)
    return embeddings_BE


class Encoder:
    """Sentence encoder with its tokenizer. Safe to call from several threads.

    The table of words, half of its weights, stays in the file, where only rows that are needed are read.

    identity: hash of weights, tokenizer and configuration; embeddings of equal identity are comparable.
    """

    def __init__(
        self,
        config: EncoderConfig,
        words_VE: NDArray[Any],
        weights: Mapping[str, jax.Array],
        tokenizer: Tokenizer,
        reading: EncoderReading,
        identity: str,
    ):
        self.identity = identity
        self.dim = config.hidden_size
        self.max_tokens = reading.max_tokens
        self._reading = reading
        self._tokenizer = tokenizer
        self._words_VE, self._weights = words_VE, weights
        self._embed = jax.jit(partial(_embed, config, reading))
        self._programs = dict[tuple[int, int], Any]()
        self._executables = Executables(cache_dir() / "executables")
        self._told_of_cut = False

    @classmethod
    def load(cls, directory: Path, narrow: bool = False) -> Encoder:
        """Read an encoder's folder: its weights, and the files of sentence-transformers (`encoder_files`).

        narrow: products are of bfloat16, about twice as fast with AMX, and slower without. A vector's cosine to that of
        float32 is above .9999, so the two are comparable.
        """
        try:
            reading = EncoderReading.read(directory, max(GRID))
            weights, vocabulary = reading.folder / "model.safetensors", reading.folder / "tokenizer.json"
            config = EncoderConfig.read(reading.folder)
            tokenizer = Tokenizer.from_file(str(vocabulary))
            tokenizer.no_padding()
            tokenizer.enable_truncation(reading.max_tokens)
            read = _read_weights(config, dict(mapped(weights)), narrow)
            identity = _identity((weights, vocabulary), f"{config} {reading.max_tokens}{reading.unusual}")
        except ConfigError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"{directory}: not a whole encoder: {error!r}; delete it to download it again") from error
        return cls(config, *read, tokenizer, reading, identity)

    def encode(self, texts: Sequence[str], query: bool = False) -> NDArray[np.float32]:
        """Embed passages, or questions: float32 [len(texts), dim], rows of length one."""
        prefix = self._reading.query if query else self._reading.passage
        rows = list[list[int]]()
        for encoding, is_whole in self._tokenize([prefix + text for text in texts] if prefix else texts):
            rows.append(encoding.ids)
            if not self._told_of_cut and (encoding.overflowing or not is_whole):
                self._told_of_cut = True
                _log.warning("the end of a text is not found: the encoder reads %d tokens", self.max_tokens)
        return self._vectors(rows)

    def embed(self, texts: Sequence[str]) -> Embedded:
        """Embed texts as they are, without the prefix of a question or passage.

        A text that is longer than what is read at once gets the mean of its parts' vectors, by their tokens.

        Raises:
            RequestError: as `encode`.
        """
        parts = [[encoding, *encoding.overflowing] for encoding, _ in self._tokenize(texts, PARTS)]
        rows = [part.ids for text in parts for part in text]
        vectors, sizes = self._vectors(rows), np.array([len(row) for row in rows], np.float32)
        if len(rows) > len(texts):
            begins = np.cumsum([0, *(len(text) for text in parts[:-1])])
            sums = np.add.reduceat(vectors * sizes[:, None], begins, axis=0)
            vectors = sums / np.linalg.norm(sums, axis=-1, keepdims=True)
        return Embedded(vectors, int(sizes.sum()), sum(len(text) > 1 for text in parts))

    def check(self, texts: Sequence[str]) -> None:
        """Raise RequestError as `encode` does, and for a text that has more than `PARTS` parts."""
        for number, (encoding, is_whole) in enumerate(self._tokenize(texts, PARTS)):
            if len(encoding.overflowing) >= PARTS or not is_whole:
                most = PARTS * (self.max_tokens - 2)
                reason = f"text {number} has more tokens than are embedded ({most}): cut it into chunks"
                raise RequestError(reason, param="input", code="context_length_exceeded")

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens of the encoder's own vocabulary. RequestError: it makes no such tokens of a text."""
        text: str = self._tokenizer.decode(list(tokens))
        again, own = self._tokenizer.encode(text, add_special_tokens=False), list(tokens)
        for bare in (own, own[1:-1]):
            if text and bare == [one for part in (again, *again.overflowing) for one in part.ids]:
                return text
        reason = (
            "these are no tokens of the encoder's vocabulary: send texts (LangChain: check_embedding_ctx_length=False)"
        )
        raise RequestError(reason, param="input", code="invalid_value")

    def _vectors(self, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        embeddings = np.empty((len(rows), self.dim), np.float32)
        for batch, length, members in self._batches(rows):
            embeddings[members] = self._run([rows[i] for i in members], batch, length)
        return embeddings

    def _tokenize(self, texts: Sequence[str], parts: int = 1) -> Iterator[tuple[Any, bool]]:
        """Each text's encoding, and whether the tokenizer was given all of the text.

        The tokenizer keeps every window of a text that is too long, 280 bytes a character, so it is given no more
        characters than the tokens that count can take up.
        """
        most = max(CHARS_PER_TOKEN * self.max_tokens, MOST_CHARS if parts > 1 else 0)
        for begin in range(0, len(texts), _TOKENIZED_AT_ONCE):
            pieces = [_first_words(text, most) for text in texts[begin : begin + _TOKENIZED_AT_ONCE]]
            if self._reading.lower:
                pieces = [(piece.lower(), whole) for piece, whole in pieces]
            try:
                encodings = self._tokenizer.encode_batch_fast([piece for piece, _ in pieces])
            except (UnicodeEncodeError, TypeError) as error:
                raise RequestError(f"a text to embed is not valid Unicode: {error}") from error
            yield from ((encoding, whole) for encoding, (_, whole) in zip(encodings, pieces, strict=True))

    def _batches(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, list[int]]]:
        """Cut the rows into (batch, length, members), texts of like length together."""
        lengths = [next(length for length in GRID if len(row) <= length) for row in rows]
        by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for length, group in groupby(by_length, key=lambda i: lengths[i]):
            members = list(group)
            single, full = GRID[length]
            while members:
                # a few texts are cheaper one by one than in a half empty batch
                size = full if len(members) > full // 2 else single
                yield size, length, members[:size]
                members = members[size:]

    def _run(self, rows: Sequence[Sequence[int]], batch: int, length: int) -> NDArray[np.float32]:
        ids_BT = np.zeros((batch, length), np.int32)
        lengths_B = np.ones(batch, np.int32)  # an absent row is one padding token: finite, and cut away
        for i, row in enumerate(rows):
            ids_BT[i, : len(row)] = row
            lengths_B[i] = len(row)
        if (batch, length) not in self._programs:
            self._programs[batch, length] = self._make(batch, length)
        word_BTE = self._words_VE[ids_BT].astype(np.float32, copy=False)
        return np.asarray(self._programs[batch, length](self._weights, word_BTE, lengths_B))[: len(rows)]

    def _make(self, batch: int, length: int) -> Any:
        arrays = self._weights.values()
        devices, dtypes = list(next(iter(arrays)).devices()), sorted({str(x.dtype) for x in arrays})
        key = key_of(devices, {"name": ("encoder", batch, length, *dtypes), "identity": self.identity})
        found = self._executables.load(key, devices)
        if found is not None:
            return found[0]
        word_BTE = jax.ShapeDtypeStruct((batch, length, self.dim), jnp.float32)
        lengths_B = jax.ShapeDtypeStruct((batch,), jnp.int32)
        program = self._embed.lower(self._weights, word_BTE, lengths_B).compile()
        self._executables.keep(key, program, None)
        return program


def _first_words(text: str, most: int) -> tuple[str, bool]:
    """The first `most` characters of a text and whether these are all; runs of blanks count as one if it is longer."""
    if len(text) <= most:
        return text, True
    words, size = list[str](), 0
    for word in _WORD.finditer(text):
        begin, end = word.span()
        words.append(text[begin : min(end, begin + most - size)])
        if size + end - begin > most:
            return " ".join(words), False
        size += end - begin + 1
    return " ".join(words), True


def _identity(paths: Sequence[Path], settings: str) -> str:
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
