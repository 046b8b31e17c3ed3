"""Why the server does not answer, in words that say what to look at."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from typing import Final

from redis.exceptions import AuthenticationError, NoPermissionError

# What redis-py says of a connection that came about and then broke.
_HUNG_UP: Final = ("Connection closed", "Connection lost", "Connection reset")

_REASONS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (AuthenticationError, "the server refuses the user or the password in --redis"),
    (NoPermissionError, "the user in --redis lacks a right that workers need"),
    (ssl.SSLError, "no TLS: --redis says rediss://, or the certificates do not fit"),
    (socket.gaierror, "unknown host in --redis"),
    (ConnectionRefusedError, "nothing listens there"),
    (TimeoutError, "no answer in time"),
)


def describe(error: BaseException) -> str:
    """An error in one line, without a URL that may hold a password."""
    said = str(error).strip().splitlines()
    words = said[0][:200] if said else ""
    reason = _reason(error) or type(error).__name__
    return f"{reason}: {words}" if words else reason


def is_refusal(error: BaseException) -> bool:
    """Whether the server knows the user or the password not: repeating that cannot help."""
    return any(isinstance(cause, AuthenticationError) for cause in _causes(error))


def tls_hint(error: BaseException, *, tls: bool) -> str:
    """What else may be wrong where a server has never answered; `tls`: it was asked to use it."""
    if tls and isinstance(error, TimeoutError):
        return "; does it speak TLS, as rediss:// says?"
    if not tls and any(words in str(error) for words in _HUNG_UP):
        return "; does it speak TLS? Then --redis must say rediss://"
    return ""


def _reason(error: BaseException) -> str:
    for cause in _causes(error):
        for kind, words in _REASONS:
            if isinstance(cause, kind):
                return words
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
