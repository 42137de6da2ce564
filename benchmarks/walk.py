"""The walk of one warm request: the files, functions and objects of ragjax that take part in it, in order.

    python -m benchmarks.walk [--strategy prefix] [--functions] [--json FILE]

A server over the tests' miniature engine answers one question twice; the second answer is traced in every thread, from
the HTTP body to the response. Functions of ragjax are counted by their code: comprehensions, lambdas and what a
dataclass generates do not count, and neither do compiled programs, which Python does not see. Objects are counted by
class, where their `__init__` runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import httpx

import ragjax
from ragjax.serve.app import create_app
from tests.support import tiny

HOME = Path(ragjax.__file__).parent
DOCUMENTS = (
    ragjax.Document("keeper", "Maud Pellinger keeps the lighthouse of Candlehythe.", "Keeper"),
    ragjax.Document("ferry", "The ferry to Orlan leaves at nine.", "Ferry"),
)
QUESTION = "Who keeps the lighthouse?"


class Walk:
    """Which functions of ragjax ran, by first call. It sees the threads that start after it was made."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, None] = {}
        self.objects: Counter[str] = Counter()  # made, by class
        self._open = False
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if self._open and event == "call":
            self._codes.setdefault(frame.f_code)
            if frame.f_code.co_name == "__init__":
                made = type(frame.f_locals.get("self"))
                self.objects[made.__qualname__] += made.__module__.startswith("ragjax.")

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def close(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def files(self) -> dict[str, dict[str, int]]:
        """By file below ragjax/ its functions and their lines of code, in the order of first calls."""
        found: dict[str, dict[str, int]] = {}
        for code in self._codes:
            path = Path(code.co_filename)
            if path.is_relative_to(HOME) and not code.co_name.startswith("<"):
                lines = {line for _, _, line in code.co_lines() if line is not None}
                found.setdefault(path.relative_to(HOME).as_posix(), {})[code.co_qualname] = len(lines)
        return found


async def ask(app: object, strategy: str) -> int:
    """Post the question; the number of prompt tokens that were reused."""
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4,
        "rag": {"strategy": strategy, "top_k": 2},
    }  # fmt: skip
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://walk") as client:
        answer = await client.post("/v1/chat/completions", json=body)
    return int(answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def trace(strategy: str) -> Walk:
    """The second of two equal requests."""
    walk = Walk()
    engine = tiny.engine()
    try:
        engine.add_documents(DOCUMENTS)
        app = create_app(engine)
        asyncio.run(ask(app, strategy))
        with walk.opened():
            reused = asyncio.run(ask(app, strategy))
    finally:
        engine.close()
        walk.close()
    if strategy != "full" and not reused:
        raise SystemExit("the second request reused nothing, so it was not warm")
    return walk


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.walk", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--strategy", default="prefix", help="of the request (default: prefix)")
    parser.add_argument("--functions", action="store_true", help="name the functions, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write functions by file")
    options = parser.parse_args(argv)
    walk = trace(options.strategy)
    files, objects = walk.files(), +walk.objects
    for file, functions in files.items():
        print(f"{file:<32} {len(functions):>3}" + ("  " + ", ".join(functions) if options.functions else ""))
    print("objects: " + ", ".join(f"{name} {count}" if count > 1 else name for name, count in objects.items()))
    rooms = dict.fromkeys(file.split("/")[0] for file in files)
    lines = [count for functions in files.values() for count in functions.values()]
    sums = f"{len(files)} files, {len(lines)} functions, {sum(lines)} lines, objects of {len(objects)} classes"
    print(f"{len(rooms)} rooms, {sums}: {' > '.join(rooms)}")
    if options.json:
        options.json.write_text(json.dumps(files, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
