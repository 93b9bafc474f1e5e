# SPDX-License-Identifier: Apache-2.0
"""Configuration of the HTTP server."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastdeploy.config.api_keys import EXPECTED_KEY, ApiKey, is_key
from fastdeploy.config.flag import check_fields, choice, integer, mapping, number, strings, switch, text
from fastdeploy.core.errors import ConfigError, InvalidRequestError
from fastdeploy.core.json_types import check_json
from fastdeploy.core.tool_formats import AUTO, TOOL_CALL_FORMATS

MAX_WORKERS = 256
MAX_TIMEOUT_S = 1e9
_API_KEY_HELP = "key that clients must send; may be repeated"
SPEC_DECODE_METRICS = ("none", "summary")
OWN_TEMPLATE_FIELDS = ("messages", "add_generation_prompt", "chat_template", "tools")
"""Fields of requests that are no further variables of the chat template."""
UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, whom it admits and how it answers. Without origins there are no CORS headers.

    `keys` are all API keys: those of `api_key_file`, and `api_keys` with generated names.
    """

    served_model_name: Annotated[
        tuple[str, ...],
        strings(
            takes_several=True, help="names of the model in requests, one or several (default: the model as given)"
        ),
    ] = ()
    host: Annotated[str, text(help="address to listen on")] = "0.0.0.0"
    port: Annotated[int, integer(0, 65535, help="port to listen on; 0: any free port")] = 8000
    uds: Annotated[str, text(help="Unix socket to listen on, instead of host and port (default: none)")] = ""
    metrics_port: Annotated[int | None, integer(1, 65535, help="port for /metrics only (default: none)")] = None
    workers: Annotated[int, integer(1, MAX_WORKERS, help="number of API processes, which share max_concurrency")] = 1
    api_keys: Annotated[
        tuple[str, ...], strings(EXPECTED_KEY, is_key, name="api_key", is_secret=True, help=_API_KEY_HELP)
    ] = field(default=(), repr=False)
    api_key_file: Annotated[str, text(help="YAML file of further keys, with names, weights and limits")] = ""
    keys: tuple[ApiKey, ...] = field(default=(), repr=False)
    max_concurrency: Annotated[
        int, integer(1, 1_000_000, help="maximum number of sequences (prompts times n) in the server")
    ] = 512
    max_waiting_time: Annotated[
        float, number(help="seconds that requests beyond max_concurrency wait before they get 429; -1: no limit")
    ] = 0.0
    request_timeout: Annotated[
        float | None,
        number(0.001, MAX_TIMEOUT_S, help="seconds after which a request is ended, from its arrival (default: none)"),
    ] = None
    max_output_tokens: Annotated[
        int | None, integer(1, help="maximum number of output tokens of a sequence (default: the context)")
    ] = None
    timeout_graceful_shutdown: Annotated[
        float, number(0, help="seconds that running requests may take after SIGTERM; 0: no limit")
    ] = 30.0
    shutdown_timeout: Annotated[
        float | None,
        number(0, help="the same, where 0 ends running requests at once (default: timeout_graceful_shutdown)"),
    ] = None
    max_connections: Annotated[int, integer(0, help="maximum number of open connections; 0: no limit")] = 4096
    max_connections_per_address: Annotated[
        int, integer(0, help="maximum per client address, which loopback addresses are exempt from; 0: no limit")
    ] = 256
    forwarded_allow_ips: Annotated[
        tuple[str, ...], strings(help="proxies whose X-Forwarded-For names the client: addresses, networks, or *")
    ] = ("127.0.0.1",)
    max_url_length: Annotated[int, integer(256, help="maximum number of bytes of a URL")] = 16 * 2**10
    max_header_size: Annotated[
        int, integer(1024, 2**24, help="maximum number of bytes of all headers of a request")
    ] = 64 * 2**10
    timeout_header: Annotated[
        float, number(0, help="seconds until the headers of a request must be complete; 0: no limit")
    ] = 10.0
    timeout_body: Annotated[
        float, number(0, help="seconds until the body of a request must be complete; 0: no limit")
    ] = 60.0
    max_body_size: Annotated[int, integer(1024, help="maximum number of bytes of a body")] = 32 * 2**20
    max_total_body_size: Annotated[
        int, integer(1024, help="maximum number of bytes of all bodies that are read at the same time")
    ] = 256 * 2**20
    max_json_elements: Annotated[int, integer(1, help="maximum number of values and keys in a body")] = 1_000_000
    max_json_depth: Annotated[
        int, integer(1, 256, help="maximum depth of arrays and objects in each other in a field of a body")
    ] = 64
    ignore_unknown_fields: Annotated[
        bool, switch(help="accept fields of bodies that the server does not know; each name is logged once")
    ] = False
    chat_template: Annotated[str, text(help="chat template, or its file (default: the tokenizer's)")] = ""
    default_chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        mapping(
            help="further variables of the chat template, such as '{\"enable_thinking\": false}'; those that a request "
            "gives in chat_template_kwargs come first",
        ),
    ] = None
    chat_template_content_format: Annotated[
        str,
        choice(
            "auto",
            "string",
            "openai",
            help="contents for the chat template: texts (string), lists of parts (openai), or as it reads them",
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        str,
        choice(
            *TOOL_CALL_FORMATS,
            AUTO,
            help="format of tool calls: hermes, llama3_json, ..., or auto: the chat template's",
        ),
    ] = AUTO
    enable_force_include_usage: Annotated[
        bool, switch(help="end every stream with the chunk of usage, whether the request asks for it or not")
    ] = False
    disable_log_requests: Annotated[bool, switch(help="log no line per request")] = False
    uvicorn_log_level: Annotated[str, choice(*UVICORN_LOG_LEVELS, help=", ".join(UVICORN_LOG_LEVELS))] = "warning"
    enable_tokenizer_info_endpoint: Annotated[
        bool, switch(help="serve /tokenizer_info: the tokenizer's settings and the chat template")
    ] = False
    disable_fastapi_docs: Annotated[bool, switch(help="do not serve /docs, /redoc and /openapi.json")] = False
    allowed_origins: Annotated[tuple[str, ...], strings(help="CORS: origins that browsers may call from, or *")] = ()
    allowed_methods: Annotated[tuple[str, ...], strings(help="CORS: methods that they may use")] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], strings(help="CORS: headers that they may send")] = ("*",)
    allow_credentials: Annotated[bool, switch(help="CORS: they may send cookies")] = False
    root_path: Annotated[str, text(help="path under which a proxy serves this server; it may forward it or not")] = ""
    return_tokens_as_token_ids: Annotated[
        bool, switch(help="name tokens in log-probabilities `token_id:17`, unless a request says otherwise")
    ] = False
    enable_per_request_metrics: Annotated[
        bool, switch(help="add `metrics` with the times of the request to answers with one choice")
    ] = False
    per_request_spec_decode_metrics: Annotated[
        str, choice(*SPEC_DECODE_METRICS, help="summary adds acceptance of drafts to `metrics` of answers")
    ] = "none"
    enable_request_id_headers: Annotated[
        bool, switch(help="send X-Request-Id with every response: the client's, or a random one")
    ] = False
    ssl_keyfile: Annotated[str, text(help="private key for TLS")] = ""
    ssl_certfile: Annotated[str, text(help="certificate for TLS")] = ""

    @property
    def drain_timeout_s(self) -> float | None:
        """Seconds that running requests may take after SIGTERM; 0 ends them at once, None is no limit."""
        return self.timeout_graceful_shutdown or None if self.shutdown_timeout is None else self.shutdown_timeout

    def __post_init__(self) -> None:
        check_fields(self)
        _check_variables(self.default_chat_template_kwargs or {})
        if self.max_waiting_time < 0 and self.max_waiting_time != -1:
            raise ConfigError("max_waiting_time", f"expected seconds, or -1 for no limit, got {self.max_waiting_time}")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError("root_path", f"expected a path that begins with /, got {self.root_path!r}")
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        for name in self.forwarded_allow_ips:
            if name != "*" and not _is_network(name):
                raise ConfigError("forwarded_allow_ips", f"expected addresses, networks, or *, got {name!r}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_certfile", "ssl_keyfile and ssl_certfile must be given together")


def _check_variables(names: Mapping[str, Any]) -> None:
    flag = "default_chat_template_kwargs"
    try:
        check_json(flag, names)
    except InvalidRequestError as error:
        raise ConfigError(flag, error.message) from None
    for name in names:
        if name in OWN_TEMPLATE_FIELDS:
            raise ConfigError(f"{flag}.{name}", "is a field of requests, of which each has its own")
        if not isinstance(name, str):
            raise ConfigError(flag, f"expected names of variables, got {name!r}")


def _is_network(name: str) -> bool:
    try:
        ipaddress.ip_network(name)
    except ValueError:
        return False
    return True
