# SPDX-License-Identifier: Apache-2.0
"""Errors that cross a border: configuration, requests, the engine's end."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FastDeployError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(FastDeployError):
    """A flag, key, file or checkpoint that cannot be used.

    Attributes:
        field: the flag, key or file at fault, as its user typed it.
        message: what is wrong with it and what would be right.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        return type(self), (self.field, self.message)


class InvalidRequestError(FastDeployError):
    """A request that cannot be served as asked (HTTP 400).

    Attributes:
        field: the request's field at fault.
        message: what is wrong with its value and the valid range.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[InvalidRequestError], tuple[str, str]]:
        return type(self), (self.field, self.message)


class ContextLengthError(InvalidRequestError):
    """A prompt that the context cannot hold (HTTP 400, code context_length_exceeded)."""


class QueueFullError(FastDeployError):
    """The engine holds as many requests as it may (HTTP 429)."""


class RequestFailedError(FastDeployError):
    """A request that failed through a fault of the server, whose log has the traceback (HTTP 500)."""


class EngineDeadError(FastDeployError):
    """The engine has stopped and will not answer (HTTP 503)."""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or nothing if none is near."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
