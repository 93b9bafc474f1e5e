# SPDX-License-Identifier: Apache-2.0
"""Walks through JSON schemas: what is a schema in a schema, and what only looks like one, such as a value of `enum`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

DEFINITIONS = ("$defs", "definitions")
MAX_SHOWN_NAME = 64  # characters of a name in the path of an error
_SCHEMA_MAPS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else"),
)


class SchemaError(Exception):
    """A part of a JSON schema cannot be followed.

    Attributes:
        path: where the part is in the schema, such as `properties.p.anyOf[0]`; "" for the whole schema.
        message: what is wrong.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas of a schema, each with its path in the schema."""
    for name, value in schema.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            for key, part in value.items():
                yield f"{name}.{key[:MAX_SHOWN_NAME]}", part
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            for i, part in enumerate(value):
                yield f"{name}[{i}]", part
        elif name in _SCHEMAS:
            yield name, value


def map_subschemas(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy of a schema in which each direct subschema is replaced by what `change` makes of it."""
    result = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            result[name] = {key: change(part) for key, part in value.items()}
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            result[name] = [change(part) for part in value]
        elif name in _SCHEMAS:
            result[name] = change(value)
    return result


@contextmanager
def within(path: str) -> Iterator[None]:
    """Put the path of a part before those of the errors of the block, which looks at that part only."""
    try:
        yield
    except SchemaError as error:
        raise SchemaError(join_path(path, error.path), error.message) from None


def join_path(path: str, name: str) -> str:
    """Return the path of a part of the schema at `path`."""
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema with the definitions of the schema that contains it."""
    definitions = {name: root[name] for name in DEFINITIONS if name in root}
    return {**definitions, **schema} if isinstance(schema, dict) else schema


def close_objects(schema: Any) -> Any:
    """Return a JSON schema whose objects have no properties beyond those that it names.

    Every part that has `properties` or `patternProperties`, and no `additionalProperties`, gets
    `additionalProperties: false`. What is not a schema, such as the values of `enum`, stays as it is.
    """
    if not isinstance(schema, dict):
        return schema
    result = map_subschemas(schema, close_objects)
    if "properties" in schema or "patternProperties" in schema:
        result.setdefault("additionalProperties", False)
    return result
