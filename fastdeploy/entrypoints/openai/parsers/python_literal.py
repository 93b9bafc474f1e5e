# SPDX-License-Identifier: Apache-2.0
"""Python literals in the output of models: where one ends in a text that arrives in pieces, and its value."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import check_json, replace_surrogates

_NAMES = {"true": True, "false": False, "null": None}
_STRING_CONTENT = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_BETWEEN_STRINGS = re.compile(r"[^'\"()\[\]{},]*")
_TOKEN = re.compile(
    r"""(?P<prefix>[A-Za-z]{0,2})
        (?:\'\'\'(?P<long1>(?:[^'\\]|\\.|'(?!''))*)\'\'\' | \"\"\"(?P<long2>(?:[^"\\]|\\.|"(?!""))*)\"\"\"
        | '(?!'')(?P<short1>[^'\\]*(?:\\.[^'\\]*)*)' | "(?!"")(?P<short2>[^"\\]*(?:\\.[^"\\]*)*)")
    | (?P<space>\#[^\r\n]* | \\?(?:\r\n|\r|\n)) | (?P<quote>['"])""",
    re.DOTALL | re.VERBOSE,
)
_LINE_END = re.compile(r"\r\n?")
_ESCAPED_LINE_END = re.compile(r"(?<=\\)\r\n?")
_ESCAPE = re.compile(
    r"""\\(?: (?P<line>\r\n|\r|\n) | (?P<char>[\\'"abfnrtv]) | (?P<octal>[0-7]{1,3})
        | x(?P<byte>[0-9a-fA-F]{2}) | u(?P<short>[0-9a-fA-F]{4}) | U(?P<long>[0-9a-fA-F]{8}) | N\{(?P<name>[^}]*)\}
        | (?P<wrong>[xuUN]) )""",
    re.VERBOSE,
)
_CHARS = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True))


class LiteralScanner:
    """Finds the end of an argument in a text that arrives in pieces: a comma or a bracket that it has not opened.

    Attributes:
        is_done: the end is found.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self.is_done = False

    def feed(self, text: str, start: int) -> int:
        """Scan `text` from `start`; return where the argument ends, or from where to scan the longer text."""
        position, last = start, -1
        while last < position < len(text) and not self.is_done:
            last = position
            position = self._scan_string(text, position) if self._quote else self._scan_structure(text, position)
        return position

    def _scan_string(self, text: str, start: int) -> int:
        quote = self._quote
        position = _STRING_CONTENT[quote[0]].match(text, start).end()  # type: ignore[union-attr]
        if position == len(text):
            return position
        if text[position] == "\\":  # of raw strings, too, where it stands for itself as well
            return position + 2 if position + 1 < len(text) else position
        if text.startswith(quote, position):
            self._quote = ""
            return position + len(quote)
        return position if quote.startswith(text[position:]) else position + 1

    def _scan_structure(self, text: str, start: int) -> int:
        position = _BETWEEN_STRINGS.match(text, start).end()  # type: ignore[union-attr]
        if position == len(text):
            return position
        char = text[position]
        if char in "'\"":
            return self._begin_string(text, position)
        if char in "([{":
            self._depth += 1
        elif self._depth == 0:
            self.is_done = True
            return position
        elif char != ",":
            self._depth -= 1
        return position + 1

    def _begin_string(self, text: str, position: int) -> int:
        """Begin a string with one quote or three; two are an empty one, unless a third may follow."""
        char, following = text[position], text[position + 1 : position + 3]
        if following in ("", char):
            return position
        if following[0] != char:
            self._quote = char
            return position + 1
        self._quote = 3 * char if following == 2 * char else ""
        return position + (3 if self._quote else 2)


def parse_literal(text: str) -> Any:
    """Return the value that Python gives to a literal, as JSON can express it.

    Strings may have line ends and NUL within their quotes. Surrogates that are a pair become the character, others are
    written as escapes. `true`, `false` and `null` are literals, too. Tuples become arrays, and keys become texts.

    Raises:
        InvalidRequestError: the text is something else, is nested too deeply, or has a number that is not finite.
    """
    try:
        source = _TOKEN.sub(_plain_token, text)
        value = _value(ast.parse(source.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # the last for too many brackets
        raise InvalidRequestError("argument", "is not a literal") from None
    check_json("argument", value)
    return value


def _plain_token(match: re.Match[str]) -> str:
    """Return a string as one of the same value that any version of Python reads; comments and line ends are spaces."""
    if match["space"] is not None:
        return " "
    kind, prefix = match.lastgroup or "", (match["prefix"] or "").lower()
    if kind == "quote" or prefix not in ("", "r", "u"):
        raise ValueError("an open string, bytes or a formatted string")
    line_end = _LINE_END if kind.startswith("long") else _ESCAPED_LINE_END
    body = line_end.sub("\n", match[kind])
    return f" {body if prefix == 'r' else _ESCAPE.sub(_unescape, body)!a}"


def _unescape(match: re.Match[str]) -> str:
    kind, text = match.lastgroup, match.group(match.lastgroup or 0)
    match kind:
        case "line":
            return ""
        case "char":
            return _CHARS[text]
        case "octal":
            return chr(int(text, 8))
        case "name":
            return _named(text)
        case "wrong":
            raise ValueError("incomplete escape")
    return chr(int(text, 16))


def _named(name: str) -> str:
    try:
        char = unicodedata.lookup(name)
    except KeyError:
        raise ValueError("unknown character") from None
    if len(char) != 1:
        raise ValueError("a sequence is no character")
    return char


def _value(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=str() as text):
            return _text(text)
        case ast.Constant(value=None | bool() | int() | float()):
            return node.value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            items = zip(map(_value, keys), map(_value, values), strict=True)
            return {_key(key): value for key, value in dict(items).items()}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            if isinstance(number, bool):
                raise ValueError("a sign of a boolean")
            return -number if isinstance(sign, ast.USub) else number
    raise ValueError("not a literal")


def _key(key: Any) -> str:
    """Return a key of an object as JSON writes it."""
    return key if isinstance(key, str) else json.dumps(key, allow_nan=False)


def _text(text: str) -> str:
    """Return a text without lone surrogates."""
    if text.isascii():
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return replace_surrogates(joined)
