"""The thread that reads uploaded files, cuts them and embeds them into the knowledge bases of their stores."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ragjax.core import Attachment, ConfigError, DamageError, DiskFullError, EndpointError, RagjaxError, RequestError
from ragjax.retrieval.catalog import Catalog
from ragjax.retrieval.chunking import checked
from ragjax.retrieval.document import parse_steps
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.retrieval.registry import KnowledgeRegistry

_log = logging.getLogger(__name__)

RETRY_S = 60.0
"""Seconds until a file is read again for which the disk had no room."""


class _MovedError(Exception):
    """A file left its store while it was read, or is there again while it is forgotten."""


class Ingest:
    """Reads files: of each tenant one after another, and the tenants take turns. Any thread may call it."""

    def __init__(self, catalog: Catalog, bases: KnowledgeRegistry[KnowledgeBase]):
        self._catalog = catalog
        self._bases = bases
        self._worker = ThreadPoolExecutor(1, "ragjax-ingest")
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[tuple[str, str], None]] = {}  # of each tenant, the next first: store, file
        self._reading: dict[str, Iterator[None]] = {}  # what is left of the file that is read for a tenant
        self._at: dict[str, tuple[str, str]] = {}  # that file, and its store
        self.running = False
        self._closed = False

    def start(self, tenant: str, store: str, file: str) -> None:
        """Queue a file to be read into its store, if it is in progress there; the catalog is told the outcome."""
        with self._lock:
            self._waiting.setdefault(tenant, {})[store, file] = None
            if not self.running and not self._closed:
                self._worker.submit(self._run)
                self.running = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._worker.shutdown()
        self._reading.clear()  # ends the process that reads a PDF

    def forget(self, store: str, file: str) -> None:
        """Take a document that left its store out of the knowledge base, if it is there. No later search finds it.

        The catalog has said so before: what is being read just now is not stored any more.
        """

        def check() -> None:
            if self._catalog.attachment(store, file) is not None:
                raise _MovedError

        try:
            self._bases.get(store).delete([file], check)
        except _MovedError:
            _log.debug("%s has the document %s again", store, file)
        except RequestError:  # it never came so far, or the store is gone too
            _log.debug("%s held no document %s", store, file)

    def _run(self) -> None:
        while (tenant := self._turn()) is not None:
            try:
                next(self._reading[tenant])
            except StopIteration:
                del self._reading[tenant]
            except DiskFullError as error:
                _log.warning("a file is read again in %g seconds: %s", RETRY_S, error)
                del self._reading[tenant]
                retry = threading.Timer(RETRY_S, self.start, (tenant, *self._at[tenant]))
                retry.daemon = True
                retry.start()
            except Exception:
                _log.exception("a file could not be read; the next start tries again")
                del self._reading[tenant]

    def _turn(self) -> str | None:
        with self._lock:
            idle = [tenant for tenant, waiting in self._waiting.items() if not waiting and tenant not in self._reading]
            for tenant in idle:
                del self._waiting[tenant]
            if self._closed or not self._waiting:
                self.running = False
                return None
            tenant = next(iter(self._waiting))
            waiting = self._waiting[tenant] = self._waiting.pop(tenant)
            if tenant not in self._reading:
                self._at[tenant] = store, file = next(iter(waiting))
                del waiting[store, file]
                self._reading[tenant] = self._read(store, file)
        return tenant

    def _read(self, store: str, file: str) -> Iterator[None]:
        attachment = self._catalog.attachment(store, file)
        if attachment is None or attachment.state != "in_progress":  # removed, cancelled, or read for an earlier call
            return
        try:
            content = self._catalog.content(file)
            if content is None:
                return
            settled = yield from self._fill(attachment, content)
        except _MovedError:
            return
        except DiskFullError:
            raise
        except (DamageError, EndpointError) as error:
            settled = replace(attachment, state="failed", error=("server_error", str(error)))
        except RagjaxError as error:
            settled = replace(attachment, state="failed", error=("invalid_file", str(error)))
        except Exception:
            _log.exception("the file %s could not be read", file)
            settled = replace(attachment, state="failed", error=("server_error", "the file could not be read"))
        self._catalog.settle(settled)

    def _fill(self, attachment: Attachment, content: bytes) -> Generator[None, None, Attachment]:
        name, file = self._catalog.name(attachment.file), attachment.file

        def check() -> None:
            if self._catalog.attachment(attachment.store, file) is None:
                raise _MovedError

        document = yield from checked(parse_steps(content, Path(name), file), check)
        if not document.text:
            raise ConfigError(f"{name}: there is no text in it")
        if document.unread:
            _log.warning("the file %s: %s", file, document.unread)
        document = replace(document, filename=name)
        base = self._bases.get(attachment.store)
        yield from checked(base.add_steps([document], max_tokens=attachment.chunk_tokens, check=check), check)
        return replace(attachment, state="completed", usage=base.size(file) or 0)
