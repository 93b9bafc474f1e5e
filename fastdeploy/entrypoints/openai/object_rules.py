# SPDX-License-Identifier: Apache-2.0
"""Rules of objects inside a body, such as the items of a conversation: which types and keys are honoured or refused.

A protocol declares its objects here once. The tables check requests, are shown in the documentation, and are compared
with the types of the official clients by tests.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import shorten, to_integer
from fastdeploy.core.notes import note_once
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.field_rules import FieldRules, without_indices
from fastdeploy.entrypoints.openai.unknown_fields import IGNORED_FIELDS


@dataclass(frozen=True)
class ObjectRules(FieldRules):
    """What happens to the keys of an object.

    Attributes:
        honoured: key -> what it does.
        required: keys that must be there and not null.
    """

    honoured: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    def read(self, place: str, given: Any, ignores_unknown: bool = False) -> dict[str, Any]:
        """Return the honoured keys that are not null.

        Args:
            place: the object's field, such as `input[3]`.
            ignores_unknown: leave unknown keys out and log them (--ignore-unknown-fields).

        Raises:
            InvalidRequestError: it is no object, a required key is missing, or a key has a wrong value.
            ApiError: 400, a key is unknown, or refused and its value requests something.
        """
        if not isinstance(given, Mapping):
            raise InvalidRequestError(place, f"expected an object, got {shorten(given)}")
        used = {}
        for key, value in given.items():
            if value is None:
                continue
            if key in self.honoured:
                used[key] = value
            elif key in self.refused:
                self._check_refused(place, key, value)
            elif key in self.without_effect:
                self.note(f"{place}.{key}", key, value)
            else:
                if not ignores_unknown:
                    raise self._unknown_key(place, key)
                IGNORED_FIELDS.record(f"{without_indices(place)}.{key}")
        for key in self.required:
            if key not in used:
                raise InvalidRequestError(f"{place}.{key}", "is missing")
        return used

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the honoured keys, for the OpenAPI document."""
        properties = {key: {"description": text} for key, text in self.honoured.items()}
        return {"type": "object", "properties": properties, "required": list(self.required)}

    def _check_refused(self, place: str, key: str, value: Any) -> None:
        reason, neutral = self.refused[key]
        if not is_neutral(value, neutral):
            raise _unsupported(f"{place}.{key}", reason)

    def _unknown_key(self, place: str, key: str) -> ApiError:
        nearest = difflib.get_close_matches(key[:64], [*self.honoured, *self.refused, *self.without_effect], n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        name = f"{place}.{key[:64]}"
        return ApiError(400, f"{name}: unknown field{hint}", param=name, code="unknown_parameter")


@dataclass(frozen=True)
class TypeRules:
    """What happens to objects of each `type` at one place of a body.

    Attributes:
        honoured: type -> the rules of its keys.
        refused: type -> why it is refused and what to do instead.
        default: the type of an object without one; empty if every object needs one.
        left_out: type -> why a request may be answered as if objects of this type were not there. `read` refuses
            them: whoever leaves them out asks `leaves_out` before.
    """

    honoured: Mapping[str, ObjectRules]
    refused: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)

    def is_left_out(self, given: Any) -> bool:
        """Return whether an object may be left out because of its type."""
        kind = given.get("type") if isinstance(given, Mapping) else None
        return isinstance(kind, str) and kind in self.left_out

    def leaves_out(self, what: str, given: Any) -> bool:
        """Return whether an object is left out because of its type; the log says so once for each type.

        Args:
            what: the objects, in the log's words.
        """
        if not self.is_left_out(given):
            return False
        kind = given["type"]
        note_once(f"{what} of type {kind} are left out: {self.left_out[kind]}")
        return True

    def read(self, place: str, given: Any, ignores_unknown: bool = False) -> tuple[str, dict[str, Any]]:
        """Return the type of an object and its honoured keys that are not null; see `ObjectRules.read`.

        Raises:
            InvalidRequestError: it is no object, its type is unknown, or a required key is missing.
            ApiError: 400, the type or one of the keys is refused, or a key is unknown.
        """
        if not isinstance(given, Mapping):
            raise InvalidRequestError(place, f"expected an object, got {shorten(given)}")
        kind = given.get("type")
        if kind is None and self.default:
            kind = self.default
        unsupported = {**self.refused, **self.left_out}
        if not isinstance(kind, str) or (kind not in self.honoured and kind not in unsupported):
            known = ", ".join(self.honoured)
            raise InvalidRequestError(f"{place}.type", f"expected one of {known}, got {shorten(kind)}")
        if kind in unsupported:
            raise _unsupported(f"{place}.type", f"{kind} is not supported: {unsupported[kind]}")
        return kind, self.honoured[kind].read(place, given, ignores_unknown)

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the types that are accepted, for the OpenAPI document."""
        schemas = []
        for name, rules in self.honoured.items():
            schema = rules.schema()
            schema["properties"]["type"] = {"const": name}
            schema["required"] += ["type"] if name != self.default else []
            schemas.append(schema)
        if self.left_out:
            kinds = {"enum": list(self.left_out), "description": "objects of these types are left out"}
            schemas.append({"type": "object", "properties": {"type": kinds}, "required": ["type"]})
        return {"anyOf": schemas}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether a value of a refused field requests nothing; true and 1 are different values."""
    value = to_integer(value)
    return any(type(value) is type(one) and value == one for one in map(to_integer, neutral))


def _unsupported(name: str, reason: str) -> ApiError:
    return ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")
