# SPDX-License-Identifier: Apache-2.0
"""Endpoints other than the two that generate, and what all endpoints have in common."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.detokenize.tokenizers_for_tests import make_tokenizer
from tests.entrypoints.server_process import ServerProcess, mock_server, templateless_server

TOKENIZER = make_tokenizer("byte_level")
LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 190, "seed": 3, "stream": True}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A slow server with two API keys that allows one origin."""
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
    response = server.post("/tokenize", {"model": "default", "prompt": text, "return_token_strs": True}).json()
    assert response["tokens"] == TOKENIZER.encode(text)
    assert (response["count"], response["max_model_len"]) == (len(response["tokens"]), 200)
    assert response["token_strs"][:2] == ["the", " quick"]
    assert server.post("/detokenize", {"tokens": response["tokens"]}).json() == {"prompt": text}
    assert server.post("/tokenize", {"prompt": text}).json()["token_strs"] is None


def test_tokenize_renders_messages_as_a_chat_would(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "hi"}]
    opened = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert opened == TOKENIZER.encode("<s>user: hi\nassistant:")
    bare = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert bare == TOKENIZER.encode("<s>user: hi\n")


def test_tokenize_accepts_texts_longer_than_the_context(server: ServerProcess) -> None:
    assert server.post("/tokenize", {"prompt": "the quick " * 10_000}).json()["count"] >= 20_000


def test_health_and_ping_accept_get_and_ping_post(server: ServerProcess) -> None:
    responses = [server.get("/health"), server.get("/ping"), server.post("/ping", b"")]
    assert [(response.status_code, response.json()) for response in responses] == [(200, {"status": "ready"})] * 3
    assert httpx.head(server.url + "/health").status_code == 200


def test_no_path_is_redirected_whatever_the_host_header_says(server: ServerProcess) -> None:
    document = server.get("/openapi.json").json()
    paths = [path for path in document["paths"] if "{" not in path and path != "/"]
    assert len(paths) == 18
    for host in ("evil.example", "[::1", "", "a b", "x:y:z"):
        for path in paths:
            response = httpx.get(f"{server.url}{path}/", headers={"Host": host})
            assert (response.status_code, "location" in response.headers) == (404, False)
            if path != "/v1/responses":  # of which what follows the slash is an id
                assert response.json()["error"]["message"] == f"{path}/: no such route; did you mean {path}?"
        assert httpx.get(f"{server.url}//evil.example/%2e%2e", headers={"Host": host}).status_code == 404


def test_models_have_the_fields_of_fastdeploy(server: ServerProcess) -> None:
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


@pytest.mark.parametrize("flags", [(), ("--chat-template", "{{ messages[0].content }}")])
def test_models_say_whether_conversations_need_a_template_of_the_request(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    with templateless_server(tmp_path, *flags) as running:
        card = running.get("/v1/models").json()["data"][0]
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert running.post("/v1/chat/completions", body).status_code == (200 if flags else 400)
    assert card["has_chat_template"] is bool(flags)
    assert (card["architecture"], card["dtype"], card["quantization"]) == ("Mock", "float32", None)


def test_models_say_what_the_model_is(drafting_server: ServerProcess) -> None:
    card = drafting_server.get("/v1/models").json()["data"][0]
    assert (card["architecture"], card["dtype"], card["quantization"]) == ("Ernie4_5ForCausalLM", "bfloat16", "none")
    assert card["has_chat_template"] is True


def test_config_info_has_the_origin_of_values_and_no_secret(keyed: ServerProcess) -> None:
    response = keyed.get("/config-info", headers=bearer("alpha"))
    info = response.json()
    assert info["provenance"]["max_model_len"] == "command line" and info["engine_config"]["max_model_len"] == 200
    assert info["cluster"] == {}, "it works alone"
    assert info["environment"]["FD_DEBUG"] == "1" and info["environment"]["FD_API_KEY"] == "***"
    assert not any(key in response.text for key in ("alpha", "beta", "gamma"))


def test_aborted_stream_ends_with_the_reason_and_is_counted(keyed: ServerProcess) -> None:
    body = {**LONG, "request_id": "mine", "return_token_ids": True}
    with httpx.stream("POST", keyed.url + "/v1/completions", json=body, headers=bearer("alpha"), timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        foreign = keyed.post("/v1/abort_requests", {"req_ids": ["mine"]}, headers=bearer("beta")).json()
        assert foreign == {"aborted": [], "not_found": ["mine"]}, "a request of another key is not found"
        everything = keyed.post("/v1/abort_requests", {"abort_all": True}, headers=bearer("beta")).json()
        assert everything == {"aborted": [], "not_found": []}
        request = {"req_ids": ["mine", "other"]}
        response = keyed.post("/v1/abort_requests", request, headers=bearer("alpha")).json()
        rest = "".join(lines)
    assert response["not_found"] == ["other"]
    (aborted,) = response["aborted"]
    assert aborted["request_id"] == "cmpl-mine" and 1 <= aborted["num_generated_tokens"] < 190
    assert '"finish_reason":"abort"' in rest and rest.endswith("data: [DONE]")


def test_aborting_a_request_of_several_prompts_ends_all_of_them_and_no_request_with_a_similar_id(
    keyed: ServerProcess,
) -> None:
    bodies = [
        {**LONG, "prompt": ["the", "dog", "fox"], "request_id": "job", "return_token_ids": True},
        {**LONG, "request_id": "job-1"},
    ]
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(
                httpx.stream("POST", f"{keyed.url}/v1/completions", json=one, headers=bearer("alpha"), timeout=60)
            )
            for one in bodies
        ]
        job, other = [stream.iter_lines() for stream in streams]
        lines = [next(job)]
        next(other)
        given = {"req_ids": ["job", "job-0", "job-2"]}
        response = keyed.post("/v1/abort_requests", given, headers=bearer("alpha")).json()
        lines += job
        assert response["not_found"] == ["job-0", "job-2"]
        assert [one["request_id"] for one in response["aborted"]] == ["cmpl-job"]
        choices = [choice for line in lines if "choices" in line for choice in json.loads(line[6:])["choices"]]
        num_tokens = sum(len(choice["token_ids"]) for choice in choices)
        assert response["aborted"][0]["num_generated_tokens"] == num_tokens >= 1
        assert [choice["finish_reason"] for choice in choices].count("abort") == 3
        ended = keyed.post("/v1/abort_requests", {"req_ids": ["job", "job-1"]}, headers=bearer("alpha")).json()
        assert [one["request_id"] for one in ended["aborted"]] == ["cmpl-job-1"] and ended["not_found"] == ["job"]
        assert '"finish_reason":"abort"' in "".join(other)


def test_cors_allows_only_the_configured_origins(keyed: ServerProcess) -> None:
    request = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = httpx.options(keyed.url + "/v1/completions", headers={"Origin": "https://a.example", **request})
    assert allowed.status_code == 200, "the preflight request of a browser has no key"
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = httpx.options(keyed.url + "/v1/completions", headers={"Origin": "https://b.example", **request})
    assert "access-control-allow-origin" not in other.headers


def test_request_id_of_the_header_is_returned_and_begins_the_response_s_id(server: ServerProcess) -> None:
    body, headers = {"prompt": "the", "max_tokens": 1}, {"X-Request-Id": "trace-7"}
    responses = [server.post("/v1/completions", body, headers=headers) for _ in range(2)]
    assert [response.headers["x-request-id"] for response in responses] == ["trace-7"] * 2
    ids = [response.json()["id"] for response in responses]
    assert all(re.fullmatch("cmpl-trace-7-[0-9a-f]{8}", name) for name in ids) and ids[0] != ids[1]
    named = server.post("/v1/completions", {**body, "request_id": "own"}, headers=headers)
    assert (named.json()["id"], named.headers["x-request-id"]) == ("cmpl-own", "trace-7")
    assert server.post("/v1/completions", body).headers["x-request-id"].startswith("cmpl-")
