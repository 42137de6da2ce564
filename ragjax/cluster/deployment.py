"""Replicas as a deployment of Ray Serve, which starts, watches, restarts, updates and drains them; and a fleet in front
of them for the server of `ragjax serve --replicas`, which stands outside of Ray Serve.

It needs Ray: the extra `ragjax[ray]`. Ray pickles what goes between processes, so whoever reaches the cluster's ports
can run code on it (docs/security.md).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ReplicaState

from ragjax.cluster.fleet import Fleet, fleet_of
from ragjax.cluster.replica import Call, Card, Item, Replica, Status, check_room, load, needs
from ragjax.core import ConfigError, EngineOptions, Inventory, LostError
from ragjax.core.options import GRACE

_log = logging.getLogger(__name__)

NAME = "Replica"
"""Of the deployment, in a configuration of Ray Serve too."""

APP = "ragjax"
"""Name of the application in Ray Serve."""

ONGOING = 100_000
"""Calls that a replica may have: how many wait is the engine's to bound, which answers 429 when its queue is full."""

ANSWER = 5.0
"""Seconds that replicas have to tell how they are."""


class ChosenReplica(RequestRouter):  # type: ignore[misc] # Ray has no types here
    """Tries replicas in the order that a call says; what is no call may go to any."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the first to be tried first. Called again until one takes the request."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        call = next((one for one in pending_request.args if isinstance(one, Call)), None)
        if call is None or call.choose is None:
            return [candidate_replicas]
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        return [[by_name[name]] for name in call.choose(by_name)]


class ReplicaServer:
    def __init__(self, options: EngineOptions):
        logging.getLogger("ragjax").setLevel(logging.INFO)
        context = serve.get_replica_context()
        rank = context.rank.rank
        self._replica = Replica(load(options, rank), context.replica_id.unique_id, rank)

    async def serve(self, call: Call) -> AsyncGenerator[Item, None]:
        async for item in self._replica.serve(call):
            yield item

    async def card(self) -> Card:
        return self._replica.card()

    async def status(self) -> Status:
        return self._replica.status()

    async def inventory(self, tenant: str) -> tuple[int, Inventory]:
        return await asyncio.to_thread(self._replica.inventory, tenant)

    def check_health(self) -> None:
        self._replica.check()

    def __del__(self) -> None:
        if hasattr(self, "_replica"):  # Ray Serve calls it when the replica has ended its requests
            self._replica.close()


def deployment(options: EngineOptions, count: int) -> serve.Application:
    made = serve.deployment(
        ReplicaServer,
        name=NAME,
        num_replicas=count,
        ray_actor_options=needs(options.tensor_parallel, ray.cluster_resources(), os.environ.get("XLA_FLAGS", "")),
        max_ongoing_requests=ONGOING,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=GRACE,
        max_constructor_retry_count=3,
        request_router_config=RequestRouterConfig(request_router_class=ChosenReplica),
    )
    return made.bind(options)


class RayTransport:
    def __init__(self, handle: DeploymentHandle[Any]):
        self._handle = handle

    async def serve(self, call: Call) -> AsyncGenerator[Item, None]:
        response, ended = self._handle.options(stream=True).serve.remote(call), False
        try:
            async for item in response:
                yield item
            ended = True
        except RayTaskError:  # a defect in the replica, which lives on
            raise
        except (RayError, DeploymentUnavailableError) as error:
            raise LostError(f"a replica was lost: {error}") from error
        finally:
            if not ended:
                with suppress(Exception):  # of a call that reached no replica it raises that error again
                    response.cancel()

    def card(self) -> Card:
        card: Card = self._handle.card.remote().result()
        return card

    def statuses(self) -> Sequence[Status]:
        return self._broadcast("status")

    def inventories(self, tenant: str) -> dict[int, Inventory]:
        return dict(self._broadcast("inventory", tenant))

    def _broadcast(self, method: str, *arguments: object) -> list[Any]:
        try:
            found = self._handle.broadcast(method, *arguments).results(timeout_s=ANSWER, return_exceptions=True)
        except (RayError, DeploymentUnavailableError, TimeoutError) as error:
            _log.info("no replica told its %s: %s", method, error)
            return []
        return [one for one in found if not isinstance(one, Exception)]

    def wanted(self) -> int:
        states = serve.status().applications[self._handle.app_name].deployments[NAME].replica_states
        ending = (ReplicaState.STOPPING, ReplicaState.STOPPED)
        return sum(number for state, number in states.items() if state not in ending)

    def close(self) -> None:
        self._handle.shutdown()


class Started(RayTransport):
    """Replicas that were started for one fleet, and end with it. own: so does Ray itself."""

    def __init__(self, options: EngineOptions, count: int, own: bool):
        self._own = own
        try:
            if own:
                check_room(count, options.tensor_parallel, ray.cluster_resources())
            super().__init__(serve.run(deployment(options, count), name=APP, route_prefix=None))
        except BaseException as error:
            application = serve.status().applications.get(APP)  # none, if it failed before it was registered
            _stop(own)
            if not isinstance(error, RuntimeError):
                raise
            # an error of Ray Serve holds tracebacks, in which the engine's message is looked for
            told = () if application is None else application.deployments.values()
            message = "\n".join((str(error), *(one.message for one in told)))
            found = re.findall(r"^(?:ragjax\.)\S*Error: (.+)$", message, re.MULTILINE)
            raise ConfigError(f"the replicas do not start: {found[-1] if found else message}") from error

    def close(self) -> None:
        _stop(self._own)


def start(options: EngineOptions, count: int, address: str | None, router: str) -> Fleet:
    """Start replicas on a Ray cluster, and a fleet in front of them, which ends them when it is closed.

    address: of the cluster, host:port; None: Ray is started on this machine.
    """
    _connect(address)
    transport = Started(options, count, address is None)
    try:
        return fleet_of(options, transport, router)
    except BaseException:
        transport.close()
        raise


def _connect(address: str | None) -> None:
    if address is not None:  # Ray itself would try for minutes
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or "/" in host:
            raise ConfigError(f"RAY_ADDRESS: give HOST:PORT of a cluster that this machine is part of, not {address!r}")
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"RAY_ADDRESS: no Ray cluster can be reached at {address}: {error}") from error
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
            f"RAY_ADDRESS: no Ray cluster can be reached at {address}: {error}. If it asks for a token, set "
            "RAY_AUTH_MODE=token here too"
        ) from error
    if address is not None and APP in serve.status().applications:
        ray.shutdown()
        raise ConfigError(f"RAY_ADDRESS: the application {APP} runs on {address} already; stop it first")


def _stop(own: bool) -> None:
    with suppress(Exception):  # Ray may be gone
        if own:
            serve.shutdown()
        else:
            serve.delete(APP)
    ray.shutdown()
