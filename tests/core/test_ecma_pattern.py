# SPDX-License-Identifier: Apache-2.0
r"""Patterns of ECMA-262, translated to a form that Rust and Python read alike.

The expected characters are what `new RegExp(pattern, "u")` of Node.js 20 accepts.
"""

from __future__ import annotations

import re

import pytest

from fastdeploy.core.ecma_pattern import translate_pattern

CHARACTERS = [*map(chr, range(0x80)), *"\x85\xa0é\u1680\u180e\u2007\u200b\u2028\u2029\u3000\ufeffα日😀"]
SPACES = set("\t\n\v\f\r \xa0\u1680\u2007\u2028\u2029\u3000\ufeff")
EVERYTHING = set(CHARACTERS)
DIGITS = set("0123456789")
WORD = {character for character in CHARACTERS if character.isascii() and (character.isalnum() or character == "_")}


def accepted(pattern: str) -> set[str]:
    """Return the characters that a translated pattern matches, read by Python as Rust reads it."""
    text = re.sub(
        r"\\u\{([0-9a-f]+)\}", lambda match: f"\\U{int(match.group(1), 16):08x}", translate_pattern(pattern).text
    )
    compiled = re.compile(text, re.ASCII)
    return {character for character in CHARACTERS if compiled.fullmatch(character)}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (".", EVERYTHING - set("\n\r\u2028\u2029")),
        (r"\s", SPACES),
        (r"\S", EVERYTHING - SPACES),
        (r"[\s]", SPACES),
        (r"[^\s]", EVERYTHING - SPACES),
        (r"[\s\d]", SPACES | DIGITS),
        (r"[^\s\w]", EVERYTHING - SPACES - WORD),
        (r"\d", DIGITS),
        (r"\D", EVERYTHING - DIGITS),
        (r"\w", WORD),
        (r"\W", EVERYTHING - WORD),
        ("[.]", {"."}),
        (r"\.", {"."}),
        ("[^]", EVERYTHING),
        ("[]|b", {"b"}),
        ("[[]", {"["}),
        ("[a&&b]", {"a", "&", "b"}),
        ("[a~~b]", {"a", "~", "b"}),
        ("[--a]", set(map(chr, range(ord("-"), ord("a") + 1)))),
        ("[+--]", {"+", ",", "-"}),
        ("[a-]", {"a", "-"}),
        ("[-a]", {"a", "-"}),
        ("[a^]", {"a", "^"}),
        (r"[\^a]", {"a", "^"}),
        (r"[[-\]]", {"[", "\\", "]"}),
        (r"\cJ", {"\n"}),
        (r"[\cJ]", {"\n"}),
        (r"\0", {"\0"}),
        (r"[\b]", {"\b"}),
        (r"\ud83d\ude00", {"😀"}),
        (r"[\ud83d\ude00é]", {"😀", "é"}),
        (r"\u00e9|\x41", {"é", "A"}),
        (r"\u{1f600}", {"😀"}),
        (r"(?:.)", EVERYTHING - set("\n\r\u2028\u2029")),
        (r"(?s:.)", EVERYTHING),
        ("{", {"{"}),
        (".{1}", EVERYTHING - set("\n\r\u2028\u2029")),
    ],
)
def test_translated_patterns_match_what_ecma_262_says(pattern: str, expected: set[str]) -> None:
    assert accepted(pattern) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "^[a-z]+$",
            r"^\d{3}-\d{2}$",
            r"^[A-Za-z0-9_\-]+$",
            r"^\w+@\w+\.[a-z]{2,}$",
            r"^(?<year>[0-9]{4})$",
            r"\p{L}+",
        ),
        *("[[:alpha:]]", r"\Aa\z", "[]a]", "[^]]", "(", "[abc", "a\\", r"(?=a)", "a|b"),
    ],
)
def test_patterns_that_both_read_alike_or_only_rust_knows_stay_as_they_are(pattern: str) -> None:
    assert translate_pattern(pattern).text.replace(r"\]", "]") == pattern.replace(r"\]", "]")


def test_a_flag_of_a_group_ends_with_it() -> None:
    assert translate_pattern("(?s:(.))(.)").text == r"(?s:(.))([^\n\r\u{2028}\u{2029}])"
    assert translate_pattern("((?s)a.)b.").text == r"((?s)a.)b[^\n\r\u{2028}\u{2029}]"


def test_control_characters_that_a_pattern_names_are_known() -> None:
    assert translate_pattern(r"^\x1b\[[0-9]+m$").code_points == {0x1B}
    assert translate_pattern(r"[\x01\t]").code_points == {1, 9}
    assert translate_pattern(r"[^\x00-\x1f\x7f]|[\x00-\x7f]").code_points == set()
