# SPDX-License-Identifier: Apache-2.0
r"""Translates the regular expressions of JSON schemas, which are those of ECMA-262, for llguidance, which reads Rust's.

What differs is written in a form that both read alike: `.` and `\s` stand for other characters, brackets and doubled
operators in a class are plain characters in ECMA-262, and Rust has no `\cX`, `\0`, `[\b]`, `[^]` and surrogate pairs.
Whatever ECMA-262 does not define with the flag `u`, such as `[[:alpha:]]` and `\A`, stays as Rust reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SPACES = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_DOT = r"[^\n\r\u{2028}\u{2029}]"
_ANYTHING = r"[\s\S]"
_NOTHING = r"[^\s\S]"
_QUANTIFIER = re.compile(r"\{[0-9]+(,[0-9]*)?\}|\{,[0-9]+\}")
_FLAGS = re.compile(r"\(\?(?P<on>[a-zA-Z]*)(-(?P<off>[a-zA-Z]+))?(?P<end>[:)])")
_GROUP_HEAD = re.compile(r"\(\?(P?<\w+>|[:=!]|<[=!])")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_ESCAPE = re.compile(
    r"\\(?:u\{[0-9a-fA-F]+\}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}"
    r"|[pP]\{[^}]*\}|c[A-Za-z]|.)",
    re.DOTALL,
)
_SETS = "dDwWsSpP"
_PAIR_LENGTH = len(r"\ud83d\ude00")
_CONTROLS = {"0": 0, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


class _LoneBracketError(Exception):
    """A closing bracket outside a class, which ECMA-262 does not allow: the pattern is not one of ECMA-262."""


@dataclass(frozen=True)
class TranslatedPattern:
    """A regular expression for llguidance.

    Attributes:
        text: the expression.
        code_points: the control characters that it names, outside negated classes and ranges.
    """

    text: str
    code_points: frozenset[int]


def translate_pattern(pattern: str) -> TranslatedPattern:
    """Translate a regular expression of ECMA-262. What is wrong with one is left for llguidance to say."""
    try:
        return _Translator(pattern, has_empty_classes=True).run()
    except _LoneBracketError:
        return _Translator(pattern, has_empty_classes=False).run()


@dataclass
class _Translator:
    """Reads a pattern from left to right.

    Attributes:
        has_empty_classes: `[]` and `[^]` are classes, as in ECMA-262; otherwise their bracket is a member, as in Rust.
    """

    pattern: str
    has_empty_classes: bool
    position: int = 0
    output: list[str] = field(default_factory=list)
    code_points: set[int] = field(default_factory=set)
    dots_match_all: list[bool] = field(default_factory=lambda: [False])  # of the groups in one another: the flag `s`

    def run(self) -> TranslatedPattern:
        while self.position < len(self.pattern):
            self._step(self.pattern[self.position])
        return TranslatedPattern("".join(self.output), frozenset(self.code_points))

    def _step(self, character: str) -> None:
        match character:
            case "\\":
                text, code_point = self._escape()
                self._note(code_point)
                self.output.append({r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}.get(text, text))
            case "[":
                self._class()
            case "(":
                self._open_group()
            case ".":
                self._take(1, "." if self.dots_match_all[-1] else _DOT)
            case "{":
                quantifier = _QUANTIFIER.match(self.pattern, self.position)
                self._take(len(quantifier.group()) if quantifier else 1, None if quantifier else r"\{")
            case "]" if self.has_empty_classes and ("[]" in self.pattern or "[^]" in self.pattern):
                raise _LoneBracketError
            case _:
                if character == ")" and len(self.dots_match_all) > 1:
                    self.dots_match_all.pop()
                self._note(ord(character))
                self._take(1)

    def _take(self, count: int, text: str | None = None) -> None:
        """Pass over some characters; write them, or `text` for them."""
        end = self.position + count
        self.output.append(self.pattern[self.position : end] if text is None else text)
        self.position = end

    def _note(self, code_point: int | None) -> None:
        if code_point is not None and (code_point < 0x20 or code_point == 0x7F):
            self.code_points.add(code_point)

    def _open_group(self) -> None:
        flags = _FLAGS.match(self.pattern, self.position)
        if flags is None:
            self.dots_match_all.append(self.dots_match_all[-1])
            head = _GROUP_HEAD.match(self.pattern, self.position)
            self._take(len(head.group()) if head else 1)
            return
        is_on = (self.dots_match_all[-1] or "s" in flags["on"]) and "s" not in (flags["off"] or "")
        if flags["end"] == ")":  # until the end of the group around it
            self.dots_match_all[-1] = is_on
        else:
            self.dots_match_all.append(is_on)
        self._take(len(flags.group()))

    def _escape(self) -> tuple[str, int | None]:
        """Pass over an escape; return it for Rust, and its character if it stands for one."""
        found = _ESCAPE.match(self.pattern, self.position)
        if found is None:  # a backslash at the end
            self.position += 1
            return "\\", None
        text = found.group()
        self.position = found.end()
        kind = text[1]
        if kind in "ux" and len(text) > 2:
            code_point = _code_point(text)
            return (f"\\u{{{code_point:x}}}" if len(text) == _PAIR_LENGTH else text), code_point
        if kind == "c" and len(text) == 3:
            code_point = ord(text[2]) % 32
            return f"\\x{code_point:02x}", code_point
        if kind == "0" and not self.pattern[self.position : self.position + 1].isdigit():
            return r"\x00", 0
        return text, _CONTROLS.get(kind)

    def _class(self) -> None:
        start, self.position = self.position, self.position + 1
        is_negated = self.pattern.startswith("^", self.position)
        self.position += is_negated
        if self.pattern.startswith("]", self.position):
            if self.has_empty_classes:
                self.position += 1
                self.output.append(_ANYTHING if is_negated else _NOTHING)
                return
            self.position += 1
            members = [r"\]"]
        else:
            members = []
        while self.position < len(self.pattern) and self.pattern[self.position] != "]":
            members.append(self._range(is_negated))
        if self.position == len(self.pattern):  # it has no end; the error should show the pattern as it is
            self.output.append(self.pattern[start:])
            return
        self.position += 1
        self.output.append(f"[{'^' if is_negated else ''}{''.join(members)}]")

    def _range(self, is_negated: bool) -> str:
        """Return a member of a class, or a range of characters."""
        first, code_point = self._member()
        has_dash = self.pattern.startswith("-", self.position) and self.position + 1 < len(self.pattern)
        if not has_dash or self.pattern[self.position + 1] == "]" or _is_set(first):
            if not is_negated:
                self._note(code_point)
            return first
        self.position += 1
        last, _ = self._member()
        return rf"{first}\-{last}" if _is_set(last) else f"{first}-{last}"

    def _member(self) -> tuple[str, int | None]:
        """Pass over one member of a class; return it for Rust, and its character if it is one."""
        character = self.pattern[self.position]
        if character == "\\":
            text, code_point = self._escape()
            if text == r"\b":
                return r"\x08", 8
            return {r"\s": _SPACES, r"\S": f"[^{_SPACES}]"}.get(text, text), code_point
        if character == "[" and (posix := _POSIX.match(self.pattern, self.position)):
            self.position = posix.end()
            return posix.group(), None
        self.position += 1
        return (f"\\{character}" if character in "[&~-^" else character), ord(character)


def _is_set(member: str) -> bool:
    """Return whether a member of a class is a set of characters, which no range begins or ends with."""
    return member == _SPACES or member[0] == "[" or (member[0] == "\\" and member[1] in _SETS)


def _code_point(escape: str) -> int:
    r"""Return the character of `\xXX`, `\uXXXX`, `\u{X}` or a surrogate pair."""
    if len(escape) == _PAIR_LENGTH:
        return ord(bytes.fromhex(escape[2:6] + escape[8:]).decode("utf-16-be"))
    return int(escape[2:].strip("{}"), 16)
