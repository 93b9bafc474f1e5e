# SPDX-License-Identifier: Apache-2.0
"""Streams without an event for a while send keep-alive events; errors of a chat get another protocol's names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy.core.errors import ContextLengthError, InvalidRequestError
from fastdeploy.entrypoints.openai import event_stream
from fastdeploy.entrypoints.openai.app import ENDPOINTS
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.event_stream import EventStream
from fastdeploy.entrypoints.openai.object_rules import ObjectRules, TypeRules
from fastdeploy.entrypoints.openai.renaming import renamed_errors
from tests.entrypoints.server_process import ServerProcess

START = {"type": "http.response.start", "status": 200, "headers": []}
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
STREAMED = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": HELLO,
    "/v1/chat/completions/batch": {**HELLO, "messages": [HELLO["messages"]]},
    "/invocations": HELLO,
    "/v1/messages": {"model": "default", **HELLO},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
}
Work = Callable[[EventStream, list[bytes]], Awaitable[None]]


def sent_by(work: Work, keep_alive: bytes) -> list[Any]:
    """Return what is sent while `work` runs: START's type, then the bodies."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        sent.append(message.get("body", message["type"]))

    async def run() -> None:
        stream = EventStream(send, START)
        async with stream.kept_alive(SimpleNamespace(keep_alive_event=keep_alive)):  # type: ignore[arg-type]
            await work(stream, sent)
        await stream.close(b"end")

    asyncio.run(run())
    return sent


async def until(sent: list[bytes], event: bytes, count: int) -> None:
    while sent.count(event) < count:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("path", [endpoint.path for endpoint in ENDPOINTS if endpoint.event is not None])
def test_streams_and_only_streams_tell_proxies_not_to_buffer_or_store_them(
    parsing_server: ServerProcess, path: str
) -> None:
    stream = parsing_server.post(path, {**STREAMED[path], "stream": True}).headers
    assert stream["content-type"].startswith("text/event-stream")
    assert (stream["x-accel-buffering"], stream["cache-control"]) == ("no", "no-cache")
    whole = parsing_server.post(path, STREAMED[path])
    refused = parsing_server.post(path, {**STREAMED[path], "stream": True, "temperature": -1})
    assert (whole.status_code, refused.status_code) == (200, 400)
    assert all("x-accel-buffering" not in answer.headers for answer in (whole, refused))


def test_silence_is_filled_with_keep_alive_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.005)

    async def work(stream: EventStream, sent: list[bytes]) -> None:
        await until(sent, b": ping", 2)
        await stream.send(b"event")
        await until(sent, b": ping", 3)

    sent = sent_by(work, b": ping")
    assert [*dict.fromkeys(sent)] == ["http.response.start", b": ping", b"event", b"end"]
    assert sent[:3] == ["http.response.start", b": ping", b": ping"] and sent.count("http.response.start") == 1
    assert sent[sent.index(b"event") + 1] == b": ping"


def test_a_stream_with_events_has_no_keep_alive_events() -> None:
    async def work(stream: EventStream, sent: list[bytes]) -> None:
        assert not stream.has_started
        for _ in range(3):
            await stream.send(b"event")
        assert stream.has_started

    assert sent_by(work, b": ping") == ["http.response.start", b"event", b"event", b"event", b"end"]


def test_protocols_without_keep_alive_events_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.001)

    async def work(stream: EventStream, sent: list[bytes]) -> None:
        await asyncio.sleep(0.01)
        await stream.send(b"event")

    assert sent_by(work, b"") == ["http.response.start", b"event", b"end"]


def test_errors_get_the_names_of_the_client_s_fields_and_keep_their_class() -> None:
    names = {"max_tokens": "max_output_tokens"}
    with pytest.raises(InvalidRequestError, match=r"^max_output_tokens: too many$"), renamed_errors(names.__getitem__):
        raise InvalidRequestError("max_tokens", "too many")
    with pytest.raises(ContextLengthError, match=r"^input: too long$"), renamed_errors(lambda field: "input"):
        raise ContextLengthError("messages", "too long")


TEXT = ObjectRules(
    honoured={"text": "the text", "type": "its type"},
    required=("text",),
    without_effect={"id": "nothing is stored"},
    refused={"image": ("this server reads text only", ([], False))},
)
PARTS = TypeRules({"text": TEXT, "plain": ObjectRules(honoured={"type": "its type"})}, {"file": "send text"}, "text")


def test_honoured_keys_are_read_and_neutral_values_and_nulls_are_dropped() -> None:
    assert PARTS.read("p", {"type": "text", "text": "a", "id": "1", "image": [], "other": None}) == (
        "text",
        {"type": "text", "text": "a"},
    )
    assert PARTS.read("p", {"text": "a"}) == ("text", {"text": "a"})
    assert PARTS.read("p", {"type": "plain"}) == ("plain", {"type": "plain"})


@pytest.mark.parametrize(
    ("given", "message", "code"),
    [
        ({"type": "text", "text": "a", "image": 1}, "p.image: this server reads text only", "unsupported_parameter"),
        ({"type": "text", "text": "a", "image": 0}, "p.image: this server reads text only", "unsupported_parameter"),
        ({"type": "file"}, "p.type: file is not supported: send text", "unsupported_parameter"),
        ({"type": "text", "text": "a", "txt": 1}, "p.txt: unknown field; did you mean 'text'?", "unknown_parameter"),
        ({"type": "text"}, "p.text: is missing", None),
        ({"type": "film"}, "p.type: expected one of text, plain, got 'film'", None),
        ({"type": ["text"]}, "p.type: expected one of text, plain, got an array", None),
        ("a", "p: expected an object, got 'a'", None),
    ],
)
def test_other_objects_are_refused_by_name(given: Any, message: str, code: str | None) -> None:
    with pytest.raises(ApiError if code else InvalidRequestError) as caught:
        PARTS.read("p", given)
    assert str(caught.value) == message
    assert getattr(caught.value, "code", None) == code
