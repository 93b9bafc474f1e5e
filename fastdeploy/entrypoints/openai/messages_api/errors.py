# SPDX-License-Identifier: Apache-2.0
"""Errors of /v1/messages and of the paths below it, in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from fastdeploy.entrypoints.openai.responses import ResponseBody

MESSAGES_PATH = "/v1/messages"
REQUEST_ID_HEADER = "request-id"
ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    414: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status of this server -> `type` of the error."""

ERROR_CODES: Mapping[str, str] = {"thread": "thread_unsupported_request"}
"""Field at fault -> the `error_code` after which clients send the request again without this field."""


class MessagesErrorDetails(ResponseBody, kw_only=True):
    """What programs read of an error.

    Attributes:
        error_code: the reason, the `code` of the same error in OpenAI's shape
        param: the field of the request at fault
    """

    error_code: str
    param: str | UnsetType = UNSET


class MessagesError(ResponseBody, kw_only=True):
    """Why a request failed.

    Attributes:
        type: kind of the error, one per status
        message: begins with the field at fault, if there is one
    """

    type: str
    message: str
    details: MessagesErrorDetails | UnsetType = UNSET


class MessagesErrorResponse(ResponseBody, kw_only=True):
    """Body of every response of /v1/messages that is not a success, and of the `error` event.

    Attributes:
        request_id: the id of the request, as in the header `request-id`
    """

    type: Literal["error"] = "error"
    error: MessagesError
    request_id: str


def is_messages_path(path: str) -> bool:
    """Return whether a path is /v1/messages or below it."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def encode_messages_error(status: int, message: str, param: str | None, code: str | None, request_id: str) -> bytes:
    """Return an error as JSON; its fields are those of `ApiError`."""
    code = ERROR_CODES.get(param or "", code)
    if code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # agents look for these words, and then shorten the conversation
    details = UNSET if code is None else MessagesErrorDetails(error_code=code, param=UNSET if param is None else param)
    error = MessagesError(type=_error_type(status), message=message, details=details)
    return msgspec.json.encode(MessagesErrorResponse(error=error, request_id=request_id))


def _error_type(status: int) -> str:
    return ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
