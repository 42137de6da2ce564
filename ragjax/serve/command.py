"""The command: its flags, its listener, and a stop that lets running requests finish."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import ipaddress
import json
import logging
import os
import re
import resource
import signal
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import uvicorn
from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator

from ragjax import core
from ragjax.cluster.router import DEFAULT_ROUTER, ROUTERS
from ragjax.commands.flags import DEFAULTS, Parser, engine_options, exit_code
from ragjax.core.check import check_fields
from ragjax.core.options import CACHE, FIRST, LOAD, RETRIEVAL, REUSE, Flag, Positive
from ragjax.core.papers import PAPERS, PaperName
from ragjax.core.registry import meant
from ragjax.serve.app import MAX_FILE_BYTES, create_app
from ragjax.serve.middleware import LOOPBACK, is_loopback
from ragjax.serve.server import Drain, Limits, Server, Watchdog, limited

if TYPE_CHECKING:
    from ragjax.cluster.fleet import Service
    from ragjax.engine.kv_events import KVEvents

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0 after a graceful stop, 2 if it cannot start as asked.

    A stop that takes too long ends the process with code 3 (`ragjax.serve.server`).
    """

    def run() -> int:
        options = parse_options(argv)
        handler = logging.StreamHandler()
        handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(handlers=[handler])
        logging.getLogger("ragjax").setLevel(logging.INFO)
        if options.paper is not None:
            for line in told(options):
                _log.info("--paper %s: %s", options.paper, line)
        _open_many()
        with _listener(options.host, options.port) as listener, closing(_load(options)) as engine:
            _run(engine, listener, options)
        return 0

    return exit_code("ragjax serve", run)


def told(options: argparse.Namespace) -> list[str]:
    """The options of a paper as they are used, each with its section of the paper or as a flag has changed it."""
    found = []
    for one in PAPERS[options.paper]:
        value = getattr(options, one.option)
        source = f"section {one.section}" if value == one.value else f"not the paper's {one.value}"
        found.append(f"{one.option} {value} ({source})")
    return found


class OneLineFormatter(logging.Formatter):
    """Escapes control characters of a message: one that quotes a client or a document forges no line of the log."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_ESCAPED)


_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


ACCESS = "Access and limits"


def _origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text):
        raise ValueError("must be scheme://host or scheme://host:port without a path, or *")
    return text.lower()


def _host(text: str) -> str:
    with suppress(ValueError):
        return str(ipaddress.ip_address(text))
    if not re.fullmatch(r"[\w.-]+", text):
        raise ValueError("must be a name without scheme and port")
    return text.lower()


@dataclass(frozen=True)
class ServerOptions:
    host: Annotated[str, Flag(FIRST, "address to listen on")] = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535), Flag(FIRST, "port to listen on, 0: a free one")] = 8000
    api_key: Annotated[
        str | None, Flag(FIRST, "key that clients must send (default: $RAGJAX_API_KEY, or no key)", "KEY")
    ] = None
    paper: Annotated[
        PaperName | None, Flag(REUSE, "a paper's settings; other flags override its own (docs/flags.md)")
    ] = None
    replicas: Annotated[
        str | None,
        Flag(
            LOAD,
            "serve by N engines on Ray Serve, at $RAY_ADDRESS if set; router: knowledge or round-robin (docs/scale.md)",
            "N[:ROUTER]",
        ),
    ] = None
    tenants: Annotated[
        str | None, Flag(ACCESS, "JSON of API keys that share no KV: {KEY: {name, quota_gb}} (docs/http.md)", "FILE")
    ] = None
    allow_host: Annotated[
        tuple[Annotated[str, AfterValidator(_host)], ...],
        Flag(ACCESS, "without keys: a name of the server, besides localhost and --host; repeatable (docs/security.md)"),
    ] = ()
    cors_origin: Annotated[
        tuple[Annotated[str, AfterValidator(_origin)], ...],
        Flag(ACCESS, "whose pages may call, such as https://app.example; *: anybody's; repeatable", "ORIGIN"),
    ] = ()
    strict: Annotated[bool, Flag(ACCESS, "refuse fields of requests that have no effect, instead of a notice")] = False
    max_file_mb: Annotated[Positive, Flag(ACCESS, "largest upload, MiB")] = MAX_FILE_BYTES / 2**20


def serve_parser() -> Parser:
    parser = Parser("ragjax serve", "OpenAI's HTTP API over a model and your documents (docs/http.md).")
    for section in (FIRST, RETRIEVAL, REUSE, CACHE, LOAD, ACCESS):
        parser.section(section)
    for options in (DEFAULTS, DEFAULTS.storage, ServerOptions()):
        parser.add_fields(options)
    return parser


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line (`sys.argv` if None), and of RAGJAX_API_KEY and RAGJAX_METRICS_KEY.

    `engine` are the `EngineOptions`.
    """
    parser = serve_parser()
    options = parser.parse_args(argv)
    if options.paper is not None:
        parser.set_defaults(**{one.option: one.value for one in PAPERS[options.paper]})
        options = parser.parse_args(argv)
    options.api_key = _key(options.api_key, "--api-key", "RAGJAX_API_KEY")
    options.metrics_key = _key(None, "", "RAGJAX_METRICS_KEY")
    options.tenants = {} if options.tenants is None else _tenants(options.tenants)
    if options.api_key in options.tenants:
        raise core.ConfigError("--tenants: the key of --api-key may not be a tenant's too")
    if options.metrics_key in _keys(options):
        raise core.ConfigError("RAGJAX_METRICS_KEY: clients have this key too: give one of its own")
    engine = engine_options(options)
    quotas = {t.name: t.quota_gb for t in options.tenants.values() if t.quota_gb is not None}
    options.engine = replace(engine, storage=replace(engine.storage, quotas=quotas))
    _check_replicas(options)
    return options


def _check_replicas(options: argparse.Namespace) -> None:
    """Read --replicas into `replicas` and `router`; raise ConfigError for flags that have no effect beside it."""
    if options.replicas is None:
        return
    count, _, router = options.replicas.partition(":")
    options.router = router or DEFAULT_ROUTER
    if not count.isdecimal() or not 1 <= int(count) <= 1024:
        raise core.ConfigError(f"--replicas: give a whole number from 1 to 1024, not {count!r}")
    if options.router not in ROUTERS:
        raise core.ConfigError(f"--replicas: unknown router {router!r}; {meant(router, ROUTERS)}")
    options.replicas = int(count)
    options.engine = replace(options.engine, preprocess=False)  # the documents are with the front, the KV is not
    if core.Guesses.parse(options.engine.speculate).stages:
        raise core.ConfigError("--speculate: a replica is chosen after the search; leave it out, or --replicas")


def _named(name: str) -> str:
    if not name.strip() or not core.is_unicode(name):
        raise ValueError("must be a name, of valid Unicode")
    return name


@dataclass(frozen=True)
class Tenant:
    """Whom an API key belongs to. quota_gb: 2^30 bytes of KV on the device, and as many in host memory."""

    name: Annotated[str, AfterValidator(_named)]
    quota_gb: Annotated[float, Gt(0), Le(1e9)] | None = None

    def __post_init__(self) -> None:
        check_fields(self, lambda _, reason: core.ConfigError(reason))


def _tenants(path: str) -> dict[str, Tenant]:
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_distinct)
    except (OSError, ValueError, RecursionError) as error:
        raise core.ConfigError(f"--tenants: cannot read {path!r}: {error}") from error
    if not isinstance(given, dict) or not given:
        raise core.ConfigError(f"--tenants: {path!r} must hold an object of API keys")
    tenants = {}
    for key, entry in given.items():
        _check_key(key, "--tenants")
        shown = f"--tenants: the entry of key {key[:4]}…"
        if not isinstance(entry, dict) or "name" not in entry or not set(entry) <= {"name", "quota_gb"}:
            raise core.ConfigError(f'{shown} must be {{"name": …, "quota_gb": …}}, and no more')
        try:
            tenants[key] = Tenant(**entry)
        except core.ConfigError as error:
            raise core.ConfigError(f"{shown}: {error}") from error
    if len({tenant.name for tenant in tenants.values()}) != len(tenants):
        raise core.ConfigError("--tenants: two keys have the same name; each tenant has one key")
    return tenants


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; of a name given twice it would keep the last alone, so a key could stop working unseen."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key or field stands twice in an object")
    return found


def _check_key(key: str, where: str) -> None:
    """Raise ConfigError for an API key that no client could send in a header."""
    if not key.strip():
        # A key that came out empty was meant to protect; an open server would be the wrong reading of it.
        raise core.ConfigError(f"{where}: an API key is empty: give one, or leave it away")
    if key != key.strip() or not key.isprintable():
        raise core.ConfigError(f"{where}: an API key must be of printable characters, without white space around it")


def _key(given: str | None, flag: str, variable: str) -> str | None:
    key = os.environ.get(variable) if given is None else given
    if key is not None:
        _check_key(key, f"{flag} or {variable}" if flag else variable)
    return key


def _listener(host: str, port: int) -> socket.socket:
    """A bound socket. It is taken before the model is loaded: an occupied port should not cost a minute."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        return listener
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: Exception) -> core.ConfigError:
    return core.ConfigError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}")


def _load(options: argparse.Namespace) -> Service:
    for place in (options.engine.index_dir, options.engine.storage.disk):
        if place is not None:
            with suppress(OSError):  # who opens it says what is wrong; one that is there keeps its mode
                Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
    # Imported late: a wrong flag should not wait for JAX.
    if options.replicas is None:
        from ragjax.engine import Engine

        return Engine.load(options.engine, early=True)
    if importlib.util.find_spec("ray") is None:
        raise core.ConfigError("--replicas needs Ray, which is not installed: pip install '.[ray]' in ragjax's folder")
    from ragjax.cluster.deployment import start

    return start(options.engine, options.replicas, os.environ.get("RAY_ADDRESS"), options.router)


def _open_many() -> None:
    """Let the process open as many files as the system allows it: connections and vector stores take them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems name a limit here that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def app_options(options: argparse.Namespace, address: str | None = None) -> dict[str, Any]:
    """Arguments of `create_app` from the command's options. address: the server listens on it; None: Ray Serve's."""
    hosts = None  # without --allow-host any name will do where other machines reach it
    if options.allow_host or (address is not None and is_loopback(address)):
        hosts = LOOPBACK | frozenset(options.allow_host) | frozenset(() if address is None else (options.host.lower(),))
    return {
        "keys": _keys(options),
        "metrics_key": options.metrics_key,
        "max_file_bytes": int(options.max_file_mb * 2**20),
        "strict": options.strict,
        "cors_origins": options.cors_origin,
        "hosts": hosts,
    }


def _run(engine: Service, listener: socket.socket, options: argparse.Namespace) -> None:
    """Serves until SIGTERM or SIGINT; running requests then get the grace time, and after it are cancelled."""
    drain = Drain()
    app = create_app(engine, drain=drain, **app_options(options, listener.getsockname()[0]))
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="info",
        http=limited(Limits(), app.state.metrics.count_ended),  # over h11, which bounds the head of a request: 64 KiB
        ws="none",
        lifespan="on",
    )
    try:  # not before the model is loaded, or clients would wait for it; another server can have come first
        listener.listen()
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _cannot_listen(host, port, error) from error
    gc.enable()
    with Watchdog() as watchdog:
        server = Server(config, engine, watchdog, drain)
        # uvicorn sets its own handlers; when done it restores these and raises the signal again, by then without harm.
        before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        place = os.environ.get("RAGJAX_KV_EVENTS")
        events = _kv_events(engine, place) if place else None
        _say_ready(engine, listener, options)
        try:
            server.run(sockets=[listener])
        finally:
            if events is not None:
                events.close()
            for number, handler in before.items():
                signal.signal(number, handler)


def _kv_events(engine: Service, place: str) -> KVEvents:
    from ragjax.engine import Engine
    from ragjax.engine.kv_events import KVEvents

    if not isinstance(engine, Engine):
        raise core.ConfigError("RAGJAX_KV_EVENTS goes with one engine: leave out --replicas, whose router needs none")
    return KVEvents(engine, place)


def _keys(options: argparse.Namespace) -> dict[str, str]:
    keys = {key: tenant.name for key, tenant in options.tenants.items()}
    return keys if options.api_key is None else {options.api_key: "", **keys}


def _say_ready(engine: Service, listener: socket.socket, options: argparse.Namespace) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    knowledge = ", ".join(engine.knowledge_names) or "none"
    serves = f"knowledge: {knowledge}; strategy: {engine.strategy_summary}"
    _log.info("%s ready at %s (%s)", engine.model_name, url, serves)
    if options.engine.model == DEFAULTS.model:
        _log.info("%s is a demonstration; `ragjax models list` says what to take for answers", DEFAULTS.model)
    if not _keys(options) and host not in ("127.0.0.1", "::1"):
        _log.warning("no API key is set, and %s can be reached from other machines", host)
