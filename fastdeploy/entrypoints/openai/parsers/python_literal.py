# SPDX-License-Identifier: Apache-2.0
"""Python literals in the output of models: where one ends in a text that arrives in pieces, and its value."""

from __future__ import annotations

import ast
import re
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import check_json

_NAMES = {"true": True, "false": False, "null": None}
_STRING_CONTENT = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_BETWEEN_STRINGS = re.compile(r"[^'\"()\[\]{},]*")
_UNKNOWN_ESCAPE = re.compile(r"(\\[\\'\"abfnrtvxuUN0-7\n])|\\")


class LiteralScanner:
    """Finds the end of an argument in a text that arrives in pieces: a comma or a bracket that it has not opened.

    Attributes:
        is_done: the end is found.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self.is_done = False

    def feed(self, text: str, start: int) -> int:
        """Scan `text` from `start`; return where the argument ends, or the length of the text."""
        position = start
        while position < len(text) and not self.is_done:
            position = self._scan_string(text, position) if self._quote else self._scan_structure(text, position)
        return position

    def _scan_string(self, text: str, start: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return start + 1
        position = _STRING_CONTENT[self._quote].match(text, start).end()  # type: ignore[union-attr]
        if position == len(text):
            return position
        self._is_escaped = text[position] == "\\"
        self._quote = self._quote if self._is_escaped else ""
        return position + 1

    def _scan_structure(self, text: str, start: int) -> int:
        position = _BETWEEN_STRINGS.match(text, start).end()  # type: ignore[union-attr]
        if position == len(text):
            return position
        char = text[position]
        if char in "'\"":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif self._depth == 0:
            self.is_done = True
            return position
        elif char != ",":
            self._depth -= 1
        return position + 1


def parse_literal(text: str) -> Any:
    """Return the value of a Python literal that JSON can express; `true`, `false` and `null` are literals, too.

    Raises:
        InvalidRequestError: the text is something else, is nested too deeply, or has a lone surrogate or a number that
            is not finite.
    """
    escaped = _UNKNOWN_ESCAPE.sub(lambda match: match.group(1) or r"\\", text.strip())
    try:
        value = _value(ast.parse(escaped, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # the last for too many brackets
        raise InvalidRequestError("argument", "is not a literal") from None
    check_json("argument", value)
    return value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            return {str(name): _value(value) for name, value in zip(names, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError("not a literal")
