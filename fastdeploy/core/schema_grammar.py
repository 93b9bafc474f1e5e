# SPDX-License-Identifier: Apache-2.0
r"""Expressions of JSON values in the Lark notation of llguidance.

A schema is `%json {...}`. llguidance reads its numbers as doubles, though, so a schema with integers beyond 2^53 is a
grammar of its own, `%lark {...}`: its numbers are terminals, the objects, arrays and alternatives that lead to them are
rules, and everything else is `%json {...}` in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy.core.json_schema import DEFINITIONS, SchemaError, join_path, with_definitions
from fastdeploy.core.large_numbers import (
    BOUNDS,
    LOWER_BOUNDS,
    UPPER_BOUNDS,
    bound,
    has_kind,
    has_large_numbers,
    has_large_value,
    is_number,
    is_within_bounds,
    kinds_of,
    references,
)
from fastdeploy.core.number_regex import (
    BoundError,
    greatest_integer,
    integers_from,
    integers_to,
    least_integer,
    numbers_from,
    numbers_to,
)

MAX_SPEC_CHARACTERS = 1 << 19
_NUMBER_KEYWORDS = (*BOUNDS, "multipleOf")
_ARRAY_KEYWORDS = ("prefixItems", "items", "additionalItems", "minItems", "maxItems")
_OBJECT_KEYWORDS = ("properties", "required", "additionalProperties")
_STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
_ANNOTATIONS = (
    *("$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "examples", "deprecated"),
    *("readOnly", "writeOnly", "contentMediaType", "contentEncoding", "x-guidance", *DEFINITIONS),
)
_FOLLOWED = frozenset(
    (
        *("type", "const", "enum", "anyOf"),
        *(*_NUMBER_KEYWORDS, *_ARRAY_KEYWORDS, *_OBJECT_KEYWORDS, *_STRING_KEYWORDS, *_ANNOTATIONS),
    )
)
_KEYWORDS_OF = {"number": _NUMBER_KEYWORDS, "array": _ARRAY_KEYWORDS, "object": _OBJECT_KEYWORDS}
_KEY = r"""/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/"""
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
_REASON = "beside or on the way to numbers beyond 2^53"


def json_expression(schema: Any, options: Mapping[str, Any]) -> str:
    """Return the expression of the JSON values that a schema allows.

    Args:
        schema: a schema that `prepare_schema` has returned.
        options: options of llguidance.

    Raises:
        SchemaError: the schema has a number beyond 2^53 at a place that cannot be followed.
    """
    if not has_large_numbers(schema, schema):
        return _json(schema, options)
    writer = _LarkWriter(schema, options)
    start = writer.expression("", schema)
    return "\n".join(["%lark {", f"start: {start}", *writer.rules, "}"])


def quoted(text: str) -> str:
    """Return a text as a terminal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def slashes_escaped(pattern: str) -> str:
    """Escape the slashes of a pattern that are not escaped yet, so that it may be put between slashes."""
    return _SLASH.sub(lambda match: match.group(1) or r"\/", pattern).replace("\n", r"\n")


class _LarkWriter:
    """Translates schemas to expressions and collects the rules that they refer to.

    In all methods, `path` is the path of `schema` in the root, for error messages.
    """

    def __init__(self, root: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._root = root
        self._options = options
        self.rules = [
            f"SEPARATOR: /{slashes_escaped(options.get('item_separator', ','))}/",
            f"COLON: /{slashes_escaped(options.get('key_separator', ':'))}/",
        ]
        self._gap, between = " ", options.get("whitespace_pattern")
        if between is None and options.get("whitespace_flexible", True):
            between = r"[\x20\x0a\x0d\x09]+"
        if between is not None:
            self._gap = " SPACE? "
            self.rules.append(f"SPACE: /{slashes_escaped(between)}/")
        self._comma = f"{self._gap}SEPARATOR{self._gap}"
        self._num_characters = 0  # of definitions, above all, which each part that refers to one repeats
        self._names: dict[tuple[str, str], str] = {}  # equal terminals would slow the lexer down

    def expression(self, path: str, schema: Any) -> str:
        if not has_large_numbers(schema, self._root):
            return self._leaf(path, schema)
        self._check_keywords(path, schema)
        if "const" in schema or "enum" in schema:
            return self._values(path, schema)
        if "anyOf" in schema:
            options = [self.expression(join_path(path, f"anyOf[{i}]"), s) for i, s in enumerate(schema["anyOf"])]
            return _one_of(options)
        return self._by_kind(path, schema)

    def _leaf(self, path: str, schema: Any) -> str:
        """Return the expression of a schema that llguidance can follow itself."""
        if any(references(schema)):
            schema = with_definitions(schema, self._root)
            for where, reference in references(schema):
                if not str(reference).startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
                    expected = f"a reference to {' or '.join(DEFINITIONS)}"
                    raise SchemaError(join_path(path, where), f"expected {expected} {_REASON}")
        expression = _json(schema, self._options)
        self._num_characters += len(expression)
        if self._num_characters > MAX_SPEC_CHARACTERS:
            raise SchemaError(path, f"makes a grammar of more than {MAX_SPEC_CHARACTERS} characters")
        return expression

    def _check_keywords(self, path: str, schema: Mapping[str, Any]) -> None:
        for keyword in schema:
            if keyword not in _FOLLOWED:
                raise SchemaError(join_path(path, keyword), f"is not supported {_REASON}")
        if "multipleOf" in schema:
            raise SchemaError(join_path(path, "multipleOf"), f"is not supported {_REASON}")
        exclusive = [name for name in ("const", "enum", "anyOf") if name in schema]
        if len(exclusive) > 1:
            raise SchemaError(join_path(path, exclusive[1]), f"is not supported beside {exclusive[0]} {_REASON}")
        if "anyOf" in schema:
            if not isinstance(schema["anyOf"], list) or not schema["anyOf"]:
                raise SchemaError(join_path(path, "anyOf"), "expected a non-empty array")
            if others := [name for name in schema if name not in ("anyOf", *_ANNOTATIONS)]:
                raise SchemaError(join_path(path, others[0]), f"is not supported beside anyOf {_REASON}")

    def _by_kind(self, path: str, schema: Mapping[str, Any]) -> str:
        """Return an expression with one alternative for each type that leads to a large number, and one for others."""
        kinds = kinds_of(path, schema)
        written: dict[str, str] = {}
        for kind in kinds:
            group = "number" if kind == "integer" else kind
            part = {name: schema[name] for name in _KEYWORDS_OF.get(group, ()) if name in schema}
            if has_large_numbers(part, self._root):
                written[kind] = self._of_kind(kind, path, schema)
        rest = [kind for kind in kinds if kind not in written]
        options = list(written.values())
        if rest:
            groups = {"number" if kind == "integer" else kind for kind in written}
            dropped = {name for group in groups for name in _KEYWORDS_OF[group]}
            others = {name: value for name, value in schema.items() if name not in (*dropped, *DEFINITIONS)}
            options.append(self._leaf(path, {**others, "type": rest}))
        return _one_of(options)

    def _of_kind(self, kind: str, path: str, schema: Mapping[str, Any]) -> str:
        if kind == "array":
            return self._array(path, schema)
        return self._object(path, schema) if kind == "object" else self._number(path, schema, kind == "integer")

    def _number(self, path: str, schema: Mapping[str, Any], is_integer: bool) -> str:
        _check_bounds(path, schema, is_integer)
        low, high = (integers_from, integers_to) if is_integer else (numbers_from, numbers_to)
        patterns = []
        for names, write in ((LOWER_BOUNDS, low), (UPPER_BOUNDS, high)):
            for name in names:
                if name in schema:
                    try:
                        patterns.append(write(bound(path, schema, name), name.startswith("exclusive")))
                    except BoundError as error:
                        raise SchemaError(join_path(path, name), str(error)) from None
        return self._rule("NUMBER", " & ".join(f"/{pattern}/" for pattern in patterns))

    def _values(self, path: str, schema: Mapping[str, Any]) -> str:
        """Return the expression of `const` or `enum`: large numbers are written, the others left to llguidance."""
        keyword = "const" if "const" in schema else "enum"
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        if not isinstance(values, list):
            raise SchemaError(join_path(path, "enum"), "expected an array")
        rest = {name: value for name, value in schema.items() if name not in (keyword, *_NUMBER_KEYWORDS)}
        kinds = kinds_of(path, schema)
        numbers = [value for value in values if is_number(value) and is_within_bounds(path, value, schema)]
        others = [value for value in values if not is_number(value)]
        written = [value for value in (*numbers, *others) if has_large_value(value) and has_kind(value, kinds)]
        if any(has_large_value(value) for value in others):
            self._check_alone(path, keyword, rest)
        left = [value for value in (*numbers, *others) if not has_large_value(value)]
        options = [self._value(value) for value in written]
        if left:
            options.append(self._leaf(path, {**rest, "enum": left}))
        if not options:
            raise SchemaError(path, f"no value of {keyword} is allowed by the keywords beside it")
        return _one_of(options)

    def _check_alone(self, path: str, keyword: str, schema: Mapping[str, Any]) -> None:
        """Refuse keywords that restrict an object or array of `const` or `enum`."""
        for name in schema:
            if name in (*_ARRAY_KEYWORDS, *_OBJECT_KEYWORDS):
                raise SchemaError(join_path(path, name), f"is not supported beside {keyword} with numbers beyond 2^53")

    def _value(self, value: Any) -> str:
        """Return the expression of exactly this value."""
        if isinstance(value, list):
            return self._between("[", self._comma.join(map(self._value, value)), "]")
        if isinstance(value, dict):
            return self._between("{", self._comma.join(self._member(*item) for item in value.items()), "}")
        return _json_text(value)

    def _member(self, name: str, value: Any) -> str:
        return f"{self._name(name)}{self._value(value)}"

    def _name(self, name: str) -> str:
        """Return the expression of a property's name and the colon behind it."""
        return f"{_json_text(name)}{self._gap}COLON{self._gap}"

    def _between(self, begin: str, content: str, end: str) -> str:
        return f"({quoted(begin)}{self._gap}{content}{self._gap if content else ' '}{quoted(end)})"

    def _array(self, path: str, schema: Mapping[str, Any]) -> str:
        prefix, items, items_path = _items(path, schema)
        fewest, most = _count(path, schema, "minItems") or 0, _count(path, schema, "maxItems")
        if items is False:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and most < fewest:
            raise SchemaError(join_path(path, "minItems"), "is greater than the number of items that are allowed")
        first = [self._rule("item", self.expression(where, part)) for where, part in prefix[:most]]
        has_more = most is None or most > len(prefix)
        more = self._rule("item", self.expression(items_path, items)) if has_more else ""
        return self._rule("array", self._between("[", self._sequence_of_items(first, more, fewest, most), "]"))

    def _sequence_of_items(self, first: Sequence[str], more: str, fewest: int, most: int | None) -> str:
        """Return the items of an array: the first ones in their order, then `more`, from `fewest` to `most` in all."""
        low, high = max(fewest - len(first), 0), None if most is None else most - len(first)
        if not first:
            return self._repeated(more, low, high)
        tail = self._rule("tail", _counted(f"{self._comma}{more}", low, high) if more else '""')
        for position in reversed(range(1, len(first))):
            count = "?" if position >= fewest else ""
            tail = self._rule("tail", f"({self._comma}{first[position]} {tail}){count}")
        return f"({first[0]} {tail}){'' if fewest else '?'}"

    def _repeated(self, item: str, low: int, high: int | None) -> str:
        """Return an item and as many others behind separators; "" for none."""
        if not item:
            return ""
        others = _counted(f"{self._comma}{item}", max(low - 1, 0), None if high is None else high - 1)
        return f"({item} {others}){'' if low else '?'}"

    def _object(self, path: str, schema: Mapping[str, Any]) -> str:
        properties, required = _members(path, schema)
        additional = schema.get("additionalProperties", True)
        extra_path = join_path(path, "additionalProperties")
        members, taken = list[tuple[str, bool]](), list[str]()
        for name in dict.fromkeys((*properties, *required)):
            taken.append(_json_text(name))
            value = properties.get(name, additional)
            if value is not False:
                where = join_path(path, f"properties.{name[:64]}") if name in properties else extra_path
                members.append((self._name(name) + self.expression(where, value), name in required))
            elif name in required:
                raise SchemaError(path, f"requires the property {name[:64]!r}, of which no value is allowed")
        extra = self._extra(extra_path, additional, taken) if additional is not False else ""
        return self._rule("object", self._between("{", self._sequence(members, extra), "}"))

    def _extra(self, path: str, schema: Any, taken: Sequence[str]) -> str:
        """Return the rule of a property with a name that is not taken."""
        key = self._rule("KEY", f"{_KEY} & ~({' | '.join(taken)})" if taken else _KEY)
        return self._rule("extra", f"{key}{self._gap}COLON{self._gap}{self.expression(path, schema)}")

    def _sequence(self, members: Sequence[tuple[str, bool]], extra: str) -> str:
        """Return the members in their order, of which only the required ones must be there, and extra ones.

        The rule `first_i` has what begins with member i or a later one, `rest_i` the same behind a separator.
        """
        first = self._rule("first", f"({extra} ({self._comma}{extra})*)?" if extra else '""')
        rest = self._rule("rest", f"({self._comma}{extra})*" if extra else '""')
        for member, is_required in reversed(members):
            rule = self._rule("member", member)
            later = (first, rest)
            first = self._rule("first", f"{rule} {rest}{'' if is_required else f' | {later[0]}'}")
            behind = f"({self._comma}{rule})"
            rest = self._rule("rest", f"{behind if is_required else behind + '?'} {later[1]}")
        return first

    def _rule(self, kind: str, expression: str) -> str:
        """Add a rule, or a terminal if its name is in capital letters; return its name."""
        name = self._names.get((kind, expression))
        if name is None:
            name = self._names[kind, expression] = f"{kind}_{len(self._names)}"
            self.rules.append(f"{name}: {expression}")
        return name


def _json(schema: Any, options: Mapping[str, Any]) -> str:
    schema = ({} if schema else {"not": {}}) if isinstance(schema, bool) else schema
    return f"%json {json.dumps({**schema, 'x-guidance': dict(options)}, ensure_ascii=False)}"


def _counted(expression: str, low: int, high: int | None) -> str:
    """Return the expression repeated from `low` to `high` times."""
    return '""' if high == 0 else f"({expression}){{{low},{'' if high is None else high}}}"


def _one_of(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def _json_text(value: Any) -> str:
    """Return the text of a value as a terminal."""
    return quoted(json.dumps(value, ensure_ascii=False))


def _check_bounds(path: str, schema: Mapping[str, Any], is_integer: bool) -> None:
    """Refuse bounds between which there is no number: nothing could follow in the output."""
    for lower in LOWER_BOUNDS:
        for upper in UPPER_BOUNDS:
            if lower not in schema or upper not in schema:
                continue
            least, most = bound(path, schema, lower), bound(path, schema, upper)
            is_open = lower != "minimum", upper != "maximum"
            if is_integer:
                is_empty = least_integer(least, is_open[0]) > greatest_integer(most, is_open[1])
            else:
                is_empty = least > most or (least == most and any(is_open))
            if is_empty:
                raise SchemaError(join_path(path, lower), f"no number is also within {upper}")


def _items(path: str, schema: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], Any, str]:
    """Return the schemas of the first items with their paths, then that of other items and its path."""
    keyword, rest = "prefixItems", "items"
    if isinstance(schema.get("items"), list):  # as before the draft 2020-12
        keyword, rest = "items", "additionalItems"
    prefix = schema.get(keyword, [])
    if not isinstance(prefix, list):
        raise SchemaError(join_path(path, keyword), "expected an array")
    first = [(join_path(path, f"{keyword}[{i}]"), part) for i, part in enumerate(prefix)]
    return first, schema.get(rest, True), join_path(path, rest)


def _count(path: str, schema: Mapping[str, Any], name: str) -> int | None:
    value = schema.get(name)
    if value is None:
        return None
    if not is_number(value) or value != int(value) or value < 0:
        raise SchemaError(join_path(path, name), "expected an integer that is not negative")
    return int(value)


def _members(path: str, schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return `properties` and `required`."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise SchemaError(join_path(path, "properties"), "expected an object")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError(join_path(path, "required"), "expected an array of strings")
    return properties, required
