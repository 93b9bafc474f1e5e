# SPDX-License-Identifier: Apache-2.0
"""API keys with names and limits: who may do what, and that keys are separate (mock engine)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy.config.api_keys import ApiKey
from fastdeploy.entrypoints.openai.clients import ClientKeys, client_of, set_client, shown_client
from tests.entrypoints.server_process import ServerProcess, mock_server
from tests.entrypoints.test_lifecycle import COMPLETION, metric, until

KEYS = """
- {name: alice, key: sesame-alice, weight: 2}
- {name: bob, key: sesame-bob, max_sequences: 4}
- {name: carol, key: sesame-carol, tokens_per_minute: 100}
- {name: root, key: sesame-root, admin: true}
"""


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sesame-{name}"}


def serve(folder: Path, *flags: str, **options: Any) -> Any:
    """Run a server with these keys."""
    file = folder / "keys.yaml"
    file.write_text(KEYS)
    file.chmod(0o600)
    model = folder / "model"
    model.mkdir()
    return mock_server(model, "--api-key-file", str(file), *flags, **options)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A slow server with a key of each kind, and a plain one."""
    with serve(tmp_path_factory.mktemp("keyed"), "--api-key", "sesame-plain", step_s=0.02) as server:
        yield server


def post(server: ServerProcess, name: str, **change: Any) -> httpx.Response:
    return server.post("/v1/completions", {**COMPLETION, **change}, headers=bearer(name))


def abort(server: ServerProcess, name: str, **body: Any) -> dict[str, Any]:
    response: dict[str, Any] = server.post("/v1/abort_requests", body, headers=bearer(name)).json()
    return response


class OpenStream:
    """A stream whose first event has been read."""

    def __init__(self, server: ServerProcess, name: str, **change: Any) -> None:
        body = {**COMPLETION, "stream": True, "max_tokens": 2000, **change}
        self._client = httpx.Client(timeout=60)
        request = self._client.build_request("POST", server.url + "/v1/completions", json=body, headers=bearer(name))
        self._response = self._client.send(request, stream=True)
        assert self._response.status_code == 200, self._response.read()
        self._lines = self._response.iter_lines()
        next(self._lines)

    def rest(self) -> str:
        """Return the events up to the end."""
        return "\n".join(self._lines)


def test_keys_of_file_and_flag_are_accepted_and_others_are_not(keyed: ServerProcess) -> None:
    for name in ("alice", "bob", "carol", "root", "plain"):
        assert post(keyed, name, max_tokens=1).status_code == 200
    for headers in ({}, bearer("nobody"), {"Authorization": "Basic sesame-alice"}, {"Authorization": "sesame-alice"}):
        refused = keyed.post("/v1/completions", COMPLETION, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_two_keys_may_use_one_request_id_and_each_aborts_its_own(keyed: ServerProcess) -> None:
    streams = {name: OpenStream(keyed, name, request_id="same") for name in ("alice", "bob")}
    twice = post(keyed, "alice", request_id="same")
    assert (twice.status_code, twice.json()["error"]["message"]) == (
        400,
        "request_id: 'cmpl-same' is in flight already",
    )
    answer = abort(keyed, "alice", req_ids=["same", "cmpl-same", "other"])
    assert [aborted["request_id"] for aborted in answer["aborted"]] == ["cmpl-same"]
    assert answer["not_found"] == ["other"]
    assert '"finish_reason":"abort"' in streams["alice"].rest()
    assert abort(keyed, "alice", req_ids=["same"])["not_found"] == ["same"]
    assert abort(keyed, "alice", abort_all=True)["aborted"] == []
    assert [aborted["request_id"] for aborted in abort(keyed, "bob", abort_all=True)["aborted"]] == ["cmpl-same"]
    assert '"finish_reason":"abort"' in streams["bob"].rest()


def test_an_administrator_aborts_requests_of_all_keys(keyed: ServerProcess) -> None:
    streams = [OpenStream(keyed, name, request_id="shared", prompt=["a", "b"]) for name in ("alice", "bob")]
    aborted = [one["request_id"] for one in abort(keyed, "root", req_ids=["shared"])["aborted"]]
    assert sorted(aborted) == ["cmpl-shared"] * 2, "one of each key"
    streams.append(OpenStream(keyed, "alice"))
    assert len(abort(keyed, "root", abort_all=True)["aborted"]) == 1
    assert all('"finish_reason":"abort"' in stream.rest() for stream in streams)


def test_the_configuration_is_for_administrators_and_shows_no_key(keyed: ServerProcess) -> None:
    for name in ("alice", "plain"):
        refused = keyed.get("/config-info", headers=bearer(name))
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["code"]) == (403, "permission_error", "admin_required")
    response = keyed.get("/config-info", headers=bearer("root"))
    assert response.status_code == 200 and "sesame" not in response.text
    keys = response.json()["server"]["keys"]
    assert keys[1] == {
        "name": "bob",
        "key": "***",
        "weight": 1.0,
        "max_sequences": 4,
        "tokens_per_minute": None,
        "admin": False,
    }
    assert [key["name"] for key in keys] == ["alice", "bob", "carol", "root", "key-1"]


def test_without_administrators_every_key_may_read_the_configuration(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--api-key", "sesame-alice", "--api-key", "sesame-bob") as server:
        response = server.get("/config-info", headers=bearer("bob"))
        assert response.status_code == 200 and "sesame" not in response.text
        assert response.json()["engine_config"]["scheduler"]["max_client_share"] == 0.875


def test_a_request_with_more_sequences_than_a_limit_is_refused(keyed: ServerProcess, tmp_path: Path) -> None:
    refused = post(keyed, "bob", n=3, prompt=["a", "b"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    expected = "expected at most 4 sequences (prompts times n) in a request, got 6; the limit is max_sequences of the"
    assert expected in refused.json()["error"]["message"]
    assert post(keyed, "bob", n=2, prompt=["a", "b"], max_tokens=1).status_code == 200
    refused = post(keyed, "alice", n=128, prompt=["a"] * 4)
    assert "at most 448 sequences (prompts times n) in a request, got 512" in refused.json()["error"]["message"]
    with mock_server(tmp_path) as server:
        refused = server.post("/v1/completions", {**COMPLETION, "n": 128, "prompt": ["a"] * 8})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert "at most 512 sequences (prompts times n)" in refused.json()["error"]["message"]
        whole = server.post("/v1/completions", {**COMPLETION, "n": 128, "prompt": ["a"] * 4, "max_tokens": 1})
        assert len(whole.json()["choices"]) == 512


def test_sequences_of_all_prompts_count_against_the_maximum(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--max-concurrency", "6", step_s=0.02) as server:
        body = {**COMPLETION, "stream": True, "max_tokens": 2000, "n": 2, "prompt": ["a", "b"]}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            load = server.get("/load").json()
            assert (load["num_requests"], load["num_sequences"], load["max_concurrency"]) == (1, 4, 6)
            assert metric(server, "num_sequences_inside") == 4
            refused = server.post("/v1/completions", {**COMPLETION, "n": 3})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert server.post("/v1/completions", {**COMPLETION, "n": 2, "max_tokens": 1}).status_code == 200
        until(lambda: server.get("/load").json()["num_sequences"] == 0, "the stream is over")


def test_tokens_per_minute_hold_a_key_back_and_say_when_to_come_again(keyed: ServerProcess) -> None:
    first = post(keyed, "carol", max_tokens=150)
    assert first.status_code == 200
    refused = post(keyed, "carol", max_tokens=1)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert "this API key may use 100 tokens per minute" in error["message"] and "sesame" not in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert post(keyed, "alice", max_tokens=1).status_code == 200, "other keys are not held back"


def test_a_stream_is_charged_while_it_runs(tmp_path: Path) -> None:
    with serve(tmp_path, step_s=0.01) as server:
        stream = OpenStream(server, "carol")
        until(lambda: metric(server, "generation_tokens_total") > 110, "the stream has used the tokens")
        assert post(server, "carol", max_tokens=1).json()["error"]["code"] == "rate_limit_exceeded"
        abort(server, "root", abort_all=True)
        stream.rest()


def test_tokens_are_counted_by_the_name_of_the_key(tmp_path: Path) -> None:
    with serve(tmp_path, step_s=0.01) as server:
        usage = post(server, "alice", max_tokens=5, n=2).json()["usage"]
        stream = OpenStream(server, "bob", max_tokens=7)
        stream.rest()
        counted = 'client_generation_tokens_total{client="%s"}'
        until(lambda: metric(server, counted % "bob") == 7, "the stream is counted at its end")
        assert metric(server, counted % "alice") == 10 == usage["completion_tokens"]
        assert metric(server, 'client_prompt_tokens_total{client="alice"}') == usage["prompt_tokens"]
        assert metric(server, counted % "carol") == 0
        page = server.get("/metrics").text
        assert set(re.findall(r'client="([^"]*)"', page)) == {"alice", "bob", "carol", "root"}


def test_waiting_and_running_requests_and_their_queue_times_are_shown_by_the_name_of_the_key(tmp_path: Path) -> None:
    flags = ("--max-concurrency", "4", "--max-client-share", "0.5", "--max-waiting-time", "-1")
    with serve(tmp_path, *flags, step_s=0.01) as server, ThreadPoolExecutor() as pool:
        stream = OpenStream(server, "alice", n=2)
        waiting = pool.submit(post, server, "alice", n=2, max_tokens=1)
        until(lambda: metric(server, 'client_num_sequences_waiting{client="alice"}') == 2, "two sequences wait")
        until(lambda: metric(server, 'client_num_requests_running{client="alice"}') == 2, "two sequences run")
        assert metric(server, 'client_num_requests_running{client="bob"}') == 0
        assert metric(server, 'client_num_requests_waiting{client="alice"}') == 0
        shown = server.get("/load", headers=bearer("root")).json()["clients"]
        nothing = {"num_running": 0, "num_waiting": 0, "num_sequences_waiting": 0}
        alice = {"name": "alice", "num_running": 2, "num_waiting": 0, "num_sequences_waiting": 2}
        assert shown == [alice, *({"name": name, **nothing} for name in ("bob", "carol", "root"))]
        assert "clients" not in server.get("/load", headers=bearer("alice")).json(), "it is for administrators"
        abort(server, "root", abort_all=True)
        stream.rest()
        assert waiting.result().status_code == 200
        until(lambda: metric(server, 'client_num_requests_running{client="alice"}') == 0, "all have ended")
        assert metric(server, 'client_num_sequences_waiting{client="alice"}') == 0
        assert metric(server, 'client_request_queue_time_seconds_count{client="alice"}') == 4
        assert metric(server, 'client_request_queue_time_seconds_count{client="bob"}') == 0
        until(lambda: server.stderr.count(", client alice, prompt ") == 4, "each choice has a line with the key's name")


def test_refusals_are_counted_by_reason_and_logged_without_text_of_the_client(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        post(server, "alice", zzz_private=1)
        server.get("/private/path%0A2026-01-01%20forged", headers=bearer("alice"))
        server.get("/config-info", headers=bearer("bob"))
        server.get("/v1/models", headers=bearer("nobody"))
        reasons = ("invalid", "not_found", "auth", "rate_limit", "timeout")
        counts = [metric(server, f'requests_rejected_total{{reason="{reason}"}}') for reason in reasons]
        assert counts == [1, 1, 2, 0, 0]
        until(lambda: server.stderr.count("refused (") == 4, "each is logged")
        lines = [line.partition(": ")[2] for line in server.stderr.splitlines() if "refused (" in line]
        assert lines == [
            "refused (invalid): 400 unknown_parameter for /v1/completions from alice",
            "refused (not_found): 404 not_found for another path from alice",
            "refused (auth): 403 admin_required for /config-info from bob",
            "refused (auth): 401 invalid_api_key for /v1/models from 127.0.0.1",
        ]
        assert not any(text in server.stderr for text in ("sesame", "private", "forged"))


def test_all_workers_know_the_keys_and_divide_the_tokens_per_minute(tmp_path: Path) -> None:
    with serve(tmp_path, "--workers", "2") as server:
        arguments = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.engine_pids()]
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in server.engine_pids()]
        assert len(arguments) == 3 and not any(b"sesame" in text for text in [*arguments, *environments])
        codes = [post(server, "carol", max_tokens=60).status_code for _ in range(12)]
        assert (codes.count(200), codes.count(429)) == (2, 10), "each worker admits one, and is at its half then"
        assert post(server, "alice", max_tokens=1).status_code == 200
        assert metric(server, 'requests_rejected_total{reason="rate_limit"}') == 10
        assert metric(server, 'client_generation_tokens_total{client="carol"}') == 120


def test_a_key_is_found_by_its_exact_bytes_only() -> None:
    keys = ClientKeys([ApiKey("a", "sesame", 3, admin=True), ApiKey("b", "open")])
    found = keys.find(b"sesame")
    assert found is not None and (found.name, found.weight, found.is_admin) == ("a", 3, True)
    assert keys.has_admin and not ClientKeys([ApiKey("b", "open")]).has_admin
    for wrong in (b"", b"sesam", b"sesame ", b"Sesame", b"sesameopen", b"\xff"):
        assert keys.find(wrong) is None


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("not an address", "192.0.2.1", False),
    ],
)
def test_without_keys_the_address_is_the_client(first: str, second: str, is_same: bool) -> None:
    ids = [client_of({"type": "http", "client": (host, 1)}).id for host in (first, second)]
    assert (ids[0] == ids[1]) == is_same
    assert client_of({"type": "http", "client": (first, 1)}).salt == "", "requests of addresses share the prefix cache"


def test_log_lines_name_the_key_or_the_address() -> None:
    scope: dict[str, Any] = {"type": "http", "client": ("192.0.2.1", 1)}
    assert shown_client(scope) == "192.0.2.1"
    found = ClientKeys([ApiKey("a", "sesame")]).find(b"sesame")
    assert found is not None
    set_client(scope, found)
    assert shown_client(scope) == "a"
    assert shown_client({"type": "http", "client": None}) == "unknown address"
