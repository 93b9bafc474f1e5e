# SPDX-License-Identifier: Apache-2.0
"""Valid bodies with hostile values at random places: what JSON allows and a server has trouble to read or to write."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.entrypoints.fuzzing import (
    MESSAGES,
    MODELS,
    PLAUSIBLE,
    PLAUSIBLE_BY_PATH,
    RESPONSE_ITEMS,
    RESPONSE_TOOL,
    SCHEMAS,
    TOOL,
    Sent,
    plausible_values,
)
from tests.entrypoints.messages_values import RICH_PROMPT

Place = tuple[str | int, ...]
DEPTHS = [60, 63, 64, 65, 200, 900, *range(955, 990, 5), 1000, 1100, 20_000]
SURROGATES = ["\\ud800", "a\\udfff", "\\udc00\\ud800", "\\ud83d\\ude42"]  # the last one is a pair
RAW = [
    *(f'"{text}"' for text in SURROGATES),
    *('"\\u0000"', '"\\uffff\\ufdd0"', '"\\ud83f\\udffe"', '"' + "é" * 70_000 + '"', '"' + "\\u202e" * 100 + '"'),
    *("NaN", "Infinity", "-Infinity", "-0", "-0.0", "1e999", "-1e999", "1e-999", "1" * 400, "9" * 4400, "0.1e1"),
    *("true", "null", "[]", "{}", '{"\\ud800": 1}', '{"": null}', "[[]]", "1.5", "18446744073709551616"),
]
"""JSON texts of values."""
TEMPLATES = [
    '{{ "\\ud800" }}',
    '{{ raise_exception("\\udfff") }}',
    "{{ messages[0].tool_calls[0].function.arguments.a }}",
    "{{ tools | tojson }}{{ messages | tojson }}{{ x | tojson }}",
    "{% set n = namespace(x=[]) %}{% for i in range(980) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{{ 'x' * 100000 }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
]
CALL_TURN = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
}
RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [*MESSAGES[:2], CALL_TURN],
        "tools": [TOOL],
        "chat_template_kwargs": {"x": [1, {"y": None}]},
        "logits_processors_args": {"thinking_budget": 3},
        "stop": ["END"],
    },
    "/v1/completions": {"bad_words": ["the"], "bad_words_token_ids": [[5, 6]], "stop": ["END"], "suffix": "end"},
    "/v1/responses": {
        "input": RESPONSE_ITEMS[:6],
        "tools": [RESPONSE_TOOL],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMAS[0]}},
        "chat_template_kwargs": {"x": [1, {"y": None}]},
        "metadata": {"a": "b"},
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    },
    "/v1/messages": RICH_PROMPT,
    "/v1/messages/count_tokens": RICH_PROMPT,
    "/tokenize": {"messages": MESSAGES[:2], "chat_template_kwargs": {"x": 1}, "tools": [TOOL]},
}
"""Path -> fields that make a body rich in places."""


def hostile_request(rng: random.Random) -> Sent:
    """Return a request with one to three hostile values."""
    path = rng.choice(list(MODELS))
    model, valid = MODELS[path]
    body = copy.deepcopy({**valid, **RICH.get(path, {})})
    if "messages" in body and path == "/tokenize":
        del body["prompt"]
    known = {*PLAUSIBLE, *PLAUSIBLE_BY_PATH.get(path, {})}
    for name in sorted(known & set(model.__struct_fields__)):
        if rng.random() < 0.03:
            body[name] = copy.deepcopy(rng.choice(plausible_values(path, name)))
    if "chat_template" in model.__struct_fields__ and rng.random() < 0.25:
        body["chat_template"] = rng.choice(TEMPLATES)
    raw: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        _replace(rng, body, raw)
    text = json.dumps(body)
    for number, value in enumerate(raw):
        text = text.replace(f'"@@{number}@@"', value)
    return Sent(path, text.encode())


def _replace(rng: random.Random, body: dict[str, Any], raw: list[str]) -> None:
    """Put a hostile value, or a text that contains one as JSON, at a random place."""
    *parents, last = rng.choice(list(_places(body)))
    container: Any = body
    for key in parents:
        container = container[key]
    value = _hostile_json(rng)
    if rng.random() < 0.25:
        value = json.dumps(value)
    container[last] = f"@@{len(raw)}@@"
    raw.append(value)


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from _places(item, (*place, key))


def _hostile_json(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(RAW)
    depth, inner = rng.choice(DEPTHS), rng.choice(["1", '"\\ud800"', "[]"])
    if rng.random() < 0.5:
        return "[" * depth + inner + "]" * depth
    name = rng.choice(["a", "properties", "items", "type", "not"])
    return f'{{"{name}":' * depth + inner + "}" * depth
