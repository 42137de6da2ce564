"""Files that tests make."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ragjax.core import ConfigError, Document
from ragjax.retrieval.confined import ReadingLimits, told_by
from ragjax.retrieval.document import parse
from ragjax.retrieval.formats import CONFINED
from ragjax.retrieval.text import clean, joined

LIMITS = ReadingLimits(pages=100, stream=2**20, chars=2**20, memory=2**31, seconds=9)


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Write objects as JSON lines; folders above are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read_here(name: str, data: str | bytes, limits: ReadingLimits = LIMITS) -> Document:
    """The document "a" in a file's bytes, as `parse` reads it, but for the process of its own."""
    path, content = Path(name), data if isinstance(data, bytes) else data.encode()
    if path.suffix not in CONFINED:
        return parse(content, path, "a")
    reason, reading = told_by(CONFINED[path.suffix], content, limits)
    if reason:
        raise ConfigError(f"{path}: {reason}")
    text, places = joined(reading.parts)
    return Document("a", text, " ".join(clean(reading.title).split()) or path.stem, places)
