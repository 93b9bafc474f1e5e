# SPDX-License-Identifier: Apache-2.0
"""Constraints under vLLM's name: one kind, its options, and which field an error names."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fastdeploy import GuidedDecodingParams, InvalidRequestError, SamplingParams, StructuredOutputsParams
from fastdeploy.core.json_schema import close_objects
from fastdeploy.core.notes import note_once

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def error_of(name: str = "structured_outputs", **given: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: given})
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "structured_outputs: expected exactly one kind of constraint, got none"),
        ({"json_object": False}, "structured_outputs: expected exactly one kind of constraint, got none"),
        (
            {"json": {}, "regex": "a"},
            "structured_outputs: expected exactly one kind of constraint, got ['json', 'regex']",
        ),
        ({"json": 3}, "structured_outputs.json: expected a JSON object or its text, got a number"),
        ({"json": "{"}, "structured_outputs.json: is not valid JSON"),
        ({"json": False}, "structured_outputs.json: no value matches the schema false"),
        ({"regex": ""}, "structured_outputs.regex: expected a non-empty string"),
        ({"choice": []}, "structured_outputs.choice: expected a non-empty list of non-empty strings"),
        ({"grammar": 3}, "structured_outputs.grammar: expected a non-empty string"),
        ({"structural_tag": []}, "structured_outputs.structural_tag: expected a JSON object or its text, got an array"),
        ({"json_object": 3}, "structured_outputs.json_object: expected true or false, got a number"),
        ({"jsn": {}}, "structured_outputs.jsn: unknown key; did you mean 'json'?"),
        ({"source": "x"}, "structured_outputs.source: unknown key; known keys: json, regex, choice, grammar, "),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern: needs json or structural_tag or json_object, got regex",
        ),
        (
            {"grammar": "a", "disable_any_whitespace": True},
            "structured_outputs.disable_any_whitespace: needs json or structural_tag or json_object, got grammar",
        ),
        (
            {"json_object": True, "disable_additional_properties": True},
            "structured_outputs.disable_additional_properties: needs json or structural_tag, got json_object",
        ),
        ({"json": {}, "disable_fallback": 1}, "structured_outputs.disable_fallback: expected true or false, got 1"),
        (
            {"json": {}, "backend": "xgramar"},
            "structured_outputs.backend: expected one of auto, guidance, llguidance, xgrammar, outlines, "
            "lm-format-enforcer, got 'xgramar'",
        ),
        ({"json": {}, "backend": ["auto"]}, "structured_outputs.backend: expected one of auto, "),
        ({"json": {}, "whitespace_pattern": ""}, "structured_outputs.whitespace_pattern: expected a non-empty string"),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "structured_outputs.whitespace_pattern: contradicts disable_any_whitespace",
        ),
    ],
)
def test_errors_name_the_field(given: dict[str, Any], expected: str) -> None:
    assert error_of(**given).startswith(expected)


def test_null_in_an_object_of_a_request_counts_as_absent() -> None:
    given = {"json": None, "regex": "a", "disable_any_whitespace": None, "whitespace_pattern": None}
    form = StructuredOutputsParams.from_fields("structured_outputs", given)
    assert (form.kind, form.arguments) == ("regex", {"regex": "a"})


def test_options_that_request_nothing_go_with_every_kind() -> None:
    options = {"disable_any_whitespace": False, "disable_additional_properties": False, "disable_fallback": True}
    assert StructuredOutputsParams(choice=["a"], **options).arguments == {"choice": ["a"]}


@pytest.mark.parametrize(
    ("params", "name"), [(StructuredOutputsParams, "structured_outputs"), (GuidedDecodingParams, "guided_decoding")]
)
@pytest.mark.parametrize("backend", ["xgrammar", "outlines", "lm-format-enforcer"])
def test_another_backend_changes_nothing_and_is_logged_once(
    params: type[StructuredOutputsParams], name: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    note_once.cache_clear()
    with caplog.at_level(logging.INFO, "fastdeploy.server"):
        forms = [params(regex="a", backend=backend) for _ in range(2)]
    assert forms == [params(regex="a")] * 2
    assert caplog.messages == [f"{name}.backend {backend} has no effect: forms are compiled by llguidance"]


@pytest.mark.parametrize("backend", ["auto", "guidance", "llguidance"])
def test_the_backend_that_there_is_may_be_named(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fastdeploy.server"):
        form = StructuredOutputsParams.from_fields("structured_outputs", {"regex": "a", "backend": backend})
    assert (form, caplog.messages) == (StructuredOutputsParams(regex="a"), [])


def test_forms_with_different_options_are_different() -> None:
    forms = [
        StructuredOutputsParams(json=POINT),
        StructuredOutputsParams(json=POINT, disable_any_whitespace=True),
        StructuredOutputsParams(json=POINT, whitespace_pattern=" "),
        StructuredOutputsParams(json=POINT, disable_additional_properties=True),
    ]
    assert len({str(form.arguments) for form in forms}) == 4


def test_both_names_of_sampling_params_constrain_and_only_one_is_allowed() -> None:
    new, old = StructuredOutputsParams(regex="a"), GuidedDecodingParams(regex="a")
    assert SamplingParams(structured_outputs=new).form is new
    assert SamplingParams(guided_decoding=old).form is old
    assert (new.field, old.field) == ("structured_outputs.regex", "guided_regex")
    assert SamplingParams().form is None
    with pytest.raises(InvalidRequestError, match="guided_decoding: cannot be combined with structured_outputs"):
        SamplingParams(structured_outputs=new, guided_decoding=old)
    assert SamplingParams(guided_decoding=old).without_form().form is None
    assert SamplingParams(structured_outputs=new).without_form().form is None


def test_closing_objects_changes_schemas_only() -> None:
    schema = {
        "type": "object",
        "properties": {
            "properties": {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
            "open": {"properties": {"x": {}}, "additionalProperties": {"properties": {}}},
            "any": {"type": "object"},
            "list": {"items": {"anyOf": [{"properties": {}}, {"enum": [{"properties": {}}]}]}},
        },
        "$defs": {"d": {"properties": {"y": True}}},
        "default": {"properties": {}},
    }
    assert close_objects(schema) == {
        "type": "object",
        "properties": {
            "properties": {
                "type": "object",
                "patternProperties": {"^a": {"type": "integer"}},
                "additionalProperties": False,
            },
            "open": {
                "properties": {"x": {}},
                "additionalProperties": {"properties": {}, "additionalProperties": False},
            },
            "any": {"type": "object"},
            "list": {
                "items": {
                    "anyOf": [{"properties": {}, "additionalProperties": False}, {"enum": [{"properties": {}}]}],
                }
            },
        },
        "$defs": {"d": {"properties": {"y": True}, "additionalProperties": False}},
        "default": {"properties": {}},
        "additionalProperties": False,
    }
    assert close_objects(True) is True
