"""Weights of a decoder: Hugging Face directories, GGUF files and Orbax checkpoints.

Whatever the source, tensors appear under their Hugging Face names and in that orientation, so that a
projection is [out, in] and RoPE pairs component i with i + head_dim / 2.
Formats: https://huggingface.co/docs/safetensors, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from filelock import FileLock
from numpy.typing import DTypeLike, NDArray

from ragjax.core import ConfigError
from ragjax.models.config import ModelConfig, RopeScaling, inverse_frequencies, rope_divisors, token_ids
from ragjax.models.hub import atomic_path

if TYPE_CHECKING:
    from ragjax.models.decoder import Decoder

Array = NDArray[Any]
Shape = tuple[int, ...]

_log = logging.getLogger(__name__)

_SAFETENSORS_DTYPES: Mapping[str, DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_CACHE_FORMAT = 1  # raise it when the content of the dequantised cache changes meaning


class Tensors(Mapping[str, Array]):
    """Tensors by Hugging Face name, read (and dequantised) each time one is asked for."""

    def __init__(self, load: Mapping[str, Callable[[], Array]], shapes: Mapping[str, Shape]):
        """`load` reads a tensor, `shapes` says what it will be; both have the same names."""
        self._load = load
        self.shapes = shapes

    def __getitem__(self, name: str) -> Array:
        """Read one tensor: as stored, or float32 where the file is quantised."""
        return self._load[name]()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._load)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._load)


@dataclass(frozen=True)
class Checkpoint:
    """A model as its files have it; `quantized` says that tensors are dequantised when read."""

    config: ModelConfig
    tensors: Tensors
    quantized: bool


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory or a .gguf file, reading headers only.

    Raises ConfigError that names the field, tensor or file which is missing, unexpected or of the wrong shape.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such model")
    if path.suffix != ".gguf":
        raise ConfigError(f"{path}: expected a .gguf file or a directory with config.json and safetensors")
    return _open_gguf(path)


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shape of every tensor that a checkpoint of this configuration has, by Hugging Face name."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _check_tensors(found: Mapping[str, Shape], config: ModelConfig, where: Path) -> None:
    # a damaged number of layers would fill the memory with names; so many layers miss a tensor anyway
    expected = expected_shapes(replace(config, num_layers=min(config.num_layers, len(found) + 1)))
    for name, shape in expected.items():
        if name not in found:
            raise ConfigError(f"{where}: tensor {name} is missing")
        if found[name] != shape:
            raise ConfigError(f"{where}: tensor {name} has shape {list(found[name])}, expected {list(shape)}")
    for name in found:
        if name not in expected:
            raise ConfigError(f"{where}: unexpected tensor {name}; a {config.family} model does not have it")


# ----------------------------------------------------------------------------------- Hugging Face

# Rotation tables that old checkpoints carry along; the configuration says the same.
_REDUNDANT = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def _open_directory(path: Path) -> Checkpoint:
    config = ModelConfig.from_hf(read_json(path / "config.json"))
    generation = path / "generation_config.json"
    if generation.exists():
        extra = token_ids(read_json(generation), "eos_token_id")
        config = replace(config, eos_ids=tuple(dict.fromkeys(config.eos_ids + extra)))
    tensors = _drop_redundant(_open_safetensors(_weight_files(path)), config, path)
    _check_tensors(tensors.shapes, config, path)
    return Checkpoint(config, tensors, quantized=False)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a model's file. Raises ConfigError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent}: {path.name} is missing") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def _weight_files(path: Path) -> list[Path]:
    """Files that hold the weights of a Hugging Face directory, sorted."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ConfigError(f"{index}: weight_map is missing")
        files = sorted({path / str(name) for name in names.values()})
    elif single.exists():
        files = [single]
    else:
        raise ConfigError(f"{path}: has neither model.safetensors nor model.safetensors.index.json")
    for file in files:
        if file.parent != path:
            raise ConfigError(f"{index}: names {file}, which lies outside the model's directory")
        if not file.is_file():
            raise ConfigError(f"{path}: {file.name}, named in {index.name}, is missing")
    return files


def _open_safetensors(files: list[Path]) -> Tensors:
    from safetensors import SafetensorError, safe_open

    load: dict[str, Callable[[], Array]] = {}
    shapes: dict[str, Shape] = {}
    for file in files:
        try:
            handle: Any = safe_open(file, framework="np")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: truncated or not a safetensors file: {error}") from error
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            if name in load:
                raise ConfigError(f"{file}: tensor {name} is in another file as well")
            view = handle.get_slice(name)
            if view.get_dtype() not in _SAFETENSORS_DTYPES:
                raise ConfigError(f"{file}: tensor {name} has unsupported type {view.get_dtype()}")
            load[name] = lambda handle=handle, name=name: handle.get_tensor(name)  # type: ignore[misc]
            shapes[name] = tuple(view.get_shape())
    return Tensors(load, shapes)


def _drop_redundant(tensors: Tensors, config: ModelConfig, where: Path) -> Tensors:
    """Leave out tensors that repeat what is known; refuse an output head that ties do not allow."""
    dropped = {name for name in tensors if _REDUNDANT.fullmatch(name)}
    if config.tie_embeddings and {"lm_head.weight", "model.embed_tokens.weight"} <= set(tensors):
        if not np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
            raise ConfigError(
                f"{where}: lm_head.weight differs from model.embed_tokens.weight, yet tie_word_embeddings is true"
            )
        dropped.add("lm_head.weight")
    kept = [name for name in tensors if name not in dropped]
    return Tensors({n: tensors._load[n] for n in kept}, {n: tensors.shapes[n] for n in kept})


# ------------------------------------------------------------------------------------------- GGUF

_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_ROPE = "rope_freqs.weight"

# Every GGUF file of Llama 3.1 and later was made from these; only the factor differs.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}


@dataclass(frozen=True)
class GgufTensor:
    """Place of a tensor in a GGUF file; shape is [out, in], offset and size are in bytes."""

    shape: Shape
    kind: int
    offset: int
    size: int


def read_gguf(path: str | Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata and tensor directory of a GGUF file (versions 2 and 3, little endian).

    The header is parsed here because the reader of the gguf package takes seconds for a vocabulary of
    150,000 entries. Raises ConfigError on truncated files and unknown types.
    """
    path = Path(path)
    header = _GgufHeader(np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8), path)
    metadata, tensors = header.read()
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConfigError(f"{path}: split.count is {parts!r}; merge the parts into one file first")
    return metadata, tensors


class _GgufHeader:
    """A cursor over the head of a GGUF file."""

    _SCALARS: Mapping[int, str] = {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
    }  # fmt: skip
    _STRING, _ARRAY = 8, 9

    def __init__(self, data: Array, path: Path):
        self._data, self._at, self._path = data.data, 0, path

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        try:
            return self._read()
        except (struct.error, IndexError, ArithmeticError, MemoryError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self._path}: the GGUF header is truncated or damaged") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path}: the GGUF header holds text that is not UTF-8") from error

    def _read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if bytes(self._data[:4]) != b"GGUF":
            raise ConfigError(f"{self._path}: not a GGUF file")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ConfigError(f"{self._path}: GGUF version {version} is not supported, only 2 and 3 (little endian)")
        tensor_count, key_count = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._text()
            metadata[key] = self._value(self._scalar("<I"))
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        return metadata, {name: self._place(name, shape, kind, start + at) for name, shape, kind, at in entries}

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _text(self) -> str:
        length = self._scalar("<Q")
        end = self._at + length
        if end > len(self._data):
            raise IndexError
        text = bytes(self._data[self._at : end]).decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == self._STRING:
            return self._text()
        if kind == self._ARRAY:
            return self._array(self._scalar("<I"), self._scalar("<Q"))
        if kind not in self._SCALARS:
            raise ConfigError(f"{self._path}: the GGUF header has a value of unknown type {kind}")
        return self._scalar(self._SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind not in self._SCALARS:
            return [self._value(kind) for _ in range(count)]
        form = f"<{count}{self._SCALARS[kind][1]}"
        values = list(struct.unpack_from(form, self._data, self._at))
        self._at += struct.calcsize(form)
        return values

    def _tensor_entry(self) -> tuple[str, Shape, int, int]:
        name = self._text()
        sizes = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        return name, tuple(reversed(sizes)), self._scalar("<I"), self._scalar("<Q")

    def _place(self, name: str, shape: Shape, kind: int, offset: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES

        if kind not in GGML_QUANT_SIZES:
            raise ConfigError(f"{self._path}: tensor {name} has unknown type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[kind]  # type: ignore[index]
        if not shape or shape[-1] % block:
            raise ConfigError(
                f"{self._path}: tensor {name} of shape {list(shape)} does not divide into blocks of {block}"
            )
        size = int(np.prod(shape, dtype=object)) // block * block_bytes
        if offset + size > len(self._data):
            raise ConfigError(f"{self._path}: truncated: tensor {name} ends beyond the end of the file")
        return GgufTensor(shape, kind, offset, size)


def _open_gguf(path: Path) -> Checkpoint:
    metadata, stored = read_gguf(path)
    bare = ModelConfig.from_gguf(metadata, tie_embeddings="output.weight" not in stored)
    scaling = None
    if _GGUF_ROPE in stored:
        scaling = _rope_scaling(_read_gguf_tensor(path, stored.pop(_GGUF_ROPE), _GGUF_ROPE), bare, path)
    config = replace(bare, rope_scaling=scaling)
    names = {name: _hugging_face_name(name, path) for name in stored}
    tensors = Tensors(
        {names[name]: _gguf_loader(path, name, names[name], tensor, config) for name, tensor in stored.items()},
        {names[name]: tensor.shape for name, tensor in stored.items()},
    )
    _check_tensors(tensors.shapes, config, path)
    return Checkpoint(config, tensors, quantized=True)


def _hugging_face_name(name: str, path: Path) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _GGUF_LAYER:
        raise ConfigError(f"{path}: unexpected tensor {name}")
    return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"


def _gguf_loader(path: Path, name: str, target: str, tensor: GgufTensor, config: ModelConfig) -> Callable[[], Array]:
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(target.split(".")[-2])
    if config.family != "llama" or heads is None:
        return lambda: _read_gguf_tensor(path, tensor, name)
    return lambda: unpermute_rope_rows(_read_gguf_tensor(path, tensor, name), heads)


def _read_gguf_tensor(path: Path, tensor: GgufTensor, name: str) -> NDArray[np.float32]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.kind)
    raw = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.size,))
    rows = np.asarray(raw).reshape(*tensor.shape[:-1], -1)
    try:
        return dequantize(rows, kind).reshape(tensor.shape).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise ConfigError(f"{path}: tensor {name} has type {kind.name}, which cannot be dequantised") from error


def unpermute_rope_rows(weight: Array, heads: int) -> Array:
    """Bring q or k rows from RoPE on neighbours (2i, 2i+1) to RoPE on halves (i, i + D/2).

    weight: [heads * D, ...], as GGUF's llama architecture stores it.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _rope_scaling(divisors: NDArray[np.float32], config: ModelConfig, path: Path) -> RopeScaling | None:
    """Recover the Llama-3.1 scaling that a table of divisors [D / 2] was made from."""
    inv_freq_R = inverse_frequencies(config.rope_theta, config.head_dim, None)
    if divisors.shape != inv_freq_R.shape:
        raise ConfigError(
            f"{path}: tensor {_GGUF_ROPE} has shape {list(divisors.shape)}, expected {list(inv_freq_R.shape)}"
        )
    if np.all(divisors == 1.0):
        return None
    scaling = RopeScaling(factor=float(divisors.max()), **_LLAMA3_ROPE)  # type: ignore[arg-type]
    if not np.allclose(divisors, rope_divisors(inv_freq_R, scaling), rtol=1e-4):
        raise ConfigError(f"{path}: tensor {_GGUF_ROPE} is not Llama-3.1 RoPE scaling, the only kind supported")
    return scaling


# ------------------------------------------------------------------------------- digest and cache


def weights_digest(path: str | Path, cache_dir: str | Path) -> bytes:
    """SHA-256 over the content of a model's weight files, 32 bytes.

    Digests are remembered in cache_dir per file, and believed while its size and modification time stay.
    """
    path = Path(path)
    files = _weight_files(path) if path.is_dir() else [path]
    digests = [_file_digest(file, Path(cache_dir) / "digests") for file in files]
    if len(files) == 1:
        return digests[0]
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(hashlib.sha256(file.name.encode()).digest() + digest)
    return whole.digest()


def _file_digest(file: Path, memory: Path) -> bytes:
    stat = file.stat()
    state = [str(file.resolve()), stat.st_size, stat.st_mtime_ns]
    note = memory / hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]
    try:
        *remembered, digest = json.loads(note.read_text(encoding="utf-8"))
        if remembered == state:
            return bytes.fromhex(digest)
    except (OSError, ValueError, TypeError):
        pass  # none yet, or damaged: computed anew below
    with file.open("rb") as stream:
        computed = hashlib.file_digest(stream, "sha256").digest()
    memory.mkdir(parents=True, exist_ok=True)
    with atomic_path(note) as part:
        part.write_text(json.dumps([*state, computed.hex()]), encoding="utf-8")
    return computed


def load_decoder(path: str | Path, dtype: DTypeLike, cache_dir: str | Path) -> Decoder:
    """Build the decoder of a checkpoint, with weights of `dtype`.

    Dequantised weights are kept in cache_dir, under the SHA-256 of the weights and the dtype, so that the
    next start need not dequantise; a damaged cache is rebuilt. Raises ConfigError as `open_checkpoint` does.
    """
    from ragjax.models.decoder import Decoder

    checkpoint = open_checkpoint(path)
    tensors: Mapping[str, Array] = checkpoint.tensors
    if checkpoint.quantized:
        tensors = _dequantized(checkpoint, Path(path), np.dtype(dtype), Path(cache_dir))
    return Decoder.from_tensors(checkpoint.config, tensors, np.dtype(dtype))


def _dequantized(checkpoint: Checkpoint, path: Path, dtype: np.dtype[Any], cache_dir: Path) -> Tensors:
    """Tensors from the cache, which is filled first where it has to be: both starts see the same numbers."""
    parts = [weights_digest(path, cache_dir), checkpoint.config.to_json().encode(), dtype.name.encode()]
    key = hashlib.sha256(b"\0".join([str(_CACHE_FORMAT).encode(), *parts])).hexdigest()[:32]
    directory = cache_dir / "dequantized"
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / f"{key}.lock"):
        file = _verified(directory, key)
        if file is None:
            file = _write_cache(checkpoint, dtype, directory, key)
        return _open_safetensors([file])


def _verified(directory: Path, key: str) -> Path | None:
    """The cache file of this key whose content has the SHA-256 that its name states."""
    for file in directory.glob(f"{key}-*.safetensors"):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if file.stem == f"{key}-{digest}":
            return file
        _log.warning("%s is damaged; dequantising the weights again", file)
        file.unlink()
    return None


def _write_cache(checkpoint: Checkpoint, dtype: np.dtype[Any], directory: Path, key: str) -> Path:
    """Dequantise tensor by tensor into a safetensors file, so that memory holds one tensor at a time."""
    from tqdm import tqdm

    kinds = {np.dtype(kind): name for name, kind in _SAFETENSORS_DTYPES.items()}
    # Vectors (norms, biases) are small and stay float32; the decoder casts them as it sees fit.
    dtypes = {n: dtype if len(s) > 1 else np.dtype(np.float32) for n, s in checkpoint.tensors.shapes.items()}
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in checkpoint.tensors.shapes.items():
        end = offset + int(np.prod(shape)) * dtypes[name].itemsize
        header[name] = {"dtype": kinds[dtypes[name]], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    part = directory / f"{key}.part"
    with part.open("wb") as stream:
        for block in (struct.pack("<Q", len(head)), head):
            digest.update(block)
            stream.write(block)
        for name in tqdm(header, desc="dequantising", unit="tensor", disable=None):
            data = np.ascontiguousarray(checkpoint.tensors[name].astype(dtypes[name], copy=False)).tobytes()
            digest.update(data)
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    file = directory / f"{key}-{digest.hexdigest()}.safetensors"
    part.replace(file)
    return file


# ------------------------------------------------------------------------------------------ Orbax

_CONFIG_FILE = "ragjax.json"


def save_decoder(decoder: Decoder, path: str | Path) -> None:
    """Save weights (as they are) and configuration with Orbax into a directory that does not exist yet."""
    import orbax.checkpoint as ocp
    from flax import nnx

    path = Path(path).absolute()
    if path.exists():
        raise ConfigError(f"{path} exists already; give a new directory to save into")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "weights", nnx.to_pure_dict(nnx.state(decoder)))
    # The configuration comes last: a directory with it was saved whole.
    with atomic_path(path / _CONFIG_FILE) as part:
        part.write_text(decoder.config.to_json(), encoding="utf-8")


def restore_decoder(path: str | Path, dtype: DTypeLike) -> Decoder:
    """Restore what `save_decoder` saved, with matrices cast to `dtype`. Raises ConfigError when it cannot."""
    import orbax.checkpoint as ocp
    from flax import nnx

    from ragjax.models.decoder import Decoder

    path = Path(path).absolute()
    try:
        text = (path / _CONFIG_FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {_CONFIG_FILE} is missing; not a decoder saved whole") from error
    config = ModelConfig.from_json(text)
    graph, state = nnx.split(Decoder.abstract(config, np.dtype(dtype)))
    wanted = nnx.to_pure_dict(state)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            _check_saved(checkpointer.metadata(path / "weights").item_metadata.tree, wanted, path)
            weights = checkpointer.restore(path / "weights", wanted)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: the saved weights are damaged: {error}") from error
    nnx.replace_by_pure_dict(state, weights)
    return nnx.merge(graph, state)


def _check_saved(saved: Any, wanted: Any, where: Path) -> None:
    """Compare the tensors in an Orbax directory with those that the configuration asks for."""
    import jax

    def shapes(tree: Any) -> dict[str, Shape]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {".".join(re.findall(r"\w+", jax.tree_util.keystr(keys))): tuple(leaf.shape) for keys, leaf in leaves}

    found, expected = shapes(saved), shapes(wanted)
    for name in expected.keys() | found.keys():
        if found.get(name) != expected.get(name):
            raise ConfigError(
                f"{where}: saved tensor {name} has shape {found.get(name, 'none (missing)')}, "
                f"expected {expected.get(name, 'none (unexpected)')}"
            )
