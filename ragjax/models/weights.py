"""Weights of a decoder, from a Hugging Face directory or a GGUF file: what they are (digest), and the decoder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from ragjax.core import ConfigError
from ragjax.core.file import atomic_path
from ragjax.models.gguf import open_gguf
from ragjax.models.hub import cache_writes, locked
from ragjax.models.huggingface import SAFETENSORS_DTYPES, open_directory, storage_note, weight_files
from ragjax.models.tensors import Array, Checkpoint

if TYPE_CHECKING:
    from ragjax.models.decoder import Decoder
    from ragjax.models.packed import PackedForm, Sources

_log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes: XLA on a CPU uses a mapped file as it is, if arrays begin so
_KINDS = {**SAFETENSORS_DTYPES, "U8": np.uint8, "I64": np.int64}
_CACHE_FORMAT = 2  # raise it when the content of the dequantised cache changes meaning


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory or a .gguf file, reading headers only.

    Raises ConfigError that names the field, tensor or file which is missing, unexpected or of the wrong shape.
    """
    path = Path(path)
    if path.is_dir():
        return open_directory(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such model")
    if path.suffix != ".gguf":
        raise ConfigError(f"{path}: expected a .gguf file or a directory with config.json and safetensors")
    return open_gguf(path)


def weights_digest(path: str | Path, cache_dir: str | Path) -> bytes:
    """SHA-256 over the content of a model's weight files, and over how they are to be read, 32 bytes.

    Digests are remembered in cache_dir per file, and believed while its size and modification time stay.
    """
    path = Path(path)
    files = weight_files(path) if path.is_dir() else [path]
    digests = [_file_digest(file, Path(cache_dir) / "digests") for file in files]
    note = storage_note(path) if path.is_dir() else b""
    if len(files) == 1 and not note:
        return digests[0]
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(hashlib.sha256(file.name.encode()).digest() + digest)
    whole.update(note)
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
        pass  # none yet, or damaged: recomputed below
    with file.open("rb") as stream:
        computed = hashlib.file_digest(stream, "sha256").digest()
    with suppress(OSError):  # only a memory: a cache that cannot be written serves as well
        memory.mkdir(parents=True, exist_ok=True)
        with atomic_path(note) as part:
            part.write_text(json.dumps([*state, computed.hex()]), encoding="utf-8")
    return computed


def load_decoder(
    path: str | Path, dtype: DTypeLike, cache_dir: str | Path, packed: PackedForm | None = None
) -> Decoder:
    """Build the decoder of a checkpoint, with weights of `dtype`.

    Dequantised weights are kept in cache_dir, under the SHA-256 of the weights, how they are read and the dtype, as the
    decoder has them: the next start maps the file. A damaged cache is rebuilt. Raises ConfigError as `open_checkpoint`.

    packed: matrices that the checkpoint has in 4 to 8 bits stay so, for a CPU (`kernels.cpu`), but for mixtures of
    experts; the form's bits are for those that have more.
    """
    from ragjax.kernels.cpu import op
    from ragjax.models.decoder import Decoder
    from ragjax.models.packed import Sources

    checkpoint = open_checkpoint(path)
    narrows = packed is not None and packed.bits is not None
    if not checkpoint.quantized and not narrows:
        return Decoder.from_tensors(checkpoint.config, checkpoint.tensors, np.dtype(dtype))
    if checkpoint.config.num_experts:
        if narrows:
            raise ConfigError(f"{path}: the matrices of a mixture of experts keep their bits; leave --weights out")
        packed = None
    sources = None
    if packed is not None:
        form = replace(packed, tiled=packed.tiled and op.tiled())
        sources = Sources(checkpoint.config, checkpoint.tensors, form)
    packings = {} if sources is None else sources.packings
    layers = {name.rpartition(".")[0] for name in packings}
    mlps = [tuple(packings.get(f"{layer}.{part}") for part in ("gate_up", "down")) for layer in layers]
    pairs = sorted({(first, second) for first, second in mlps if first and second}, key=repr)
    op.register_packed(sorted(set(packings.values()), key=repr), Path(cache_dir) / "kernels", pairs)
    file = _own_file(checkpoint, sources, Path(path), np.dtype(dtype), Path(cache_dir))
    return Decoder.from_arrays(checkpoint.config, mapped(file), np.dtype(dtype), packings)


def mapped(file: Path) -> Iterator[tuple[str, Array]]:
    """The arrays of a safetensors file, by name, as parts of a mapping of it."""
    data = np.memmap(file, np.uint8, "r")
    begin = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:begin].tobytes())
    header.pop("__metadata__", None)
    for name, about in header.items():
        low, high = about["data_offsets"]
        array = data[begin + low : begin + high].view(_KINDS[about["dtype"]])
        yield name, array.reshape(about["shape"])


def _own_file(
    checkpoint: Checkpoint, sources: Sources | None, path: Path, dtype: np.dtype[Any], cache_dir: Path
) -> Path:
    """The cache's file, which is written first where it has to be: both starts see the same numbers."""
    # besides the files' bytes these alone determine tensors: an end token or the context's length changes none
    config, shapes = checkpoint.config, sorted(checkpoint.tensors.shapes.items())
    reading = json.dumps([config.family, config.num_heads, config.num_kv_heads, config.rotary_dim, shapes]).encode()
    form = dtype.name if sources is None else f"{dtype.name} stacks {sorted(sources.packings.items())}"
    parts = [str(_CACHE_FORMAT).encode(), weights_digest(path, cache_dir), reading, form.encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]
    directory = cache_dir / ("dequantized" if sources is None else "packed")
    with cache_writes(cache_dir):
        whole = [file for file in _cached(directory, key) if _is_whole(file, key)]
        if whole:
            return whole[0]  # without the lock, which a read-only cache cannot have
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / f"{key}.lock", f"reading {path}"):
            for file in _cached(directory, key):
                if _is_whole(file, key):
                    return file
                _log.warning("%s is damaged; the weights are read again", file)
                file.unlink(missing_ok=True)
            return _write_cache(checkpoint, sources, dtype, directory, key)


def _cached(directory: Path, key: str) -> list[Path]:
    return list(directory.glob(f"{key}-*.safetensors"))


def _is_whole(file: Path, key: str) -> bool:
    try:
        digest = _file_digest(file, file.parent.parent / "digests").hex()
    except FileNotFoundError:  # another process found it damaged
        return False
    return file.stem == f"{key}-{digest}"


def _write_cache(
    checkpoint: Checkpoint, sources: Sources | None, dtype: np.dtype[Any], directory: Path, key: str
) -> Path:
    """Write a safetensors file layer by layer, so that memory holds one layer at a time."""
    from tqdm import tqdm

    from ragjax.models.decoder import Decoder, matrix_shape, own_arrays

    kinds = {np.dtype(kind): name for name, kind in _KINDS.items()}
    weights = Decoder.abstract(checkpoint.config, dtype).weights()
    packings, stacks = ({}, {}) if sources is None else (sources.packings, sources.stacks)
    header: dict[str, Any] = {}
    offset = 0
    stored: dict[str, np.dtype[Any]] = {}
    for name in (*stacks, *(name for name in weights if name not in stacks)):
        shape, kind, entry = tuple(weights[name].shape), weights[name].dtype, stacks.get(name, name)
        if name in packings:
            shape, kind = packings[name].shape(*matrix_shape(name, shape)), np.dtype(np.uint8)
        stored[entry] = kind
        end = offset + int(np.prod(shape)) * kind.itemsize
        if entry in header:
            header[entry]["shape"][0] += 1
            header[entry]["data_offsets"][1] = end
        else:
            whole = [1, *shape] if name in stacks else list(shape)
            header[entry] = {"dtype": kinds[kind], "shape": whole, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-(8 + len(head)) % _ALIGNMENT)
    digest = hashlib.sha256()
    part = directory / f"{key}.part"
    with part.open("wb") as stream:
        for block in (struct.pack("<Q", len(head)), head):
            digest.update(block)
            stream.write(block)
        plain = own_arrays(checkpoint.config, checkpoint.tensors)
        arrays = plain if sources is None else sources.arrays()
        for name, array in tqdm(arrays, desc="reading weights", unit="tensor", total=len(weights), disable=None):
            data = np.ascontiguousarray(array.astype(stored[name], copy=False)).tobytes()
            digest.update(data)
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    file = directory / f"{key}-{digest.hexdigest()}.safetensors"
    part.replace(file)
    return file
