# SPDX-License-Identifier: Apache-2.0
"""Random requests with plausible and arbitrary values for every field, and a driver that sends many concurrently."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from fastdeploy.entrypoints.openai.messages_api.protocol import CountTokensRequest, MessagesRequest
from fastdeploy.entrypoints.openai.protocol import (
    REFUSED,
    WITHOUT_EFFECT,
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    CompletionRequest,
)
from fastdeploy.entrypoints.openai.responses_api.protocol import ResponsesRequest
from fastdeploy.entrypoints.openai.routes_cluster import RoleRequest
from fastdeploy.entrypoints.openai.routes_tokenize import AbortRequest, DetokenizeRequest, TokenizeRequest
from tests.entrypoints.messages_values import MESSAGES_FIELDS, PROMPT_FIELDS
from tests.entrypoints.response_check import LAST_EVENTS, named_events

NUMBERS = [0, 1, -1, 2, 3, 20, 21, 128, 2**31, 2**63, 2**64, -(2**63), 2**70, 10**300, 0.0, 0.5, -1.5, 1e308, 1e-300]
TEXTS = [
    "",
    "a",
    "the",
    "\x00",
    "é🙂",
    "</s>",
    "<think>",
    "<tool_call>",
    "\u202e",
    "{}",
    "[",
    "x" * 500,
    "auto",
    "none",
]
KEYS = [
    "type",
    "role",
    "content",
    "text",
    "method",
    "function",
    "name",
    "parameters",
    "json_schema",
    "schema",
    "5",
    "999",
]
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "string", "maxLength": 5},
    {"enum": ["a", "b", 3, None]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}}},
    {"type": "object", "patternProperties": {"(": {}}},
    {"type": "number", "minimum": 5, "maximum": 1},
    {},
]
REGEXES = ["[a-z]{3}", "a|b", "(", "a{1000000}", "(a+)+$", "\\p{L}+", "(?=a)b", "[^\\x00-\\x7f]*", ""]
GRAMMARS = ['start: "a" | "b"', 'root ::= "x" | "y" root', "start: start", "start: missing", "%", "", "start: /(/"]
TEMPLATES = ["{{ messages[0].content }}", "{% for %}", "{{ 1/0 }}", "{{ ''.__class__ }}", "{{ nothing.at.all }}", "x"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMAS[0]}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
    {"role": "assistant", "content": "so", "reasoning_content": "because"},
]
PLAUSIBLE: dict[str, list[Any]] = {
    "model": ["default", None, "gpt"],
    "n": [1, 2, 3],
    "temperature": [0, 0.7, 1, 5],
    "top_p": [0.0, 0.5, 1.0],
    "top_k": [-1, 0, 1, 50],
    "min_p": [0, 0.1],
    "presence_penalty": [0.5],
    "frequency_penalty": [-0.5],
    "repetition_penalty": [1.1],
    "reasoning_max_tokens": [3],
    "response_max_tokens": [3],
    "best_of": [1],
    "seed": [0, 1, 2**64 - 1],
    "max_tokens": [1, 5, 30],
    "max_completion_tokens": [1, 5, 30],
    "min_tokens": [0, 3],
    "stop": ["e", ["a", "th"], []],
    "logit_bias": [{"5": 3}, {"6": -50, "7": 100}],
    "logits_processors_args": [{"logit_bias": {"5": 1}}, {"thinking_budget": 3}],
    "bad_words": [["the"], ["a", " b"]],
    "bad_words_token_ids": [[5, 6], [[7, 8]]],
    "stop_token_ids": [[5], []],
    "logprob_token_ids": [[5, 6], []],
    "allowed_token_ids": [[5, 6, 7], list(range(300)), []],
    "logprobs": [0, 2, True, False],
    "top_logprobs": [0, 3],
    "prompt_logprobs": [0, 2],
    "speculative": [{"method": "off"}, {"num_speculative_tokens": 1}],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        *({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in SCHEMAS),
    ],
    "guided_json": [*SCHEMAS, "{}", '{"type": "integer"}', True],
    "guided_regex": REGEXES,
    "guided_choice": [["a"], ["yes", "no"], ["é", "é🙂"], []],
    "guided_grammar": GRAMMARS,
    "structural_tag": [
        {"structures": [{"begin": "<f>", "schema": SCHEMAS[0], "end": "</f>"}], "triggers": ["<f"]},
        {"structures": [], "triggers": []},
    ],
    "structured_outputs": [
        *({"json": schema, "disable_any_whitespace": True} for schema in SCHEMAS),
        *({"regex": regex} for regex in REGEXES),
        {"json_object": True, "whitespace_pattern": "[ ]*"},
        {"choice": ["a"], "whitespace_pattern": " "},
        {},
    ],
    "prompt": ["the", ["a", "the fox"], [5, 6, 7], [[5], [6, 7]], "é🙂" * 9],
    "prompt_token_ids": [[5, 6], [[5], [6]]],
    "suffix": ["end"],
    "messages": [[message] for message in MESSAGES] + [MESSAGES[1:5], MESSAGES],
    "tools": [[TOOL], [TOOL, TOOL], [{"type": "function", "function": {"name": "g"}}]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "chat_template": TEMPLATES,
    "chat_template_kwargs": [{"enable_thinking": False}, {"x": [1, {"y": None}]}],
    "reasoning_effort": ["low", "none", "huge"],
    "truncate_prompt_tokens": [-1, 1, 50],
    "truncation_side": ["left", "right"],
    "thinking_token_budget": [-1, 3],
    "priority": [-5, 0, 7],
    "max_streaming_response_tokens": [1, 4],
    "cache_salt": ["", "s"],
    "request_id": ["one", "two"],
    "tokens": [[5, 6], []],
    "req_ids": [["a"], []],
}
"""Values that often are right, by field; some are wrong in ways that only a deeper check finds."""

RESPONSE_TOOL = {"type": "function", "name": "f", "parameters": SCHEMAS[0]}
RESPONSE_ITEMS: list[Any] = [
    {"role": "user", "content": "hi"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}], "status": "completed"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
    {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "3"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    {"type": "item_reference", "id": "msg_1"},
    {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
]
PLAUSIBLE_BY_PATH: dict[str, dict[str, list[Any]]] = {
    "/v1/chat/completions/batch": {"messages": [[[message] for message in MESSAGES], [MESSAGES[1:5]]]},
    "/v1/messages": MESSAGES_FIELDS,
    "/v1/messages/count_tokens": PROMPT_FIELDS,
    "/v1/responses": {
        "input": ["the", *([item] for item in RESPONSE_ITEMS), RESPONSE_ITEMS[:6], RESPONSE_ITEMS],
        "instructions": ["be brief", ""],
        "max_output_tokens": [1, 5, 30],
        "text": [
            {"format": {"type": "text"}, "verbosity": "medium"},
            {"format": {"type": "json_object"}},
            *({"format": {"type": "json_schema", "name": "x", "schema": schema}} for schema in SCHEMAS),
        ],
        "reasoning": [{"effort": "low", "summary": "auto"}, {"effort": "huge"}, {}],
        "tools": [[RESPONSE_TOOL], [RESPONSE_TOOL, RESPONSE_TOOL], [{"type": "web_search"}], []],
        "tool_choice": ["auto", "none", "required", {"type": "function", "name": "f"}],
        "include": [["message.output_text.logprobs"], []],
        "truncation": ["disabled", "auto"],
        "metadata": [{"a": "b"}, {"a": 1}],
        "stream_options": [{"include_obfuscation": False}],
        "prompt_cache_options": [{"mode": "implicit"}, {"prewarm": True}],
        "max_tool_calls": [1],
    },
}
"""Path -> fields whose values there are others than in `PLAUSIBLE`."""

MODELS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "the", "max_tokens": 6}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [MESSAGES[1]], "max_tokens": 6}),
    "/v1/chat/completions/batch": (
        BatchChatCompletionRequest,
        {"messages": [[MESSAGES[1]], [MESSAGES[1]]], "max_tokens": 6},
    ),
    "/invocations": (ChatCompletionRequest, {"messages": [MESSAGES[1]], "max_tokens": 6}),
    "/v1/responses": (ResponsesRequest, {"input": "the", "max_output_tokens": 6}),
    "/v1/messages": (MessagesRequest, {"messages": [MESSAGES[1]], "max_tokens": 6}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": [MESSAGES[1]]}),
    "/tokenize": (TokenizeRequest, {"prompt": "the"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
    "/v1/abort_requests": (AbortRequest, {"req_ids": ["x"]}),
    "/v1/role": (RoleRequest, {"role": "mixed"}),
}
WEIGHTS = [40, 50, 20, 10, 40, 40, 6, 4, 3, 3, 2]
ALLOWED = (200, 400, 404, 405, 413, 415, 429)
MESSAGES_BEGIN = ("event: message_start", "event: ping", "event: error")
OUR_FAULTS = ("internal_error", "internal")


@dataclass(frozen=True)
class Sent:
    """A request.

    Attributes:
        body: a mapping, or bytes that are sent as they are.
        leave_after: the client closes a stream after so many lines; None reads to the end.
    """

    path: str
    body: dict[str, Any] | bytes
    leave_after: int | None = None


@dataclass
class Outcome:
    """Counts of the responses by status, and the faults of the server."""

    statuses: Counter[int] = field(default_factory=Counter)
    num_left: int = 0
    faults: list[str] = field(default_factory=list)


def plausible_values(path: str, name: str) -> list[Any]:
    """Return values of a field that often are right."""
    return PLAUSIBLE_BY_PATH.get(path, {}).get(name) or PLAUSIBLE.get(name, [True, False])


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a value that may be anything."""
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(TEXTS),
        lambda: [rng.randrange(400) for _ in range(rng.randrange(4))],
        lambda: {str(rng.randrange(500)): rng.choice([1, -5.5, 200, None, "x"])},
    ]
    if depth < 3:
        kinds.append(lambda: [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))])
        kinds.append(lambda: {rng.choice(KEYS): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))})
    return rng.choice(kinds)()


def make_request(rng: random.Random) -> Sent:
    """Return a request: a valid one with some fields changed, sometimes with corrupt JSON, sometimes abandoned."""
    path = rng.choices(list(MODELS), WEIGHTS)[0]
    model, valid = MODELS[path]
    body = dict(valid)
    names = [spec.name for spec in msgspec.structs.fields(model)]
    for _ in range(rng.choice([1, 1, 2, 2, 3, 5])):
        name = rng.choice(names) if rng.random() < 0.97 else rng.choice([*REFUSED, *WITHOUT_EFFECT, "maxtokens"])
        is_odd = rng.random() < 0.15
        body[name] = odd_value(rng) if is_odd else rng.choice(plausible_values(path, name))
    if "stream" in names and rng.random() < 0.3:
        body["stream"] = True
    if rng.random() < 0.03:
        return Sent(path, _damaged(rng, json.dumps(body).encode()))
    return Sent(path, body, rng.randrange(4) if body.get("stream") is True and rng.random() < 0.3 else None)


def _damaged(rng: random.Random, body: bytes) -> bytes:
    at = rng.randrange(len(body))
    return rng.choice([body[:at], body[at:], body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :], body + body])


async def send_all(url: str, requests: list[Sent], num_at_once: int = 16) -> Outcome:
    """Send the requests, `num_at_once` at a time, and check each response."""
    outcome, waiting = Outcome(), iter(requests)

    async def work(client: httpx.AsyncClient) -> None:
        for sent in waiting:
            await _send(client, sent, outcome)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(work(client) for _ in range(num_at_once)))
    return outcome


async def _send(client: httpx.AsyncClient, sent: Sent, outcome: Outcome) -> None:
    content = {"content": sent.body} if isinstance(sent.body, bytes) else {"json": sent.body}
    async with client.stream("POST", sent.path, **content) as response:  # type: ignore[arg-type]
        if sent.leave_after is not None and response.status_code == 200:
            outcome.num_left += 1
            lines = response.aiter_lines()
            for _ in range(sent.leave_after):
                await anext(lines, None)
            return
        text = (await response.aread()).decode()
    outcome.statuses[response.status_code] += 1
    if (fault := find_fault(response.status_code, response.headers.get("content-type", ""), text)) is not None:
        outcome.faults.append(f"{fault}: {sent} -> {response.status_code} {text[-500:]}")


def find_fault(status: int, media_type: str, text: str) -> str | None:
    """Return what is wrong with a response, None if nothing is."""
    if media_type.startswith("text/event-stream"):
        if text.startswith(MESSAGES_BEGIN):
            return _find_fault_of_message(text)
        if text.startswith("event: "):
            return _find_fault_of_response(text)
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        if events[-1:] != ["[DONE]"]:
            return "the stream has no end"
        errors = [parsed["error"] for event in events[:-1] if "error" in (parsed := json.loads(event))]
        return "our own fault in a stream" if any(error["code"] in OUR_FAULTS for error in errors) else None
    parsed = json.loads(text)
    if status == 200:
        return None if isinstance(parsed, dict) else "no object"
    error = openai_error(parsed)
    if status == 500 and error["code"] == "numerics":  # the mock engine's way to fail one request on demand
        return None
    if status not in ALLOWED:
        return "a status that no request should get"
    return None if error["message"] and set(error) == {"message", "type", "param", "code"} else "another shape"


def openai_error(body: dict[str, Any]) -> dict[str, Any]:
    """Return an error of either shape in OpenAI's; keys that a shape does not have stay."""
    if body.get("type") != "error" or not isinstance(body.get("request_id"), str):
        return dict(body["error"])
    error = dict(body["error"])
    details = error.pop("details")
    return {**error, "code": details.pop("error_code"), "param": details.pop("param", None), **details}


def _find_fault_of_message(text: str) -> str | None:
    """Return what is wrong with a stream of /v1/messages, None if nothing is."""
    name, data = named_events(text)[-1]
    if name not in ("message_stop", "error"):
        return "the stream has no end"
    return "our own fault in a stream" if '"type":"api_error"' in data and "the mock says NaN" not in data else None


def _find_fault_of_response(text: str) -> str | None:
    """Return what is wrong with a stream whose events have names, None if nothing is."""
    name, data = named_events(text)[-1]
    if name not in LAST_EVENTS:
        return "the stream has no end"
    return "our own fault in a stream" if "internal error" in data.partition('"error":')[2][:200] else None
