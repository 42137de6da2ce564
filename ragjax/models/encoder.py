"""The sentence encoder: BERT or RoBERTa in Flax NNX, float32, or with products of bfloat16 (`narrow`).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from ragjax.core import ConfigError, Embedded, RequestError
from ragjax.models.encoder_files import EncoderConfig, EncoderReading
from ragjax.models.executables import Executables, key_of
from ragjax.models.hub import cache_dir

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

_log = logging.getLogger(__name__)


class _Tensors:
    """Makes modules of the tensors of a file. Each is taken once.

    Modules get their weights as initial ones, and no random keys: JAX takes most of a second to make these.
    """

    def __init__(self, config: EncoderConfig, tensors: dict[str, NDArray[Any]], narrow: bool):
        found = (prefix for prefix in _PREFIXES if any(name.startswith(prefix) for name in tensors))
        prefix = next(found, "")
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        self._config, self._tensors, self._narrow = config, own, narrow
        self._rngs: Any = SimpleNamespace(params=lambda: None)

    def linear(self, name: str, n_in: int, n_out: int) -> nnx.Linear:
        kernel, bias = self._initial(f"{name}.weight", kernel=True), self._initial(f"{name}.bias")
        return nnx.Linear(n_in, n_out, kernel_init=kernel, bias_init=bias, rngs=self._rngs)

    def norm(self, name: str) -> nnx.LayerNorm:
        return nnx.LayerNorm(
            self._config.hidden_size,
            epsilon=self._config.layer_norm_eps,
            use_fast_variance=False,
            scale_init=self._initial(f"{name}.weight"),
            bias_init=self._initial(f"{name}.bias"),
            rngs=self._rngs,
        )

    def table(self, name: str, rows: int) -> nnx.Embed:
        table = self._initial(f"{name}.weight")
        return nnx.Embed(rows, self._config.hidden_size, embedding_init=table, rngs=self._rngs)

    def check_empty(self) -> None:
        if left := self._tensors.keys() - set(_UNUSED_TENSORS):
            raise ValueError(f"{min(left)} has no place in the encoder")

    def _initial(self, name: str, kernel: bool = False) -> Callable[..., jax.Array]:
        value = self._tensors.pop(name).astype(jnp.bfloat16 if kernel and self._narrow else np.float32, copy=False)

        def initial(_: object, shape: Sequence[int], dtype: object) -> jax.Array:
            given = value.T if kernel else value
            if given.shape != tuple(shape):
                raise ValueError(f"{name} has shape {value.shape}, which does not fit")
            placed: jax.Array = jax.device_put(given)  # jnp.asarray compiles a program for each shape
            return placed

        return initial


class _Embeddings(nnx.Module):
    def __init__(self, config: EncoderConfig, reading: EncoderReading, tensors: _Tensors):
        self.first_position = reading.first_position
        self.word_embeddings = tensors.table("embeddings.word_embeddings", config.vocab_size)
        self.position_embeddings = tensors.table("embeddings.position_embeddings", config.max_position_embeddings)
        self.token_type_embeddings = tensors.table("embeddings.token_type_embeddings", config.type_vocab_size)
        self.LayerNorm = tensors.norm("embeddings.LayerNorm")

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        # a bucket may be longer than the table, and beyond a table there is NaN; only padding stands there
        last = self.position_embeddings.num_embeddings - 1
        positions_T = jnp.minimum(self.first_position + jnp.arange(ids_BT.shape[1], dtype=jnp.int32), last)
        x_BTE = self.word_embeddings(ids_BT) + self.position_embeddings(positions_T)
        x_BTE = x_BTE + self.token_type_embeddings(jnp.zeros_like(positions_T))
        y_BTE: jax.Array = self.LayerNorm(x_BTE)
        return y_BTE


class _Layer(nnx.Module):
    def __init__(self, config: EncoderConfig, tensors: _Tensors, name: str):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.heads = config.num_attention_heads
        self.query = tensors.linear(f"{name}.attention.self.query", hidden, hidden)
        self.key = tensors.linear(f"{name}.attention.self.key", hidden, hidden)
        self.value = tensors.linear(f"{name}.attention.self.value", hidden, hidden)
        self.attention_output = tensors.linear(f"{name}.attention.output.dense", hidden, hidden)
        self.attention_norm = tensors.norm(f"{name}.attention.output.LayerNorm")
        self.intermediate = tensors.linear(f"{name}.intermediate.dense", hidden, inner)
        self.output = tensors.linear(f"{name}.output.dense", inner, hidden)
        self.output_norm = tensors.norm(f"{name}.output.LayerNorm")

    def __call__(self, x_BTE: jax.Array, valid_BT: jax.Array) -> jax.Array:
        x_BTE = self.attention_norm(x_BTE + _product(self.attention_output, self._attend(x_BTE, valid_BT)))
        inner_BTF = jax.nn.gelu(_product(self.intermediate, x_BTE), approximate=False)
        y_BTE: jax.Array = self.output_norm(x_BTE + _product(self.output, inner_BTF))
        return y_BTE

    def _attend(self, x_BTE: jax.Array, valid_BT: jax.Array) -> jax.Array:
        def heads(linear: nnx.Linear) -> jax.Array:
            y_BTE = _product(linear, x_BTE).astype(linear.kernel.dtype)
            return y_BTE.reshape(*y_BTE.shape[:2], self.heads, -1)

        queries, keys, values = heads(self.query), heads(self.key), heads(self.value)
        mask = valid_BT[:, None, None, :]
        with jax.numpy_dtype_promotion("standard"):  # it widens bfloat16 by itself
            context_BTHD = jax.nn.dot_product_attention(queries, keys, values, mask=mask, implementation="xla")
        return context_BTHD.reshape(x_BTE.shape)


def _product(linear: nnx.Linear, x_BTE: jax.Array) -> jax.Array:
    """The layer's output, float32, of a product in the dtype of its kernel."""
    assert linear.bias is not None
    kernel_EF = linear.kernel[...]
    x_BTE = x_BTE.astype(kernel_EF.dtype)
    return jnp.matmul(x_BTE, kernel_EF, precision="highest", preferred_element_type=jnp.float32) + linear.bias[...]


class _Bert(nnx.Module):
    """Token ids int32 [B, T] and lengths int32 [B] → normalised sentence embeddings float32 [B, E]."""

    def __init__(self, config: EncoderConfig, reading: EncoderReading, tensors: _Tensors):
        self.pooling = reading.pooling
        self.embeddings = _Embeddings(config, reading, tensors)
        names = (f"encoder.layer.{i}" for i in range(config.num_hidden_layers))
        self.layers = nnx.List([_Layer(config, tensors, name) for name in names])
        tensors.check_empty()

    def __call__(self, ids_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
        valid_BT = jnp.arange(ids_BT.shape[1], dtype=jnp.int32) < lengths_B[:, None]
        x_BTE = self.embeddings(ids_BT)
        for layer in self.layers:
            x_BTE = layer(x_BTE, valid_BT)
        # the mean's 1/n cancels
        pooled_BE = x_BTE[:, 0] if self.pooling == "cls" else jnp.where(valid_BT[..., None], x_BTE, 0.0).sum(axis=1)
        embeddings_BE: jax.Array = pooled_BE / jnp.linalg.norm(pooled_BE, axis=-1, keepdims=True)
        return embeddings_BE


class Encoder:
    """Sentence encoder with its tokenizer. Safe to call from several threads.

    identity: hash of weights, tokenizer and configuration; embeddings of equal identity are comparable.
    """

    def __init__(self, model: _Bert, tokenizer: Tokenizer, reading: EncoderReading, *, dim: int, identity: str):
        graph, state = nnx.split(model)
        self.identity = identity
        self.dim = dim
        self.max_tokens = reading.max_tokens
        self._reading = reading
        self._tokenizer = tokenizer
        self._state = state
        self._dtype = str(model.layers[0].output.kernel.dtype)
        self._embed = jax.jit(partial(_embed, graph))
        self._programs = dict[tuple[int, int], Any]()
        self._executables = Executables(cache_dir() / "executables")
        self._told_of_cut = False

    @classmethod
    def load(cls, directory: Path, narrow: bool = False) -> Encoder:
        """Read an encoder's folder: its weights, and the files of sentence-transformers (`encoder_files`).

        narrow: products are of bfloat16, about twice as fast on a CPU that multiplies it. A vector's cosine to that of
        float32 is above .9999, so the two are comparable.
        """
        try:
            reading = EncoderReading.read(directory, max(GRID))
            weights, vocabulary = reading.folder / "model.safetensors", reading.folder / "tokenizer.json"
            config = EncoderConfig.read(reading.folder)
            tokenizer = Tokenizer.from_file(str(vocabulary))
            tokenizer.no_padding()
            tokenizer.enable_truncation(reading.max_tokens)
            model = _Bert(config, reading, _Tensors(config, load_file(weights), narrow))
            identity = _identity((weights, vocabulary), f"{config} {reading.max_tokens}{reading.unusual}")
        except ConfigError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"{directory}: not a whole encoder: {error!r}; delete it to download it again") from error
        return cls(model, tokenizer, reading, dim=config.hidden_size, identity=identity)

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
            # a few texts are cheaper one by one than in a mostly empty batch
            step = full if len(members) > full // 4 else single
            for start in range(0, len(members), step):
                yield step, length, members[start : start + step]

    def _run(self, rows: Sequence[Sequence[int]], batch: int, length: int) -> NDArray[np.float32]:
        ids_BT = np.zeros((batch, length), np.int32)
        lengths_B = np.ones(batch, np.int32)  # an absent row is one padding token: finite, and cut away
        for i, row in enumerate(rows):
            ids_BT[i, : len(row)] = row
            lengths_B[i] = len(row)
        if (batch, length) not in self._programs:
            self._programs[batch, length] = self._make(batch, length)
        return np.asarray(self._programs[batch, length](self._state, ids_BT, lengths_B))[: len(rows)]

    def _make(self, batch: int, length: int) -> Any:
        devices = list(jax.tree.leaves(self._state)[0].devices())
        key = key_of(devices, {"name": ("encoder", batch, length, self._dtype), "identity": self.identity})
        found = self._executables.load(key, devices)
        if found is not None:
            return found[0]
        arrays = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, length), (batch,)))
        program = self._embed.lower(self._state, *arrays).compile()
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


def _embed(graph: Any, state: Any, ids_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    embeddings_BE: jax.Array = nnx.merge(graph, state)(ids_BT, lengths_B)
    return embeddings_BE


def _identity(paths: Sequence[Path], settings: str) -> str:
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
