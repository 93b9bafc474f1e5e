# SPDX-License-Identifier: Apache-2.0
"""Texts and JSON values of clients: depth, length, valid Unicode, and how errors show them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import check_json, check_unicode, parse_json, replace_surrogates, shorten, write_json


def nested(depth: int) -> Any:
    """Return `depth` lists and objects in one another."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def test_depth_of_64_passes_and_65_is_refused() -> None:
    check_json("tools", nested(64))
    assert parse_json("f", json.dumps(nested(64))) == nested(64)
    for refuse in (check_json, write_json):
        with pytest.raises(InvalidRequestError, match="tools: is nested too deeply: expected at most 64 levels"):
            refuse("tools", nested(65))


@pytest.mark.parametrize("depth", [65, 900, 960, 970, 985, 990, 1000, 1100, 100_000])
def test_text_of_any_depth_is_refused_with_the_same_error(depth: int) -> None:
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        with pytest.raises(InvalidRequestError, match="f: is nested too deeply: expected at most 64 levels"):
            parse_json("f", text)


@pytest.mark.parametrize("value", ["\ud800", ["a", "\udfff"], {"a": {"b": "é\udc00"}}, {"\ud800": 1}])
def test_lone_surrogates_in_texts_and_names_are_refused(value: Any) -> None:
    for refuse in (check_json, write_json):
        with pytest.raises(InvalidRequestError, match=r"f: expected valid Unicode, got the lone surrogate '\\ud"):
            refuse("f", value)
    with pytest.raises(InvalidRequestError, match="f: expected valid Unicode"):
        parse_json("f", json.dumps(value))


def test_texts_with_pairs_of_surrogates_noncharacters_and_nul_pass() -> None:
    assert parse_json("f", '"\\ud83d\\ude42\\uffff\\u0000"') == "🙂\uffff\0"
    check_unicode("f", "\U0010ffff\ufdd0\0")


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", '{"a": 1e999}'])
def test_numbers_that_are_not_finite_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="f: expected finite numbers"):
        parse_json("f", text)


def test_length_counts_texts_names_and_values() -> None:
    check_json("f", {"ab": ["cde", 1]}, 9)  # four values, five characters
    with pytest.raises(InvalidRequestError, match="f: expected at most 8 characters of JSON"):
        check_json("f", {"ab": ["cde", 1]}, 8)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a", "'a'"),
        ("x" * 1000, repr("x" * 64)),
        ("\ud800", "'\\ud800'"),
        (nested(2000), "an array"),
        ([], "an array"),
        (10**4000, "a number"),
        (2**64, "18446744073709551616"),
        (1.5, "1.5"),
        (None, "None"),
    ],
)
def test_values_are_shown_briefly(value: Any, shown: str) -> None:
    assert shorten(value) == shown


def test_surrogates_are_written_as_escapes_in_errors() -> None:
    assert msgspec.json.encode(replace_surrogates("é\ud800")) == '"é\\\\ud800"'.encode()
