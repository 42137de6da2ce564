"""Errors that a user can cause or must know of; each message says what to change."""

from __future__ import annotations


class RagjaxError(Exception):
    """Base of the errors a user can cause or must know of; the message says what to change."""


class RequestError(RagjaxError):
    """A request that cannot be served as asked. `param` names the field, `code` the OpenAI error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


def invalid(param: str, message: str) -> RequestError:
    """The error of a field whose value cannot be served."""
    return RequestError(message, param=param, code="invalid_value")


class MissingError(RequestError):
    """A request for something that is not there, or not for this tenant."""


class ConfigError(RagjaxError):
    """A flag, model or setting that cannot work, found at start-up."""


class DamageError(RagjaxError):
    """Stored data is not as it was written."""


class OverloadError(RagjaxError):
    """The queue is full. `retry_after`: seconds until there is a place, as requests end at present (None: unknown)."""

    def __init__(self, message: str, *, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class ClosedError(RagjaxError):
    """The engine was closed: nothing is served any more."""


class DeviceFullError(RagjaxError):
    """The device has no memory left for what a request computes."""


class DiskFullError(RagjaxError):
    """The disk has no room for what is to be kept."""


class LostError(RagjaxError):
    """The replica that served a request is gone, or none is there; the same request can be sent again."""


class EndpointError(RagjaxError):
    """Another server, which embeds or answers, cannot be reached or refuses; the message says what it said."""


class OutOfPages(RagjaxError):
    """The device pool has no room left that is not pinned."""


class VisibilityError(RagjaxError):
    """A visibility that one hidden interval per key cannot say."""
