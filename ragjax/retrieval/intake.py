"""The thread that reads uploaded files, cuts and embeds them into the knowledge bases of their stores."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ragjax.core import Attachment, ConfigError, DamageError, RagjaxError, RequestError
from ragjax.retrieval.catalog import Catalog
from ragjax.retrieval.document import parse
from ragjax.retrieval.knowledge import KnowledgeBase

_log = logging.getLogger(__name__)


class Bases(Protocol):
    """The engine's knowledge bases by name."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that nobody owns."""

    def get(self, name: str | None = None) -> KnowledgeBase:
        """The one of this name."""

    def make(self, name: str | None = None, owner: str | None = None) -> KnowledgeBase:
        """As `get`, and opened if need be."""

    def drop(self, name: str) -> None:
        """Close one."""


class Intake:
    """Reads one file after another. Any thread may call it."""

    def __init__(self, catalog: Catalog, bases: Bases):
        self._catalog = catalog
        self._bases = bases
        self._worker = ThreadPoolExecutor(1, "ragjax-intake")

    def start(self, attachment: Attachment) -> None:
        """Have a file read into its store, if it is in progress there; the catalog is told what became of it."""
        self._worker.submit(self._read, attachment)

    def close(self) -> None:
        """End with the file that is being read. What was not begun stays in progress."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def forget(self, store: str, file: str) -> None:
        """Take a document out of a knowledge base, if it is there."""
        try:
            self._bases.get(store).delete([file])
        except RequestError:  # it never came so far, or the store is gone too
            _log.debug("%s held no document %s", store, file)

    def _read(self, attachment: Attachment) -> None:
        store, file = attachment.store, attachment.file
        try:
            kept = self._catalog.attachment(store, file)
            if kept is None or kept.state != "in_progress":  # removed, cancelled, or read for an earlier call
                return
            attachment = kept  # it may have been replaced since the call
            content = self._catalog.content(file)
            if content is None:
                return
            settled = self._fill(attachment, content)
        except DamageError as error:
            settled = replace(attachment, state="failed", error=("server_error", str(error)))
        except RagjaxError as error:
            settled = replace(attachment, state="failed", error=("invalid_file", str(error)))
        except Exception:
            _log.exception("the file %s could not be read", file)
            settled = replace(attachment, state="failed", error=("server_error", "the file could not be read"))
        noted = self._catalog.settle(settled)
        if not noted and self._gone(store, file):  # while it was read
            self.forget(store, file)

    def _gone(self, store: str, file: str) -> bool:
        """Whether an attachment was removed or cancelled meanwhile."""
        attachment = self._catalog.attachment(store, file)
        return attachment is None or attachment.state == "cancelled"

    def _fill(self, attachment: Attachment, content: bytes) -> Attachment:
        name, file = self._catalog.name(attachment.file), attachment.file
        document = parse(content, Path(name), file)
        if not document.text:
            raise ConfigError(f"{name}: there is no text in it")
        base = self._bases.get(attachment.store)
        base.add([document], max_tokens=attachment.chunk_tokens)
        return replace(attachment, state="completed", usage=base.size(file) or 0)
