"""One entry of the disk tier as a file: KV arrays, and the record that says what they are, under one checksum.

A safetensors file, which any reader of that format opens; the record stands in its metadata. The checksum
(SHA-256) covers the record, the arrays' names, dtypes and shapes, and their bytes. A header is accepted only if it is
bit for bit what this module would write, so that no bit of a file can change unnoticed.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ragjax.core import RagjaxError
from ragjax.core.tiers import Record

FORMAT = 1
"""Version of the layout of entries, index and manifest; a reader uses no other."""

Arrays = Mapping[str, NDArray[Any]]
"""KV arrays by name, each of a dtype in DTYPES."""

Bytes = NDArray[np.uint8]

_Hash = Any  # hashlib names no type for it

_HUGE = 4 * 2**20

DTYPES: Mapping[np.dtype[Any], str] = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.uint16): "U16",
}
"""The dtypes an entry can hold, and their names in the format."""

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_METADATA = "__metadata__"
_PREFIX = 8  # bytes of the header's length, which stand first
_LONGEST_HEADER = 64 * 2**20


class DiskError(RagjaxError):
    """The disk tier could not do what it was asked; the KV is computed instead."""


class Damaged(DiskError):
    """An entry is not, or not any more, what was written under its key."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Arrays in the order of their bytes: (name, dtype, shape)."""

    arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]

    def extents(self) -> list[tuple[int, int]]:
        """Half-open byte ranges, from the end of the header on."""
        ends = [0]
        for _, dtype, shape in self.arrays:
            ends.append(ends[-1] + dtype.itemsize * math.prod(shape))
        return list(pairwise(ends))


def encode(record: Record, arrays: Arrays, identity: bytes) -> tuple[Bytes, ...]:
    """The pieces of a file, in order: header, then each array's bytes (no copy is made of contiguous arrays).

    Raises:
        ValueError: a record or array that the format cannot hold; the message names it.
    """
    _check(record, arrays)
    # Widest first, so that every array begins at a multiple of its item size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    layout = _Layout(tuple((name, arrays[name].dtype, arrays[name].shape) for name in names))
    data = tuple(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) for name in names)
    checksum = _checksum(record, layout, identity, data)
    return (np.frombuffer(_header(record, layout, identity, checksum), np.uint8), *data)


def _room(size: int) -> Bytes:
    """So many bytes; NumPy asks for huge pages from 4 MiB on, and to fill small ones takes longer than to read."""
    return np.empty(max(size, _HUGE if 4 * size > _HUGE else 0), np.uint8)[:size]


class Content(Protocol):
    """The bytes of an entry, wherever they lie. size: how many."""

    size: int

    def fill(self, data: Bytes, offset: int) -> None:
        """Put the bytes from `offset` on into `data`.

        Raises:
            Damaged: there are fewer.
            OSError: they cannot be read.
        """
        ...


class OnDisk:
    """The content of an open file. It is not mapped: a file cut short under a mapping would kill the process."""

    def __init__(self, file: FileIO):
        self.size = os.fstat(file.fileno()).st_size
        self._file = file

    def fill(self, data: Bytes, offset: int) -> None:
        """See `Content`."""
        got = 0
        while got < len(data):
            more = os.preadv(self._file.fileno(), [data.data[got:]], offset + got)
            if not more:
                raise Damaged("it was cut short")
            got += more


class InMemory:
    """Content that is there already."""

    def __init__(self, data: bytes):
        self.size = len(data)
        self._data = np.frombuffer(data, np.uint8)

    def fill(self, data: Bytes, offset: int) -> None:
        """See `Content`."""
        part = self._data[offset : offset + len(data)]
        if len(part) < len(data):
            raise Damaged("it was cut short")
        data[:] = part


class Reader:
    """An entry that is read a share of each array at a time: of KV, some layers (every array's first axis).

    record: what it says it is. size: its bytes. Nothing of it is checked before the last share is there.

    Raises:
        Damaged: the header is not what `encode` writes for this identity, or the content has another length.
    """

    def __init__(self, content: Content, identity: bytes):
        self.size = content.size
        self._content = content
        self._start = _header_end(self._bytes(min(_PREFIX, self.size)), self.size)
        self.record, self._layout, self._checksum = _parse(self._bytes(self._start), identity)
        self._extents = _fit(self._layout, self.size - self._start)
        self._digest = _digest(self.record, self._layout, identity)

    def shares(self, count: int) -> Iterator[dict[str, NDArray[Any]]]:
        """So many equal shares in order, views of one array; the last comes once the checksum was found right.

        Raises:
            Damaged: the bytes are not those that were written, or an array cannot be shared.
            OSError: they cannot be read.
        """
        shapes = [self._shape(name, shape, count) for name, _, shape in self._layout.arrays]
        data = _room(self.size - self._start)
        hashed = 0
        for i in range(count):
            arrays = {
                name: self._share(data, extent, i, count).view(dtype).reshape(shape)
                for (name, dtype, _), shape, extent in zip(self._layout.arrays, shapes, self._extents, strict=True)
            }
            last = i == count - 1
            if last:
                self._digest.update(data[hashed:].data)
                if self._digest.hexdigest() != self._checksum:
                    raise Damaged("its checksum does not match")
            yield arrays
            there = 0 if last else self._there(i + 1, count)
            self._digest.update(data[hashed:there].data)  # after the yield: the share is wanted sooner than the sum
            hashed = max(hashed, there)

    def _shape(self, name: str, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        if count == 1:
            return shape
        if not shape or shape[0] % count:
            raise Damaged(f"array {name} of shape {list(shape)} does not fall into {count} shares")
        return shape[0] // count, *shape[1:]

    def _share(self, data: Bytes, extent: tuple[int, int], i: int, count: int) -> Bytes:
        """Read the bytes of an array's i-th share."""
        size = (extent[1] - extent[0]) // count
        part = slice(extent[0] + i * size, extent[0] + (i + 1) * size)
        self._content.fill(data[part], self._start + part.start)
        return data[part]

    def _bytes(self, count: int) -> bytes:
        """The first bytes of the content."""
        data = np.empty(count, np.uint8)
        self._content.fill(data, 0)
        return data.tobytes()

    def _there(self, shares: int, count: int) -> int:
        """Up to where all bytes were read, after so many shares: only the first array's lie at the beginning."""
        begin, end = next(iter(self._extents), (0, 0))
        return begin + (end - begin) // count * shares


def peek(path: Path, identity: bytes) -> Record:
    """The record of a file, from its header alone: the arrays' bytes must be there, but are not checked.

    Raises:
        Damaged: the header is not what `encode` writes for this identity, or the file has another length.
    """
    with open(path, "rb", buffering=0) as file:
        return Reader(OnDisk(file), identity).record


def record_of(head: bytes, identity: bytes) -> Record:
    """Parse the record of a header alone; the bytes that it describes are not checked.

    Raises:
        Damaged: it is not what `encode` writes for this identity.
    """
    if _header_end(head[:_PREFIX], len(head)) != len(head):
        raise Damaged("its header has another length")
    return _parse(head, identity)[0]


def _check(record: Record, arrays: Arrays) -> None:
    if len(record.key) != 32 or len(record.place) != 32:
        raise ValueError(f"key and place must be 32 bytes, not {len(record.key)} and {len(record.place)}")
    if not record.tokens or len(record.tokens) % 4:
        raise ValueError(f"tokens must be int32 ids, at least one; got {len(record.tokens)} bytes")
    if not -(2**31) <= record.local_start < 2**31:
        raise ValueError(f"local_start must be an int32, not {record.local_start}")
    for text in (record.provenance, record.method):
        text.encode()  # UnicodeEncodeError, a ValueError, where it is no text
    for name, array in arrays.items():
        if array.dtype not in DTYPES:
            raise ValueError(f"array {name!r} has dtype {array.dtype}; an entry holds {', '.join(map(str, DTYPES))}")
        if name == _METADATA:
            raise ValueError(f"no array can be named {name!r}")


def _metadata(record: Record, identity: bytes) -> dict[str, str]:
    return {
        "format": str(FORMAT),
        "identity": identity.hex(),
        "key": record.key.hex(),
        "local_start": str(record.local_start),
        "lossy": str(int(record.lossy)),
        "meta": base64.b64encode(record.meta).decode(),
        "method": record.method,
        "place": record.place.hex(),
        "provenance": record.provenance,
        "tokens": base64.b64encode(record.tokens).decode(),
    }


def _record(metadata: Mapping[str, str]) -> Record:
    return Record(
        key=bytes.fromhex(metadata["key"]),
        place=bytes.fromhex(metadata["place"]),
        tokens=base64.b64decode(metadata["tokens"], validate=True),
        provenance=metadata["provenance"],
        method=metadata["method"],
        local_start=int(metadata["local_start"]),
        lossy=metadata["lossy"] == "1",
        meta=base64.b64decode(metadata["meta"], validate=True),
    )


def _header(record: Record, layout: _Layout, identity: bytes, checksum: str | None) -> bytes:
    """The header with its length before it. Only what the checksum covers if there is no checksum yet."""
    metadata = _metadata(record, identity) | ({} if checksum is None else {"checksum": checksum})
    header: dict[str, Any] = {_METADATA: metadata}
    for (name, dtype, shape), extent in zip(layout.arrays, layout.extents(), strict=True):
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": extent}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_PREFIX, "little") + text


def _checksum(record: Record, layout: _Layout, identity: bytes, data: Sequence[Bytes]) -> str:
    digest = _digest(record, layout, identity)
    for piece in data:
        digest.update(piece.data)
    return str(digest.hexdigest())


def _digest(record: Record, layout: _Layout, identity: bytes) -> _Hash:
    """Start the checksum with the record, names, dtypes and shapes; the arrays' bytes follow."""
    return sha256(_header(record, layout, identity, None))  # the fastest here that trusts nobody


def _header_end(prefix: bytes, size: int) -> int:
    end = _PREFIX + int.from_bytes(prefix, "little")
    if size < _PREFIX or not end <= min(size, _LONGEST_HEADER):
        raise Damaged(f"its {size} bytes hold no whole header")
    return end


def _parse(header: bytes, identity: bytes) -> tuple[Record, _Layout, str]:
    try:
        fields = json.loads(header[_PREFIX:])
        metadata = fields.pop(_METADATA)
        written = metadata["format"], metadata["identity"]
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("metadata must be text")
        record, checksum = _record(metadata), metadata["checksum"]
        layout = _Layout(tuple((name, _BY_NAME[one["dtype"]], _shape(one["shape"])) for name, one in fields.items()))
        _check(record, {})
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise Damaged("its header is not one of ours") from None
    if written != (str(FORMAT), identity.hex()):
        raise Damaged("it is of another format or model")
    if header != _header(record, layout, identity, checksum):
        raise Damaged("its header is not as it was written")
    return record, layout, checksum


def _shape(sizes: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("sizes must be whole numbers")
    return tuple(sizes)


def _fit(layout: _Layout, size: int) -> list[tuple[int, int]]:
    extents = layout.extents()
    expected = extents[-1][1] if extents else 0
    if size != expected:
        raise Damaged(f"it holds {size} bytes of arrays instead of {expected}")
    return extents
