"""The server as an application of Ray Serve: `import_path: ragjax.serve.cluster:app` (docs/scale.md).

It needs Ray: the extra `ragjax[ray]`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from ragjax.cluster.deployment import RayTransport, deployment
from ragjax.cluster.fleet import fleet_of
from ragjax.core import ConfigError
from ragjax.core.options import GRACE
from ragjax.serve.app import create_app
from ragjax.serve.command import app_options, parse_options

REFUSED = ("host", "port")
"""Flags whose work Ray Serve's own configuration does."""


class Ingress:
    """The front of the replicas, and HTTP. There is one: it owns the documents, which two could not keep alike."""

    async def __init__(self, options: argparse.Namespace, replicas: DeploymentHandle[Any]):  # type: ignore[misc]
        self._options = options
        self._fleet = await asyncio.to_thread(fleet_of, options.engine, RayTransport(replicas), options.router)

    def __serve_build_asgi_app__(self) -> FastAPI:  # Ray Serve's name
        return create_app(self._fleet, proxied=True, **app_options(self._options))

    def check_health(self) -> None:
        """Ray Serve calls it. It serves as long as it runs; its replicas have checks of their own."""

    def __del__(self) -> None:
        if hasattr(self, "_fleet"):
            self._fleet.close()


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application. args: flags of `python -m ragjax.serve` without their dashes, `replicas` among them.

    A flag without a value is `true`, one that is given several times has a list.
    """
    for name in REFUSED:
        if name in args:
            raise ConfigError(f"args: {name} is set in Ray Serve's configuration, not here")
    options = parse_options([*_flags({"replicas": 1, **args})])
    made = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=GRACE,
    )
    return made.bind(options, deployment(options.engine, options.replicas))


def _flags(args: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in args.items():
        if value is None:
            raise ConfigError(f"args: {name} has no value; give one, or leave it out")
        if value is False:
            continue
        for one in value if isinstance(value, list) else [value]:
            found.append(f"--{name}" if one is True else f"--{name}={one}")
    return found
