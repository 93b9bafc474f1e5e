# SPDX-License-Identifier: Apache-2.0
"""Formats, patterns and escapes of JSON schemas mean what JSON Schema 2020-12, RFC 3339 and ECMA-262 say."""

from __future__ import annotations

import calendar
import json
import logging
from typing import Any

import pytest

from fastdeploy.core import schema_dialect
from fastdeploy.core.schema_dialect import FORMATS, escape_options, note_unknown_formats, prepare_schema
from tests.structured_output.schema_grammars import allowed_texts, allows, compile_form

ANNOTATIONS = ["path", "password", "byte", "binary", "int64", "double", "uri-reference", "iri", "idn-email", "regex"]
ANNOTATIONS += ["uri-template", "json-pointer", "relative-json-pointer", "colour", "unknown", ""]


def test_unknown_formats_are_annotations_wherever_a_schema_stands_and_nowhere_else() -> None:
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "path"},
            "list": {"type": "array", "items": {"format": "byte"}, "prefixItems": [{"format": "email"}]},
            "any": {"anyOf": [{"type": "string", "format": "iri"}, {"const": {"format": "regex"}}]},
        },
        "$defs": {"d": {"format": "password"}},
        "additionalProperties": {"format": "uri-reference"},
        "default": {"format": "colour"},
    }
    found = set[str]()
    prepared = prepare_schema(schema, found)
    assert found == {"path", "byte", "iri", "password", "uri-reference"}
    assert prepared["properties"]["format"] == {"type": "string"}
    assert prepared["properties"]["list"] == {"type": "array", "items": {}, "prefixItems": [{"format": "email"}]}
    assert prepared["properties"]["any"]["anyOf"] == [{"type": "string"}, {"const": {"format": "regex"}}]
    assert prepared["default"] == {"format": "colour"}


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_a_schema_with_an_unknown_format_allows_what_it_allows_without_it(name: str) -> None:
    assert allowed_texts(['"any text"', "5"], json={"type": "string", "format": name}) == ['"any text"']
    assert allowed_texts(['"any text"', "5"], json={"type": "integer", "format": name}) == ["5"]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("duration", "P3DT4H", "3 days"),
        ("email", "a@example.com", "a"),
        ("hostname", "a.example", "-a"),
        ("ipv4", "10.0.0.255", "10.0.0.256"),
        ("ipv6", "fe80::1", "fe80:::1"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ("uri", "https://example.com/a", "no uri"),
        ("date", "2024-02-29", "2023-02-29"),
        ("time", "23:59:60Z", "12:00:60Z"),
        ("date-time", "2024-02-29T12:00:00Z", "2023-02-29T12:00:00Z"),
    ],
)
def test_other_formats_are_enforced(name: str, right: str, wrong: str) -> None:
    assert name in FORMATS
    assert allowed_texts([f'"{right}"', f'"{wrong}"'], json={"type": "string", "format": name}) == [f'"{right}"']


def test_dates_are_those_of_the_calendar() -> None:
    date = compile_form(json={"type": "string", "format": "date"})
    moment = compile_form(json={"type": "string", "format": "date-time"})
    for year in (*range(1890, 1910), *range(1996, 2005), 2023, 2100, 2400, 9999, 1):
        for month in range(14):
            last = calendar.monthrange(year, month)[1] if 1 <= month <= 12 else 0
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert allows(date, f'"{text}"') is (1 <= day <= last), text
                assert allows(moment, f'"{text}T00:00:00Z"') is (1 <= day <= last), text


RIGHT_TIMES = ["23:59:59Z", "23:59:60Z", "23:59:60z", "23:59:60.25Z", "00:00:00.5+01:30"]
WRONG_TIMES = ["12:59:60Z", "23:58:60Z", "23:59:60+01:00", "23:59:61Z", "24:00:00Z", "23:59:59", "1:00:00Z"]


@pytest.mark.parametrize("text", [*RIGHT_TIMES, *WRONG_TIMES])
def test_a_leap_second_ends_a_day_in_utc(text: str) -> None:
    is_time = text in RIGHT_TIMES
    assert bool(allowed_texts([f'"{text}"'], json={"type": "string", "format": "time"})) is is_time
    for day, is_last in (("1990-12-31", True), ("2015-06-30", True), ("2015-06-29", ":60" not in text)):
        found = allowed_texts([f'"{day}T{text}"'], json={"type": "string", "format": "date-time"})
        assert bool(found) is (is_time and is_last), day


def test_a_format_is_beside_the_patterns_of_a_schema() -> None:
    for patterns in ({"pattern": "^20"}, {"pattern": "^20", "allOf": [{"pattern": "-29$"}]}):
        schema = {"type": "string", "format": "date", **patterns}
        texts = ['"2024-02-29"', '"1904-02-29"', '"2023-02-29"']
        assert allowed_texts(texts, json=schema) == texts[:1]


def test_each_unknown_format_is_logged_once_and_their_number_is_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_dialect, "_noted_formats", set())
    with caplog.at_level(logging.INFO, "fastdeploy.server"):
        note_unknown_formats(["path", "a\nb"])
        note_unknown_formats(["path"])
        note_unknown_formats([f"f{i}" for i in range(200)])
    assert len(caplog.messages) == 100
    assert sum("'path'" in message for message in caplog.messages) == 1
    assert not any("\n" in message for message in caplog.messages)


CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}


@pytest.mark.parametrize(
    "schema", [CLOSED, OPEN, {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}}]
)
def test_a_name_cannot_be_written_with_escapes_to_pass_for_another(schema: dict[str, Any]) -> None:
    texts = ['{"a": 1}', r'{"\u0061": "x"}', r'{"a": 1, "\u0061": "x"}', r'{"\u0061": 1}']
    assert allowed_texts(texts, json=schema) == texts[:1]
    tag = {"format": {"type": "json_schema", "json_schema": schema}}
    assert allowed_texts(texts, structural_tag=tag) == texts[:1]


def test_strings_have_short_escapes_and_no_others() -> None:
    texts = [r'"\n\t\r\b\f\"\\"', '"é/\u2028"', r'"\u0001"', '"\x01"', r'"\u00e9"', '"\x7f"']
    assert allowed_texts(texts, json={"type": "string"}) == texts[:2]


@pytest.mark.parametrize("character", ["\0", "\x01", "\x1f", "\x7f"])
def test_control_characters_that_a_schema_requires_are_escaped(character: str) -> None:
    for schema in ({"const": f"a{character}"}, {"enum": ["b", [f"a{character}"], f"a{character}"]}):
        assert allowed_texts([f'"a\\u{ord(character):04x}"', f'"a{character}"'], json=schema) == [
            f'"a\\u{ord(character):04x}"'
        ]
    pattern = {"type": "string", "pattern": f"^\\x{ord(character):02x}$"}
    assert allowed_texts([f'"\\u{ord(character):04x}"', '"a"'], json=pattern) == [f'"\\u{ord(character):04x}"']


def test_only_schemas_that_require_control_characters_have_unicode_escapes() -> None:
    for schema in (
        {"pattern": r"^[^\x00-\x1f]*$"},
        {"const": "a\n\t"},
        {"properties": {"\x01": {}}},
        {"default": "\x01"},
    ):
        assert "u" not in escape_options(schema)["json_allowed_escapes"], schema
    assert allowed_texts([r'{"\u0001": 1}'], json={"type": "object", "properties": {"\x01": {}}}) == [r'{"\u0001": 1}']


def test_patterns_of_schemas_are_those_of_ecma_262() -> None:
    texts = [
        json.dumps(text, ensure_ascii=False) for text in ("a", "\n", "\r", "\u2028", "\u2029", "\ufeff", "\x85", " ")
    ]
    assert allowed_texts(texts, json={"type": "string", "pattern": "^.$"}) == ['"a"', '"\ufeff"', '"\x85"', '" "']
    assert allowed_texts(texts, json={"type": "string", "pattern": r"^\S$"}) == ['"a"', '"\x85"']
    names = ['{"\\r": 1}', '{"a": 1}', '{"a": "x"}', '{"\\r": "x"}']
    schema = {
        "type": "object",
        "patternProperties": {"^.$": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    assert allowed_texts(names, json=schema) == ['{"a": 1}', '{"\\r": "x"}']
