"""What the packages' tests run against: a server that RAGJAX_TEST_URL names, and a search with canned results."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

RESULTS = [
    {
        "file_id": "north",
        "filename": "The north door",
        "page": 3,
        "heading": None,
        "score": 0.75,
        "attributes": {"floor": 2, "title": "North"},
        "content": [{"type": "text", "text": "The north door is red."}],
    },
    {
        "file_id": "south",
        "filename": "The south door",
        "score": 0.5,
        "attributes": None,
        "content": [{"type": "text", "text": "The south door"}, {"type": "text", "text": "is blue."}],
    },
]


@pytest.fixture
def url() -> str:
    """The server's base URL, with /v1; its model is called tiny."""
    if "RAGJAX_TEST_URL" not in os.environ:
        pytest.skip("RAGJAX_TEST_URL names no server")
    return os.environ["RAGJAX_TEST_URL"]


@dataclass
class Search:
    """A search endpoint: its base URL, and what it was asked."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def search() -> Iterator[Search]:
    """Answers every search with `RESULTS`; knowledge bases but "doors" are unknown."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            made.asked.append({"path": self.path, "key": self.headers["authorization"], **body})
            known = self.path == "/v1/vector_stores/doors/search"
            page = {"object": "vector_store.search_results.page", "search_query": body["query"], "data": RESULTS}
            refused = {"error": {"message": "no such knowledge base", "type": "invalid_request_error", "code": None}}
            text = json.dumps(page | {"has_more": False, "next_page": None} if known else refused).encode()
            self.send_response(200 if known else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Search(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()
