# SPDX-License-Identifier: Apache-2.0
"""Endpoints beside the two that generate, and what all of them have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.detokenize.tokenizers_for_tests import make_tokenizer
from tests.entrypoints.server_process import ServerProcess, mock_server

TOKENIZER = make_tokenizer("byte_level")
LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 190, "seed": 3, "stream": True}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A slow server with two API keys, and pages of one other site allowed."""
    folder = tmp_path_factory.mktemp("keyed")
    flags = [
        "--api-key",
        "alpha",
        "--api-key",
        "beta",
        "--max-model-len",
        "200",
        "--allowed-origins",
        "https://a.example",
    ]
    with mock_server(folder, *flags, env={"FD_API_KEY": "gamma", "FD_DEBUG": "1"}, step_s=0.02) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_tokenize_and_detokenize_are_inverse_and_count(server: ServerProcess) -> None:
    text = "the quick 🙂"
    answer = server.post("/tokenize", {"model": "default", "prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == TOKENIZER.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 200)
    assert answer["token_strs"][:2] == ["the", " quick"]
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert server.post("/tokenize", {"prompt": text}).json()["token_strs"] is None


def test_tokenize_renders_messages_as_a_chat_would(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "hi"}]
    opened = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert opened == TOKENIZER.encode("<s>user: hi\nassistant:")
    bare = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert bare == TOKENIZER.encode("<s>user: hi\n")


def test_tokenize_counts_what_the_context_cannot_hold(server: ServerProcess) -> None:
    assert server.post("/tokenize", {"prompt": "the quick " * 10_000}).json()["count"] >= 20_000


def test_health_and_ping_answer_get_and_ping_post(server: ServerProcess) -> None:
    answers = [server.get("/health"), server.get("/ping"), server.post("/ping", b"")]
    assert [(answer.status_code, answer.json()) for answer in answers] == [(200, {"status": "ready"})] * 3
    assert httpx.head(server.url + "/health").status_code == 200


def test_models_carry_the_fields_of_fastdeploy(server: ServerProcess) -> None:
    listed = server.get("/v1/models").json()
    card = listed["data"][0]
    assert (listed["object"], card["object"], card["owned_by"], card["max_model_len"]) == (
        "list",
        "model",
        "FastDeploy",
        200,
    )
    assert card["permission"][0]["object"] == "model_permission"
    assert server.get("/v1/models/default").json() == card


def test_config_info_says_where_values_came_from_and_shows_no_secret(keyed: ServerProcess) -> None:
    answer = keyed.get("/config-info", headers=bearer("alpha"))
    info = answer.json()
    assert info["provenance"]["max_model_len"] == "command line" and info["engine_config"]["max_model_len"] == 200
    assert info["environment"]["FD_DEBUG"] == "1" and info["environment"]["FD_API_KEY"] == "***"
    assert not any(key in answer.text for key in ("alpha", "beta", "gamma"))


def test_aborted_stream_ends_with_the_reason_and_is_counted(keyed: ServerProcess) -> None:
    body = {**LONG, "request_id": "mine", "return_token_ids": True}
    with httpx.stream("POST", keyed.url + "/v1/completions", json=body, headers=bearer("alpha"), timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        foreign = keyed.post("/v1/abort_requests", {"req_ids": ["mine"]}, headers=bearer("beta")).json()
        assert foreign == {"aborted": [], "not_found": ["mine"]}, "another key's request is nobody's business"
        everything = keyed.post("/v1/abort_requests", {"abort_all": True}, headers=bearer("beta")).json()
        assert everything == {"aborted": [], "not_found": []}
        asked = {"req_ids": ["mine", "other"]}
        answer = keyed.post("/v1/abort_requests", asked, headers=bearer("alpha")).json()
        rest = "".join(lines)
    assert answer["not_found"] == ["other"]
    (aborted,) = answer["aborted"]
    assert aborted["request_id"] == "cmpl-mine" and 1 <= aborted["num_generated_tokens"] < 190
    assert '"finish_reason":"abort"' in rest and rest.endswith("data: [DONE]")


def test_aborting_a_request_of_several_prompts_ends_all_of_them(keyed: ServerProcess) -> None:
    body = {**LONG, "prompt": ["the", "dog"], "request_id": "pair"}
    with httpx.stream("POST", keyed.url + "/v1/completions", json=body, headers=bearer("alpha"), timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        answer = keyed.post("/v1/abort_requests", {"req_ids": ["cmpl-pair"]}, headers=bearer("alpha")).json()
        rest = "".join(lines)
    assert sorted(one["request_id"] for one in answer["aborted"]) == ["cmpl-pair-0", "cmpl-pair-1"]
    assert rest.count('"finish_reason":"abort"') == 2 and answer["not_found"] == []


def test_other_sites_pages_are_let_in_only_if_named(keyed: ServerProcess) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = httpx.options(keyed.url + "/v1/completions", headers={"Origin": "https://a.example", **asked})
    assert allowed.status_code == 200, "a browser's first question brings no key"
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = httpx.options(keyed.url + "/v1/completions", headers={"Origin": "https://b.example", **asked})
    assert "access-control-allow-origin" not in other.headers


def test_request_id_of_the_header_comes_back_and_begins_the_answer_s_id(server: ServerProcess) -> None:
    body, headers = {"prompt": "the", "max_tokens": 1}, {"X-Request-Id": "trace-7"}
    answers = [server.post("/v1/completions", body, headers=headers) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["trace-7"] * 2
    ids = [answer.json()["id"] for answer in answers]
    assert all(re.fullmatch("cmpl-trace-7-[0-9a-f]{8}", name) for name in ids) and ids[0] != ids[1]
    named = server.post("/v1/completions", {**body, "request_id": "own"}, headers=headers)
    assert (named.json()["id"], named.headers["x-request-id"]) == ("cmpl-own", "trace-7")
    assert server.post("/v1/completions", body).headers["x-request-id"].startswith("cmpl-")


def test_root_path_changes_neither_routes_nor_who_may_come_in(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--root-path", "/api", "--api-key", "alpha") as running:
        host = running.url.removesuffix("/api")
        assert httpx.get(host + "/health").status_code == 200
        assert httpx.get(host + "/v1/models").status_code == 401
        assert httpx.get(host + "/v1/models", headers=bearer("alpha")).status_code == 200
        assert (
            'http_requests_total{method="GET",path="/v1/models",status_code="200"} 1.0'
            in httpx.get(host + "/metrics").text
        )
