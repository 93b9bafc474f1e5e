# SPDX-License-Identifier: Apache-2.0
"""Translates structural tags, free text that contains tags with constrained content, to grammars in Lark notation.

Both formats in use are supported: `structures` with `triggers`, and the tree of `format` objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastdeploy.core.errors import InvalidRequestError

JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,32})?"}
"""Whitespace between JSON tokens: a space, or a newline with bounded indentation, since a model may never stop it."""

_TEXT = "TEXT"
_HEADER = "TEXT: /(?s:.*)/"


def structural_tag_to_lark(field: str, text: str, special_ids: Mapping[str, int]) -> str:
    """Translate a structural tag.

    Args:
        field: the request's field, for errors.
        text: the tag as JSON.
        special_ids: ids of the special tokens by their text; tags may contain them.

    Raises:
        InvalidRequestError: a part is missing, of the wrong type, or not supported; names its path in the tag.
    """
    writer = _LarkWriter(field, special_ids)
    root = writer.mapping("", json.loads(text))
    if "format" in root:
        body = writer.format("format", root["format"])
    else:
        body = writer.triggered_tags("", {**root, "tags": _tags_of(writer, root)})
    return "\n".join([f"start: {body}", _HEADER, *writer.rules])


def _tags_of(writer: _LarkWriter, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert `structures` to the tags of a `format`."""
    tags = []
    for i, item in enumerate(writer.items("", root, "structures")):
        at = f"structures[{i}]"
        structure = writer.mapping(at, item)
        content = {"type": "json_schema", "json_schema": writer.key(at, structure, "schema")}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return tags


class _LarkWriter:
    """Translates formats to expressions and collects the rules that they refer to."""

    def __init__(self, field: str, special_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._field = field
        self._special_ids = special_ids
        names = sorted((name for name in special_ids if name), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._writers: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
            "const_string": lambda at, given: self.literal(self.text(at, given, "value")),
            "json_schema": lambda at, given: self.schema(at, self.key(at, given, "json_schema")),
            "regex": lambda at, given: self.regex(self.text(at, given, "pattern")),
            "any_text": lambda at, given: _TEXT,
            "sequence": self.sequence,
            "or": lambda at, given: self.one_of(self.formats(at, given, "elements")),
            "tag": self.tag,
            "triggered_tags": self.triggered_tags,
            "tags_with_separator": self.tags_with_separator,
        }

    def format(self, at: str, given: Any) -> str:
        """Return the expression of one format."""
        kind = self.mapping(at, given).get("type")
        write = self._writers.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise self.error(f"{at}.type", f"expected one of {', '.join(self._writers)}, got {kind!r}")
        if given.get("excludes"):
            raise self.error(f"{at}.excludes", "is not supported")
        return write(at, given)

    def formats(self, at: str, given: Mapping[str, Any], name: str) -> list[str]:
        return [self.format(f"{at}.{name}[{i}]", item) for i, item in enumerate(self.items(at, given, name))]

    def sequence(self, at: str, given: Mapping[str, Any]) -> str:
        parts = self.formats(at, given, "elements")
        if _TEXT in parts[:-1]:
            raise self.error(f"{at}.elements", "any_text must be the last element, or the content of a tag")
        return f"({' '.join(parts)})"

    def one_of(self, expressions: Sequence[str]) -> str:
        return f"({' | '.join(expressions)})"

    def tag(self, at: str, given: Mapping[str, Any], trigger: str = "") -> str:
        """Return the expression of a tag, without the trigger that its `begin` starts with."""
        begin = self.literal(self.text(at, given, "begin")[len(trigger) :])
        ends = given.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise self.error(f"{at}.end", "expected a string")
        content = self.format(f"{at}.content", self.key(at, given, "content"))
        if content == _TEXT:
            return f"({begin} {self.one_of([self.until(end) if end else _TEXT for end in ends])})"
        return f"({begin} {content} {self.one_of([self.literal(end) for end in ends])})"

    def triggered_tags(self, at: str, given: Mapping[str, Any]) -> str:
        triggers = self.items(at, given, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise self.error(_join(at, "triggers"), "expected non-empty strings")
        groups: dict[str, list[str]] = {}
        for i, item in enumerate(self.items(at, given, "tags")):
            place = f"{_join(at, 'tags' if at else 'structures')}[{i}]"
            tag = self.mapping(place, item)
            begin = self.text(place, tag, "begin")
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise self.error(f"{place}.begin", f"starts with none of the triggers: {begin!r}")
            groups.setdefault(trigger, []).append(self.tag(place, tag, trigger))
        one = self.one_of([f"{self.until(trigger)} {self.one_of(tags)}" for trigger, tags in groups.items()])
        at_least_one = self.flag(at, given, "at_least_one")
        if self.flag(at, given, "stop_after_first"):
            return one if at_least_one else f"({one} | {_TEXT})"
        return f"({one}{'+' if at_least_one else '*'} {_TEXT})"

    def tags_with_separator(self, at: str, given: Mapping[str, Any]) -> str:
        tags = [self.mapping(f"{at}.tags[{i}]", item) for i, item in enumerate(self.items(at, given, "tags"))]
        one = self.one_of([self.tag(f"{at}.tags[{i}]", tag) for i, tag in enumerate(tags)])
        separator = self.literal(self.text(at, given, "separator"))
        many = one if self.flag(at, given, "stop_after_first") else f"({one} ({separator} {one})*)"
        return many if self.flag(at, given, "at_least_one") else f"({many})?"

    def until(self, text: str) -> str:
        """Return the expression of free text up to and including the first `text`."""
        head, *rest = self.pieces(text)
        if head in self._special_ids:
            start = f"{_TEXT} {self.literal(head)}"
        else:
            start = f"until_{len(self.rules)}"
            self.rules.append(f"{start}[lazy]: {_TEXT} {_quoted(head)}")
        return " ".join([start, *(self.literal(piece) for piece in rest)])

    def literal(self, text: str) -> str:
        """Return the expression of a text; special tokens in it are matched as tokens."""
        ids = self._special_ids
        return " ".join(f"<[{ids[p]}]>" if p in ids else _quoted(p) for p in self.pieces(text)) or '""'

    def pieces(self, text: str) -> list[str]:
        """Split a text at its special tokens."""
        at, found = 0, []
        for match in self._special.finditer(text):
            found += [text[at : match.start()], match.group()]
            at = match.end()
        return [piece for piece in (*found, text[at:]) if piece]

    def regex(self, pattern: str) -> str:
        name = f"REGEX_{len(self.rules)}"
        self.rules.append(f"{name}: /{_slashes_escaped(pattern)}/")
        return name

    def schema(self, at: str, schema: Any) -> str:
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise self.error(f"{at}.schema", f"is not valid JSON: {error}") from None
        schema = {} if schema is True else self.mapping(f"{at}.schema", schema)
        given = self.mapping(f"{at}.schema.x-guidance", schema.get("x-guidance", {}))
        options = {**JSON_OPTIONS, **given, "lenient": False}
        return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)

    def mapping(self, at: str, given: Any) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            raise self.error(at, f"expected an object, got {type(given).__name__}")
        return given

    def items(self, at: str, given: Mapping[str, Any], name: str) -> list[Any]:
        value = given.get(name)
        if not isinstance(value, list) or not value:
            raise self.error(_join(at, name), "expected a non-empty list")
        return value

    def text(self, at: str, given: Mapping[str, Any], name: str) -> str:
        value = given.get(name)
        if not isinstance(value, str):
            raise self.error(_join(at, name), f"expected a string, got {type(value).__name__}")
        return value

    def key(self, at: str, given: Mapping[str, Any], name: str) -> Any:
        if name not in given:
            raise self.error(_join(at, name), "is missing")
        return given[name]

    def flag(self, at: str, given: Mapping[str, Any], name: str) -> bool:
        value = given.get(name, False)
        if not isinstance(value, bool):
            raise self.error(_join(at, name), f"expected true or false, got {value!r}")
        return value

    def error(self, at: str, message: str) -> InvalidRequestError:
        return InvalidRequestError(_join(self._field, at), message)


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at and name else at or name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashes_escaped(pattern: str) -> str:
    """Escape the slashes of a pattern that are not escaped yet, so that it may be put between slashes."""
    return re.sub(r"(\\.)|/", lambda match: match.group(1) or r"\/", pattern, flags=re.DOTALL).replace("\n", r"\n")
