"""Files and vector stores over HTTP: OpenAI's shapes, lists, errors, tenants and limits."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ragjax import core
from ragjax.retrieval.catalog import Catalog
from tests.support import tiny
from tests.support.fakes import FakeEngine
from tests.support.serving import Served, error_of, serving

FORM = "multipart/form-data; boundary=x"
A_FILE = {"file": ("a.txt", b"x")}
TIMED = {"purpose": "assistants", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
COUNTS = {"in_progress": 0, "completed": 0, "failed": 0, "cancelled": 0, "total": 0}


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(FakeEngine()) as made:
        yield made


def upload(served: Served, name: str = "a.txt", content: bytes = b"The lighthouse is red.") -> dict[str, Any]:
    response = served.post("/v1/files", files={"file": (name, content)}, data={"purpose": "assistants"})
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


def test_files_come_and_go(served: Served) -> None:
    client = served.client()
    made = client.files.create(file=("naïve.md", b"# A\r\n\x00--\r\n"), purpose="assistants")
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", 10, "naïve.md", "assistants")
    assert made.expires_at is None and made.status == "processed" and client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == b"# A\r\n\x00--\r\n"
    assert [file.id for file in client.files.list(purpose="user_data")] == []
    timed = client.files.create(
        file=("b.md", b"b"), purpose="assistants", expires_after={"anchor": "created_at", "seconds": 2_592_000}
    )
    assert timed.expires_at == timed.created_at + 2_592_000
    assert client.files.delete(made.id).deleted is True
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as error:
            gone(made.id)
        assert error.value.code == "not_found"


def test_a_file_is_deleted_only_if_it_is_in_no_store(served: Served) -> None:
    client, file = served.client(), upload(served)["id"]
    store = client.vector_stores.create(file_ids=[file])
    with pytest.raises(openai.BadRequestError, match="is in a vector store") as refused:
        client.files.delete(file, extra_query={"unattached": True})
    assert (refused.value.code, refused.value.param) == ("in_use", "file_id")
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.delete(file, extra_query={"unattached": "perhaps"})
    assert refused.value.param == "unattached" and client.files.retrieve(file).id == file
    client.vector_stores.files.delete(file, vector_store_id=store.id)
    assert client.files.delete(file, extra_query={"unattached": True}).deleted is True
    with pytest.raises(openai.NotFoundError):
        client.files.delete(file, extra_query={"unattached": True})


def test_a_damaged_file_is_an_error_of_the_server(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = upload(served)["id"], upload(served, content=b"x")["id"]
    whole = Catalog._rows
    monkeypatch.setattr(Catalog, "_rows", lambda self, sql, *values: _without_x(whole(self, sql, *values)))
    response = served.get(f"/v1/files/{bad}/content")
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (500, "server_error", "damaged")
    assert bad in error["message"]
    assert served.get(f"/v1/files/{good}/content").content == b"The lighthouse is red."
    assert "\nragjax_files_damaged_total 1.0\n" in served.get("/metrics").text


def _without_x(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [tuple(b"" if value == b"x" else value for value in row) for row in rows]


def test_lists_have_pages(served: Served) -> None:
    ids = [upload(served)["id"] for _ in range(5)]
    page = served.get("/v1/files", params={"limit": 2, "order": "asc"}).json()
    assert [file["id"] for file in page["data"]] == ids[:2]
    assert (page["first_id"], page["last_id"], page["has_more"], page["object"]) == (ids[0], ids[1], True, "list")
    assert [file.id for file in served.client().files.list(limit=2, order="asc")] == ids
    assert [file.id for file in served.client().files.list()] == ids[::-1]
    assert served.get("/v1/files", params={"after": ids[0]}).json() == {
        **{"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    }
    store = served.client().vector_stores.create(file_ids=ids)
    path = f"/v1/vector_stores/{store.id}/files"
    before = served.get(path, params={"order": "asc", "before": ids[2]}).json()
    assert [file["id"] for file in before["data"]] == ids[:2] and not before["has_more"]
    for order, shown in (("asc", ids[1:3]), ("desc", ids[-2:-4:-1])):
        page = served.get(path, params={"order": order, "before": ids[3] if order == "asc" else ids[1], "limit": 2})
        assert [file["id"] for file in page.json()["data"]] == shown and page.json()["has_more"]
    between = served.get(path, params={"order": "asc", "after": ids[0], "before": ids[4], "limit": 2}).json()
    assert [file["id"] for file in between["data"]] == ids[1:3] and between["has_more"]
    for query in ({"after": "file-0"}, {"limit": 0}, {"order": "up"}, {"limit": 101}):
        response = served.get(path, params=query)
        assert error_of(response)["param"] == next(iter(query))
        assert response.status_code == (404 if "after" in query else 400)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_the_files_of_an_own_store_have_pages(shared: Served, order: str) -> None:
    path, ids = "/v1/vector_stores/demo/files", [f"isle/{n}" for n in range(4)]
    ids = ids if order == "asc" else ids[::-1]

    def listed(**query: Any) -> tuple[list[str], bool]:
        page = shared.get(path, params={"order": order, **query}).json()
        return [file["id"] for file in page["data"]], page["has_more"]

    assert listed() == (ids, False) and listed(limit=2) == (ids[:2], True)
    assert listed(limit=2, after=ids[0]) == (ids[1:3], True) and listed(after=ids[1]) == (ids[2:], False)
    assert listed(limit=2, before=ids[3]) == (ids[1:3], True) and listed(before=ids[2]) == (ids[:2], False)
    assert listed(limit=1, before=ids[3]) == (ids[2:3], True) and listed(limit=1) == (ids[:1], True)
    assert listed(after=ids[0], before=ids[3]) == (ids[1:3], False)
    assert listed(filter="completed") == (ids, False) and listed(filter="failed") == ([], False)
    for param in ("after", "before"):
        response = shared.get(path, params={param: "isle/9"})
        assert response.status_code == 404 and error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("files", "data", "param", "words"),
    [
        ({"file": ("a.exe", b"x")}, {"purpose": "assistants"}, "file", "Markdown, text, HTML, PDF, .docx"),
        ({"file": ("a.txt", b"")}, {"purpose": "assistants"}, "file", "is empty"),
        ({"file": ("a.txt", b"x")}, {"purpose": "batch"}, "purpose", "assistants or user_data"),
        ({"file": ("a.txt", b"x")}, {}, "purpose", "needs a purpose"),
        ({"other": ("a.txt", b"x")}, {"purpose": "assistants"}, "file", "needs a file"),
        ({"file": ("a.txt", b"x")}, {"purpose": "assistants", "expires_after[days]": "1"}, "expires_after[days]", ""),
        (A_FILE, {**TIMED, "expires_after[anchor]": "last_active_at"}, "expires_after[anchor]", "created_at"),
        (A_FILE, {**TIMED, "expires_after[seconds]": "3599"}, "expires_after[seconds]", "3600 to 2592000"),
        (A_FILE, {**TIMED, "expires_after[seconds]": "1e6"}, "expires_after[seconds]", "whole number"),
        (A_FILE, {"purpose": "assistants", "expires_after[seconds]": "4000"}, "expires_after[anchor]", "or neither"),
    ],
)
def test_bad_uploads(shared: Served, files: Any, data: Any, param: str, words: str) -> None:
    response = shared.post("/v1/files", files=files, data=data)
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == param and words in error["message"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{}", "application/json"),
        (b"--x\r\n\r\n", FORM),
        (b"--x\r\nno headers", FORM),
        (b"--x\r\ncontent-disposition: form-data; name=file\r\n\r\nabc", FORM),
        (b"--x--", "multipart/form-data"),
        (b"junk--x\r\n--x--", FORM),
        (b"--x\r\ncontent-disposition: form-data\r\n\r\na\r\n--x--", FORM),
        (
            b"".join(b"--x\r\ncontent-disposition: form-data; name=%d\r\n\r\na\r\n" % n for n in range(17)) + b"--x--",
            FORM,
        ),
    ],
)
def test_broken_forms(shared: Served, body: bytes, kind: str) -> None:
    response = shared.post("/v1/files", content=body, headers={"content-type": kind})
    assert response.status_code == 400 and error_of(response)["code"] == "invalid_form"


def test_an_upload_has_a_limit_of_its_own() -> None:
    with serving(FakeEngine(), max_body_bytes=2000, max_file_bytes=5000) as served:
        assert upload(served, content=b"x" * 4000)["bytes"] == 4000
        response = served.post("/v1/files", files={"file": ("a.txt", b"x" * 6000)}, data={"purpose": "assistants"})
        assert response.status_code == 413
        assert served.post("/v1/vector_stores", json={"description": "x" * 3000}).status_code == 413


def test_a_store_as_an_object(served: Served) -> None:
    client = served.client()
    made = client.vector_stores.create(
        name="harbour", metadata={"a": "b"}, expires_after={"anchor": "last_active_at", "days": 2}
    )
    assert made.file_counts.model_dump() == COUNTS and made.status == "completed" and made.usage_bytes == 0
    assert made.expires_after is not None and made.expires_at == made.last_active_at + 2 * 86400
    assert client.vector_stores.update(made.id, name="port").metadata == {"a": "b"}
    raw = served.post(f"/v1/vector_stores/{made.id}", json={"metadata": None, "expires_after": None}).json()
    assert (raw["name"], raw["metadata"], raw["expires_after"], raw["expires_at"]) == ("port", {}, None, None)
    assert [store.id for store in client.vector_stores.list()] == [made.id, "demo"]
    assert client.vector_stores.delete(made.id).deleted is True
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.retrieve(made.id)


def test_files_in_a_store(served: Served) -> None:
    client = served.client()
    store, file = client.vector_stores.create(name="s"), upload(served)["id"]
    sizes: Any = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 0}}
    done = client.vector_stores.files.create_and_poll(
        file, vector_store_id=store.id, attributes={"a": 1, "b": True, "c": "d"}, chunking_strategy=sizes,
        poll_interval_ms=5,
    )  # fmt: skip
    assert (done.status, done.last_error, done.vector_store_id) == ("completed", None, store.id)
    assert done.attributes == {"a": 1, "b": True, "c": "d"} and done.usage_bytes > 0
    assert done.chunking_strategy.to_dict() == sizes
    whole = client.vector_stores.retrieve(store.id)
    assert (whole.file_counts.completed, whole.file_counts.total, whole.usage_bytes) == (1, 1, done.usage_bytes)
    content = client.vector_stores.files.content(file, vector_store_id=store.id)
    assert content.data[0].text == "a\nThe lighthouse is red.\n\n"
    listed = served.get(f"/v1/vector_stores/{store.id}/files", params={"filter": "failed"}).json()
    assert listed["data"] == []
    assert client.vector_stores.files.delete(file, vector_store_id=store.id).deleted is True
    assert list(client.vector_stores.files.list(store.id)) == [] and client.files.retrieve(file).id == file


def test_a_search(served: Served) -> None:
    client = served.client()
    found = client.vector_stores.search("demo", query="Who exports honey?", max_num_results=2)
    first, second = found.data
    assert (first.file_id, first.filename, first.content[0].type) == ("isle/1", "Merrin", "text")
    assert "honey" in first.content[0].text and first.score >= second.score
    far: Any = {"type": "eq", "key": "a", "value": 1}
    assert client.vector_stores.search("demo", query=["a", "b"], filters=far).data == []
    assert client.vector_stores.search("demo", query="honey", ranking_options={"score_threshold": 0.99}).data == []
    assert client.vector_stores.search(client.vector_stores.create().id, query="a").data == []
    assert client.vector_stores.files.retrieve("isle/1", vector_store_id="demo").status == "completed"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("vs_0/search", {"query": "a"}, 404, "vector_store_id"),
        ("demo/search", {"query": ""}, 400, "query[0]"),
        ("demo/search", {"query": "a", "rewrite_query": True}, 400, "rewrite_query"),
        ("demo/search", {"query": "a", "max_num_results": 51}, 400, "max_num_results"),
        ("demo/search", {"query": "a", "filters": {"type": "like", "key": "a", "value": 1}}, 400, "filters.type"),
        ("demo/search", {"query": "a", "filters": {"type": "and", "filters": []}}, 400, "filters.type"),
        ("demo/search", {"query": "a", "filters": {"type": "eq", "key": "a", "value": 1, "x": 1}}, 400, "filters.x"),
        ("demo/search", {"query": "a", "filters": {"type": "in", "key": "a", "value": [1] * 65}}, 400, "filters.value"),
        ("demo/files", {"file_id": "file-0"}, 400, "vector_store_id"),
        ("demo/search", {"query": " "}, 400, "query"),
        ("{store}/search", {"query": ["a", " "]}, 400, "query"),
        ("{store}/files", {"file_id": "file-0"}, 404, "file_id"),
        ("{store}/files", {"file_id": "f", "attributes": {"a": [1]}}, 400, "attributes.a"),
        ("{store}", {"expires_after": {"anchor": "now", "days": 1}}, 400, "expires_after.anchor"),
        ("{store}", {"colour": 1}, 400, "colour"),
        (
            "{store}/files",
            {"file_id": "f", "chunking_strategy": {"type": "auto", "static": {"max_chunk_size_tokens": 100}}},
            400,
            "chunking_strategy.static",
        ),
    ],
)
def test_bad_input(shared: Served, path: str, body: Any, status: int, param: str) -> None:
    store = shared.post("/v1/vector_stores", json={}).json()["id"]
    response = shared.post(f"/v1/vector_stores/{path.format(store=store)}", json=body)
    assert (response.status_code, error_of(response)["param"]) == (status, param), response.text


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_numbers_are_finite(shared: Served, number: str) -> None:
    store, file = shared.post("/v1/vector_stores", json={}).json()["id"], upload(shared)["id"]
    kind = {"content-type": "application/json"}
    body = f'{{"file_id": "{file}", "attributes": {{"a": {number}}}}}'
    response = shared.post(f"/v1/vector_stores/{store}/files", content=body, headers=kind)
    assert response.status_code == 400 and shared.get(f"/v1/vector_stores/{store}/files").json()["data"] == []
    body = f'{{"query": "a", "ranking_options": {{"score_threshold": {number}}}}}'
    assert shared.post("/v1/vector_stores/demo/search", content=body, headers=kind).status_code == 400


@pytest.mark.parametrize(
    ("name", "kind"), [("data:日/本,x.md", "text/markdown"), ("data:text/html,x.txt", "text/plain")]
)
def test_the_type_of_a_file_comes_from_its_ending(served: Served, name: str, kind: str) -> None:
    file = upload(served, name=name)["id"]
    response = served.get(f"/v1/files/{file}/content")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(kind)


def test_chunks_do_not_overlap(shared: Served) -> None:
    sizes = {"type": "static", "static": {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 400}}
    before = shared.get("/v1/vector_stores").json()["data"]
    for files in ({"file_ids": [upload(shared)["id"]]}, {}):
        response = shared.post("/v1/vector_stores", json={**files, "chunking_strategy": sizes})
        assert "must be 0" in error_of(response)["message"] and shared.get("/v1/vector_stores").json()["data"] == before


def test_a_store_is_made_with_all_its_files_or_not_at_all(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    file, before = upload(served)["id"], served.get("/v1/vector_stores").json()["data"]
    response = served.post("/v1/vector_stores", json={"file_ids": [file, file]})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "file_ids") and "given twice" in error["message"]

    def deleted_meanwhile(*_: object) -> None:
        raise sqlite3.IntegrityError

    monkeypatch.setattr(Catalog, "attach", deleted_meanwhile)
    assert served.post("/v1/vector_stores", json={"file_ids": [file]}).status_code == 404
    assert served.get("/v1/vector_stores").json()["data"] == before


def test_keys_part_what_tenants_have() -> None:
    with serving(FakeEngine(), keys={"k1": "acme", "k2": "umbra"}) as served:
        one, two = served.client(api_key="k1"), served.client(api_key="k2")
        file = one.files.create(file=("a.txt", b"secret"), purpose="assistants")
        store = one.vector_stores.create(name="mine", file_ids=[file.id])
        assert [s.id for s in two.vector_stores.list()] == ["demo"] and list(two.files.list()) == []
        for call in (
            lambda: two.files.content(file.id),
            lambda: two.vector_stores.retrieve(store.id),
            lambda: two.vector_stores.search(store.id, query="secret"),
            lambda: two.vector_stores.create(file_ids=[file.id]),
        ):
            with pytest.raises(openai.NotFoundError):
                call()


def test_requests_reach_their_own_stores_alone() -> None:
    """Against an engine: rag.knowledge, and the default base, which is never a store of a client."""
    with tiny.engine(share_knowledge=True) as engine, serving(engine, keys={"k1": "acme", "k2": "umbra"}) as served:
        one, two = served.client(api_key="k1", timeout=60), served.client(api_key="k2", timeout=60)
        store = one.vector_stores.create(name="mine")
        file = one.files.create(file=("a.txt", b"the secret is red"), purpose="assistants")
        one.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=5)

        def ask(client: openai.OpenAI, **rag: Any) -> Any:
            messages: Any = [{"role": "user", "content": "the secret is red"}]
            return client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=2, extra_body={"rag": rag}
            )

        made = ask(one, knowledge=store.id)
        assert [s["id"] for s in made.rag["segments"] if s["score"] is not None] == [f"{file.id}#0"]
        assert not any(hit.public for hit in engine._preparation.composer.grounding.hits(request_of(store.id)) or ())
        with pytest.raises(openai.BadRequestError) as refused:
            ask(two, knowledge=store.id)
        assert refused.value.code == "not_found" and store.id not in str(engine.knowledge_names)
        theirs = two.vector_stores.create(
            name="theirs", file_ids=[two.files.create(file=("b.txt", b"b"), purpose="assistants").id]
        )
        search: Any = {"type": "file_search", "vector_store_ids": [theirs.id, store.id]}
        filtered: Any = {**search, "filters": {"type": "eq", "key": "a", "value": 1}}
        for tool in (search, filtered):
            with pytest.raises(openai.NotFoundError) as missing:
                two.responses.create(model="tiny", input="the secret is red", tools=[tool])
            assert (missing.value.code, missing.value.param) == ("not_found", "vector_store_id")
        assert all(s["score"] is None for s in ask(two).rag["segments"])
        models = served.get("/v1/models", headers={"authorization": "Bearer k1"}).json()["data"]
        assert models[0]["rag"]["knowledge"] == []


def request_of(store: str) -> core.Request:
    return core.Request((core.Message("user", "red"),), rag=core.Rag(store), tenant="acme")


def test_the_document_of_the_api_lists_the_errors_that_are_sent(shared: Served) -> None:
    document = shared.get("/openapi.json").json()
    assert document["components"]["schemas"]["Error"]["properties"]["error"]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            statuses = set(route["responses"])
            assert ("422" not in statuses and "503" in statuses) or path == "/metrics", (method, path)
            assert ("400" in statuses) or method == "get", (method, path)
            assert ("403" in statuses) or path == "/health", (method, path)
            for status in statuses - {"200"}:
                content = route["responses"][status]["content"]["application/json"]["schema"]
                assert content == {"$ref": "#/components/schemas/Error"}, (method, path, status)
    assert {"413", "429"} <= set(document["paths"]["/v1/responses"]["post"]["responses"])
    content = document["paths"]["/v1/files/{file_id}/content"]["get"]["responses"]["200"]["content"]
    assert "text/markdown" in content and "application/json" not in content
    assert "404" in document["paths"]["/v1/files/{file_id}"]["get"]["responses"]
    form = document["paths"]["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["file", "purpose"]
    assert not {"HTTPValidationError", "ValidationError"} & set(document["components"]["schemas"])
