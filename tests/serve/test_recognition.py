"""RAG programs that stuff passages into their messages, over HTTP: warm at any place; only the base URL changed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragjax import core
from tests.support import stuff_program, tiny
from tests.support.serving import Caught, Served, error_of, serving
from tests.support.stuffed import DOCUMENTS

RETRIEVED = ([0, 1, 2], [2, 0], [1, 2, 0], [0, 2, 1])
"""What four questions find, best first."""

Chain = Callable[[str, list[str]], list[dict[str, str]]]


def stuff_chain(question: str, found: list[str]) -> list[dict[str, str]]:
    """As LangChain's `create_stuff_documents_chain` makes it: passages in the system message."""
    system = "Use the following pieces of retrieved context to answer.\n\n" + "\n\n".join(found)
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def stuff_prompt(question: str, found: list[str]) -> list[dict[str, str]]:
    """As the prompt of LangChain's `load_qa_chain(chain_type="stuff")`: everything in the user's message."""
    context = "\n\n".join(found)
    asked = f"Use these pieces of context.\n\n{context}\n\nQuestion: {question}\nHelpful Answer:"
    return [{"role": "user", "content": asked}]


@pytest.fixture(params=["naive", "anchor"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """As `python -m ragjax.serve --recognise --strategy NAME`."""
    with tiny.engine(recognise=True, strategy=request.param) as engine, serving(engine) as running:
        yield running
        engine.audit()


@pytest.mark.slow
@pytest.mark.parametrize("chain", [stuff_chain, stuff_prompt])
def test_passages_that_come_back_are_warm_in_any_order_from_then_on(served: Served, chain: Chain) -> None:
    """New ones are computed exactly; what a second request brings again is computed for any place."""
    client = served.client(timeout=120)
    known: set[int] = set()
    for number, order in enumerate(RETRIEVED):
        messages: Any = chain(f"Who keeps lamp {number}?", [DOCUMENTS[i] for i in order])
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
        rag = answer.model_extra["rag"]
        passages = [report for report in rag["segments"] if report["id"].startswith("passage-")]
        assert [report["tokens"] for report in passages] == [len(DOCUMENTS[i]) for i in order]
        for i, report in zip(order, passages, strict=True):
            if i not in known:
                assert report["tier"] is None
            elif rag["strategy"] == "naive":
                assert report["reused"] == report["tokens"]
            else:  # a share of all passages' tokens is computed again
                assert report["reused"] > 0.5 * report["tokens"] and report["tier"] == "device"
        assert rag["approximate"] == (number > 0)
        if rag["approximate"]:
            assert rag["predicted"] is None
            known |= set(order)


def test_an_earlier_turn_that_was_stuffed_is_warm(served: Served) -> None:
    client = served.client(timeout=120)
    turn: Any = stuff_prompt("Who built it?", DOCUMENTS[:2])
    said = client.chat.completions.create(model="tiny", messages=turn, max_tokens=4).choices[0].message.content
    more: Any = [*turn, {"role": "assistant", "content": said}, {"role": "user", "content": "And when?"}]
    rag = client.chat.completions.create(model="tiny", messages=more, max_tokens=2).model_extra["rag"]
    passages = [report for report in rag["segments"] if report["id"].startswith("passage-")]
    assert len(passages) == 2 and all(report["reused"] > 0.5 * report["tokens"] for report in passages)


def test_the_field_and_the_flag_reach_the_engine(caught: Caught) -> None:
    assert caught.request(rag={"recognise": True}).rag == core.Rag(recognise=True)
    assert caught.request(rag={"recognise": False}).rag == core.Rag(recognise=False)
    text = caught.request("/v1/completions", prompt="a", rag={"recognise": True})
    assert text.rag == core.Rag(top_k=0, recognise=True)
    wrong = {"recognise": True, "graph": "facts"}
    response = caught.served.post(json={"model": "fake", "messages": stuff_prompt("?", []), "rag": wrong})
    assert (response.status_code, error_of(response)["param"]) == (400, "rag.recognise")


def test_a_knowledge_base_is_named_with_the_model(caught: Caught) -> None:
    assert caught.request(model="fake:demo").rag == core.Rag(knowledge="demo")
    assert caught.request(model="fake:demo", rag={"top_k": 2}).rag == core.Rag(knowledge="demo", top_k=2)
    assert caught.request(model="fake:demo", rag={"knowledge": "demo"}).rag == core.Rag(knowledge="demo")
    listed = [model.id for model in caught.served.client().models.list().data]
    assert listed == ["fake", "fake:demo", "fake-encoder"]
    assert caught.served.client().models.retrieve("fake:demo").id == "fake:demo"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("chat/completions", {"model": "fake:other"}, 404),
        ("chat/completions", {"model": "fake:"}, 404),
        ("chat/completions", {"model": "demo"}, 404),
        ("chat/completions", {"model": "fake:demo", "rag": None}, 400),
        ("chat/completions", {"model": "fake:demo", "rag": {"knowledge": "other"}}, 400),
        ("chat/completions", {"model": "fake:demo", "rag": {"graph": "facts"}}, 400),
        ("completions", {"model": "fake:demo", "prompt": "a"}, 400),
    ],
)
def test_a_models_name_that_contradicts_the_request_is_refused(
    caught: Caught, path: str, body: dict[str, Any], status: int
) -> None:
    asked = {"messages": stuff_prompt("?", [])} if "chat" in path else {}
    response = caught.served.post(f"/v1/{path}", json={**asked, **body})
    assert response.status_code == status and error_of(response)["message"]


@pytest.mark.parametrize("chain", ["stuff", "system"])
def test_langchain_over_faiss_in_its_own_environment(chain: str) -> None:
    """Nothing is set but base URL and model."""
    python = os.environ.get("RAGJAX_CLIENTS_PYTHON")
    if not python:
        pytest.skip("RAGJAX_CLIENTS_PYTHON names no Python with client packages")
    if subprocess.run([python, "-c", stuff_program.NEEDS], capture_output=True, check=False).returncode:
        pytest.skip("langchain, langchain-openai, langchain-community and faiss-cpu are not installed there")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tiny.engine(recognise=True, strategy="naive") as engine, serving(engine) as served:
        run = [python, str(Path(stuff_program.__file__)), chain, served.url + "/v1"]
        given = json.dumps(DOCUMENTS)
        done = subprocess.run(
            run, input=given, capture_output=True, text=True, env=environment, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        cached, *later = json.loads(done.stdout.splitlines()[-1])
    assert cached == 0
    whole = sum(map(len, DOCUMENTS))
    assert len(later) == 2 and min(later) >= whole, "every passage is warm from the second question on"
