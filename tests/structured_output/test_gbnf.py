# SPDX-License-Identifier: Apache-2.0
"""Escapes of GBNF, in literals and classes, mean what llama.cpp says."""

from __future__ import annotations

import pytest

from fastdeploy.structured_output.gbnf import convert_gbnf
from tests.structured_output.schema_grammars import allowed_texts

STRING = r'root ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\""'


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (r'root ::= "\u00e9"', ["é"], [r"\u00e9", "ue9"]),
        (r'root ::= "\U0001F600"', ["😀"], []),
        (r'root ::= "\u65e5\u672c"', ["日本"], []),
        (r'root ::= "a\x41\x22\x5c\x0a\x00\x7fb"', ['aA"\\\n\0\x7fb'], []),
        (r"root ::= [^\u0000-\u001f]", ["a", "é", " "], ["\x1f", "\0"]),
        (r"root ::= [\u00e0-\u00ff]+", ["é", "àÿ"], ["a", "ß"]),
        (r"root ::= [\U0001F600-\U0001F64F]", ["😀"], ["a"]),
        (r"root ::= [\x2d\x5d\x5ea]", ["-", "]", "^", "a"], ["_", "\\"]),
        (r"root ::= [a\x2dz]", ["a", "-", "z"], ["b"]),
        (r"root ::= [\u005d\u005c\u005b]", ["]", "\\", "["], ["u"]),
        (r"root ::= [/\x2f]", ["/"], ["\\"]),
        ("root ::= [a&&b~~c]", ["a", "&", "b", "~", "c"], [""]),
        (r'root ::= "\x28"* "\u005b\u005d"', ["[]", "(([]"], ["("]),
        (r'root ::= "\\u00e9"', [r"\u00e9"], ["é"]),
        (r"root ::= [\\u]", ["\\", "u"], ["0"]),
        ('root ::= "\\x23" "#" # "\\u00e9\nrest ::= "b"', ["##"], ["é"]),
        (STRING, [r'"a\n\u00e9"', '"é"'], ['"\x7f"', '"\x1f"', r'"\x"']),
    ],
)
def test_escapes_stand_for_their_characters(grammar: str, right: list[str], wrong: list[str]) -> None:
    assert allowed_texts([*right, *wrong], grammar=grammar) == right


@pytest.mark.parametrize("escape", [r"\ud83d", r"\U00110000"])
@pytest.mark.parametrize("place", ['"{}"', "[{}]"])
def test_escapes_of_no_character_are_refused(escape: str, place: str) -> None:
    with pytest.raises(ValueError, match="is not a character"):
        convert_gbnf(f"root ::= {place.format(escape)}")
