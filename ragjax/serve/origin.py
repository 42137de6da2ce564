"""Which pages of a browser may call a server that has no API keys.

A browser sends requests for any page that it shows, also to addresses that only its own machine reaches. A page of
another site must not use that: neither by a request whose answer it cannot read (cross-site request forgery), nor by a
name of its own that it has resolve to the server's address (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ragjax.serve.error import ApiError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names by which a browser calls a server on its own machine."""


@dataclass(frozen=True)
class Callers:
    """Pages and names that requests may come by. Requests of other programs have no such headers, and pass.

    origins: of pages elsewhere that may call; "*": all. hosts: names that the server may be called by, in lower case;
    None: any.
    """

    origins: Collection[str] = ()
    hosts: Collection[str] | None = None

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError 403 for a request of a page that may not call."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host and self.hosts is not None and _name(host) not in self.hosts:
            raise _refused(
                f"this server does not go by the name {_name(host)!r}",
                f"call it by its address, or start it with --allow-host {_name(host)}, or with --api-key",
                "host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if "*" in self.origins or origin in self.origins or not _is_elsewhere(headers, origin, host):
            return
        raise _refused(
            f"pages of {origin} may not call this server" if origin else "pages elsewhere may not call this server",
            f"start it with --cors-origin {origin or 'ORIGIN'}, or with --api-key",
            "origin_not_allowed",
        )


def _is_elsewhere(headers: Mapping[bytes, bytes], origin: str, host: str) -> bool:
    """Whether a page sends the request that is not of this server."""
    site = headers.get(b"sec-fetch-site")
    if site == b"same-origin":  # the browser's word, also where a proxy has changed the host
        return False
    if origin:
        return origin not in (f"http://{host}", f"https://{host}")
    return site == b"cross-site"


def _name(host: str) -> str:
    """The name in a Host header, without its port, and without the brackets of an address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _refused(what: str, remedy: str, code: str) -> ApiError:
    return ApiError(403, f"{what}: {remedy}", code=code)


def is_loopback(address: str) -> bool:
    """Whether an IP address is of this machine alone."""
    return ipaddress.ip_address(address).is_loopback
