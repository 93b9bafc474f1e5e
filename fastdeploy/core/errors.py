# SPDX-License-Identifier: Apache-2.0
"""Errors of configurations and requests, and of the engine as a whole."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_SHELL_VARIABLE = re.compile(r"\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")


class FastDeployError(Exception):
    """Base class of all errors that callers are expected to handle."""


class ConfigError(FastDeployError):
    """An invalid flag, key, file or checkpoint.

    Attributes:
        field: the flag, key or file; a flag has its Python name, unless a message of the parser names it.
        message: what is wrong, and what is expected.
        typed: the whole line with flags as the user of a command line types them; empty where that is not known.
    """

    def __init__(self, field: str, message: str, typed: str = "") -> None:
        message = message.replace("\n", "\\n")  # of a path or a file, so that an error stays one line
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.typed = typed

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, str]]:
        return type(self), (self.field, self.message, self.typed)


class ConfigErrors(ConfigError):
    """Several errors of one configuration, one per line.

    Attributes:
        errors: the errors, at least two.
    """

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__(errors[0].field, errors[0].message)
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)

    def __reduce__(self) -> tuple[type[ConfigErrors], tuple[Sequence[ConfigError]]]:  # type: ignore[override]
        return type(self), (self.errors,)


class ErrorCollector:
    """Collects the errors of a configuration, to raise all of them at once."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the error that ends the block, if one does."""
        try:
            yield
        except ConfigErrors as errors:
            self.errors += errors.errors
        except ConfigError as error:
            self.errors.append(error)

    def add(self, field: str, message: str) -> None:
        """Collect a ConfigError."""
        self.errors.append(ConfigError(field, message))

    def raise_all(self) -> None:
        """Raise the collected errors, if there are any."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ConfigErrors(self.errors)


class InvalidRequestError(FastDeployError):
    """An invalid request (HTTP 400).

    Attributes:
        field: the invalid field.
        message: what is wrong with its value, and what is expected.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[InvalidRequestError], tuple[str, str]]:
        return type(self), (self.field, self.message)


class ContextLengthError(InvalidRequestError):
    """A prompt that is too long for the context (HTTP 400, code context_length_exceeded)."""


class TemplateLimitError(InvalidRequestError):
    """A chat template takes too much time or memory, or prints too much (HTTP 400)."""


class QueueFullError(FastDeployError):
    """The maximum number of requests is waiting already (HTTP 429)."""


class QueueTimeoutError(QueueFullError):
    """A request that no node has begun within `--scheduler-max-waiting-time` (HTTP 429)."""


class RequestFailedError(FastDeployError):
    """A request that failed because of an internal error; the traceback is in the log (HTTP 500)."""


class ShuttingDownError(FastDeployError):
    """The server shuts down and cannot wait for the request any longer (HTTP 503)."""


class RequestTimeoutError(FastDeployError):
    """A request that did not end in its time (HTTP 504)."""


class NoProgressError(FastDeployError):
    """A request that has got no token for `--scheduler-ttl` seconds (HTTP 504)."""


class AttemptsFailedError(FastDeployError):
    """A request whose nodes were lost, each time that it was tried (HTTP 503)."""


class EngineDeadError(FastDeployError):
    """The engine has failed, or its process has ended (HTTP 503)."""


class DeviceFailedError(FastDeployError):
    """A device cannot be used, or has failed: there is none, its driver is too old, or it lacks memory (status 1)."""


class DeviceError(BaseException):
    """A call of a device's library failed, and what the device holds may be lost: the engine ends.

    It is no Exception, so that nothing takes it for the failure of one request.
    """


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise DeviceFailedError for a DeviceError, where the engine runs in the caller's process."""
    try:
        yield
    except DeviceError as error:
        raise DeviceFailedError(f"device: {error}") from error


def error_lines(error: FastDeployError) -> str:
    """Return an error as the command line shows it: one line, or one per error of several."""
    errors = error.errors if isinstance(error, ConfigErrors) else (error,)
    texts = [(error.typed if isinstance(error, ConfigError) else "") or str(error) for error in errors]
    return "\n".join(f"fastdeploy: error: {line}" for text in texts for line in text.split("\n"))


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a suggestion for a message about an unknown name: the nearest known name; "" if there is none."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def unset_variable(value: object) -> str:
    """Return the end of a message about a wrong value in which a shell variable was not replaced; "" for others."""
    found = _SHELL_VARIABLE.search(value) if isinstance(value, str) else None
    if found is None:
        return ""
    return f"; a shell variable was not set: no shell has replaced {found.group()}, as in single quotes and in files"
