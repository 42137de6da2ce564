"""API keys and tenants."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ragjax import core
from ragjax.serve.command import parse_options
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, error_of, serving

INDEXING = core.Indexing(
    "docs", 3, 40, 1.23, 9.0, 17, 88.8, tuple(core.Skipped(f"{n}.pdf", "mend it") for n in range(12)), True
)


def test_health_and_metrics_say_how_far_documents_are_read() -> None:
    with serving(FakeEngine(indexing=INDEXING)) as served:
        told = served.get("/health").json()["indexing"]
        first = [{"name": f"{n}.pdf", "reason": "mend it"} for n in range(10)]
        assert told == {
            "knowledge": "docs", "files": 3, "files_total": 40, "mb": 1.2, "mb_total": 9.0, "chunks": 17,
            "facts": 0, "seconds_left": 89, "running": True, "skipped_total": 12, "skipped": first,
        }  # fmt: skip
        lines = served.get("/metrics").text.splitlines()
        for line in ('files{state="indexed"} 3.0', 'files{state="waiting"} 37.0', "skipped 12.0"):
            assert f"ragjax_indexing_{line}" in lines


def test_key_is_required_except_for_health() -> None:
    engine = FakeEngine()
    with serving(engine, keys={"sésame": ""}) as served:
        health = {"status": "ok", "ready": True, "model": "fake", "strategy": "prefix", "programs_left": 2}
        assert served.get("/health").json() == health
        engine.progress = core.Preprocessed(passages=9, prepared=4, beyond=2, running=True)
        told = {"passages": 9, "prepared": 4, "beyond": 2, "running": True}
        assert served.get("/health").json()["preprocessing"] == told
        engine.indexing = INDEXING
        told = served.get("/health").json()["indexing"]
        assert told["files"] == 3 and told["skipped_total"] == 12 and told["skipped"] == [], "names are not for all"
        for path in ("/metrics", "/v1/models", "/nowhere", "/openapi.json"):
            response = served.get(path)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
        for wrong in ("sésam", "sésames", "SÉSAME"):
            headers = {"authorization": f"Bearer {wrong}".encode()}
            assert served.post(json=CHAT, headers=headers).status_code == 401
        assert served.post(json=CHAT, headers={"authorization": "sésame".encode()}).status_code == 401
        assert served.post(json=CHAT, headers={"authorization": "Bearer sésame".encode()}).status_code == 200
        assert served.post(json=CHAT, headers={"authorization": "bearer sésame".encode()}).status_code == 200
        assert served.post(json=CHAT, headers={"x-api-key": "sésame".encode()}).status_code == 200
        assert served.post(json=CHAT, headers={"x-api-key": "other"}).status_code == 401


def test_metrics_have_a_key_of_their_own() -> None:
    def asked(path: str, key: str) -> int:
        return served.get(path, headers={"authorization": f"Bearer {key}"}).status_code

    with serving(FakeEngine(), keys={"k1": "acme", "master": ""}, metrics_key="scrape") as served:
        assert [asked("/metrics", key) for key in ("scrape", "k1", "master", "wrong")] == [200, 401, 401, 401]
        assert [asked("/v1/models", key) for key in ("scrape", "k1")] == [401, 200]
    with serving(FakeEngine(), metrics_key="scrape") as served:
        assert served.get("/v1/models").status_code == 200 and served.get("/metrics").status_code == 401


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "cannot read"),
        ("[]", "object"),
        ("{}", "object"),
        ('{"k": {}}', "no more"),
        ('{"k": {"name": ""}}', "must be a name"),
        ('{"k": {"name": "a", "quota": 1}}', "no more"),
        ('{"k": {"name": "a", "quota_gb": -1}}', "quota_gb must be greater than 0"),
        ('{"k": {"name": "a"}, "l": {"name": "a"}}', "same name"),
        ('{" ": {"name": "a"}}', "empty"),
        ('{"k": {"name": "a"}, "k": {"name": "b"}}', "twice"),
        ('{"k": {"name": "a", "name": "b"}}', "twice"),
        ('{"k": {"name": "\\ud800"}}', "Unicode"),
        ('{"k": {"name": "a", "quota_gb": true}}', "quota_gb must be a valid number"),
        ('{"k": {"name": "a", "quota_gb": 1e305}}', "less than or equal to 1000000000"),
        ('{"\\ud800": {"name": "a"}}', "printable"),
        ('{"k\\n": {"name": "a"}}', "printable"),
        ('{"a\\tb": {"name": "a"}}', "printable"),
        ('{"shared": {"name": "a"}}', "--api-key"),
    ],
)
def test_bad_tenant_files(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(content)
    with pytest.raises(core.ConfigError, match=message):
        parse_options(["--tenants", str(path), "--api-key", "shared"])


def test_the_key_decides_the_tenant() -> None:
    engine = FakeEngine()
    with serving(engine, keys={"master": "", "k1": "acme", "k2": "umbra"}) as served:
        for key in ("k1", "k2", "master"):
            assert served.post(json=CHAT, headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert served.post(json=CHAT, headers={"authorization": "Bearer acme"}).status_code == 401
    assert [request.tenant for request in engine.requests] == ["acme", "umbra", ""]


def test_a_notice_keeps_its_code_on_its_way_between_processes() -> None:
    notice = pickle.loads(pickle.dumps(INDEXING.notice))
    assert isinstance(notice, core.Notice) and notice.code == "indexing" and notice.startswith("3 of 40 files")
