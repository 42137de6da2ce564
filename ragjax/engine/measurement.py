"""Measurements of a model: its quality report, Cache-Craft's alpha, and prefill times.

Each is a file in ragjax's folder, by what the model's KV depends on (`identity`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ragjax.core import ConfigError
from ragjax.models.hub import cache_dir
from ragjax.quality.report import Alpha, Budget, Report, Setting
from ragjax.reuse.base import Strategy
from ragjax.reuse.craft import Craft

_log = logging.getLogger(__name__)


def report_path(identity: bytes) -> Path:
    """Where the quality report of a model is kept, by what its KV depends on."""
    return cache_dir() / "quality" / f"{identity.hex()}.json"


def alpha_path(identity: bytes) -> Path:
    """Where a model's calibrated alpha of Cache-Craft is kept, by what its KV depends on."""
    return cache_dir() / "craft" / f"{identity.hex()}.json"


def cost_path(identity: bytes) -> Path:
    """Where a model's prefill times on this machine are kept, by what its KV depends on."""
    return cache_dir() / "cost" / f"{identity.hex()}.json"


def alpha_of(identity: bytes) -> float:
    """The calibrated alpha of Cache-Craft, 1 if there is none.

    Raises:
        ConfigError: if its file cannot be used.
    """
    path = alpha_path(identity)
    return Alpha.load(path, identity.hex()).value if path.exists() else 1.0


def report_of(identity: bytes, budget: Budget | None, known: Mapping[str, Strategy], top_k: int) -> Report | None:
    """The model's quality report, as far as it is of known strategies.

    None if no budget needs one and there is none, or, with a warning, none that can be used.

    What Cache-Craft's strategies did by another alpha than they have now is left out.

    Raises:
        ConfigError: if a budget needs one that cannot be used, or that tells nothing of so many chunks.
    """
    path = report_path(identity)
    if budget is None and not path.exists():
        return None
    try:
        report = Report.load(path, identity.hex())
    except ConfigError as error:
        if budget is not None:
            raise
        _log.warning("answers predict no divergence: %s", error)
        return None
    if budget is not None and top_k > report.top_k:
        raise ConfigError(
            f"the quality report was made with {report.top_k} chunks a question, and {top_k} are to be retrieved: "
            f"run ragjax gate --top-k {top_k}, or lower --top-k"
        )
    changed = {Setting(name) for name, one in known.items() if isinstance(one, Craft) and one.alpha != report.alpha}
    stale = sorted(m.setting.strategy for m in report.measurements if m.setting in changed)
    if stale:
        again = "run ragjax gate again"
        _log.warning("%s: %s had another alpha, %g: %s", path, ", ".join(stale), report.alpha, again)
    kept = (m for m in report.measurements if m.setting.strategy in known and m.setting not in changed)
    return replace(report, measurements=tuple(kept))
