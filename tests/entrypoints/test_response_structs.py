# SPDX-License-Identifier: Apache-2.0
"""Every endpoint's responses have the fields of their structs, and no others; all tests decode what they receive."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fastdeploy.entrypoints.openai.app import ENDPOINTS
from tests.entrypoints.error_table import CHAT, COMPLETION, VALID
from tests.entrypoints.response_check import check_response, decode_as, find_endpoint
from tests.entrypoints.server_process import ServerProcess

EVERYTHING: dict[str, Any] = {
    "n": 2,
    "return_token_ids": True,
    "collect_metrics": True,
    "prompt_logprobs": 1,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


# A server that works alone has no role; tests/entrypoints/test_cluster_routes.py decodes the responses of /v1/role.
# What needs a flag is tested with it, as in tests/entrypoints/test_tokenizer_info.py.
@pytest.mark.parametrize(
    "endpoint",
    [one for one in ENDPOINTS if one.response and one.path != "/v1/role" and not one.flag],
    ids=lambda one: one.path,
)
def test_responses_decode_as_their_structs(server: ServerProcess, endpoint: Any) -> None:
    path = endpoint.path.replace("{name:path}", "default")
    body = {"abort_all": True} if path == "/v1/abort_requests" else VALID.get(path)
    response = server.get(path) if "GET" in endpoint.methods else server.post(path, body)
    assert response.status_code == 200
    decode_as(response.text, endpoint.response)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**COMPLETION, "logprobs": 2, "echo": True}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ],
)
def test_responses_with_all_optional_fields_decode(
    server: ServerProcess, path: str, body: dict[str, Any], stream: bool
) -> None:
    options = {name: value for name, value in EVERYTHING.items() if stream or name != "stream_options"}
    response = server.post(path, {**body, **options, "stream": stream})
    assert response.status_code == 200
    for name in ("prompt_token_ids", "completion_tokens", "speculate_metrics", "prompt_logprobs", "top_logprobs"):
        assert f'"{name}"' in response.text, name


def test_a_field_that_no_struct_has_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
        check_response("/health", 200, "application/json", '{"status": "ready", "colour": 1}')
    with pytest.raises(msgspec.ValidationError, match="missing required field `code`"):
        check_response("/load", 500, "application/json", '{"error": {"message": "x", "type": "y", "param": null}}')
    with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
        check_response("/v1/completions", 200, "text/event-stream", 'data: {"colour": 1}\n\ndata: [DONE]\n\n')


def test_endpoints_are_found_by_their_paths() -> None:
    assert find_endpoint("/v1/models/a/b").path == "/v1/models/{name:path}"  # type: ignore[union-attr]
    assert find_endpoint("/v1/models").path == "/v1/models"  # type: ignore[union-attr]
    assert find_endpoint("/v1/nothing") is None
