# SPDX-License-Identifier: Apache-2.0
"""Errors of schemas name the part and the keyword, and show no line of a grammar that the server has made."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.structured_output import schema_errors
from fastdeploy.structured_output.schema_errors import find_schema_error
from fastdeploy.structured_output.source import LIMITS
from fastdeploy.structured_output.trial_process import TrialProcess
from tests.structured_output.test_structural_tag import compiler

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"not": {"type": "integer"}}, "not"),
    ({"if": {"type": "integer"}, "then": {}}, "if"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "string", "pattern": "("}, "pattern: .*unclosed group"),
    ({"type": "string", "pattern": "a(?=b)"}, "pattern: .*look-around"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum .* maximum"),
    ({"type": "string", "format": 5}, "'format', got 5"),
    ({"type": "colour"}, "Invalid type: colour"),
    ({"type": "integer", "maximum": "x"}, "'maximum', got \"x\""),
    ({"enum": "a"}, "enum"),
    ({"enum": []}, "enum: "),
    ({"multipleOf": 0}, "multipleOf: "),
    ({"$ref": "#/$defs/missing"}, r"\$ref: .*/\$defs/missing"),
    ({"type": "object", "minProperties": 2, "properties": {"a": {}}}, "minProperties: "),
    ({"type": "object", "patternProperties": {"^a": {}, "^ab": {}}}, "patternProperties: "),
    ({"type": "integer", "maximum": 2**60, "multipleOf": 3}, "multipleOf"),
]
PLACES: list[tuple[str, Any]] = [
    ("", lambda part: part),
    ("properties.p", lambda part: {"type": "object", "properties": {"ok": {}, "p": part}, "required": ["p"]}),
    ("items", lambda part: {"type": "array", "items": part, "minItems": 1}),
    ("prefixItems[1]", lambda part: {"type": "array", "prefixItems": [{}, part], "minItems": 2}),
    ("allOf[0]", lambda part: {"allOf": [part]}),
    ("$defs.d", lambda part: {"$ref": "#/$defs/d", "$defs": {"d": part, "e": {}}}),
    (
        "properties.p.items",
        lambda part: {
            "type": "object",
            "properties": {"p": {"items": part, "minItems": 1, "type": "array"}},
            "required": ["p"],
        },
    ),
]


def error_of(**form: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        compiler()[1].compile(StructuredOutputsParams(**form))
    error = caught.value
    assert not re.search(r"start:|%json|%lark|x-guidance|[0-9]\([0-9]+\):|\n", error.message), error
    return error


@pytest.mark.parametrize(("path", "wrap"), PLACES, ids=[path or "root" for path, _ in PLACES])
@pytest.mark.parametrize(("part", "reason"), WRONG, ids=str)
def test_errors_name_the_path_of_the_part_that_is_wrong(
    part: dict[str, Any], reason: str, path: str, wrap: Any
) -> None:
    if path == "allOf[0]" and 2**60 in part.values():
        path, reason = "allOf", "is not supported"
    if path == "$defs.d" and 2**60 in part.values():
        path, reason = "$ref", "is not supported"
    error = error_of(json=wrap(part))
    assert error.field == "structured_outputs.json"
    assert re.match(f"{re.escape(path)}.*{reason}" if path else reason, error.message) or (
        not path and re.search(reason, error.message)
    ), error


@pytest.mark.parametrize(("part", "reason"), WRONG, ids=str)
def test_errors_in_structural_tags_name_the_schema_and_the_part(part: dict[str, Any], reason: str) -> None:
    schema = {"type": "object", "properties": {"p": part}, "required": ["p"]}
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    error = error_of(structural_tag={"format": tag})
    assert error.field == "structured_outputs.structural_tag.format.content.schema"
    assert re.search(f"^properties\\.p.*{reason}", error.message), error


def test_errors_of_tools_name_the_field_of_the_schema() -> None:
    _, grammars = compiler()
    schemas = {
        "tools[0].function.parameters": "{}",
        "tools[2].function.parameters": '{"properties": {"p": {"not": {}}}}',
    }
    grammar = "\n".join(["start: a | b", *(f"{name}: %json {text}" for name, text in zip("ab", schemas.values()))])
    trial = TrialProcess()
    try:
        verdict = trial.run(
            grammars.vocabulary, StructuredOutputsParams(grammar=grammar, source="tools", schemas=schemas)
        )
    finally:
        trial.close()
    assert (verdict.field, verdict.message) == (
        "tools[2].function.parameters",
        'properties.p: Unimplemented keys: ["not"]',
    )


def test_an_error_that_is_no_schemas_keeps_the_field_and_hides_the_grammar() -> None:
    error = error_of(grammar='start: "a" missing', source="tools", schemas={"tools[0].function.parameters": "{}"})
    assert error.field == "tools"
    assert error.message == 'unknown name: "missing"'


def test_optional_parts_that_allow_nothing_are_not_blamed() -> None:
    empty = {"type": "integer", "minimum": 5, "maximum": 3}
    schema = {"type": "object", "properties": {"empty": empty, "wrong": {"not": {}}}}
    error = find_schema_error(schema, LIMITS)
    assert error is not None and str(error).startswith("properties.wrong: ")
    assert find_schema_error({"type": "object", "properties": {"empty": empty}}, LIMITS) is None


def test_the_part_is_found_among_many() -> None:
    texts = {f"p{i}": {"type": "string", "pattern": f"^a{i}.*$"} for i in range(400)}
    for wrong in ({"not": {}}, {"type": "integer", "minimum": 5, "maximum": 3}):
        for name in ("p0", "p100", "p399"):
            schema = {"type": "object", "properties": {**texts, name: {"items": wrong, "minItems": 1, "type": "array"}}}
            error = find_schema_error({**schema, "required": [name]}, LIMITS)
            assert error is not None and error.path == f"properties.{name}.items"


def test_the_search_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_errors, "MAX_SEARCH_S", -1.0)
    schema = {"type": "object", "properties": {"p": {"not": {}}}}
    assert str(find_schema_error(json.loads(json.dumps(schema)), LIMITS)) == 'Unimplemented keys: ["not"]'
