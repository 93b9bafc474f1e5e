# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document in few lines: its paths with their statuses, its fields with their types and ranges."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastdeploy.entrypoints.openai.app import ENDPOINTS
from fastdeploy.entrypoints.openai.openapi import build_document

RELEASED = Path(__file__).parent / "data" / "openapi_fields.txt"
RENEW = "python -m scripts.make_request_tables --renew-openapi"
Schema = dict[str, Any]


def make_document(has_flags: bool = True) -> Schema:
    """Return the document of a server without API keys, with the endpoints that need a flag or without them."""
    return build_document([endpoint for endpoint in ENDPOINTS if has_flags or not endpoint.flag])


def document_lines(document: Schema) -> Iterator[str]:
    """Yield one line per operation and one per field."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"{method.upper()} {path}: {' '.join(operation['responses'])}"
    for name, schema in document["components"]["schemas"].items():
        for field, part in schema["properties"].items():
            is_required = " required" if field in schema.get("required", ()) else ""
            yield f"{name}.{field}: {', '.join(filter(None, (type_text(part), range_text(part))))}{is_required}"


def type_text(schema: Schema) -> str:
    """Return the types of a schema."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(type_text(part) for part in schema["anyOf"])
    types = schema.get("type", "any" if "enum" not in schema else "")
    text = types if isinstance(types, str) else " or ".join(types)
    return f"{text} of {type_text(schema['items'])}" if schema.get("items") else text


def range_text(schema: Schema) -> str:
    """Return the values that a schema allows, empty if its types say all."""
    texts = []
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None:
        texts.append(f"at least {_number(low)}" if high is None else f"{_number(low)} to {_number(high)}")
    if "maxItems" in schema:
        texts.append(f"up to {schema['maxItems']} items")
    if "maxLength" in schema:
        texts.append(f"{schema.get('minLength', 0)} to {schema['maxLength']} characters")
    if "enum" in schema:
        texts.append("one of " + ", ".join(str(value) for value in schema["enum"] if value is not None))
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and range_text(values):
        texts.append(f"values {range_text(values)}")
    return ", ".join(texts)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def changes_since_release() -> list[str]:
    """Return the lines that were removed (-) and added (+) since the last released document."""
    released = RELEASED.read_text().splitlines()
    lines = difflib.unified_diff(released, list(document_lines(make_document())), lineterm="", n=0)
    return [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]
