# SPDX-License-Identifier: Apache-2.0
"""5.0 is an integer wherever one is expected (JSON Schema 2020-12, RFC 8259); 5.5 is none, and 1e20 is out of range."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import msgspec
import pytest

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.app import ENDPOINTS
from fastdeploy.entrypoints.openai.bodies import parse_body
from fastdeploy.entrypoints.openai.openapi import models_of
from tests.entrypoints.server_process import ServerProcess

CONFIG = ServerConfig()


def integer_fields() -> Iterator[tuple[type[msgspec.Struct], str, bool]]:
    """Yield body, field, and whether it is a list, for every field of every body that may be an integer or a list."""
    for model in dict.fromkeys(model for endpoint in ENDPOINTS for model in models_of(endpoint.request)):
        for field in msgspec.structs.fields(model):
            kinds = get_args(field.type) or (field.type,)
            if int in kinds or list[int] in kinds:
                yield model, field.name, int not in kinds


FIELDS = list(integer_fields())


@pytest.mark.parametrize(("model", "name", "is_list"), FIELDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_whole_number_with_a_fraction_of_zero_is_an_integer_in_every_field(
    model: type[msgspec.Struct], name: str, is_list: bool
) -> None:
    def parse(number: str) -> Any:
        text = f"[3,{number}]" if is_list else number
        return getattr(parse_body(f'{{"{name}": {text}}}'.encode(), model, CONFIG), name)

    for number, value in (("5.0", 5), ("-0.0", 0), ("1e2", 100), ("50e-1", 5), ("9007199254740992.0", 2**53)):
        given = parse(number)
        assert given == ([3, value] if is_list else value)
        assert {type(item) for item in (given if is_list else [given])} == {int}
    for number in ("5.5", "1e-1", "1e400", '"5"'):
        with pytest.raises(InvalidRequestError) as caught:
            parse(number)
        assert caught.value.field == name and caught.value.message


def test_every_kind_of_body_has_a_field_with_an_integer() -> None:
    names = {model.__name__ for model, _, _ in FIELDS}
    assert names >= {"CompletionRequest", "ChatCompletionRequest", "MessagesRequest", "ResponsesRequest"}
    assert "DetokenizeRequest" in names and len(FIELDS) > 40


def with_floats(value: Any) -> Any:
    """Return a body whose integers are written with a fraction of zero."""
    if isinstance(value, dict):
        return {name: with_floats(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    return float(value) if type(value) is int else value


USER = {"role": "user", "content": "the quick"}
COMMON: dict[str, Any] = {"seed": 7, "top_k": 3, "speculative": {"num_speculative_tokens": 0}, "priority": 1}
LISTS: dict[str, Any] = {
    **COMMON,
    "max_tokens": 5,
    "n": 2,
    "min_tokens": 1,
    "stop_token_ids": [380],
    "bad_words_token_ids": [5, [6, 7]],
    "logit_bias": {"5": 3},
    "logits_processors_args": {"logit_bias": {"6": 1}},
    "stream_interval": 1,
    "truncate_prompt_tokens": 9,
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**LISTS, "prompt": [5, 6, 7], "logprobs": 2, "best_of": 2}),
    ("/v1/completions", {**LISTS, "prompt": [[5, 6], [7, 8]], "logprobs": 2, "logprob_token_ids": [9]}),
    ("/v1/completions", {**LISTS, "prompt_token_ids": [[5, 6]], "allowed_token_ids": [40, 41], "prompt_logprobs": 1}),
    ("/v1/chat/completions", {**LISTS, "messages": [USER], "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**LISTS, "prompt_token_ids": [5, 6]}),
    (
        "/v1/messages",
        {**COMMON, "max_tokens": 5, "messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 3}},
    ),
    (
        "/v1/responses",
        {
            **COMMON,
            "max_output_tokens": 5,
            "input": "the quick",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
        },
    ),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=str)
def test_the_answer_to_integers_with_a_fraction_is_the_same(server: ServerProcess, path: str, body: Any) -> None:
    answers = [server.post(path, one) for one in (body, with_floats(body))]
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    parts = [{key: answer.json().get(key) for key in ("choices", "content", "usage", "prompt")} for answer in answers]
    assert parts[0] == parts[1] and any(parts[0].values())


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/completions", '"seed": 1e20', "seed"),
        ("/v1/completions", '"max_tokens": 1e300', "max_tokens"),
        ("/v1/completions", '"stop_token_ids": [1e20]', "stop_token_ids"),
        ("/v1/completions", '"bad_words_token_ids": [[5.5]]', "bad_words_token_ids"),
        ("/v1/completions", '"speculative": {"num_speculative_tokens": 1.5}', "speculative.num_speculative_tokens"),
        ("/v1/completions", '"prompt_token_ids": [5.5]', "prompt_token_ids"),
        ("/v1/chat/completions", '"logits_processors_args": {"thinking_budget": 0.5}', "logits_processors_args"),
        ("/v1/chat/completions", '"top_k": 1e400', "top_k"),
        (
            "/v1/messages",
            '"max_tokens": 4, "thinking": {"type": "enabled", "budget_tokens": 0.5}',
            "thinking.budget_tokens",
        ),
    ],
)
def test_a_fraction_and_a_number_out_of_range_are_refused_by_name(
    server: ServerProcess, path: str, change: str, param: str
) -> None:
    prompt = f'"messages": [{json.dumps(USER)}]' if "completions" not in path or "chat" in path else '"prompt": "the"'
    prompt = "" if "prompt_token_ids" in change else f"{prompt}, "
    response = httpx.post(
        server.url + path, content=f"{{{prompt}{change}}}", headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert (response.status_code, param in error["message"]) == (400, True), error
    assert error.get("param", param) == param
