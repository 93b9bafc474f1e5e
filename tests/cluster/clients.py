# SPDX-License-Identifier: Apache-2.0
"""Clients that stream completions, and what each of them got."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

READ_TIMEOUT_S = 60.0
RETRY_S = 0.05
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass
class Choice:
    """One choice of an answer, put together from the events of a stream."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    end: tuple[Any, Any] | None = None  # finish_reason and stop_reason

    def add(self, event: dict[str, Any]) -> None:
        """Append what one event of the stream says."""
        assert self.end is None, "an event after the last one"
        self.token_ids += event.get("completion_token_ids") or []
        self.prompt_token_ids += event.get("prompt_token_ids") or []
        self.text += event["text"]
        for name in _LISTS if event.get("logprobs") else ():
            self.logprobs.setdefault(name, []).extend(event["logprobs"].get(name) or [])
        self.seed = event.get("seed")
        if event["finish_reason"] is not None:
            self.end = event["finish_reason"], event.get("stop_reason")


@dataclass
class Answer:
    """What a client got.

    Attributes:
        node: index of the node that served it.
        status: of the response; 0 if there was none.
        choices: by index.
        usage: numbers of tokens.
        error: of the response or of the stream.
        is_complete: the stream has its last event.
        broken: why the connection broke; "" if it did not.
        num_retries: refused attempts before this one.
    """

    node: int = -1
    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    is_complete: bool = False
    broken: str = ""
    num_retries: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0

    def read(self, line: str) -> None:
        """Take one line of the stream."""
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.is_complete = True
            return
        event = json.loads(data)
        self.error = event.get("error", self.error)
        if usage := event.get("usage"):
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        for choice in event.get("choices", ()):
            self.choices.setdefault(choice["index"], Choice()).add(choice)

    def equals(self, expected: Answer) -> bool:
        """Return whether this is the whole of the expected answer and no more."""
        is_whole = self.is_complete and self.error is None
        return is_whole and (self.choices, self.usage) == (expected.choices, expected.usage)

    def begins(self, expected: Answer) -> bool:
        """Return whether no token of this answer differs from the expected one."""
        for index, choice in self.choices.items():
            whole = expected.choices.get(index, Choice()).token_ids
            if whole[: len(choice.token_ids)] != choice.token_ids:
                return False
        return True

    @property
    def is_refused(self) -> bool:
        """Return whether the node took nothing, so that a client may ask another one."""
        refused = self.error is not None and self.error["code"] in ("service_unavailable", "shutting_down", "stalled")
        return not self.choices and (refused or self.broken == "ConnectError")

    def outcome(self) -> str:
        """Return in a few words how it ended."""
        if self.broken:
            return f"broken: {self.broken}"
        if self.error is not None:
            return f"{self.status} {self.error.get('code')}: {self.error.get('message')}"
        return "complete" if self.is_complete else "no end"


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request for a stream with its token ids."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], answer: Answer | None = None) -> Answer:
    """Stream one completion; a broken connection is part of the answer."""
    answer = answer or Answer()
    try:
        async with client.stream("POST", url + "/v1/completions", json=streamed(body)) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = json.loads(await response.aread())["error"]
                return answer
            rest = b""
            async for data in response.aiter_bytes():
                *lines, rest = (rest + data).split(b"\n")  # a text may hold other separators of lines
                for line in lines:
                    if line:
                        answer.read(line.decode())
    except httpx.HTTPError as error:
        answer.broken = type(error).__name__
    return answer


async def ask_any(
    client: httpx.AsyncClient,
    urls: Callable[[], Sequence[str]],
    first: int,
    body: dict[str, Any],
    timeout_s: float = READ_TIMEOUT_S,
) -> Answer:
    """Stream one completion from a node; one that refuses it is followed by the next one.

    Args:
        urls: the present address of every node; "" for one that does not run.
        first: index of the node to ask first.
    """
    began_s = time.monotonic()
    num_retries, node = 0, first
    while True:
        node %= len(urls())
        url = urls()[node]
        answer = await ask(client, url, body) if url else Answer(broken="ConnectError")
        answer.node, answer.num_retries = node, num_retries
        answer.began_s, answer.ended_s = began_s, time.monotonic()
        if not answer.is_refused or time.monotonic() > began_s + timeout_s:
            return answer
        num_retries, node = num_retries + 1, node + 1
        await asyncio.sleep(RETRY_S)


def make_client() -> httpx.AsyncClient:
    """Return a client for any number of streams, each on a connection of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=httpx.Timeout(READ_TIMEOUT_S), limits=limits)
