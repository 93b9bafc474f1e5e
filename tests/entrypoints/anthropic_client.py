# SPDX-License-Identifier: Apache-2.0
"""The official anthropic client, which checks every response against its types, as our own structs do."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2

from tests.entrypoints.response_check import check_response
from tests.entrypoints.server_process import ServerProcess


def _check(response: httpx2.Response) -> None:
    response.read()
    check_response(response.url.path, response.status_code, response.headers.get("content-type", ""), response.text)


def messages_client(server: ServerProcess, is_checked: bool = True, **options: Any) -> anthropic.Anthropic:
    """Return a client with strict validation that does not try again.

    Args:
        is_checked: our own structs check the responses, too; each is then read to its end before the client sees it.
    """
    hooks = {"response": [_check]} if is_checked else {}
    http_client = anthropic.DefaultHttpxClient(event_hooks=hooks, timeout=120)
    values: dict[str, Any] = {"base_url": server.url, "max_retries": 0, **options}
    if "auth_token" not in options:
        values.setdefault("api_key", "none")
    return anthropic.Anthropic(http_client=http_client, _strict_response_validation=True, **values)
