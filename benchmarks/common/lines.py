"""Files of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
