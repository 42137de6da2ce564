"""Files of JSON lines, and the questions of the demo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragjax.commands.flags import DEMO
from ragjax.core import ConfigError


def read_lines(path: Path, *fields: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, each of which must have these fields.

    Raises:
        ConfigError: naming the line that is not so.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}:{number}: not JSON: {error}") from None
            missing = [field for field in fields if not isinstance(found, dict) or field not in found]
            if missing:
                raise ConfigError(f"{path}:{number}: no field {missing[0]!r}")
            yield found


def demo_questions(name: str = "questions", limit: int | None = None) -> list[dict[str, Any]]:
    """The packaged questions (`graph_questions`: those on its graph), the first `limit` of them."""
    return list(read_lines(DEMO / f"{name}.jsonl", "question"))[:limit]


TEXTS = Path(__file__).parents[1] / "texts"


def excerpt(name: str, words: int, skip: int = 0) -> str:
    """So many words of one of the texts, its paragraphs kept."""
    whole = (TEXTS / f"{name}.txt").read_text()
    begin = len(" ".join(whole.split(" ")[:skip]))
    return " ".join(whole[begin:].split(" ")[:words]).strip()
