"""Files that clients upload: of each tenant up to a quota, and some for a time only."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from ragjax.core import PURPOSES, WHOLE, File, MissingError, RequestError, Slice, has_controls, is_unicode
from ragjax.retrieval.catalog import Catalog
from ragjax.retrieval.document import suffixes
from ragjax.retrieval.ingest import Intake

NAME_CHARS = 1024
"""Characters of a file's name: every passage has it."""
QUOTA = 2**30
"""Bytes of files that a tenant may keep unless somebody says otherwise."""
LEAST_BYTES = 4096
"""What a file counts as, at least: a quota bounds the number of files too."""


class Files:
    """Files of tenants ("": of nobody). Any thread may call it; whatever is not the tenant's is not there.

    now: the time in seconds since 1970. quota: most bytes of files of a tenant, each of at least `LEAST_BYTES`; and of
    the files in its stores, where one counts for each store that it is in.
    """

    def __init__(self, catalog: Catalog, intake: Intake, now: Callable[[], float] = time.time, quota: int = QUOTA):
        self._catalog = catalog
        self._intake = intake
        self._now = now
        self._quota = quota
        self._expiring = threading.Lock()
        self._due: int | None = None

    def upload(self, tenant: str, name: str, purpose: str, content: bytes, seconds: int | None = None) -> File:
        """Keep a file. seconds: until it expires; None: it does not.

        Raises:
            RequestError: if it could not be searched in, has no use here, or is beyond the quota.
        """
        kinds = ", ".join(suffixes())
        if purpose not in PURPOSES:
            reason = f"files serve searches here: purpose must be {' or '.join(PURPOSES)}, not {purpose!r}"
            raise RequestError(reason, param="purpose", code="invalid_value")
        if Path(name).suffix.lower() not in suffixes() or not is_unicode(name):
            reason = f"the file {name!r} cannot be read: files of these types can: {kinds}"
            raise RequestError(reason, param="file", code="unsupported_file")
        if len(name) > NAME_CHARS or has_controls(name):
            reason = f"the file's name may have {NAME_CHARS} characters, and no control characters"
            raise RequestError(reason, param="file", code="invalid_value")
        if not content:
            raise RequestError(f"the file {name!r} is empty", param="file", code="invalid_value")
        self.expire()
        now = int(self._now())
        file = File(
            f"file-{hexadecimal()}", name, purpose, len(content), now, None if seconds is None else now + seconds
        )
        if not self._catalog.add_file(tenant, file, content, self._quota, LEAST_BYTES):
            reason = (
                f"all your files together may have {self._quota / 2**20:g} MiB: delete some, or upload a smaller one"
            )
            raise RequestError(reason, param="file", code="quota_exceeded")
        if seconds is not None:
            with self._expiring:
                self._due = self._catalog.next_expiry()
        return file

    def files(self, tenant: str, purpose: str | None = None, part: Slice = WHOLE) -> list[File]:
        """All files, the oldest first, or a part of them. purpose: those of it alone."""
        self.expire()
        return self._catalog.files(tenant, purpose, part)

    def file(self, tenant: str, file: str) -> File:
        """One file.

        Raises:
            MissingError: if it is not there.
        """
        self.expire()
        found = self._catalog.file(tenant, file)
        if found is None:
            raise MissingError(f"no file {file!r}", param="file_id", code="not_found")
        return found

    def content(self, tenant: str, file: str) -> bytes:
        """A file's bytes.

        Raises:
            MissingError: if it is not there.
            DamageError: if they are not as they were uploaded; other files are not concerned.
        """
        return self._catalog.content(self.file(tenant, file).id) or b""

    @property
    def damaged(self) -> int:
        """Times that a file was read, for a client or into a store, and found damaged."""
        return self._catalog.damaged

    def remove(self, tenant: str, file: str) -> None:
        """Delete a file, and take it out of all stores; raises as `file`."""
        self._discard(self.file(tenant, file).id)

    def expire(self) -> None:
        """Delete the files whose time is over. All that shows files calls it."""
        if self._due is None or self._now() < self._due:
            return
        with self._expiring:
            if self._due is None:
                return
            gone = [(store, file) for file in self._catalog.expired(int(self._now())) for store in self._remove(file)]
            self._due = self._catalog.next_expiry()
        for store, file in gone:
            self._intake.forget(store, file)

    def _discard(self, file: str) -> None:
        for store in self._remove(file):
            self._intake.forget(store, file)

    def _remove(self, file: str) -> list[str]:
        """Forget a file; the stores that had it."""
        return self._catalog.remove_file(file)

    def _begin(self) -> None:
        """Have files expire from now on, those that should have meanwhile at once."""
        with self._expiring:
            self._due = self._catalog.next_expiry()
        self.expire()


def hexadecimal() -> str:
    """The random part of an id."""
    return uuid.uuid4().hex[:24]
