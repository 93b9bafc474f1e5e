# SPDX-License-Identifier: Apache-2.0
"""Fields of JSON bodies: what is counted in their text agrees with their values, and large bodies cost little."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import msgspec
import pytest

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.bodies import parse_body
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.json_fields import (
    check_duplicates,
    check_size,
    decode_field,
    decoder_of,
    split_object,
)
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

TEXTS = ["", "a", ":", '"', '":', '\\":', "\\", "\\\\", "[{,", "é", "🙂", "\n", "a: b", '{"a": 1, "a": 2}', "\\u0041"]
SPACES = ["", "", "", " ", "\n", "\t \r"]


class Builder:
    """Writes random JSON with a chosen layout, and counts what it has written.

    Attributes:
        num_elements, depth: values and keys, and levels, of the last field.
        duplicate: a key that occurs twice in one object of the body.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_elements = self.depth = 0
        self.duplicate: str | None = None

    def body(self) -> tuple[str, list[tuple[str, int, int]]]:
        """Return a body and name, number of elements, and depth of each field."""
        fields, texts = [], []
        for index in range(self.rng.randrange(1, 5)):
            self.num_elements = self.depth = 0
            name = f"field {index}:"
            texts.append(f"{json.dumps(name)}{self.space()}:{self.value(1)}")
            fields.append((name, self.num_elements, self.depth))
        if self.rng.random() < 0.1 and self.duplicate is None:
            self.duplicate = fields[0][0]
            texts.append(f"{json.dumps(self.duplicate)}:{texts[0].partition(':')[2].partition(':')[2]}")
        return f"{{{self.space()}{','.join(texts)}}}", fields

    def value(self, level: int) -> str:
        self.num_elements += 1
        kind = self.rng.randrange(6) if level < 8 else self.rng.randrange(3)
        if kind < 3:
            choices = [str(self.rng.choice([0, -1.5, "true", "null"])), json.dumps(self.rng.choice(TEXTS))]
            return self.space() + self.rng.choice([*choices, '"\\u00e9:"']) + self.space()
        self.depth = max(self.depth, level)
        if kind == 3:
            parts = [self.value(level + 1) for _ in range(self.rng.randrange(5))]
            return f"[{self.space()}{','.join(parts)}{self.space()}]"
        keys = self.rng.sample(TEXTS, self.rng.randrange(5))
        if keys and self.rng.random() < 0.05 and self.duplicate is None:
            self.duplicate = keys[0]
            keys.append(keys[0])
        pairs = []
        for key in keys:
            self.num_elements += 1
            pairs.append(f"{json.dumps(key)}{self.space()}:{self.value(level + 1)}")
        return f"{{{self.space()}{','.join(pairs)}{self.space()}}}"

    def space(self) -> str:
        return self.rng.choice(SPACES)


def decode_all(fields: dict[str, msgspec.Raw]) -> dict[str, Any]:
    return {name: decode_field(name, text, decoder_of(Any)) for name, text in fields.items()}


def check_random_body(seed: int) -> bool:
    """Check one random body; return whether it had a duplicate key."""
    builder = Builder(random.Random(seed))
    written, counts = builder.body()
    text = written.encode()
    fields = split_object(text)
    if builder.duplicate is None:
        check_duplicates(text, fields, decode_all(fields))
    else:
        with pytest.raises(ApiError) as refused:
            check_duplicates(text, fields, decode_all(fields))
        assert refused.value.param == builder.duplicate
        return True
    total, depth = sum(count for _, count, _ in counts), max(depth for _, _, depth in counts)
    check_size(text, fields, depth, total)
    with pytest.raises(InvalidRequestError, match="values and keys") as too_many:
        check_size(text, fields, depth, total - 1)
    assert too_many.value.field == counts[-1][0]
    if depth:
        with pytest.raises(InvalidRequestError, match="in each other") as too_deep:
            check_size(text, fields, depth - 1, total)
        assert too_deep.value.field == next(name for name, _, levels in counts if levels == depth)
    return False


def test_counts_of_random_bodies_are_exact() -> None:
    assert 300 < sum(check_random_body(seed) for seed in range(3000)) < 2500


@pytest.mark.nightly
def test_counts_of_many_random_bodies_are_exact() -> None:
    assert sum(check_random_body(seed) for seed in range(10_000, 110_000)) > 10_000


def refusal(body: bytes, model: type[Any] = CompletionRequest, **limits: int) -> tuple[str | None, str]:
    """Return field and message of the error for a body."""
    with pytest.raises((ApiError, InvalidRequestError)) as refused:
        parse_body(body, model, ServerConfig(**limits))  # type: ignore[arg-type]
    error = refused.value
    return (error.param, error.message) if isinstance(error, ApiError) else (error.field, error.message)


def test_duplicate_keys_are_refused_at_every_level() -> None:
    assert refusal(b'{"prompt": "a", "n": 1, "prompt": "a"}') == ("prompt", "prompt: given twice in one object")
    nested = b'{"prompt": "a", "guided_json": {"a": [{"b": {"c": 1, "\\u0063": 1}}]}}'
    assert refusal(nested) == ("c", "c: given twice in one object")
    options = b'{"stream": true, "prompt": "a", "stream_options": {"include_usage": true, "include_usage" : true}}'
    assert refusal(options)[0] == "include_usage"
    assert refusal(b'{"prompt": "a", "metadata": {"a": "b", "a": "c"}}')[0] == "a"
    assert refusal(b'{"prompt": "a: b", "logit_bias": {"5": 1, "5": 1}}')[0] == "5"


def test_colons_in_texts_are_no_keys() -> None:
    messages = [{"role": "user", "content": 'a: {"a": 1, "a": 2} \\": \\\\'}, {"role": "user", "content": ' :":'}]
    body = {"messages": messages, "chat_template_kwargs": {"a:": '":', '":': "a:"}}
    for text in (json.dumps(body), json.dumps(body, indent=1), json.dumps(body, separators=(" ,", " :"))):
        assert parse_body(text.encode(), ChatCompletionRequest, ServerConfig()).messages == messages


def test_unknown_fields_are_refused_before_their_values_are_decoded() -> None:
    assert refusal(b'{"promt": "\xff"}') == ("promt", "promt: unknown field; did you mean 'prompt'?")
    assert refusal(b'{"guided_json": ' + b"[" * 70 + b"]" * 70 + b', "x": 1}')[0] == "x"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prompt", b'"\xff"'),
        ("bad_words", b'["a", "\xc3"]'),
        ("user", b'"\xed\xa0\x80"'),
        ("metadata", b'{"\xff": "a"}'),
    ],
)
def test_texts_that_are_no_utf_8_are_refused_by_name(name: str, text: bytes) -> None:
    param, message = refusal(b'{"%b": %b}' % (name.encode(), text))
    assert param == name and message.startswith(f"{name}: is not valid JSON: 'utf-8' codec can't decode byte")


@pytest.mark.parametrize("escape", ["\\ud800", "\\udc00", "\\uDBFF\\u0041", "\\ud800\\ud800"])
def test_half_surrogate_pairs_are_refused(escape: str) -> None:
    for field in ('"prompt": "%s"', '"metadata": {"%s": "a"}', '"guided_choice": ["a", "%s"]'):
        assert "half of a surrogate pair is not a text" in refusal(f"{{{field % escape}}}".encode())[1]


def test_nesting_is_refused_at_any_depth_with_the_name_of_the_field() -> None:
    for depth in (65, 300, 800):
        for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
            value = opening * depth + b"1" + closing * depth
            message = "more than 64 arrays and objects in each other (--max-json-depth)"
            assert refusal(b'{"guided_json": %b}' % value) == ("guided_json", message)
    for depth in (960, 985, 10**6):  # the parser's own limit is near the first ones
        refusal_text = refusal(b'{"guided_json": ' + b"[" * depth + b"]" * depth + b"}")[1]
        assert refusal_text.endswith(("in each other", "in each other (--max-json-depth)"))
    deepest = b"[" * 64 + b"]" * 64
    assert parse_body(b'{"prompt": "[[", "metadata": {}, "prompt_token_ids": %b}' % deepest, CompletionRequest,
                      ServerConfig())  # fmt: skip


LARGE = {
    "empty arrays": b"[" + b"[]," * 10_400_000 + b"[]]",
    "empty objects": b"[" + b"{}," * 10_400_000 + b"{}]",
    "numbers": b"[" + b"1," * 15_000_000 + b"1]",
    "texts": b"[" + b'"",' * 10_400_000 + b'""]',
    "quotes in a list": b"[" + b'"\\"\\"",' * 4_400_000 + b'""]',
    "keys": b"{" + b",".join(b'"%d":1' % key for key in range(2_000_000)) + b"}",
    "chains": b"[" + b",".join([b"[" * 63 + b"]" * 63] * 240_000) + b"]",
}


@pytest.mark.parametrize("kind", LARGE)
def test_bodies_of_millions_of_values_are_refused_without_building_them(kind: str) -> None:
    body = b'{"model": "a", "guided_json": %b}' % LARGE[kind]
    tracemalloc.start()
    try:
        assert refusal(body) == ("guided_json", "more than 1000000 values and keys (--max-json-elements)")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * len(body)


def test_long_texts_are_not_counted_as_values() -> None:
    text = ', [{": ' * 1_500_000
    body = json.dumps({"prompt": text, "guided_json": {"a": [text[:50]]}}).encode()
    assert parse_body(body, CompletionRequest, ServerConfig()).prompt == text
