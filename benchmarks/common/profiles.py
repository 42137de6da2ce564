"""Files of what a prefill costs, which `benchmarks.cost` writes and `benchmarks.policies` reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ragjax.cache.profile import Profile
from ragjax.core import ConfigError


def save(profile: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(profile), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Profile:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(tuple(map(float, row)) for row in data["seconds"])
        return Profile(tuple(map(int, data["cached"])), tuple(map(int, data["new"])), rows, str(data["measured_on"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: no cost profile: {error!r}") from error
