"""Schemathesis against the server's own OpenAPI document: what it sends is answered as the document says.

RAGJAX_SCHEMATHESIS_PYTHON names a Python that has it (`pip install schemathesis`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.devices import ROOT
from tests.support.outside import python_of, run
from tests.support.serving import Served, serving

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance"),
)
HOOKS = ROOT / "tests" / "support" / "schemathesis_hooks.py"
SERVER_ERRORS = {"503"}
"""Those that a busy server may send, as the document lists."""


def answered(served: Served) -> Counter[tuple[str, str]]:
    """Requests by route and status."""
    pattern = r'^ragjax_http_requests_total{route="(.*?)",status="(\d+)"} (\S+)$'
    lines = re.findall(pattern, served.get("/metrics").text, re.MULTILINE)
    return Counter({(route, status): int(float(count)) for route, status, count in lines})


def known(served: Served) -> dict[str, Any]:
    """Values that are served: of what is there, a store with a file, and something to ask."""
    client = served.client(timeout=120)
    file = client.files.create(file=("a.md", b"# A\n\nThe lighthouse is red."), purpose="assistants").id
    store = client.vector_stores.create(name="s").id
    attached = client.vector_stores.files.create_and_poll(file, vector_store_id=store, poll_interval_ms=10)
    assert attached.status == "completed"
    models = client.models.list().data
    names = {"model": models[0].id, "file_id": file, "vector_store_id": store}
    ask = "Is the lighthouse red?"
    return {**names, "input": ask, "prompt": ask, "query": ask, "messages": [{"role": "user", "content": ask}]}


@pytest.mark.long
def test_no_request_of_the_document_breaks_the_server(tmp_path: Path) -> None:
    python = python_of("RAGJAX_SCHEMATHESIS_PYTHON")
    with tiny.engine() as engine, serving(engine) as served:
        variables = {"SCHEMATHESIS_HOOKS": str(HOOKS), "RAGJAX_KNOWN": json.dumps(known(served))}
        flags = ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "-n", "15", "--seed", "1"]
        flags += ["--request-timeout", "300"]
        program = str(Path(python).with_name("schemathesis"))
        command = (program, "run", f"{served.url}/openapi.json", *flags)
        done = run(*command, cwd=tmp_path, variables=variables, timeout=3000)
        found = answered(served)
    statuses = Counter[str]()
    for (_, status), count in found.items():
        statuses[status] += count
    print(f"{sum(statuses.values())} requests: {dict(statuses)}")  # with -s, for docs/security.md
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert {status for status in statuses if status >= "500"} <= SERVER_ERRORS
    for route in ("/v1/chat/completions", "/v1/responses", "/v1/vector_stores/{vector_store_id}/search"):
        assert found[route, "200"] and found[route, "400"], "it reaches what lies behind the checks"
