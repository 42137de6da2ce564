"""Files from servers, by the user's proxies and certificates; a transfer that breaks off is resumed."""

from __future__ import annotations

import logging
import os
import shutil
import ssl
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, url2pathname

from ragjax.core import ConfigError

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

_ATTEMPTS = 4  # a broken transfer is resumed this often before giving up

UNTRUSTED = (
    "the server's certificate could not be verified; "
    "set SSL_CERT_FILE or PIP_CERT to a file of the certificates to trust"
)
"""What is said of a certificate that cannot be verified."""


def download(url: str, part: Path) -> None:
    """Bring a URL into `part`, going on where an earlier transfer broke off.

    Raises:
        ConfigError: if it cannot be had, saying why.
    """
    if urlsplit(url).scheme == "file":
        source = Path(url2pathname(urlsplit(url).path))
        if not os.access(source, os.R_OK):
            raise ConfigError(f"{url} cannot be read: there is no such file, or its permissions forbid it")
        shutil.copyfile(source, part)
        return
    import httpx

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _transfer(url, part)
            return
        except httpx.HTTPStatusError as error:
            raise ConfigError(f"download of {url} failed: {error.response.status_code}") from error
        except httpx.HTTPError as error:
            if _is_untrusted(error):
                raise ConfigError(f"download of {url} failed: {UNTRUSTED} ({error})") from error
            if attempt == _ATTEMPTS:
                here = part.stat().st_size if part.exists() else 0
                raise ConfigError(
                    f"download of {url} broke off ({error}); start again to go on at {here} bytes"
                ) from error
            _log.warning("download of %s broke off (%s); resuming", url, error)


def _transfer(url: str, part: Path) -> None:
    import httpx
    from tqdm import tqdm

    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with (
        _client() as client,
        client.stream("GET", url, headers=headers) as response,
    ):
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # nothing lies beyond what is here, yet its checksum is wrong
            raise httpx.RemoteProtocolError("the part on disk is longer than the file")
        response.raise_for_status()
        resumed = response.headers.get("Content-Range", "").startswith(f"bytes {have}-") and have > 0
        have = have if resumed else 0
        length = int(response.headers.get("Content-Length", 0))
        bar = tqdm(total=have + length or None, initial=have, unit="B", unit_scale=True, desc=part.stem, disable=None)
        with part.open("ab" if resumed else "wb") as stream, bar:
            for block in response.iter_raw():  # as it arrives, so that a break loses nothing
                stream.write(block)
                bar.update(len(block))


def download_bytes(url: str) -> int | None:
    """The size of what lies at a URL; None if the server does not say."""
    if urlsplit(url).scheme == "file":
        return Path(url2pathname(urlsplit(url).path)).stat().st_size
    import httpx

    try:
        with _client() as client:
            answer = client.head(url)
    except httpx.HTTPError:
        return None
    length = answer.headers.get("Content-Length", "")
    return int(length) if answer.is_success and length.isdecimal() else None


def _client() -> httpx.Client:
    import httpx

    check_proxies()
    return httpx.Client(verify=ssl_context(), follow_redirects=True, timeout=60.0)


def check_proxies() -> None:
    """Raise ConfigError that names the variable if a proxy of the environment cannot be one."""
    import httpx

    trusts_none = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # nothing is asked
    for scheme, value in getproxies_environment().items():
        if scheme not in ("http", "https", "all"):
            continue
        try:
            httpx.HTTPTransport(proxy=value if "://" in value else f"http://{value}", verify=trusts_none)
        except (ValueError, ImportError, httpx.InvalidURL) as error:  # ImportError: SOCKS needs a package
            variable = f"{scheme}_proxy"
            variable = variable if os.environ.get(variable) else variable.upper()
            raise ConfigError(f"{variable} cannot be used as a proxy: {error}") from error


def _is_untrusted(error: BaseException | None) -> bool:
    """Whether an error comes from a certificate that could not be verified."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def ssl_context() -> ssl.SSLContext:
    """The system's certificates (or $SSL_CERT_FILE), certifi's, and those that pip is told to trust."""
    context = ssl.create_default_context()
    if find_spec("certifi") is not None:  # a Python of its own may not find the system's
        import certifi

        context.load_verify_locations(cafile=certifi.where())
    for variable in ("PIP_CERT", "REQUESTS_CA_BUNDLE"):
        extra = os.environ.get(variable)
        if not extra:
            continue
        try:
            context.load_verify_locations(**{"capath" if Path(extra).is_dir() else "cafile": extra})
        except OSError as error:
            raise ConfigError(f"{variable}={extra} cannot be read as a file of certificates: {error}") from error
    return context
