# SPDX-License-Identifier: Apache-2.0
"""Errors as HTTP answers, always in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fastdeploy.core.errors import ContextLengthError, EngineDeadError, InvalidRequestError, QueueFullError
from fastdeploy.core.outputs import ErrorInfo

RETRY_AFTER_S = 1

logger = logging.getLogger("fastdeploy.server")


class ApiError(Exception):
    """An error that the client is told.

    Attributes:
        status: HTTP status.
        message, type, param, code: the fields of OpenAI's error object; `param` is the request's field at fault.
        headers: further headers of the answer.
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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class GenerationFailed(Exception):
    """A request that the engine took and could not finish."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def too_many_requests(message: str) -> ApiError:
    """Return the 429 that says when to come again."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(429, message, type="rate_limit_error", code="server_overloaded", headers=headers)


def unavailable(message: str) -> ApiError:
    """Return the 503 of a server that starts, drains, or has lost its engine."""
    return ApiError(503, message, type="service_unavailable_error", code="service_unavailable")


def to_api_error(error: BaseException, request_id: str) -> ApiError:
    """Return what the client is told of `error`; what is our own fault goes to the log with the request's id."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError(field=field, message=message):
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
            return ApiError(400, f"{field}: {message}", param=field, code=code)
        case QueueFullError():
            return too_many_requests(str(error))
        case EngineDeadError():
            return unavailable(str(error))
        case GenerationFailed(info=ErrorInfo(type="timeout", message=message)):
            return ApiError(504, message, type="timeout_error", code="timeout")
        case GenerationFailed(info=ErrorInfo(type="no_token", message=message)):
            return ApiError(400, message, code="no_token")
        case GenerationFailed(info=info):
            return ApiError(500, f"{info.message} (request {request_id})", type="internal_error", code=info.type)
        case HTTPException(status_code=status, detail=detail):
            return ApiError(status, detail, headers=error.headers)
    logger.error("request %s failed by our fault", request_id, exc_info=error)
    return ApiError(500, f"internal error (request {request_id})", type="internal_error", code="internal_error")


def error_response(error: ApiError, request_id: str = "") -> Response:
    """Return the HTTP answer for `error`."""
    headers = {**error.headers, **({"X-Request-Id": request_id} if request_id else {})}
    return Response(msgspec.json.encode(error.body()), error.status, headers, media_type="application/json")
