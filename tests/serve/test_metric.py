"""Metrics, and the pages that name them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ragjax import core
from ragjax.cluster.fleet import ROUTING
from ragjax.serve.app import create_app
from ragjax.serve.metric import HELP
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, Served, serving


def _families(served: Served) -> list[Metric]:
    response = served.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return list(text_string_to_metric_families(response.text))


def _samples(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = _families(served)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_metrics() -> None:
    with serving(FakeEngine()) as served:
        served.post(json=CHAT)
        served.post(json={**CHAT, "stream": True, "rag": {"strategy": "naive"}})
        served.post(json={**CHAT, "temperature": "hot"})
        served.get("/nowhere/1")
        served.get("/nowhere/2")
        samples = _samples(served)
    chat = ("route", "/v1/chat/completions")
    assert all(name.startswith("ragjax_") for name, _ in samples)
    assert samples["ragjax_requests_total", (("strategy", "prefix"),)] == 1
    assert samples["ragjax_requests_total", (("strategy", "naive"),)] == 1
    assert samples["ragjax_reused_tokens_total", ()] == 14
    assert samples["ragjax_pages_capacity", ()] == 128
    assert samples["ragjax_attention_calls_total", (("backend", "xla"),)] == 60
    assert samples["ragjax_attention_fallbacks_total", (("reason", "triton: no such kernel"),)] == 60
    assert samples["ragjax_http_requests_total", (chat, ("status", "200"))] == 2
    assert samples["ragjax_http_requests_total", (chat, ("status", "400"))] == 1
    assert samples["ragjax_http_requests_total", (("route", "unknown"), ("status", "404"))] == 2
    assert samples["ragjax_http_request_seconds_count", (chat,)] == 3
    assert samples["ragjax_ttft_seconds_count", (("strategy", "naive"),)] == 1
    assert samples["ragjax_inter_token_seconds_count", ()] == 10, "five gaps between six tokens, twice"


def test_first_texts_are_counted_for_the_strategy_that_ran() -> None:
    engine = FakeEngine()
    with serving(engine) as served:
        served.post(json=CHAT)
        engine.breakdown = core.RequestError("a stage was lost")
        served.post(json={**CHAT, "stream": True})
        samples = _samples(served)
    assert samples["ragjax_ttft_seconds_count", (("strategy", "prefix"),)] == 1
    assert ("ragjax_ttft_seconds_count", (("strategy", "naive"),)) not in samples


def test_every_engine_number_is_exposed() -> None:
    engine = FakeEngine()
    with serving(engine) as served:
        served.post(json=CHAT)
        names = {name for name, _ in _samples(served)}
    renamed = {"pages_total": "pages_capacity"}
    assert {f"ragjax_{renamed.get(name, name)}" for name in engine.stats()} <= names


def test_every_metric_says_what_it_counts() -> None:
    with serving(FakeEngine()) as served:
        lines = served.get("/metrics").text.splitlines()
    told = {line.split()[2]: line.split()[3:] for line in lines if line.startswith("# HELP ")}
    named = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert named and [name for name in named if not told[name]] == []
    assert set(ROUTING) <= set(HELP), "of a fleet alone"


def test_metrics_that_pages_name_exist() -> None:
    pages = "".join(page.read_text() for page in (Path(__file__).parents[2] / "docs").glob("*.md"))
    with serving(FakeEngine()) as served:
        known = {f.name + "_total" * (f.type == "counter") for f in _families(served)}
    known |= {f"ragjax_{name}" for name in ROUTING}  # of a fleet alone
    known |= {"ragjax_indexing_files", "ragjax_indexing_skipped"}  # of a server with documents alone
    named = re.findall(r"`(ragjax_\w+)[`{]", pages)
    assert len(named) > 20 and set(named) <= known
    groups = re.findall(r"`(ragjax_\w+)\*`", pages)
    assert groups and [group for group in groups if not any(name.startswith(group) for name in known)] == []


def test_the_page_names_every_endpoint() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    named, whole = set(), ""
    for path in re.findall(r"`(?:GET|POST|DELETE) ([/…][^`]*)`", page):
        whole = path if path.startswith("/") else whole
        named.add(path.replace("…", whole) if path.startswith("…") else path)  # "…/content" goes on from the last one
    served = {*create_app(FakeEngine()).openapi()["paths"], "/openapi.json", "/", "/page/…"}
    assert named == served


def test_what_shadow_replay_sees_is_a_histogram() -> None:
    engine = FakeEngine()
    with serving(engine) as served:
        (observe,) = engine.observers
        observe("naive", core.Divergence(0.02, 0.75))
        observe("naive", core.Divergence(0.5, 1.0))
        samples = _samples(served)
    naive = ("strategy", "naive")
    assert samples["ragjax_shadow_kl_sum", (naive,)] == pytest.approx(0.52)
    assert samples["ragjax_shadow_kl_bucket", (("le", "0.03"), naive)] == 1
    assert samples["ragjax_shadow_top1_count", (naive,)] == 2
    assert samples["ragjax_shadow_top1_bucket", (("le", "0.8"), naive)] == 1
    assert samples["ragjax_shadow_replays_total", (("outcome", "replayed"),)] == 1
    assert samples["ragjax_shadow_escalations_total", (("reason", "fault"),)] == 0


def test_two_apps_count_apart() -> None:
    with serving(FakeEngine()) as one, serving(FakeEngine()) as other:
        one.post(json=CHAT)
        assert not any(("route", "/v1/chat/completions") in labels for _, labels in _samples(other))
