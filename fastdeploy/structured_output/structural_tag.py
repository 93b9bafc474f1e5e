# SPDX-License-Identifier: Apache-2.0
"""Translates structural tags, free text that contains tags with constrained content, to grammars in Lark notation.

Both formats in use are supported: `structures` with `triggers`, and the tree of `format` objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.core.json_schema import SchemaError, close_objects
from fastdeploy.core.json_types import json_type, parse_json
from fastdeploy.core.schema_dialect import escape_options, prepare_schema
from fastdeploy.core.schema_grammar import json_expression, quoted, slashes_escaped
from fastdeploy.structured_output.schema_errors import FormSchemas
from fastdeploy.structured_output.schema_limits import check_schema

JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,32})?"}
"""Whitespace between JSON tokens: a space, or a newline with bounded indentation, since a model may never stop it."""

_TEXT = "TEXT"
_HEADER = "TEXT: /(?s:.*)/"


def structural_tag_to_lark(
    spec: StructuredOutputsParams, special_ids: Mapping[str, int], schemas: FormSchemas | None = None
) -> str:
    """Translate a structural tag.

    Args:
        spec: the form with the tag as JSON text.
        special_ids: ids of the special tokens by their text; tags may contain them.
        schemas: gets the JSON schemas of the tag.

    Raises:
        InvalidRequestError: a part is missing, of the wrong type, or not supported; names its path in the tag.
    """
    writer = _LarkWriter(spec, special_ids, schemas or FormSchemas())
    root = writer.mapping("", parse_json(spec.field, spec.structural_tag))
    if root.get("format") is not None:
        body = writer.format("format", root["format"])
    else:
        body = writer.triggered_tags("", {**root, "tags": _tags_of(writer, root)})
    return "\n".join([f"start: {body}", _HEADER, *writer.rules])


def _tags_of(writer: _LarkWriter, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert `structures` to the tags of a `format`."""
    tags = []
    for i, item in enumerate(writer.items("", root, "structures")):
        path = f"structures[{i}]"
        structure = writer.mapping(path, item)
        content = {"type": "json_schema", "json_schema": writer.key(path, structure, "schema")}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return tags


class _LarkWriter:
    """Translates formats to expressions and collects the rules that they refer to.

    In all methods, `path` is the path of `node` in the structural tag, for error messages.
    """

    def __init__(self, spec: StructuredOutputsParams, special_ids: Mapping[str, int], schemas: FormSchemas) -> None:
        self.rules: list[str] = []
        self._schemas = schemas
        self._field = spec.field
        self._spec = spec
        self._special_ids = special_ids
        names = sorted((name for name in special_ids if name), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._writers: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
            "const_string": lambda path, node: self.literal(self.text(path, node, "value")),
            "json_schema": lambda path, node: self.schema(path, self.key(path, node, "json_schema")),
            "regex": lambda path, node: self.regex(self.text(path, node, "pattern")),
            "any_text": lambda path, node: _TEXT,
            "sequence": self.sequence,
            "or": lambda path, node: self.one_of(self.formats(path, node, "elements")),
            "tag": self.tag,
            "triggered_tags": self.triggered_tags,
            "tags_with_separator": self.tags_with_separator,
        }

    def format(self, path: str, node: Any) -> str:
        """Return the expression of one format."""
        kind = self.mapping(path, node).get("type")
        write = self._writers.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise self.error(f"{path}.type", f"expected one of {', '.join(self._writers)}, got {_shown(kind)}")
        if node.get("excludes"):
            raise self.error(f"{path}.excludes", "is not supported")
        return write(path, node)

    def formats(self, path: str, node: Mapping[str, Any], name: str) -> list[str]:
        return [self.format(f"{path}.{name}[{i}]", item) for i, item in enumerate(self.items(path, node, name))]

    def sequence(self, path: str, node: Mapping[str, Any]) -> str:
        parts = self.formats(path, node, "elements")
        if _TEXT in parts[:-1]:
            raise self.error(f"{path}.elements", "any_text must be the last element, or the content of a tag")
        return f"({' '.join(parts)})"

    def one_of(self, expressions: Sequence[str]) -> str:
        return f"({' | '.join(expressions)})"

    def tag(self, path: str, node: Mapping[str, Any], trigger: str = "") -> str:
        """Return the expression of a tag, without the trigger that its `begin` starts with."""
        begin = self.literal(self.text(path, node, "begin")[len(trigger) :])
        ends = node.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise self.error(f"{path}.end", "expected a string")
        content = self.format(f"{path}.content", self.key(path, node, "content"))
        if content == _TEXT:
            return f"({begin} {self.one_of([self.until(end) if end else _TEXT for end in ends])})"
        return f"({begin} {content} {self.one_of([self.literal(end) for end in ends])})"

    def triggered_tags(self, path: str, node: Mapping[str, Any]) -> str:
        triggers = self.items(path, node, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise self.error(_join(path, "triggers"), "expected non-empty strings")
        groups: dict[str, list[str]] = {}
        for i, item in enumerate(self.items(path, node, "tags")):
            tag_path = f"{_join(path, 'tags' if path else 'structures')}[{i}]"
            tag = self.mapping(tag_path, item)
            begin = self.text(tag_path, tag, "begin")
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise self.error(f"{tag_path}.begin", f"starts with none of the triggers: {begin!r}")
            groups.setdefault(trigger, []).append(self.tag(tag_path, tag, trigger))
        any_tag = self.one_of([f"{self.until(trigger)} {self.one_of(tags)}" for trigger, tags in groups.items()])
        at_least_one = self.flag(path, node, "at_least_one")
        if self.flag(path, node, "stop_after_first"):
            return any_tag if at_least_one else f"({any_tag} | {_TEXT})"
        return f"({any_tag}{'+' if at_least_one else '*'} {_TEXT})"

    def tags_with_separator(self, path: str, node: Mapping[str, Any]) -> str:
        tags = [self.mapping(f"{path}.tags[{i}]", item) for i, item in enumerate(self.items(path, node, "tags"))]
        any_tag = self.one_of([self.tag(f"{path}.tags[{i}]", tag) for i, tag in enumerate(tags)])
        separator = self.literal(self.text(path, node, "separator"))
        tag_list = any_tag if self.flag(path, node, "stop_after_first") else f"({any_tag} ({separator} {any_tag})*)"
        return tag_list if self.flag(path, node, "at_least_one") else f"({tag_list})?"

    def until(self, text: str) -> str:
        """Return the expression of free text up to and including the first `text`."""
        head, *rest = self.pieces(text)
        if head in self._special_ids:
            start = f"{_TEXT} {self.literal(head)}"
        else:
            start = f"until_{len(self.rules)}"
            self.rules.append(f"{start}[lazy]: {_TEXT} {quoted(head)}")
        return " ".join([start, *(self.literal(piece) for piece in rest)])

    def literal(self, text: str) -> str:
        """Return the expression of a text; special tokens in it are matched as tokens."""
        ids = self._special_ids
        return " ".join(f"<[{ids[p]}]>" if p in ids else quoted(p) for p in self.pieces(text)) or '""'

    def pieces(self, text: str) -> list[str]:
        """Split a text at its special tokens."""
        start, pieces = 0, []
        for match in self._special.finditer(text):
            pieces += [text[start : match.start()], match.group()]
            start = match.end()
        return [piece for piece in (*pieces, text[start:]) if piece]

    def regex(self, pattern: str) -> str:
        name = f"REGEX_{len(self.rules)}"
        self.rules.append(f"{name}: /{slashes_escaped(pattern)}/")
        return name

    def schema(self, path: str, schema: Any) -> str:
        if isinstance(schema, str):
            schema = parse_json(_join(self._field, f"{path}.schema"), schema)
        schema = {} if schema is True else self.mapping(f"{path}.schema", schema)
        own_options = self.mapping(f"{path}.schema.x-guidance", schema.get("x-guidance", {}))
        field = _join(self._field, f"{path}.schema")
        check_schema(field, schema)
        if self._spec.disable_additional_properties:
            schema = close_objects(schema)
        self._schemas.by_field[field] = schema
        schema = prepare_schema(schema, self._schemas.unknown_formats)
        defaults = {**JSON_OPTIONS, **escape_options(schema)}
        options = {**defaults, **own_options, **self._spec.json_options, "lenient": False}
        try:
            return json_expression(schema, options)
        except SchemaError as error:
            raise InvalidRequestError(field, str(error)) from None

    def mapping(self, path: str, node: Any) -> Mapping[str, Any]:
        if not isinstance(node, Mapping):
            raise self.error(path, f"expected an object, got {json_type(node)}")
        return node

    def items(self, path: str, node: Mapping[str, Any], name: str) -> list[Any]:
        value = node.get(name)
        if not isinstance(value, list) or not value:
            raise self.error(_join(path, name), "expected a non-empty list")
        return value

    def text(self, path: str, node: Mapping[str, Any], name: str) -> str:
        value = node.get(name)
        if not isinstance(value, str):
            raise self.error(_join(path, name), f"expected a string, got {json_type(value)}")
        return value

    def key(self, path: str, node: Mapping[str, Any], name: str) -> Any:
        if name not in node:
            raise self.error(_join(path, name), "is missing")
        return node[name]

    def flag(self, path: str, node: Mapping[str, Any], name: str) -> bool:
        value = node.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(_join(path, name), f"expected true or false, got {json_type(value)}")
        return value

    def error(self, path: str, message: str) -> InvalidRequestError:
        return InvalidRequestError(_join(self._field, path), message)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else json_type(value)
