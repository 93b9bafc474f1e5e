# SPDX-License-Identifier: Apache-2.0
"""Schemas with integers beyond 2^53, of which doubles express only some: single values, and schemas at random."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.structured_output.source import make_source
from tests.structured_output.schema_grammars import allowed_texts, allows, compile_form

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
NEIGHBORS = [2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**25, 0, 7]
TEXTS = [*map(str, NEIGHBORS), "9007199254740993.5", "9007199254740992.5", "9007199254740994.0", "null", '"a"', "true"]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"const": 9007199254740993}, ["9007199254740993"]),
        ({"enum": [9007199254740993, 7, "a", None]}, ["9007199254740993", "7", "null", '"a"']),
        ({"enum": [9007199254740993, 7, 2**63], "type": "integer", "maximum": 2**60}, ["9007199254740993", "7"]),
        (INT64, [str(n) for n in NEIGHBORS if -(2**63) <= n < 2**63]),
        ({**INT64, "type": ["integer", "null"]}, [*(str(n) for n in NEIGHBORS if -(2**63) <= n < 2**63), "null"]),
        ({"type": "integer", "exclusiveMinimum": 2**53 + 1}, [str(n) for n in NEIGHBORS if n > 2**53 + 1]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, [str(n) for n in NEIGHBORS if n > 2**53]),
        (
            {"type": "integer", "minimum": 2**53 + 1, "exclusiveMaximum": 2**63},
            [str(2**53 + n) for n in (1, 2)] + [str(2**63 - 1)],
        ),
        ({"type": "integer", "maximum": 1e25, "minimum": 2**63}, [str(2**63), str(10**25)]),
        (
            {"type": "number", "minimum": 2**53 + 1, "maximum": 2**53 + 2},
            [str(2**53 + 1), str(2**53 + 2), "9007199254740993.5", "9007199254740994.0"],
        ),
        ({"maximum": -(2**63) - 1}, [str(-(2**63) - 1), "null", '"a"', "true"]),
        ({"anyOf": [{"const": 2**63}, {"type": "boolean"}]}, [str(2**63), "true"]),
    ],
    ids=str,
)
def test_digits_of_large_integers_are_exact(schema: dict[str, Any], expected: list[str]) -> None:
    assert allowed_texts(TEXTS, json=schema) == [text for text in TEXTS if text in expected]


def test_values_around_a_large_integer_keep_their_form() -> None:
    schema = {"const": {"a": [2**63, 1.5, "x"], "b": {}}}
    texts = ['{"a": [9223372036854775808, 1.5, "x"], "b": {}}', '{"a":[9223372036854775808,1.5,"x"],"b":{}}']
    wrong = ['{"b": {}, "a": [9223372036854775808, 1.5, "x"]}', '{"a": [9223372036854775807, 1.5, "x"], "b": {}}']
    assert allowed_texts([*texts, *wrong], json=schema) == texts
    assert allowed_texts(texts, json=schema, disable_any_whitespace=True) == texts[1:]


def test_schemas_without_large_integers_are_left_to_llguidance() -> None:
    for schema in (
        {"const": 2**53},
        {"maximum": 2**53 - 1},
        {"const": 1e300},
        {"default": 2**60},
        {"$defs": {"a": INT64}},
    ):
        assert 'lark_grammar":null' in make_source(StructuredOutputsParams(json=schema), {}), schema


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        (
            {"properties": {"p": {"$ref": "#/$defs/id"}}, "$defs": {"id": INT64}},
            r"properties\.p\.\$ref: is not supported",
        ),
        ({"items": {"allOf": [INT64]}}, r"items\.allOf: is not supported"),
        ({"patternProperties": {"^a": INT64}}, "patternProperties: is not supported"),
        ({"anyOf": [{"if": INT64}]}, r"anyOf\[0\]\.if: is not supported"),
        ({"oneOf": [INT64, {"type": "null"}]}, "oneOf: is not supported"),
        ({"multipleOf": 10**20, "type": "integer"}, "multipleOf: is not supported"),
        ({**INT64, "multipleOf": 3}, "multipleOf: is not supported"),
        (
            {"properties": {"p": {"type": "integer", "minimum": 2**60, "maximum": 2**60 - 1}}},
            r"properties\.p\.minimum: no number",
        ),
        ({"type": "integer", "minimum": 2**60, "maximum": "x"}, "maximum: expected a number, got a string"),
        (
            {"type": "integer", "maximum": int("12345678" * 15)},
            "maximum: expected a bound with at most 100 significant",
        ),
        ({"prefixItems": [INT64, {"$ref": "#/prefixItems/0"}]}, r"prefixItems\[1\]\.\$ref: is not supported"),
        ({"$ref": "#id", "$defs": {"a": {"$anchor": "id", **INT64}}}, r"\$ref: is not supported"),
        (
            {"prefixItems": [INT64, {"$ref": "#/items"}], "items": {}},
            r"prefixItems\[1\]\.\$ref: expected a reference to",
        ),
    ],
    ids=str,
)
def test_ways_to_large_integers_that_cannot_be_followed_are_refused(schema: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^structured_outputs.json: {error}"):
        make_source(StructuredOutputsParams(json=schema), {})


def test_other_parts_refer_to_definitions() -> None:
    schema = {
        "type": "object",
        "properties": {"id": INT64, "tag": {"$ref": "#/$defs/tag"}},
        "$defs": {"tag": {"enum": ["x"]}},
        "required": ["id", "tag"],
        "additionalProperties": False,
    }
    texts = ['{"id": 9223372036854775807, "tag": "x"}', '{"id": 9223372036854775807, "tag": "y"}', '{"id": 5}']
    assert allowed_texts(texts, json=schema) == texts[:1]


def test_grammars_are_not_longer_than_their_schemas_by_much() -> None:
    items = {"type": "array", "prefixItems": [INT64] * 1500}
    assert len(make_source(StructuredOutputsParams(json=items), {})) < 400_000
    parts = {f"p{i}": {"$ref": "#/$defs/text"} for i in range(900)}
    schema = {"properties": {"id": INT64, **parts}, "$defs": {"text": {"const": "x" * 20_000}}}
    with pytest.raises(InvalidRequestError, match=r"properties\.p[0-9]+: makes a grammar of more than 524288"):
        make_source(StructuredOutputsParams(json=schema), {})


class Generator:
    """Makes schemas with large integers, and values that many of them allow.

    Names come in one order everywhere, because the order of properties is that of the schema.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self) -> int:
        return self._random.choice([2**53, 2**63, -(2**63), 2**64, -(2**53), 10**25]) + self._random.randint(-2, 2)

    def schema(self, depth: int) -> Any:
        match self._random.randrange(4) if depth else 4:
            case 0:
                return self._object(depth - 1)
            case 1:
                few, many = self._random.randint(0, 2), self._random.randint(2, 4)
                return {"type": "array", "items": self.schema(depth - 1), "minItems": few, "maxItems": many}
            case 2:
                first = [self.schema(depth - 1) for _ in range(self._random.randint(1, 3))]
                rest = self._random.choice([False, True, self.schema(depth - 1)])
                return {"type": ["array", "null"], "prefixItems": first, "items": rest}
            case 3:
                return {"anyOf": [self.schema(depth - 1) for _ in range(self._random.randint(1, 3))]}
        return self._leaf()

    def value(self, schema: Any) -> Any:
        """Return a value of which most parts follow the schema."""
        if isinstance(schema, bool) or self._random.random() < 0.1:
            return self._random.choice([None, True, "a", self.number(), [], {}, 5, [self.number()]])
        if "anyOf" in schema:
            return self.value(self._random.choice(schema["anyOf"]))
        if "properties" in schema:
            schemas = {**schema["properties"], "y": schema["additionalProperties"]}
            return {name: self.value(part) for name, part in schemas.items() if self._random.random() < 0.8}
        if "items" in schema:
            parts = [*schema.get("prefixItems", []), *[schema["items"]] * 4]
            return [self.value(part) for part in parts[: self._random.randint(0, 4)]]
        values = [schema["const"]] if "const" in schema else schema.get("enum") or [schema[name] for name in schema]
        value = self._random.choice(values)
        return value + self._random.randint(-2, 2) if isinstance(value, int) else value

    def _object(self, depth: int) -> dict[str, Any]:
        names = sorted(self._random.sample(["a", "b", "c", "é"], self._random.randint(1, 4)))
        return {
            "type": "object",
            "properties": {name: self.schema(depth) for name in names},
            "required": [name for name in names if self._random.random() < 0.5],
            "additionalProperties": self._random.choice([True, False, self.schema(depth)]),
        }

    def _leaf(self) -> dict[str, Any]:
        low, high = sorted([self.number(), self.number()])
        return self._random.choice(
            [
                {"const": low},
                {"enum": [low, "a", 5, None, [high]]},
                {"type": "integer", "minimum": low, "exclusiveMaximum": high + 1},
                {"type": "number", "exclusiveMinimum": low - 1, "maximum": high},
                {"type": ["integer", "string"], "exclusiveMaximum": high},
                {"minimum": low},
                {"type": "string"},
            ]
        )


def test_random_schemas_allow_exactly_the_values_that_json_schema_allows() -> None:
    counts = {True: 0, False: 0}
    for seed in range(250):
        generator = Generator(seed)
        schema = generator.schema(seed % 4)
        form, reference = compile_form(json=schema), jsonschema.Draft202012Validator(schema)
        for _ in range(10):
            value = generator.value(schema)
            is_valid = reference.is_valid(value)
            text = json.dumps(value, ensure_ascii=False)
            assert allows(form, text) is is_valid, (text, json.dumps(schema))
            counts[is_valid] += 1
    assert min(counts.values()) > 400
