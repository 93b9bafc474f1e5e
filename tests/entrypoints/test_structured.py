# SPDX-License-Identifier: Apache-2.0
"""Structured output through the server with the real engine, and offline: fields, refusals, validity."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from fastdeploy import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from tests.entrypoints.response_check import checked_client
from tests.entrypoints.schemas import HEAD, SCHEMAS, is_valid, make_params
from tests.entrypoints.server_process import ServerProcess, real_server
from tests.thinking_model import save_thinking_model

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "adaptive": false}'
FLAGS = ("--max-model-len", "512", "--num-gpu-blocks-override", "40")
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
ONE_CALL = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</f>",
    },
}
SWITCH = ({}, {"method": "off"})
X = r'\{\s*"x"\s*:\s*\d\s*\}'


@pytest.fixture(scope="module")
def server(drafting_server: ServerProcess) -> ServerProcess:
    return drafting_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return checked_client(server.url)


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA}, X),
    ({"guided_json": json.dumps(SCHEMA)}, X),
    ({"guided_json": True}, r"(?s).+"),
    ({"guided_regex": "[0-9]{2}-[a-z]"}, "[0-9]{2}-[a-z]"),
    ({"guided_choice": ["ja", "nein", "größer als 😀"]}, "ja|nein|größer als 😀"),
    ({"guided_grammar": 'start: "f(" %json {"enum": [1, 2]} ")"'}, r"f\([12]\)"),
    ({"guided_grammar": 'root ::= "a" | "b"'}, "[ab]"),
    ({"structural_tag": TAG}, "(?s).*"),
    ({"structural_tag": ONE_CALL}, f"<f>{X}</f>"),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, r'\{"x":\d\}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": "\n"}}, r'\{\n?"x"\n?:\n?\d\n?\}'),
    ({"structured_outputs": {"regex": "[0-9]{2}-[a-z]", "json": None}}, "[0-9]{2}-[a-z]"),
    ({"structured_outputs": {"choice": ["ja", "nein"], "disable_fallback": True}}, "ja|nein"),
    ({"structured_outputs": {"choice": ["ja", "nein"], "backend": "xgrammar"}}, "ja|nein"),
    ({"guided_choice": ["ja", "nein"], "guided_decoding_backend": "outlines"}, "ja|nein"),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "[ab]"),
    ({"structured_outputs": {"json_object": True}}, r"(?s)\{.*"),
    ({"structured_outputs": {"structural_tag": {"format": ONE_CALL["format"]}}}, f"<f>{X}</f>"),
    ({"structured_outputs": {"structural_tag": json.dumps(ONE_CALL)}}, f"<f>{X}</f>"),
    ({"response_format": {"type": "text"}}, "(?s).*"),
    ({"response_format": {"type": "json_object"}}, r"(?s)\{.*"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}}, X),
    ({"response_format": ONE_CALL}, f"<f>{X}</f>"),
]


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize(("field", "pattern"), FIELDS, ids=lambda value: str(value)[:40])
def test_every_field_constrains_completions_and_chats(
    client: openai.OpenAI, field: dict[str, Any], pattern: str, off: bool
) -> None:
    body = {**field, **({"speculative": {"method": "off"}} if off else {})}
    message = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "def f("}], max_tokens=60, seed=1, extra_body=body
    )
    assert re.fullmatch(pattern, message.choices[0].message.content or ""), message.choices[0]
    answer = client.completions.create(model="demo", prompt="x = ", max_tokens=60, seed=2, extra_body=body)
    assert re.fullmatch(pattern, answer.choices[0].text), answer.choices[0]


def test_a_stream_joins_to_the_text_and_ends_with_stop(client: openai.OpenAI) -> None:
    options = {"model": "demo", "prompt": "x = ", "max_tokens": 80, "seed": 3, "extra_body": {"guided_json": SCHEMA}}
    whole = client.completions.create(**options).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True) if chunk.choices]
    assert "".join(part.text for part in parts) == whole.text
    assert (parts[-1].finish_reason, whole.finish_reason) == ("stop", "stop")
    assert json.loads(whole.text).keys() == {"x"}


def test_parsed_answers_of_the_official_client(client: openai.OpenAI) -> None:
    pydantic = pytest.importorskip("pydantic")
    point = pydantic.create_model("Point", x=(bool, ...), y=(bool, ...))
    parsed = client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": "a point"}],
        response_format=point,
        max_tokens=100,
        seed=4,
    )
    assert isinstance(parsed.choices[0].message.parsed, point)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json and guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "may have one constraint"),
    (
        {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "may have one constraint, got guided_regex and structured_outputs",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}},
        "response_format",
        "may have one constraint, got structured_outputs and response_format",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one kind of constraint, got none"),
    (
        {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}},
        "structured_outputs.json",
        "uniqueItems",
    ),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "did you mean 'regex'?"),
    (
        {"structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "needs json or structural_tag or json_object, got choice",
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "["}},
        "structured_outputs.json",
        "whitespace_pattern: at 1(8): invalid regex",
    ),
    (
        {"structured_outputs": {"structural_tag": {"format": {"type": "tree"}}}},
        "structured_outputs.structural_tag.format.type",
        "expected one of",
    ),
    ({"guided_json": False}, "guided_json", "no value"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_regex": ""}, "guided_regex", "non-empty"),
    ({"guided_choice": []}, "guided_choice", "non-empty"),
    ({"guided_choice": [""]}, "guided_choice", "non-empty"),
    ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
    ({"guided_grammar": "a" * 200_000}, "guided_grammar", "131072 bytes"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "expected one of text"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "unknown key"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "expected an object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "expected an object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format",
        "Unimplemented keys",
    ),
    (
        {"structural_tag": {"structures": [], "triggers": ["<"]}},
        "structural_tag.structures",
        "expected a non-empty list",
    ),
    (
        {"structural_tag": {"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["<"]}},
        "structural_tag.structures[0].begin",
        "none of the triggers",
    ),
    ({"structural_tag": {"format": {"type": "tree"}}}, "structural_tag.format.type", "expected one of"),
    *(
        (
            {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"x-guidance": options}}}},
            "structural_tag.format.schema.x-guidance",
            "expected an object",
        )
        for options in (None, 5)
    ),
    (
        {"structural_tag": {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}}},
        "structural_tag.format.elements",
        "any_text must be the last element",
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "regex"}}},
        "response_format.format.pattern",
        "expected a string",
    ),
]


@pytest.mark.parametrize(("field", "param", "reason"), REFUSED, ids=lambda value: str(value)[:50])
def test_unsupported_constraints_are_refused_by_name(
    server: ServerProcess, field: dict[str, Any], param: str, reason: str
) -> None:
    response = server.post("/v1/completions", {"model": "demo", "prompt": "x", **field})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert reason in error["message"]


def test_a_dead_end_fails_only_its_request(server: ServerProcess) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 9, "guided_regex": "[ab]"}
    biased = {str(token_id): 0 for token_id in (72, 73)}
    response = server.post("/v1/completions", {**body, "bad_words_token_ids": [[72], [73]], "logit_bias": biased})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_token")
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] in ("a", "b")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_allowed_ids_restrict_the_output_with_and_without_drafts(server: ServerProcess, path: str) -> None:
    allowed = list(range(300, 400, 3))
    prompt = {"prompt": "x = x = x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    body = {"model": "demo", **prompt, "max_tokens": 20, "seed": 5, "return_token_ids": True}
    answers = [server.post(path, {**body, "allowed_token_ids": allowed, "speculative": how}) for how in SWITCH]
    one, other = (answer.json()["choices"][0] for answer in answers)
    ids = one.get("completion_token_ids") or one["message"]["completion_token_ids"]
    assert set(ids) <= set(allowed) and len(ids) == 20
    assert (one["finish_reason"], one) == ("length", other)


def test_allowed_ids_that_no_form_begins_with_are_a_dead_end(server: ServerProcess) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 9, "guided_regex": "[ab]", "allowed_token_ids": [300]}
    response = server.post("/v1/completions", body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_token")


@pytest.mark.parametrize("tokens_per_chunk", [1, 7])
def test_a_stream_has_the_same_text_before_its_error_with_and_without_drafts(
    server: ServerProcess, tokens_per_chunk: int
) -> None:
    tokens = server.post("/tokenize", {"prompt": "5", "add_special_tokens": False}).json()["tokens"]
    body = {"model": "demo", "prompt": "x", "max_tokens": 40, "stream": True, "bad_words_token_ids": [tokens[-1:]]}
    body["max_streaming_response_tokens"] = tokens_per_chunk
    texts = []
    for how in SWITCH:
        form = {"guided_regex": "return value5 and more", "speculative": how}
        answer = server.post("/v1/completions", {**body, **form}).text
        *events, end = [json.loads(line) for line in re.findall(r"^data: (\{.*\})$", answer, re.MULTILINE)]
        assert end["error"]["code"] == "no_token"
        texts.append("".join(event["choices"][0]["text"] for event in events))
    assert texts == ["return value"] * 2


def test_the_constraint_applies_to_the_answer_after_the_reasoning(tmp_path: Path) -> None:
    flags = ("--reasoning-parser", "deepseek_r1", "--speculative-config", NGRAM, "--served-model-name", "thinker")
    body = {"model": "thinker", "messages": [{"role": "user", "content": "def f("}], "max_tokens": 40, "seed": 6}
    budget = {"reasoning_max_tokens": 6, "guided_choice": ["ja", "nein"]}
    with real_server(str(save_thinking_model(tmp_path)), *FLAGS, *flags) as server:
        both = [server.post("/v1/chat/completions", {**body, **budget, "speculative": how}).json() for how in SWITCH]
        short = server.post(
            "/v1/chat/completions", {**body, "reasoning_max_tokens": 2, "response_max_tokens": 3}
        ).json()
    first, second = (answer["choices"][0] for answer in both)
    assert first["message"] == second["message"]
    assert first["message"]["content"] in ("ja", "nein")
    assert first["message"]["reasoning_content"]
    assert (short["usage"]["completion_tokens"], short["choices"][0]["finish_reason"]) == (2 + 1 + 3, "length")


def test_reasoning_budgets_are_refused_without_a_reasoning_parser(server: ServerProcess) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "reasoning_max_tokens": 3}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "reasoning_max_tokens"
    assert "--reasoning-parser" in error["message"]


@pytest.mark.parametrize("backend", ["auto", "llguidance"])
def test_offline_constraints_need_no_server(backend: str) -> None:
    llm = LLM("demo", max_model_len=256, guided_decoding_backend=backend)
    forms: list[dict[str, Any]] = [
        {"guided_decoding": GuidedDecodingParams(json=SCHEMA)},
        {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ]
    params = [SamplingParams(seed=5, max_tokens=60, **form) for form in forms]
    texts = [result.outputs[0].text for result in llm.generate(["x = "] * 3, params, use_tqdm=False)]
    assert re.fullmatch(X, texts[0]) and texts == texts[:1] * 3


def check_validity(count: int) -> None:
    """Assert that `count` sampled answers are valid, and the same without speculation."""
    requests = make_params(count, temperature=1.0)
    texts = []
    for speculative in ({"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}, None):
        options = {"speculative_config": speculative} if speculative else {}
        llm = LLM("demo", max_model_len=1024, **options)
        results = llm.generate([HEAD] * count, [params for _, params in requests], use_tqdm=False)
        texts.append([result.outputs[0].token_ids for result in results])
        for (name, params), result in zip(requests, results):
            assert is_valid(name, result.outputs[0]), (name, params.seed, result.outputs[0].text)
        if speculative:
            assert llm.engine.stats().num_accepted_tokens > 0
            assert llm.engine.stats().num_forbidden_draft_tokens > 0
    assert texts[0] == texts[1]


def test_sampled_answers_are_valid_and_the_same_without_speculation() -> None:
    check_validity(2 * len(SCHEMAS))


@pytest.mark.nightly
def test_five_hundred_of_five_hundred_are_valid() -> None:
    check_validity(500)
