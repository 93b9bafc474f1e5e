# SPDX-License-Identifier: Apache-2.0
"""Errors as HTTP responses, and what to say about routes and methods that do not exist.

They have OpenAI's shape, except below /v1/messages, where they have Anthropic's.
"""

from __future__ import annotations

import difflib
import logging
import math
import uuid
from collections.abc import Iterable, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdeploy.core.errors import (
    AttemptsFailedError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    NoProgressError,
    QueueFullError,
    RequestTimeoutError,
    ShuttingDownError,
)
from fastdeploy.core.json_types import replace_surrogates
from fastdeploy.core.outputs import ErrorInfo
from fastdeploy.entrypoints.openai.messages_api.errors import REQUEST_ID_HEADER, encode_messages_error, is_messages_path
from fastdeploy.entrypoints.openai.responses import ErrorDetail, ErrorResponse
from fastdeploy.metrics.refusals import Reason

RETRY_AFTER_S = 1
REQUEST_ID_KEY = "fastdeploy.request_id"  # in the scope of a request that has an id

_TEXT_ONLY = "this server generates text; use /v1/chat/completions"
_NO_POOLING = "pooling models are not supported"
_STATELESS = "conversations are not stored; use /v1/responses or /v1/chat/completions"
_NO_LORA = "LoRA adapters are not supported"
_NO_PAUSE = "a running server cannot be paused; --max-concurrency limits the load, and SIGTERM drains the server"
_WEIGHTS = "weights are loaded once; to change them, start a new server and stop this one"
_EXPERTS = "experts do not move between ranks while the server runs"
_RENDER = "/tokenize renders messages with the chat template and returns the token ids"
_IDS = "use /v1/completions, whose prompt may be token ids, with return_token_ids"
_OTHER_PROTOCOL = "use OpenAI's routes /v1/chat/completions and /v1/completions, or Anthropic's /v1/messages"
_NO_PROFILE = "the server writes no profiles; see /metrics"
_NO_CONTROLLER = "there is no controller port; see /load"
ABSENT_ROUTES = {
    "/v1/embeddings": "embedding models are not supported",
    "/v1/reward": "reward models are not supported",
    "/pooling": _NO_POOLING,
    "/classify": _NO_POOLING,
    "/score": _NO_POOLING,
    "/v1/score": _NO_POOLING,
    "/rerank": _NO_POOLING,
    "/v1/rerank": _NO_POOLING,
    "/v2/rerank": _NO_POOLING,
    "/v2/embed": "embedding models are not supported",
    "/v1/moderations": "moderation models are not supported",
    "/v1/responses/input_tokens": "/tokenize counts the tokens of a conversation",
    "/v1/responses/compact": "conversations are not compacted; send a shorter input",
    "/v1/assistants": _STATELESS,
    "/v1/threads": _STATELESS,
    "/v1/messages/batches": "`fastdeploy run-batch` runs batches of requests",
    "/v1/chat/completions/render": _RENDER,
    "/v1/completions/render": _RENDER,
    "/inference/v1/generate": _IDS,
    "/generate": _IDS,
    "/generative_scoring": "use logprob_token_ids of /v1/completions",
    "/api": _OTHER_PROTOCOL,
    "/server_info": "/config-info shows the configuration",
    "/tokenizer_info": "start the server with --enable-tokenizer-info-endpoint",
    "/v1/complete": "Anthropic's older protocol is not supported; use /v1/messages",
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
    "/v1/videos": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/v1/files": "this server stores no files; `fastdeploy run-batch` reads and writes them",
    "/v1/batches": "`fastdeploy run-batch` runs batches of requests",
    "/v1/fine_tuning": "training is not supported",
    "/v1/load_lora_adapter": _NO_LORA,
    "/v1/unload_lora_adapter": _NO_LORA,
    "/v1/pause": _NO_PAUSE,
    "/v1/resume": _NO_PAUSE,
    "/v1/is_paused": _NO_PAUSE,
    "/pause": _NO_PAUSE,
    "/resume": _NO_PAUSE,
    "/is_paused": _NO_PAUSE,
    "/sleep": _WEIGHTS,
    "/wake_up": _WEIGHTS,
    "/is_sleeping": _WEIGHTS,
    "/reset_prefix_cache": "cached prefixes make room by themselves; requests of different `cache_salt` share none",
    "/collective_rpc": "the engine runs no code of clients",
    "/start_profile": _NO_PROFILE,
    "/stop_profile": _NO_PROFILE,
    "/v1/sleep": _WEIGHTS,
    "/v1/wakeup": _WEIGHTS,
    "/v1/update_weights": _WEIGHTS,
    "/update_model_weight": _WEIGHTS,
    "/clear_load_weight": _WEIGHTS,
    "/rearrange_experts": _EXPERTS,
    "/get_per_expert_tokens_stats": _EXPERTS,
    "/check_redundant": _EXPERTS,
    "/controller/scheduler": _NO_CONTROLLER,
    "/controller/reset_scheduler": _NO_CONTROLLER,
}
"""Routes of FastDeploy, vLLM and OpenAI that this server does not have, and the reason or the alternative."""

ABSENT_BELOW = {
    "/v1/responses": "responses are not stored; a running one is aborted by its id with /v1/abort_requests",
}
"""Routes that exist -> why there is nothing below them."""

REASONS: dict[int, Reason] = {
    400: "invalid",
    401: "auth",
    403: "auth",
    404: "not_found",
    405: "not_found",
    408: "slow_client",
    413: "too_large",
    414: "headers",
    415: "invalid",
    431: "headers",
    503: "unavailable",
    504: "timeout",
}
"""Status -> the reason under which refusals with this status are counted, unless the error has its own."""

logger = logging.getLogger("fastdeploy.server")


class ApiError(Exception):
    """An error that is sent to the client.

    Attributes:
        status: HTTP status.
        message, type, param, code: the fields of OpenAI's error object; `param` is the request's field at fault.
        headers: further headers of the response.
        reason: under which the refusal is counted; None for a fault of the server, which is no refusal.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: Reason | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.reason = reason or REASONS.get(status)

    def encode(self) -> bytes:
        """Return the error as JSON in OpenAI's shape."""
        message, param = self._texts()
        detail = ErrorDetail(message=message, type=self.type, param=param, code=self.code)
        return msgspec.json.encode(ErrorResponse(error=detail))

    def encode_for_messages(self, request_id: str) -> bytes:
        """Return the error as JSON in Anthropic's shape."""
        return encode_messages_error(self.status, *self._texts(), self.code, request_id)

    def content(self, path: str, request_id: str = "") -> tuple[bytes, dict[str, str]]:
        """Return body and headers of the response to a request, in the shape of its path.

        Args:
            path: of the request, without the root path.
            request_id: empty if the request has none.
        """
        if not is_messages_path(path):
            return self.encode(), self.headers
        request_id = request_id or uuid.uuid4().hex
        return self.encode_for_messages(request_id), {**self.headers, REQUEST_ID_HEADER: request_id}

    def _texts(self) -> tuple[str, str | None]:
        """Return message and field. What a client wrote may be in them, such as lone surrogates of a template."""
        return replace_surrogates(self.message), replace_surrogates(self.param) if self.param is not None else None


class GenerationFailed(Exception):
    """The engine accepted a request and could not finish it."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def too_many_requests(
    message: str, reason: Reason, code: str = "server_overloaded", retry_after_s: float = RETRY_AFTER_S
) -> ApiError:
    """Return a 429 with the time after which to try again."""
    headers = {"Retry-After": str(math.ceil(retry_after_s))}
    return ApiError(429, message, type="rate_limit_error", code=code, headers=headers, reason=reason)


def deadline_exceeded() -> ApiError:
    """Return the 504 of a request whose time is over."""
    return ApiError(504, "the request's time is over", type="timeout_error", code="timeout")


def unavailable(message: str, code: str = "service_unavailable") -> ApiError:
    """Return the 503 of a server that is starting or draining, or whose engine has died or stalled."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if code == "stalled" else {}
    return ApiError(503, message, type="service_unavailable_error", code=code, headers=headers)


def route_not_found(path: str, known: Iterable[str]) -> ApiError:
    """Return the 404 for a path, with the reason for its absence or the nearest known path."""
    for absent, reason in ABSENT_ROUTES.items():
        if path == absent or path.startswith(absent + "/"):
            return ApiError(404, f"{absent}: {reason}", type="not_found_error", code="not_found")
    for parent, reason in ABSENT_BELOW.items():
        if path.startswith(parent + "/"):
            return ApiError(404, f"{path[:64]}: {reason}", type="not_found_error", code="not_found")
    nearest = difflib.get_close_matches(path[:64], known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return ApiError(404, f"{path[:64]}: no such route{hint}", type="not_found_error", code="not_found")


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    """Return the 405 that names the methods of a path."""
    message = f"{path[:64]}: expected {allowed}, got {method[:16]}"
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})


def to_api_error(error: BaseException, request_id: str) -> ApiError:
    """Return what to send to the client for `error`; an unexpected one is logged with the request's id."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError(field=field, message=message):
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
            return ApiError(400, f"{field}: {message}", param=field, code=code)
        case QueueFullError():
            return too_many_requests(str(error), "queue_full")
        case EngineDeadError():
            return unavailable(str(error))
        case AttemptsFailedError():
            return unavailable(str(error), "attempts_failed")
        case ShuttingDownError():
            return unavailable(str(error), "shutting_down")
        case RequestTimeoutError() | GenerationFailed(info=ErrorInfo(type="timeout")):
            return deadline_exceeded()
        case NoProgressError():
            return ApiError(504, str(error), type="timeout_error", code="no_progress")
        case GenerationFailed(info=ErrorInfo(type="no_token", message=message)):
            return ApiError(400, message, code="no_token")
        case GenerationFailed(info=ErrorInfo(type="out_of_memory", message=message)):
            return unavailable(message, "out_of_memory")
        case GenerationFailed(info=info):
            return ApiError(500, f"{info.message} (request {request_id})", type="internal_error", code=info.type)
        case HTTPException(status_code=status, detail=detail):
            return ApiError(status, detail, headers=error.headers)
    logger.error("request %s failed with an internal error", request_id, exc_info=error)
    return ApiError(500, f"internal error (request {request_id})", type="internal_error", code="internal_error")


def error_response(error: ApiError, request_id: str = "") -> Response:
    """Return the HTTP response for `error`."""
    return _ErrorResponse(error, request_id)


def record_refusal(scope: Scope, error: ApiError) -> None:
    """Count and log that a request is refused, where an error is sent to its client."""
    if error.reason is not None:
        scope["app"].state.server.record_refusal(scope, error)


class _ErrorResponse(Response):
    def __init__(self, error: ApiError, request_id: str) -> None:
        super().__init__(status_code=error.status)
        self._error = error
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_refusal(scope, self._error)
        body, headers = self._error.content(scope["path"], self._request_id or scope.get(REQUEST_ID_KEY, ""))
        if self._request_id:
            headers = {**headers, "X-Request-Id": self._request_id}
        response = Response(body, self._error.status, headers, media_type="application/json")
        await response(scope, receive, send)
