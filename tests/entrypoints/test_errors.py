# SPDX-License-Identifier: Apache-2.0
"""Wrong requests: status, field and message, always in OpenAI's format; the server continues to serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from fastdeploy.entrypoints.openai.protocol import REFUSED
from tests.entrypoints.error_table import COMPLETION, MODELS, ROWS, Row
from tests.entrypoints.server_process import ServerProcess, mock_server


@pytest.fixture(scope="module")
def wire(server: ServerProcess) -> Iterator[httpx.Client]:
    """A client with a persistent connection."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error, of either shape, with OpenAI's names."""
    body = response.json()
    if body.pop("type", "") == "error":
        assert body.pop("request_id") == response.headers["request-id"]
        details = body["error"].pop("details")
        body["error"] |= {"param": details.get("param"), "code": details["error_code"]}
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_of_the_error_table_is_what_the_client_gets(wire: httpx.Client, row: Row) -> None:
    content: dict[str, Any] = {"content": row.body} if isinstance(row.body, bytes) else {"json": row.body}
    response = wire.request(row.method, row.path, headers=row.headers, **content)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (row.status, row.param, row.code)
    assert row.message in error["message"]
    expected = "not_found_error" if row.status == 404 else "invalid_request_error"
    assert error["type"] == expected
    if row.param is not None:
        assert error["message"].startswith(row.param), "the message begins with the field"


def test_every_field_has_a_wrong_value_in_the_table() -> None:
    for path, model in MODELS.items():
        named = {row.param for row in ROWS if row.path == path}
        fields = {spec.name for spec in msgspec.structs.fields(model)}
        assert fields <= named, f"{path}: {sorted(fields - named)}"


def test_a_405_names_the_methods_of_the_route(server: ServerProcess) -> None:
    assert server.get("/v1/completions").headers["allow"] == "POST"
    assert set(httpx.delete(server.url + "/ping").headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_refused_fields_are_named_and_their_neutral_values_are_accepted(server: ServerProcess, field: str) -> None:
    refused = server.post("/v1/completions", {**COMPLETION, field: {"some": "thing"}})
    assert refused.status_code == 400
    assert error_of(refused)["param"] == field and error_of(refused)["code"] == "unsupported_parameter"
    for neutral in (None, *REFUSED[field][1]):
        assert server.post("/v1/completions", {**COMPLETION, field: neutral}).status_code == 200


def test_fields_for_hosted_services_have_no_effect(server: ServerProcess) -> None:
    extra = {"user": "u", "metadata": {"a": "b"}, "store": False}
    assert server.post("/v1/completions", {**COMPLETION, **extra}).status_code == 200


def test_body_without_length_is_refused_at_the_limit(server: ServerProcess) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 2**20

    response = httpx.post(server.url + "/v1/completions", content=parts(), timeout=60)
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


def test_body_in_pieces_without_length_is_read_completely(server: ServerProcess) -> None:
    body = json.dumps(COMPLETION).encode()
    response = httpx.post(server.url + "/v1/completions", content=iter([body[:9], body[9:]]), timeout=60)
    assert response.status_code == 200


def test_choice_that_cannot_be_computed_fails_its_own_request_only(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    ids = server.post("/v1/completions", {**COMPLETION, "seed": 1, "max_tokens": 6, "return_token_ids": True})
    fifth = ids.json()["choices"][0]["completion_token_ids"][4]
    poisoned = {**COMPLETION, "seed": 1, "max_tokens": 6, "logit_bias": {str(fifth): -100}, "request_id": "bad"}
    response = server.post("/v1/completions", poisoned)
    assert (response.status_code, error_of(response)["code"]) == (500, "numerics")
    assert "cmpl-bad" in error_of(response)["message"]
    with pytest.raises(openai.APIError, match="the mock says NaN"):
        list(
            client.completions.create(
                model="default", prompt="the", max_tokens=6, seed=1, logit_bias={str(fifth): -100}, stream=True
            )
        )
    assert server.post("/v1/completions", COMPLETION).status_code == 200


def test_request_id_of_a_running_request_cannot_be_reused(tmp_path: Path) -> None:
    with mock_server(tmp_path, step_s=0.02) as running:
        body = {**COMPLETION, "request_id": "same", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", running.url + "/v1/completions", json=body) as first:
            lines = first.iter_lines()  # kept: a generator that is dropped closes the connection
            next(lines)
            second = running.post("/v1/completions", {**COMPLETION, "request_id": "same"})
            assert (second.status_code, error_of(second)["param"]) == (400, "request_id")


def test_keys_are_checked_except_for_open_paths(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--api-key", "alpha", "--api-key", "beta") as running:
        for key in (None, "gamma", "alph"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            refused = running.post("/v1/completions", COMPLETION, headers=headers)
            assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
            assert running.get("/v1/models", headers=headers).status_code == 401
            assert running.get("/config-info", headers=headers).status_code == 401
        for key in ("alpha", "beta"):
            accepted = running.post("/v1/completions", COMPLETION, headers={"Authorization": f"Bearer {key}"})
            assert accepted.status_code == 200
        assert running.get("/health").status_code == 200
        config = running.get("/config-info", headers={"Authorization": "Bearer alpha"}).text
        assert "alpha" not in config and "beta" not in config
    assert "alpha" not in running.stdout + running.stderr


def test_full_server_gives_429_with_retry_after(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--max-concurrency", "1", step_s=0.02) as running:
        body = {**COMPLETION, "max_tokens": 200, "stream": True}
        with httpx.stream("POST", running.url + "/v1/completions", json=body) as first:
            lines = first.iter_lines()  # kept: a generator that is dropped closes the connection
            next(lines)
            refused = running.post("/v1/completions", COMPLETION)
            assert (refused.status_code, error_of(refused)["type"]) == (429, "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
    with mock_server(tmp_path, "--max-concurrency", "1", "--max-waiting-time", "30", step_s=0.01) as running:
        body = {**COMPLETION, "max_tokens": 20, "stream": True}
        with httpx.stream("POST", running.url + "/v1/completions", json=body) as first:
            lines = first.iter_lines()
            next(lines)
            for _ in lines:
                pass
            assert running.post("/v1/completions", COMPLETION).status_code == 200
