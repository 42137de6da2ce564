"""A folder of real documents: seconds to the first answer, until all is indexed, and of a restart.

The folder is collected from this machine: texts, pages and PDFs of /usr/share and of the installed Python packages, or
of the folders of `--from`, in an order that is the same each time, and three files that cannot be read. `first` is the
first start over them, its programs compiled, `later` the next one with the same index, and `none` a start without
documents. `ready_s`, `answer_s` and `indexed_s` count from the start of the process; `read` is how many of the files
the start reads, `others` how many cores other programs keep busy meanwhile.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import sysconfig
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.process import wait
from benchmarks.common.report import Benchmark, Parser, Session, existing_folder
from benchmarks.latency.system import OtherLoad, own_cache
from benchmarks.load.own_server import body, served

COLUMNS = ("state", "files", "mb", "read", "ready_s", "answer_s", "indexed_s", "chunks", "skipped", "others")
KINDS = (".html", ".htm", ".md", ".txt", ".pdf")
MOST_S = 12 * 3600.0  # of indexing
BAD = {"broken.pdf": b"%PDF-1.4 and no more", "binary.txt": b"\0\0\0", "broken.docx": b"PK\3\4 and no more"}


def found(roots: Sequence[Path]) -> Iterator[Path]:
    """Documents under these folders, the same first each time."""
    files = {path.resolve() for root in roots for path in root.rglob("*") if path.suffix in KINDS and path.is_file()}
    yield from sorted(files, key=lambda path: hashlib.sha256(path.read_bytes()).digest())


def collect(roots: Sequence[Path], folder: Path, files: int, megabytes: float, largest: int) -> None:
    """Fill a folder with so many documents, or megabytes of them, and three that cannot be read.

    largest: bytes of a document.
    """
    left = megabytes * 1e6
    for name, content in BAD.items():
        (folder / name).write_bytes(content)
    for number, path in enumerate(found(roots)):
        size = path.stat().st_size
        if files == len(BAD):
            break
        if 200 < size <= min(largest, left):
            shutil.copy(path, folder / f"{number:05}-{path.name}")
            files, left = files - 1, left - size


def started(state: str, cache: Path, folder: Path, index: Path) -> dict[str, Any]:
    """The figures of a start, its server ended."""
    knowledge = ("--knowledge", "none") if state == "none" else ("--knowledge", str(folder), "--index-dir", str(index))
    began = time.perf_counter()
    with served(cache, *knowledge, "--no-preprocess") as (process, url):
        load = OtherLoad(process.pid)
        before = wait(process, url)
        times = {"ready_s": time.perf_counter() - began}
        httpx.post(f"{url}/v1/chat/completions", json=body("How is it installed?"), timeout=600).raise_for_status()
        times["answer_s"] = time.perf_counter() - began
        if state == "none":
            return {"state": state, **times, "others": load.so_far()}
        health = wait(process, url, lambda health: not health["indexing"]["running"], pause=0.5, limit_s=MOST_S)
        told = health["indexing"]
        times["indexed_s"] = time.perf_counter() - began
        others = load.so_far()
    return {
        "state": state, "files": told["files_total"], "mb": told["mb_total"],
        "read": told["files_total"] - before["indexing"]["files"] if state == "later" else told["files_total"],
        **times, "chunks": told["chunks"], "skipped": told["skipped_total"], "others": others,
    }  # fmt: skip


def measured(chosen: Namespace, session: Session) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        documents, index = Path(folder, "documents"), Path(folder, "index")
        documents.mkdir()
        roots = chosen.source or (Path("/usr/share"), Path(sysconfig.get_path("purelib")))
        collect(roots, documents, 30 if chosen.quick else chosen.files, chosen.mb, int(chosen.kb * 1000))
        cache = Path(own_cache(Path(folder, "cache")))
        for state in ("first", "later", "none"):
            row = started(state, cache, documents, index)
            print(row, file=sys.stderr)
            yield row


def add_flags(flags: Parser) -> None:
    flags.add("--from", type=existing_folder, nargs="+", dest="source", metavar="DIR", help="where documents are found")
    flags.add("--files", type=int, default=1086, help="documents, at most (%(default)s)")
    flags.add("--kb", type=float, default=200.0, help="kilobytes of a document, at most (%(default)s)")
    flags.add("--mb", type=float, default=75.0, help="megabytes of them, at most (%(default)s)")


main = Benchmark("documents", __doc__, COLUMNS, measured, flags=add_flags).main

if __name__ == "__main__":
    sys.exit(main())
