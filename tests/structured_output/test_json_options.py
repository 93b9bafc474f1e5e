# SPDX-License-Identifier: Apache-2.0
"""Which JSON the options of a form allow, alone, in structural tags and beside tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.entrypoints.openai.parsers.argument_grammar import json_expression
from tests.structured_output.test_structural_tag import compiler

SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
COMPACT, SPACED, BROKEN, MORE = '{"a":[1,2]}', '{"a": [1, 2]}', '{\n"a":[1,2]}', '{"a":[1,2],"b":3}'
TEXTS = (COMPACT, SPACED, BROKEN, MORE)
OPTIONS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {COMPACT, SPACED, BROKEN, MORE}),
    ({"disable_any_whitespace": True}, {COMPACT, MORE}),
    ({"whitespace_pattern": " ?"}, {COMPACT, SPACED, MORE}),
    ({"whitespace_pattern": r"\n"}, {COMPACT, BROKEN, MORE}),
    ({"disable_additional_properties": True}, {COMPACT, SPACED, BROKEN}),
    ({"disable_additional_properties": True, "disable_any_whitespace": True}, {COMPACT}),
]


def accepts(form: StructuredOutputsParams, text: str) -> bool:
    tokenizer, grammars = compiler()
    state = grammars.compile(form)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        state = state.advance(token_id)
        if state.error:
            return False
    return state.is_accepting


@pytest.mark.parametrize(("options", "expected"), OPTIONS, ids=[str(options) for options, _ in OPTIONS])
def test_options_change_what_json_is_allowed(options: dict[str, Any], expected: set[str]) -> None:
    form = StructuredOutputsParams(json=SCHEMA, **options)
    assert {text for text in TEXTS if accepts(form, text)} == expected


@pytest.mark.parametrize(("options", "expected"), OPTIONS, ids=[str(options) for options, _ in OPTIONS])
def test_options_apply_to_the_schemas_of_a_structural_tag(options: dict[str, Any], expected: set[str]) -> None:
    content = {"type": "json_schema", "json_schema": {**SCHEMA, "x-guidance": {"whitespace_pattern": "[ \n]?"}}}
    tag = {"format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    form = StructuredOutputsParams(structural_tag=json.dumps(tag), **options)
    assert {text for text in TEXTS if accepts(form, f"<f>{text}</f>")} == expected


def test_options_of_the_request_replace_those_of_the_schema() -> None:
    schema = {**SCHEMA, "x-guidance": {"whitespace_pattern": "[ \n]?"}}
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    assert {text for text in TEXTS if accepts(form, text)} == {COMPACT, MORE}


def test_any_json_object_may_be_compact() -> None:
    form = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    assert {text for text in TEXTS if accepts(form, text)} == {COMPACT, MORE}


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, {SPACED}), ({"disable_any_whitespace": True}, {COMPACT}), ({"whitespace_pattern": " ?"}, {COMPACT, SPACED})],
    ids=["spaced", "compact", "either"],
)
def test_options_replace_the_spacing_of_an_answer_beside_tools(options: dict[str, Any], expected: set[str]) -> None:
    given = StructuredOutputsParams(json=SCHEMA, disable_additional_properties=True, **options)
    expression = json_expression(json.loads(given.json), given.json_options)
    form = StructuredOutputsParams(grammar=f"start: {expression}")
    assert {text for text in TEXTS if accepts(form, text)} == expected


def test_a_wrong_whitespace_pattern_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs.json: whitespace_pattern: .*unclosed"):
        accepts(StructuredOutputsParams(json=SCHEMA, whitespace_pattern="["), COMPACT)
