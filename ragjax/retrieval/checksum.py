"""Checksums of what databases and stores of triples keep. They find damage, and are no signatures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def checksum(parts: Iterable[object]) -> bytes:
    """16 bytes that tell values, in this order, from others: bytes as they are, all else as its text."""
    digest = hashlib.blake2b(digest_size=16)
    for value in parts:
        part = value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
