# SPDX-License-Identifier: Apache-2.0
"""Prepares JSON schemas of requests for llguidance, where it reads them otherwise than JSON Schema 2020-12."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from fastdeploy.core.ecma_pattern import translate_pattern
from fastdeploy.core.json_schema import map_subschemas, subschemas
from fastdeploy.core.json_types import shorten

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")  # of llguidance
)
"""The values of `format` that are followed; others are annotations (JSON Schema 2020-12, section 7.2.3)."""
MAX_NOTED_FORMATS = 100
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"([0-9]{{4}}-(0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_LEAP_SECOND = r"23:59:60(\.[0-9]+)?[zZ]$"
_FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^({_TIME}|{_LEAP_SECOND})",
    "date-time": f"^({_DATE}[tT]{_TIME}|[0-9]{{4}}-(06-30|12-31)[tT]{_LEAP_SECOND})",
}
"""What llguidance's expressions of these formats leave out: the lengths of February, and where a leap second is."""
_SHORT_ESCAPES = 'nrbtf\\"'
_NEEDS_UNICODE_ESCAPE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")  # the control characters without a short escape

logger = logging.getLogger("fastdeploy.server")
_noted_formats: set[str] = set()


def prepare_schema(schema: Any, unknown_formats: set[str]) -> Any:
    """Return a schema in which patterns and formats mean what JSON Schema says.

    Args:
        unknown_formats: gets the formats that were removed because they are not followed.
    """
    if not isinstance(schema, dict):
        return schema
    result = map_subschemas(schema, lambda part: prepare_schema(part, unknown_formats))
    if isinstance(result.get("pattern"), str):
        result["pattern"] = translate_pattern(result["pattern"]).text
    if isinstance(result.get("patternProperties"), dict):
        result["patternProperties"] = _translate_names(result["patternProperties"])
    name = result.get("format")
    if isinstance(name, str):
        if name not in FORMATS:
            unknown_formats.add(result.pop("format"))
        elif name in _FORMAT_PATTERNS:
            _add_pattern(result, _FORMAT_PATTERNS[name])
    return result


def escape_options(schema: Any) -> dict[str, str]:
    r"""Return the option of llguidance that says which escapes strings have.

    Without `\uXXXX` there is one way to write each name, so that none passes for another. Only strings that a schema
    requires, and that have control characters without a short escape, need it.
    """
    return {"json_allowed_escapes": _SHORT_ESCAPES + ("u" if _needs_unicode_escapes(schema) else "")}


def note_unknown_formats(names: Collection[str]) -> None:
    """Write a line to the log for each format that is not followed, once per process."""
    for name in sorted(names):
        if name not in _noted_formats and len(_noted_formats) < MAX_NOTED_FORMATS:
            _noted_formats.add(name)
            logger.info("JSON schemas with the format %s: it is an annotation and not enforced", shorten(name))


def _translate_names(patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Return pattern properties with translated patterns, of which two may have become the same text."""
    result: dict[str, Any] = {}
    for pattern, schema in patterns.items():
        text = translate_pattern(pattern).text
        while text in result:
            text = f"(?:{text})"
        result[text] = schema
    return result


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    """Add a pattern to those that a schema has."""
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(schema.get("allOf", []), list):
        schema["allOf"] = [*schema.get("allOf", []), {"pattern": pattern}]


def _needs_unicode_escapes(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    values = [schema[name] for name in ("const", "enum") if name in schema]
    if any(map(_has_control_character, values)) or _names_control_character(schema.get("pattern")):
        return True
    return any(_needs_unicode_escapes(part) for _, part in subschemas(schema))


def _has_control_character(value: Any) -> bool:
    if isinstance(value, str):
        return _NEEDS_UNICODE_ESCAPE.search(value) is not None
    if isinstance(value, Mapping):
        return any(_has_control_character(part) for item in value.items() for part in item)
    return isinstance(value, list) and any(map(_has_control_character, value))


def _names_control_character(pattern: Any) -> bool:
    if not isinstance(pattern, str):
        return False
    named = translate_pattern(pattern).code_points
    return any(_NEEDS_UNICODE_ESCAPE.match(chr(code_point)) for code_point in named)
