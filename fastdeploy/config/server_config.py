# SPDX-License-Identifier: Apache-2.0
"""Configuration of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy.config.fields import check_fields, choice, integer, number, strings, switch, text
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.sampling_params import MAX_LOGPROBS_LIMIT
from fastdeploy.core.tool_formats import TOOL_CALL_FORMATS

MAX_WORKERS = 256
UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, whom it admits and how it answers. Without origins there are no CORS headers."""

    served_model_name: str = text(help="name by which clients request the model (default: the model as given)")
    host: str = text("0.0.0.0", help="address to listen on")
    port: int = integer(8000, 0, 65535, help="port to listen on; 0: any free port")
    metrics_port: int | None = integer(None, 1, 65535, help="additional port, for /metrics only (default: none)")
    workers: int = integer(1, 1, MAX_WORKERS, help="number of API processes, which share max_concurrency")
    api_keys: tuple[str, ...] = strings(
        name="api_key", is_secret=True, help="key that clients must send; may be repeated (default: none)"
    )
    max_concurrency: int = integer(512, 1, 1_000_000, help="maximum number of requests in the server; others get 429")
    max_waiting_time: float = number(0.0, help="seconds that a request may wait before it gets 429; -1: no limit")
    timeout_graceful_shutdown: float = number(
        0.0, 0, help="seconds that running requests may take after SIGTERM; 0: no limit"
    )
    max_logprobs: int = integer(
        MAX_LOGPROBS_LIMIT, 0, MAX_LOGPROBS_LIMIT, help="maximum number of alternatives per token in a response"
    )
    chat_template: str = text(help="chat template, or its file, instead of the tokenizer's")
    tool_call_parser: str = choice(
        "", TOOL_CALL_FORMATS, help="format of the model's tool calls: hermes, llama3_json, ... (default: none)"
    )
    disable_log_requests: bool = switch(False, help="log no line per request")
    uvicorn_log_level: str = choice(
        "warning", UVICORN_LOG_LEVELS, help="critical, error, warning, info, debug or trace"
    )
    allowed_origins: tuple[str, ...] = strings(help="CORS: origins that browsers may call from, or * (default: none)")
    allowed_methods: tuple[str, ...] = strings(("*",), help="CORS: methods that they may use")
    allowed_headers: tuple[str, ...] = strings(("*",), help="CORS: headers that they may send")
    allow_credentials: bool = switch(False, help="CORS: they may send cookies")
    root_path: str = text(help="path under which a proxy serves this server (default: none)")
    ssl_keyfile: str = text(help="private key for TLS (default: none)")
    ssl_certfile: str = text(help="certificate for TLS (default: none)")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_waiting_time < 0 and self.max_waiting_time != -1:
            raise ConfigError("max_waiting_time", f"expected seconds, or -1 for no limit, got {self.max_waiting_time}")
        if not all(self.api_keys):
            raise ConfigError("api_key", "expected keys that are not empty")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError("root_path", f"expected a path that begins with /, got {self.root_path!r}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_certfile", "ssl_keyfile and ssl_certfile must be given together")
