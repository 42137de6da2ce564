"""The quality report of a model: a file in ragjax's folder, by what the model's KV depends on (`identity`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ragjax import quality
from ragjax.core import ConfigError
from ragjax.models.hub import cache_dir
from ragjax.quality.report import Report
from ragjax.reuse.base import Strategy

_log = logging.getLogger(__name__)


def report_path(identity: bytes) -> Path:
    return cache_dir() / "quality" / f"{identity.hex()}.json"


def shipped_report(identity: bytes) -> Report | None:
    for path in sorted(Path(quality.__file__).parent.glob("*.json")):
        with suppress(ConfigError):
            return Report.load(path, identity.hex())
    return None


def report_of(identity: bytes, known: Mapping[str, Strategy]) -> Report | None:
    """The model's quality report, as far as it is of known strategies; the shipped one if the user has none.

    None if there is none, or, with a warning, none that can be used.
    """
    path = report_path(identity)
    try:
        report = Report.load(path, identity.hex()) if path.exists() else shipped_report(identity)
    except ConfigError as error:
        _log.warning("answers predict no divergence: %s", error)
        return None
    if report is None:
        return None
    kept = (m for m in report.measurements if m.setting.strategy in known)
    told = report.conversations
    said = told if told is not None and told.setting.strategy in known else None
    return replace(report, measurements=tuple(kept), conversations=said)
