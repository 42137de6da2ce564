"""Records requests as hashes and sizes, no text, so that policies can be compared on them (`benchmarks.policies`).

One JSON object a line: {"time": seconds since the start, "tenant": hash, "strategy": name, "segments": [[hash,
tokens], …] in the prompt's order, "kinds": ["system", "chunk", "join", …], "output": tokens generated}. Hashes are
keyed by a secret of the recording that is written nowhere: equal segments have equal hashes within one file, and
nobody can find a segment's text by trying.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ragjax.core import ConfigError, Prompt

_log = logging.getLogger(__name__)


class Recorder:
    """Appends to one file; called in the engine's thread."""

    def __init__(self, path: str | Path):
        self._key = secrets.token_bytes(32)
        self._began = time.perf_counter()
        try:
            self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the engine)
        except OSError as error:
            raise ConfigError(f"cannot record a trace in {str(path)!r}: {error.strerror}") from error

    def add(self, arrival: float, tenant: str, strategy: str, prompt: Prompt, output: int) -> None:
        entry = {
            "time": round(arrival - self._began, 6),
            "tenant": self._hash(tenant.encode(), 4),
            "strategy": strategy,
            "segments": [[self._hash(s.tokens.tobytes(), 8), len(s)] for s in prompt.segments],
            "kinds": [str(s.kind) for s in prompt.segments],
            "output": output,
        }
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError as error:  # no reason to fail a request
            _log.error("the trace ends here: %s cannot be written: %s", self._file.name, error.strerror)
            self.close()

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was told already
            self._file.close()

    def _hash(self, data: bytes, size: int) -> str:
        return hashlib.blake2b(data, digest_size=size, key=self._key).hexdigest()
