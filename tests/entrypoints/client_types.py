# SPDX-License-Identifier: Apache-2.0
"""Reads the parameter types of the official clients, with which the tables of a protocol are compared."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import typing_extensions

from fastdeploy.entrypoints.openai.field_rules import FieldRules
from fastdeploy.entrypoints.openai.object_rules import ObjectRules, TypeRules

WRAPPERS = (typing.Required, typing.NotRequired, typing.Annotated)
UNIONS = (typing.Union, types.UnionType)


def objects_in(kind: Any) -> list[type]:
    """Return the object types (typed dictionaries) in a type, such as those of a union or of the items of a list."""
    if typing_extensions.is_typeddict(kind):
        return [kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in WRAPPERS:
        return objects_in(arguments[0])
    return [found for part in arguments for found in objects_in(part)] if origin is not typing.Literal else []


def keys_of(model: type) -> dict[str, Any]:
    """Return the keys of an object type, as they are sent, with their types."""
    hints = typing.get_type_hints(model, include_extras=True)
    return {_sent_name(name, kind): kind for name, kind in hints.items()}


def type_names(model: type) -> tuple[str, ...]:
    """Return the values of the key `type` of an object type; none if it has no such key."""
    return tuple(value for value in literals(keys_of(model).get("type")) if value is not None)


def missing_types(rules: TypeRules, models: Iterable[type]) -> Iterator[str]:
    """Yield the types of a client that a table has not in exactly one class, and their keys that it has not so.

    Types of the table that no client has are yielded as well.
    """
    seen = set()
    for model in models:
        names = type_names(model) or (rules.default,)
        for name in names:
            seen.add(name)
            if sum(name in one for one in (rules.honoured, rules.refused, rules.left_out)) != 1:
                yield name
            elif name in rules.honoured:
                yield from (f"{name}.{key}" for key in missing_keys(rules.honoured[name], keys_of(model)))
    yield from (f"{name}: no client has it" for name in {*rules.honoured, *rules.refused, *rules.left_out} - seen)


def missing_keys(rules: ObjectRules, keys: Iterable[str]) -> Iterator[str]:
    """Yield the keys that a table has not in exactly one class."""
    yield from (key for key in keys if sum(key in one for one in _classes(rules, rules.honoured)) != 1)


def missing_fields(body: type, rules: FieldRules, keys: Iterable[str]) -> Iterator[str]:
    """Yield the keys of a client's body that are not in exactly one class: honoured, without effect, or refused."""
    honoured = getattr(body, "__struct_fields__", ())
    yield from (key for key in keys if sum(key in one for one in _classes(rules, honoured)) != 1)


def _classes(rules: FieldRules, honoured: Iterable[str]) -> tuple[Iterable[str], ...]:
    return tuple(honoured), rules.without_effect, rules.refused


def literals(kind: Any) -> Iterator[Any]:
    """Yield the literal values in a type, such as those of a union or of the items of a list."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        yield from arguments
    elif origin is not None:
        for part in arguments:
            yield from literals(part)


def _sent_name(name: str, kind: Any) -> str:
    """Return the alias of a key, if it is annotated with one."""
    for note in getattr(kind, "__metadata__", ()):
        if getattr(note, "alias", None):
            return str(note.alias)
    arguments = typing.get_args(kind) if typing.get_origin(kind) in WRAPPERS else ()
    return _sent_name(name, arguments[0]) if arguments else name
