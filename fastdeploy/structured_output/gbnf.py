# SPDX-License-Identifier: Apache-2.0
"""Converts grammars in GBNF, the notation of llama.cpp, to Lark.

llguidance has a converter, but it removes zeros from escapes such as `\\u00e9`, or writes them in a way that Lark does
not know. So the escapes of literals and classes are replaced by what they stand for before it reads the grammar.
"""

from __future__ import annotations

import re
import sys

from llguidance.gbnf_to_lark import gbnf_to_lark

_PARTS = re.compile(
    r"""(?P<comment>\#[^\r\n]*)|(?P<literal>"(?:[^"\\]|\\.)*+"?)|(?P<class>\[(?:[^\]\\]|\\.)*+\]?)""", re.DOTALL
)
_CHARACTERS = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\.|.", re.DOTALL)


def convert_gbnf(text: str) -> str:
    """Convert a grammar; raise ValueError if it is none."""
    try:
        return gbnf_to_lark(_PARTS.sub(_without_escapes, text))
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"failed to convert the grammar from GBNF to Lark: {error}") from None


def _without_escapes(match: re.Match[str]) -> str:
    """Return a literal or class in which hexadecimal escapes are replaced; a comment stays as it is."""
    part = match.group()
    if match.lastgroup == "comment":
        return part
    is_class = match.lastgroup == "class"
    return _CHARACTERS.sub(lambda found: _character(found, is_class), part)


def _character(match: re.Match[str], is_class: bool) -> str:
    """Return one character of a literal or class in a form that the converter passes on and Lark reads."""
    text = match.group()
    digits = match.group(1) or match.group(2) or match.group(3)
    if digits is None:
        return f"\\x{ord(text):02x}" if is_class and text in "&~" else text  # doubled, these are operators of Rust
    code_point = int(digits, 16)
    if 0xD800 <= code_point < 0xE000 or code_point > sys.maxunicode:
        raise ValueError(f"{text} is not a character")
    character = chr(code_point)
    return character if code_point >= 0x80 or character.isalnum() else f"\\x{code_point:02x}"
