# SPDX-License-Identifier: Apache-2.0
"""Changes JSON schemas."""

from __future__ import annotations

from typing import Any

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else"),
)


def close_objects(schema: Any) -> Any:
    """Return a JSON schema whose objects have no properties beyond those that it names.

    Every part that has `properties` or `patternProperties`, and no `additionalProperties`, gets
    `additionalProperties: false`. What is not a schema, such as the values of `enum`, stays as it is.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            result[name] = {key: close_objects(part) for key, part in value.items()}
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            result[name] = [close_objects(part) for part in value]
        elif name in _SCHEMAS:
            result[name] = close_objects(value)
    if "properties" in schema or "patternProperties" in schema:
        result.setdefault("additionalProperties", False)
    return result
