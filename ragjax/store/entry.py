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
import stat
from collections.abc import Iterator, Mapping
from hashlib import sha256
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

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


def encode(record: Record, arrays: Arrays, identity: bytes) -> tuple[Bytes, ...]:
    """The pieces of a file, in order: header, then each array's bytes (no copy is made of contiguous arrays)."""
    _check(record)
    for name, array in arrays.items():
        if array.dtype not in DTYPES:
            raise ValueError(f"array {name!r} has dtype {array.dtype}; an entry holds {', '.join(map(str, DTYPES))}")
        if name == _METADATA:
            raise ValueError(f"no array can be named {name!r}")
    # Widest first, so that every array begins at a multiple of its item size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    data = [np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) for name in names]
    fields: dict[str, Any] = {_METADATA: _metadata(record, identity)}
    end = 0
    for name, piece in zip(names, data, strict=True):
        begin, end = end, end + len(piece)
        fields[name] = {"dtype": DTYPES[arrays[name].dtype], "shape": arrays[name].shape, "data_offsets": (begin, end)}
    digest = sha256(_header(fields))  # the fastest here that trusts nobody
    for piece in data:
        digest.update(piece.data)
    fields[_METADATA]["checksum"] = digest.hexdigest()
    return (np.frombuffer(_header(fields), np.uint8), *data)


class Reader:
    """An entry that is read a share of each array at a time: of KV, some layers (every array's first axis).

    Nothing of it is checked before the last share is there. The file is not mapped: one that is cut short under a
    mapping would kill the process. Raises Damaged if the header is not what `encode` writes for this identity.
    """

    def __init__(self, content: FileIO | BytesIO, identity: bytes):
        self.size = content.seek(0, 2)
        self._content = content
        self._start = _header_end(self._fill(np.empty(min(_PREFIX, self.size), np.uint8), 0).tobytes(), self.size)
        fields = _parse(self._fill(np.empty(self._start, np.uint8), 0).tobytes(), identity)
        self.record, self._checksum = _record(fields[_METADATA]), fields[_METADATA].pop("checksum")
        self._digest = sha256(_header(fields))
        del fields[_METADATA]
        self._arrays = {name: (_BY_NAME[one["dtype"]], tuple(one["shape"])) for name, one in fields.items()}
        self._extents = [tuple(one["data_offsets"]) for one in fields.values()]
        expected = self._extents[-1][1] if self._extents else 0
        if self.size - self._start != expected:
            raise Damaged(f"it holds {self.size - self._start} bytes of arrays instead of {expected}")

    def shares(self, count: int) -> Iterator[dict[str, NDArray[Any]]]:
        """So many equal shares in order, views of one array; the last comes once the checksum was found right."""
        for name, (_, shape) in self._arrays.items():
            if count > 1 and (not shape or shape[0] % count):
                raise Damaged(f"array {name} of shape {list(shape)} does not fall into {count} shares")
        size = self.size - self._start
        # NumPy asks for huge pages from 4 MiB on, and to fill small ones takes longer than to read
        data = np.empty(max(size, _HUGE if 4 * size > _HUGE else 0), np.uint8)[:size]
        first = self._extents[0][1] if self._extents else 0
        hashed = 0
        for i in range(count):
            arrays = {}
            for (name, (dtype, shape)), (begin, end) in zip(self._arrays.items(), self._extents, strict=True):
                step = (end - begin) // count
                part = self._fill(data[begin + i * step : begin + (i + 1) * step], self._start + begin + i * step)
                arrays[name] = part.view(dtype).reshape((shape[0] // count, *shape[1:]) if count > 1 else shape)
            if i == count - 1:
                self._digest.update(data[hashed:].data)
                if self._digest.hexdigest() != self._checksum:
                    raise Damaged("its checksum does not match")
            yield arrays
            there = first // count * (i + 1)  # only the first array's shares lie at the beginning
            self._digest.update(data[hashed:there].data)  # after the yield: the share is wanted sooner than the sum
            hashed = there

    def _fill(self, data: Bytes, offset: int) -> Bytes:
        self._content.seek(offset)
        got = 0
        while got < len(data):
            more = self._content.readinto(data[got:].data)
            if not more:
                raise Damaged("it was cut short")
            got += more
        return data


def peek(path: Path, identity: bytes) -> Record:
    """The record of a file, from its header alone: the arrays' bytes must be there, but are not checked."""
    with open_regular(path) as file:
        return Reader(file, identity).record


def open_regular(path: Path) -> FileIO:
    """The file, open to be read. Raises Damaged if it is none: to read a pipe would wait for ever."""
    file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Damaged("it is no file")
    return file


def record_of(head: bytes, identity: bytes) -> Record:
    if _header_end(head[:_PREFIX], len(head)) != len(head):
        raise Damaged("its header has another length")
    return _record(_parse(head, identity)[_METADATA])


def _check(record: Record) -> None:
    if len(record.key) != 32 or len(record.place) != 32:
        raise ValueError(f"key and place must be 32 bytes, not {len(record.key)} and {len(record.place)}")
    if not record.tokens or len(record.tokens) % 4:
        raise ValueError(f"tokens must be int32 ids, at least one; got {len(record.tokens)} bytes")
    if not -(2**31) <= record.local_start < 2**31:
        raise ValueError(f"local_start must be an int32, not {record.local_start}")
    for text in (record.provenance, record.method):
        text.encode()  # UnicodeEncodeError, a ValueError, where it is no text


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


def _header(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_PREFIX, "little") + text


def _header_end(prefix: bytes, size: int) -> int:
    end = _PREFIX + int.from_bytes(prefix, "little")
    if size < _PREFIX or not end <= min(size, _LONGEST_HEADER):
        raise Damaged(f"its {size} bytes hold no whole header")
    return end


def _parse(header: bytes, identity: bytes) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(header[_PREFIX:])
        metadata = fields[_METADATA]
        written = metadata["format"], metadata["identity"]
        record = _record(metadata)
        _check(record)
        canonical: dict[str, Any] = {_METADATA: _metadata(record, identity) | {"checksum": str(metadata["checksum"])}}
        end = 0
        for name, one in fields.items():
            if name != _METADATA:
                if not all(type(size) is int and size >= 0 for size in one["shape"]):
                    raise ValueError("sizes must be whole numbers")
                begin, end = end, end + _BY_NAME[one["dtype"]].itemsize * math.prod(one["shape"])
                canonical[name] = {"dtype": one["dtype"], "shape": one["shape"], "data_offsets": [begin, end]}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise Damaged("its header is not one of ours") from None
    if written != (str(FORMAT), identity.hex()):
        raise Damaged("it is of another format or model")
    if header != _header(canonical):
        raise Damaged("its header is not as it was written")
    return canonical
