# SPDX-License-Identifier: Apache-2.0
"""Where a JSON schema has numbers that doubles cannot express, and which values the keywords beside them allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from fastdeploy.core.json_schema import DEFINITIONS, SchemaError, join_path, subschemas
from fastdeploy.core.json_types import json_type

MAX_DOUBLE_INTEGER = 1 << 53  # up to here, doubles express every integer
LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
UPPER_BOUNDS = ("maximum", "exclusiveMaximum")
BOUNDS = (*LOWER_BOUNDS, *UPPER_BOUNDS)
_DEFINITION_PATHS = tuple(f"{name}." for name in DEFINITIONS)
KINDS = ("null", "boolean", "number", "string", "array", "object")


def has_large_numbers(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether a schema, or one that it refers to, has a number beyond 2^53 that restricts the output.

    Args:
        root: the schema that has the definitions.
    """
    parts, seen = [schema], set[str]()
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            continue
        if _restricts_large_numbers(part):
            return True
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:  # chains of references are longer than stacks
            seen.add(reference)
            parts += _targets(reference, root)
        parts += [child for path, child in subschemas(part) if not path.startswith(_DEFINITION_PATHS)]
    return False


def _restricts_large_numbers(schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword of a schema itself has a number beyond 2^53."""
    values = schema.get("enum")
    return (
        any(_is_large_bound(schema.get(name)) for name in (*BOUNDS, "multipleOf"))
        or has_large_value(schema.get("const"))
        or (isinstance(values, list) and any(map(has_large_value, values)))
    )


def _targets(reference: str, root: Mapping[str, Any]) -> list[Any]:
    """Return what a reference may refer to: all definitions if it is not a JSON pointer."""
    if reference != "#" and not reference.startswith("#/"):
        return [part for name in DEFINITIONS if isinstance(root.get(name), Mapping) for part in root[name].values()]
    target: Any = root
    for key in reference.split("/")[1:]:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            target = target.get(key) if isinstance(target, Mapping) else None
    return [target]


def references(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the references in a schema and its definitions, each with its path."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield "$ref", schema["$ref"]
        for path, part in subschemas(schema):
            for rest, reference in references(part):
                yield join_path(path, rest), reference


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def has_large_value(value: Any) -> bool:
    """Return whether a value is or has an integer beyond 2^53; other numbers are doubles in all readers of JSON."""
    if isinstance(value, Mapping):
        return any(map(has_large_value, value.values()))
    if isinstance(value, list):
        return any(map(has_large_value, value))
    return is_number(value) and isinstance(value, int) and abs(value) > MAX_DOUBLE_INTEGER


def _is_large_bound(value: Any) -> bool:
    """Return whether a bound is one that doubles cannot express, or from which the next integer is none."""
    return is_number(value) and abs(value) >= MAX_DOUBLE_INTEGER


def kinds_of(path: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema allows."""
    declared = schema.get("type", list(KINDS))
    kinds = declared if isinstance(declared, list) else [declared]
    for kind in kinds:
        if kind not in (*KINDS, "integer"):
            raise SchemaError(join_path(path, "type"), f"expected {', '.join(KINDS)} or integer")
    return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]


def has_kind(value: Any, kinds: Collection[str]) -> bool:
    """Return whether a value has one of these types."""
    if is_number(value):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    names = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
    return names[type(value)] in kinds


def bound(path: str, schema: Mapping[str, Any], name: str) -> Decimal:
    """Return a bound exactly as the client wrote it, if it has at most 17 digits or is an integer."""
    value = schema[name]
    if not is_number(value):
        raise SchemaError(join_path(path, name), f"expected a number, got {json_type(value)}")
    return Decimal(repr(value))


def is_within_bounds(path: str, value: float, schema: Mapping[str, Any]) -> bool:
    """Return whether a number is within the bounds of a schema."""
    given, limits = Decimal(repr(value)), {name: bound(path, schema, name) for name in BOUNDS if name in schema}
    return (
        ("minimum" not in limits or given >= limits["minimum"])
        and ("exclusiveMinimum" not in limits or given > limits["exclusiveMinimum"])
        and ("maximum" not in limits or given <= limits["maximum"])
        and ("exclusiveMaximum" not in limits or given < limits["exclusiveMaximum"])
    )
