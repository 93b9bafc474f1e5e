# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as applications use them, requests with them, and the check of an answer.

Each schema is bounded, so that the output of any model ends.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema

from fastdeploy import GuidedDecodingParams, SamplingParams
from fastdeploy.core.outputs import CompletionOutput

HEAD = "import json\n\n\ndef load():\n    # the answer as JSON:\n    return "


def text(limit: int) -> dict[str, Any]:
    """Return the schema of a string."""
    return {"type": "string", "maxLength": limit}


def integer(low: int, high: int) -> dict[str, Any]:
    """Return the schema of an integer."""
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: int, high: int) -> dict[str, Any]:
    """Return the schema of a number with at most two decimal places."""
    return {"type": "number", "minimum": low, "maximum": high, "multipleOf": 0.25}


def record(optional: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def array(items: Any, low: int, high: int) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


_POINT = record(x=number(-1, 1), y=number(0, 10))

SCHEMAS: dict[str, dict[str, Any]] = {
    "person": record(
        name=text(12), age=integer(0, 120), email={"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.org$"}
    ),
    "order": record(
        id={"type": "string", "pattern": "^ORD-[0-9]{6}$"},
        lines=array(record(sku=text(8), quantity=integer(1, 99), price=number(0, 999)), 1, 3),
        status={"enum": ["open", "paid", "shipped", "returned"]},
    ),
    "tree": {
        "$ref": "#/$defs/n0",
        "$defs": {
            "n0": record(label=text(4), children=array({"$ref": "#/$defs/n1"}, 0, 2)),
            "n1": record(label=text(4), children=array({"$ref": "#/$defs/leaf"}, 0, 2)),
            "leaf": record(label=text(4)),
        },
    },
    "shape": {
        "oneOf": [
            record(kind={"const": "circle"}, center=_POINT, radius=number(0, 5)),
            record(kind={"const": "polygon"}, points=array(_POINT, 3, 4)),
        ]
    },
    "value": {"anyOf": [integer(-5, 5), text(6), {"type": "null"}, {"type": "boolean"}, array(integer(0, 9), 0, 3)]},
    "calendar": record(
        optional=("notes",),
        day={"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])$"},
        at={"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
        guests=array(text(10), 0, 3),
        notes=text(20),
    ),
    "unicode": record(größe=integer(30, 60), 色=array({"enum": ["rot", "grün", "青", "😀"]}, 2, 2)),
    "options": record(optional=("a", "b", "c"), a=integer(0, 9), b={"type": "boolean"}, c=text(5)),
    "sentiment": record(label={"enum": ["positive", "negative", "neutral"]}, score=number(0, 1)),
    "matrix": array(array(integer(0, 99), 3, 3), 3, 3),
    "network": record(
        host={"type": "string", "format": "ipv4"}, port=integer(1, 65535), id={"type": "string", "format": "uuid"}
    ),
    "call": record(
        name={"enum": ["search", "open", "close"]},
        arguments={
            "anyOf": [
                record(query=text(16), limit=integer(1, 20)),
                record(path={"type": "string", "pattern": "^(/[a-z]{1,6}){1,3}$"}),
            ]
        },
    ),
    "merged": {
        "allOf": [{"type": "object", "properties": {"a": integer(0, 9)}, "required": ["a"]}, record(a={}, b=text(5))]
    },
}


def make_params(count: int, temperature: float) -> list[tuple[str, SamplingParams]]:
    """Return (name of the schema, sampling parameters) of each request."""
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(count)]
    common = SamplingParams(temperature=temperature, max_tokens=900)
    return [
        (name, replace(common, seed=i, guided_decoding=GuidedDecodingParams(json=SCHEMAS[name])))
        for i, name in enumerate(names)
    ]


def is_valid(name: str, output: CompletionOutput) -> bool:
    """Return True for a complete answer that conforms to its schema."""
    if output.finish_reason != "stop":
        return False
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=formats).is_valid(json.loads(output.text))
