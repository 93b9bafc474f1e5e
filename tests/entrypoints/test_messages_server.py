# SPDX-License-Identifier: Apache-2.0
"""/v1/messages on a server with API keys: who may use it, aborts, and what a shutdown does to its streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from fastdeploy.config.args import parse_serve_args
from tests.entrypoints import server_process
from tests.entrypoints.anthropic_client import messages_client
from tests.entrypoints.server_process import ServerProcess, mock_server
from tests.entrypoints.test_responses_server import QUICK_KEEP_ALIVE

BODY: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A slow server with two keys, which keeps streams alive every 50 ms and ignores unknown fields."""
    folder = tmp_path_factory.mktemp("keyed")
    names = ("--served-model-name", "large", "small", "--api-key", "one", "--api-key", "two")
    flags = (*names, "--ignore-unknown-fields", "--max-num-seqs", "8", "--max-num-batched-tokens", "16")
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            launcher = server_process.LAUNCHER.replace("from fastdeploy", QUICK_KEEP_ALIVE + "from fastdeploy", 1)
            patch.setattr(server_process, "LAUNCHER", launcher)
            running = stack.enter_context(mock_server(folder, *flags, step_s=0.02, prefill_s_per_token=0.003))
        yield running


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "one"}, 200),
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "Bearer one", "x-api-key": "one"}, 200),
        ({"Authorization": "Bearer one", "x-api-key": "two"}, 401),
        ({"Authorization": "Basic one", "x-api-key": "one"}, 401),
        ({"x-api-key": "three"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ],
)
def test_both_headers_of_keys_must_agree(keyed: ServerProcess, headers: dict[str, str], status: int) -> None:
    response = keyed.post("/v1/messages", BODY, headers=headers)
    assert response.status_code == status
    if status == 401:
        content = response.json()
        assert (content["type"], content["error"]["type"]) == ("error", "authentication_error")
        assert content["request_id"] == response.headers["request-id"]
    chat = keyed.post("/v1/chat/completions", BODY, headers=headers)
    assert chat.status_code == status
    assert status == 200 or chat.json()["error"]["code"] == "invalid_api_key"


def test_the_client_sends_its_key_and_names_the_error(keyed: ServerProcess) -> None:
    assert messages_client(keyed, api_key="one").messages.create(**BODY).stop_reason == "max_tokens"
    assert messages_client(keyed, auth_token="two").messages.create(**BODY).stop_reason == "max_tokens"
    with pytest.raises(anthropic.AuthenticationError) as caught:
        messages_client(keyed, api_key="three").messages.create(**BODY)
    assert (caught.value.type, caught.value.error_code) == ("authentication_error", "invalid_api_key")


def test_a_message_is_aborted_by_its_id(keyed: ServerProcess) -> None:
    client = messages_client(keyed, api_key="one", is_checked=False)
    ids, key, other = {"req_ids": ["mine", "msg_mine"]}, {"x-api-key": "one"}, {"x-api-key": "two"}
    with client.messages.stream(**{**BODY, "max_tokens": 2000}, extra_body={"request_id": "mine"}) as stream:
        assert next(stream).type == "message_start"
        found = keyed.post("/v1/abort_requests", ids, headers=other).json()
        assert (found["aborted"], found["not_found"]) == ([], ["mine", "msg_mine"])
        found = keyed.post("/v1/abort_requests", ids, headers=key).json()
        assert ([request["request_id"] for request in found["aborted"]], found["not_found"]) == (["msg_mine"], [])
        message = stream.get_final_message()
    assert (message.stop_reason, message.stop_sequence) == (None, None)
    assert message.usage.output_tokens > 0


def test_streams_that_a_shutdown_cuts_end_with_an_error_event(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--timeout-graceful-shutdown", "0.5", step_s=0.05) as server:
        options = {**BODY, "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", server.url + "/v1/messages", json=options, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: message_start"
            server.terminate()
            rest = [line for line in lines if line]
        assert rest[-2] == "event: error" and "message_stop" not in "".join(rest)
        assert '"type":"overloaded_error"' in rest[-1] and '"error_code":"shutting_down"' in rest[-1]
        assert server.wait_end() == 0


def test_models_are_listed_by_each_of_their_names(keyed: ServerProcess) -> None:
    client = messages_client(keyed, api_key="one")
    for owner in (client, client.beta):
        models = list(owner.models.list())
        assert [model.id for model in models] == ["large", "small"]
        assert owner.models.retrieve("small") == models[1]
        assert owner.models.retrieve("default").id == "large"
    assert (models[0].type, models[0].lifecycle, models[0].max_input_tokens) == ("model", "active", 2048)
    assert models[0].created_at.utcoffset() == timedelta(0)


@pytest.mark.parametrize(("requested", "answered"), [("large", "large"), ("small", "small"), ("default", "large")])
def test_answers_have_the_requested_name(keyed: ServerProcess, requested: str, answered: str) -> None:
    headers = {"x-api-key": "one"}
    for path in ("/v1/messages", "/v1/chat/completions"):
        body = {**BODY, "model": requested}
        assert keyed.post(path, body, headers=headers).json()["model"] == answered
        response = keyed.post(path, {**body, "stream": True}, headers=headers)
        assert f'"model":"{answered}"' in response.text
    unknown = keyed.post("/v1/messages", {**BODY, "model": "tiny"}, headers=headers).json()["error"]["message"]
    assert unknown == "model: 'tiny' is not served here; this server serves 'large', 'small'"


def test_names_of_a_model_follow_each_other_or_the_flag_is_repeated() -> None:
    flags = ["demo", "--served-model-name", "large", "small", "--served-model-name", "old"]
    assert parse_serve_args(flags).server.served_model_name == ("large", "small", "old")


def test_pings_keep_a_long_prefill_alive_until_the_first_event(keyed: ServerProcess) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "the quick brown fox " * 30}], "stream": True}
    response = keyed.post("/v1/messages", body, headers={"x-api-key": "one"})
    ping = 'event: ping\ndata: {"type":"ping"}\n\n'
    assert response.text.startswith(ping * 2)
    assert response.text.replace(ping, "").startswith("event: message_start\n")
    client = messages_client(keyed, api_key="one")
    body["messages"][0]["content"] += "again"
    events = [event.type for event in client.messages.create(**body)]
    assert (events[0], events[-1]) == ("message_start", "message_stop")


def test_an_error_after_a_ping_is_an_event(keyed: ServerProcess) -> None:
    content = "the quick brown fox " * 120
    body = {**BODY, "messages": [{"role": "user", "content": content}], "stream": True, "timeout": 0.3}
    response = keyed.post("/v1/messages", body, headers={"x-api-key": "one"})
    *pings, last, _ = response.text.split("\n\n")
    assert set(pings) == {'event: ping\ndata: {"type":"ping"}'}
    assert last.startswith('event: error\ndata: {"type":"error","error":{"type":"timeout_error","message":"the request')


def test_unknown_fields_are_ignored_where_the_server_is_told_to(keyed: ServerProcess) -> None:
    block = {"type": "text", "text": "a", "shade": 1}
    body = {**BODY, "hue": 1, "messages": [{"role": "user", "content": [block], "colour": 2}]}
    headers = {"x-api-key": "one"}
    assert keyed.post("/v1/messages", body, headers=headers).status_code == 200
    for name in ("'hue'", "'messages.colour'", "'messages.content.shade'"):
        assert keyed.stderr.count(name) == 1
    refused = keyed.post("/v1/messages", {**body, "container": "x"}, headers=headers)
    assert refused.status_code == 400, "fields that are refused by name stay refused"
