"""A fleet for one process that stands outside of Ray Serve: the server of `python -m ragjax.serve --replicas`."""

from __future__ import annotations

import re
import socket
from contextlib import suppress

import ray
from ray import serve

from ragjax.cluster.deployment import RayTransport, deployment
from ragjax.cluster.fleet import Fleet, fleet_of
from ragjax.cluster.replica import check_room
from ragjax.core import ConfigError, EngineOptions

APP = "ragjax"
"""Name of the application in Ray Serve."""


class Started(RayTransport):
    """Replicas that were started for one fleet, and end with it. own: so does Ray itself."""

    def __init__(self, options: EngineOptions, count: int, grace: float, own: bool):
        self._own = own
        try:
            if own:
                check_room(count, options.tensor_parallel, ray.cluster_resources())
            super().__init__(serve.run(deployment(options, count, grace), name=APP, route_prefix=None))
        except RuntimeError as error:
            reason = _reason(error)
            _stop(own)
            raise ConfigError(f"the replicas do not start: {reason}") from error
        except BaseException:
            _stop(own)
            raise

    def close(self) -> None:
        """As `Transport.close`."""
        _stop(self._own)


def start(options: EngineOptions, count: int, address: str | None, grace: float, router: str) -> Fleet:
    """Start replicas on a Ray cluster, and a fleet in front of them, which ends them when it is closed.

    address: of the cluster, host:port; None: Ray is started on this machine.

    Raises:
        ConfigError: if there is no cluster there, or the replicas cannot start.
    """
    _connect(address)
    transport = Started(options, count, grace, address is None)
    try:
        return fleet_of(options, transport, router)
    except BaseException:
        transport.close()
        raise


def _connect(address: str | None) -> None:
    if address is not None:
        _check(address)
    try:
        if address is None:
            # Ray's own choice is a niceness of 15, which is for batch work
            ray.init("local", include_dashboard=False, log_to_driver=False, _system_config={"worker_niceness": 0})
        else:
            ray.init(address, log_to_driver=False)
        # no proxy: this process listens
        serve.start(proxy_location="Disabled")
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is None:
            raise ConfigError(f"--replicas: Ray does not start: {error}") from error
        raise ConfigError(
            f"--ray-address: no Ray cluster can be reached at {address}: {error}. If it asks for a token, set "
            "RAY_AUTH_MODE=token here too"
        ) from error
    if address is not None and APP in serve.status().applications:
        ray.shutdown()
        raise ConfigError(f"--ray-address: the application {APP} runs on {address} already; stop it first")


def _check(address: str) -> None:
    """Raise ConfigError if nobody listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ConfigError(f"--ray-address: give HOST:PORT of a cluster that this machine is part of, not {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray-address: no Ray cluster can be reached at {address}: {error}") from error


def _stop(own: bool) -> None:
    with suppress(Exception):  # Ray may be gone
        if own:
            serve.shutdown()
        else:
            serve.delete(APP)
    ray.shutdown()


def _reason(error: RuntimeError) -> str:
    """What the engine had to say, out of the messages of Ray Serve, which hold tracebacks."""
    application = serve.status().applications.get(APP)  # none, if it failed before it was registered
    told = () if application is None else application.deployments.values()
    message = "\n".join((str(error), *(one.message for one in told)))
    found = re.findall(r"^(?:ragjax\.)\S*Error: (.+)$", message, re.MULTILINE)
    return found[-1] if found else message
