# SPDX-License-Identifier: Apache-2.0
"""Configuration of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.sampling_params import MAX_LOGPROBS_LIMIT
from fastdeploy.core.tool_formats import TOOL_CALL_FORMATS

UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

MAX_WORKERS = 256


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens and what it lets in.

    Attributes:
        host, port: address of the API; port 0 takes a free one.
        metrics_port: a further port that serves /metrics only; None serves it on `port` alone.
        workers: API processes; each lets in its part of max_concurrency.
        served_model_name: name under which clients ask for the model; empty takes the model's path as given.
        api_keys: clients must send one of these; empty lets everybody in.
        max_concurrency: requests in the server at once; further ones get 429.
        max_waiting_time: seconds a request may wait for its turn before that; -1 without limit.
        timeout_graceful_shutdown: seconds that running requests may take after SIGTERM; 0 without limit.
        max_logprobs: most alternatives that a request may ask for.
        chat_template: source or file of a template that replaces the tokenizer's.
        tool_call_parser: name of the model's format of tool calls; empty: tool calls are not looked for.
        disable_log_requests: no line in the log when a request ends.
        allowed_origins, allowed_methods, allowed_headers, allow_credentials: CORS; without origins there is none.
        uvicorn_log_level, root_path, ssl_keyfile, ssl_certfile: as uvicorn has them.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    metrics_port: int | None = None
    workers: int = 1
    served_model_name: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_concurrency: int = 512
    max_waiting_time: float = 0.0
    timeout_graceful_shutdown: float = 0.0
    max_logprobs: int = MAX_LOGPROBS_LIMIT
    chat_template: str = ""
    tool_call_parser: str = ""
    disable_log_requests: bool = False
    uvicorn_log_level: str = "warning"
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    ssl_keyfile: str = ""
    ssl_certfile: str = ""

    def __post_init__(self) -> None:
        _check_range("port", self.port, 0, 65535)
        _check_range("metrics_port", self.metrics_port, 1, 65535)
        _check_range("max_concurrency", self.max_concurrency, 1, 1_000_000)
        _check_range("max_logprobs", self.max_logprobs, 0, MAX_LOGPROBS_LIMIT)
        _check_range("workers", self.workers, 1, MAX_WORKERS)
        if self.max_waiting_time < 0 and self.max_waiting_time != -1:
            raise ConfigError("max_waiting_time", f"expected seconds, or -1 for no limit, got {self.max_waiting_time}")
        if self.timeout_graceful_shutdown < 0:
            raise ConfigError("timeout_graceful_shutdown", f"expected seconds, got {self.timeout_graceful_shutdown}")
        if self.tool_call_parser and self.tool_call_parser not in TOOL_CALL_FORMATS:
            raise ConfigError(
                "tool_call_parser", f"expected one of {', '.join(TOOL_CALL_FORMATS)}, got {self.tool_call_parser!r}"
            )
        if self.uvicorn_log_level not in UVICORN_LOG_LEVELS:
            raise ConfigError(
                "uvicorn_log_level", f"expected one of {', '.join(UVICORN_LOG_LEVELS)}, got {self.uvicorn_log_level!r}"
            )
        if not all(self.api_keys):
            raise ConfigError("api_key", "expected keys that are not empty")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError("root_path", f"expected a path that begins with /, got {self.root_path!r}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_certfile", "ssl_keyfile and ssl_certfile belong together")


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(name, f"expected an integer in [{low}, {high}], got {value}")
