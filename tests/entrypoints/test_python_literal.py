# SPDX-License-Identifier: Apache-2.0
"""A literal in the output of a model has the value that Python gives it, as far as JSON can express it."""

from __future__ import annotations

import ast
import json
import random
import warnings
from typing import Any

import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.parsers.python_literal import LiteralScanner, parse_literal

NUMBERS = (
    *("1", "+3", "-3", "1_000", "0x10", "0o17", "0b11", "1.5e3", "+1.", ".5", "1e400", "-1e400", "1j", "1+2j", "--3"),
    *("-True", "00", "01", "nan", "1 + 2"),
)
NAMES = ("True", "False", "None", "...", "x", "set()")
PIECES = (
    *("a", "é", "😀", "'", '"', "\\", "\\n", "\\\n", "\\\r\n", "\n", "\r\n", "\\d", "\\x41", "\\x4", "\\u00e9"),
    *("\\ud83d", "\\ude00", "\\U0001F600", "\\N{BULLET}", "\\N{nope}", "\\101", "\\8", "\\777", "\\'", '\\"'),
    *(",", ")", "[", "}", "{", "\0", " ", "\\/", "r", "b"),
)
LEFT_OUT = "left out"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'Martha\'s \"x\" \u00e9\n'", 'Martha\'s "x" é\n'),
        (r"'C:\dir \d+'", r"C:\dir \d+"),
        (r"r'C:\dir'", r"C:\dir"),
        (r"R'\'\n'", r"\'\n"),
        ("u'a'", "a"),
        ("'a' 'b'", "ab"),
        ("'a'\n  'b'", "ab"),
        ("'''it's\r\nhere'''", "it's\nhere"),
        ("'a\\\nb'", "ab"),
        (r"'\N{BULLET}\x41\101'", "•AA"),
        (r"'\ud83d\ude00'", "😀"),
        (r"'\ud83d' '\ude00'", "😀"),
        (r"'a\ud800'", r"a\ud800"),
        ("{'a': {'b': None}, 1: (True, false)}", {"a": {"b": None}, "1": [True, False]}),
        ("{True: 1, None: 2, -1: 3, 1.5: 4}", {"true": 1, "null": 2, "-1": 3, "1.5": 4}),
        ("[1, 2,]", [1, 2]),
        ("-7", -7),
        ("+3", 3),
        ("1_000", 1000),
        ("0x10", 16),
        # Python has no value for these, but their meaning is clear
        ("'a\nb'", "a\nb"),
        ("r'a\n\\d'", "a\n\\d"),
        ("'a\0b'", "a\0b"),
    ],
)
def test_literals_of_python_are_read(text: str, value: object) -> None:
    assert repr(parse_literal(text)) == repr(value), "the same type, too"


@pytest.mark.parametrize(
    "text",
    [
        *("", "f()", "x", "1 + 1", "b'z'", "rb'z'", "{1, 2}", "{**a}", "f'{x}'", "1e999", "1j", "...", "-True", "--3"),
        *("'a", "'''a'", "'\\x4'", "'\\N{nope}'", "{[1]: 2}", "{1e999: 2}", "1 2", "nan"),
        *("9" * 5000, "[" * 90 + "]" * 90, "(" * 5000, "-" * 99999 + "1"),
    ],
    ids=range(26),
)
def test_what_is_no_literal_that_json_can_express_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_literal(text)


def random_string(rng: random.Random) -> str:
    quote = rng.choice(["'", '"', "'''", '"""'])
    prefix = rng.choice(["", "", "", "r", "R", "u", "b", "f", "br"])
    return prefix + quote + "".join(rng.choices(PIECES, k=rng.randint(0, 5))) + quote


def random_literal(rng: random.Random, depth: int = 0) -> str:
    """Return the text of a literal, or of something that resembles one."""
    kind = rng.choice(
        ["string", "string", "strings", "number", "name", "list", "tuple", "set", "dict"][: 9 if depth < 3 else 5]
    )
    if kind.startswith("string"):
        return " ".join(random_string(rng) for _ in range(1 + kind.endswith("s")))
    if kind in ("number", "name"):
        return rng.choice(NUMBERS if kind == "number" else NAMES)
    items = [random_literal(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind == "dict":
        items = [f"{random_literal(rng, 3)}: {item}" for item in items]
    begin, end = {"list": "[]", "tuple": "()", "set": "{}", "dict": "{}"}[kind]
    return begin + ", ".join(items) + rng.choice(["", ","] if items else [""]) + end


def in_json(value: Any) -> Any:
    """Return what a reader of JSON gets of a value of Python; `LEFT_OUT` if JSON cannot express it."""
    if isinstance(value, str):
        return json.loads(json.dumps(value)).encode(errors="backslashreplace").decode()
    if isinstance(value, (list, tuple)):
        items = [in_json(item) for item in value]
        return LEFT_OUT if LEFT_OUT in items else items
    if isinstance(value, dict):
        keys, items = [in_json(key) for key in value], in_json(list(value.values()))
        if items == LEFT_OUT or any(key == LEFT_OUT or isinstance(key, list) for key in keys):
            return LEFT_OUT
        return {key if isinstance(key, str) else json.dumps(key): item for key, item in zip(keys, items, strict=True)}
    is_number = isinstance(value, (int, float)) and abs(value) < float("inf")
    return value if value is None or is_number else LEFT_OUT


def test_values_are_those_of_python() -> None:
    rng, num_read = random.Random(37), 0
    for _ in range(4000):
        text = random_literal(rng)
        try:
            with warnings.catch_warnings(action="ignore"):  # of unknown escapes
                expected = in_json(ast.literal_eval(text))
        except SyntaxError:
            continue
        except (ValueError, TypeError):
            expected = LEFT_OUT
        try:
            value = parse_literal(text)
        except InvalidRequestError:
            value = LEFT_OUT
        assert repr(value) == repr(expected), text
        num_read += value != LEFT_OUT
        scanner = LiteralScanner()
        assert (scanner.feed(f"{text})x", 0), scanner.is_done) == (len(text), True), text
    assert num_read > 1000


def test_scanner_finds_the_same_end_by_characters() -> None:
    rng = random.Random(38)
    for _ in range(1000):
        text = random_literal(rng) + rng.choice([")", ",", ", b=1)"])
        whole, by_character, position = LiteralScanner(), LiteralScanner(), 0
        end = whole.feed(text, 0)
        for length in range(1, len(text) + 1):
            position = by_character.feed(text[:length], position)
        assert (by_character.is_done, position) == (whole.is_done, end), text
