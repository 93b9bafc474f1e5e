# SPDX-License-Identifier: Apache-2.0
"""Random forms that are hard to compile: what a client could send to slow a server down."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

Kind = dict[str, Any]
ATOMS = ["a", "[a-z]", ".", r"\w", "é", r"[^\"\\]", r"\d", "日", "(?i:ab)", r"\s", r"\p{L}", "x?"]
COUNTS = [0, 1, 2, 3, 9, 100, 999, 65_535, 1_000_000, 2**31, 2**63]
NUMBERS = [0, 1, -1, 0.1, 0.00001, 7, 997, 65_521, 99_991, 999_983, 2_147_483_648, 1e300, 1e-300, -(2**63), 10**30]
FORMATS = ["date-time", "uuid", "email", "hostname", "ipv6", "uri", "unknown"]
MAX_CHARS = 120_000
MAX_PART_CHARS = 5000


def hostile_form(random: Random) -> Kind:
    """Return the keyword argument of a GuidedDecodingParams."""
    make: Callable[[Random], Kind] = random.choice([_json, _json, _regex, _lark, _gbnf, _choice, _tag, _whitespace])
    form = make(random)
    if "json" in form or "structural_tag" in form:
        form |= random.choice([{}, {}, _whitespace_pattern(random), {"disable_additional_properties": True}])
    return form


def _whitespace_pattern(random: Random) -> Kind:
    return {"whitespace_pattern": regex(random, random.randint(1, 4))[:MAX_PART_CHARS] or " "}


def _count(random: Random) -> int:
    return random.choice(COUNTS)


def _regex(random: Random) -> Kind:
    return {"regex": regex(random, random.randint(1, 6))[:MAX_CHARS] or "a"}


def regex(random: Random, depth: int) -> str:
    """Return a pattern of nested quantifiers, alternations and repeats."""
    part = regex(random, depth - 1) if depth > 1 else random.choice(ATOMS)
    if len(part) > MAX_PART_CHARS:
        return part
    low = _count(random)
    return random.choice(
        [
            f"({part})*",
            f"({part})+?{part}",
            f"({part}){{{low},{low + _count(random)}}}",
            f"({part}){{{low}}}",
            f"({part}|{random.choice(ATOMS)}|{part}{random.choice(ATOMS)})",
            part * random.choice([2, 10, 200]),
            f"(.*{part}.*{part})",
            "(" * (wrap := random.choice([1, 50, 2000])) + part + ")?" * wrap,
            f"({part}|{random.choice(ATOMS)}{part})*a({part}){{{random.choice([5, 20, 300])}}}",
        ]
    )


def _json(random: Random) -> Kind:
    schema = json_schema(random, random.randint(1, 5))
    names = [f"d{i}" for i in range(random.choice([1, 3, 200]))]
    definitions = {
        name: random.choice([{"$ref": f"#/$defs/{random.choice(names)}"}, json_schema(random, 1)]) for name in names
    }
    schema = {**schema, "$defs": definitions}
    text = json.dumps(schema)
    return {"json": text if random.random() < 0.3 else schema} if len(text) < MAX_CHARS else {"json": {"type": "null"}}


def json_schema(random: Random, depth: int) -> dict[str, Any]:
    """Return a schema whose parts combine, refer to one another, or have large numbers."""
    if depth == 0:
        return _leaf(random)
    parts = [json_schema(random, depth - 1) for _ in range(random.choice([1, 1, 2, 3]))]
    times = random.choice([1, 20]) if depth == 1 else 1
    match random.randrange(8):
        case 0 | 1:
            return {random.choice(["allOf", "anyOf", "oneOf"]): parts * times}
        case 2:
            names = [f"p{i}" for i in range(random.choice([1, 5, 40, 1100]))]
            required = random.choice([names, names[:1], []])
            return {
                "type": "object",
                "properties": {n: parts[0] if n == "p0" else {} for n in names},
                "required": required,
            }
        case 3:
            return {"type": "array", "items": parts[0], "minItems": _count(random), "maxItems": _count(random)}
        case 4:
            return {"type": "array", "prefixItems": parts * times, "items": random.random() < 0.5}
        case 5:
            return {"type": "object", "patternProperties": {regex(random, 2)[:2000]: parts[0]}}
        case 6:
            return {"type": "object", "additionalProperties": parts[0], "maxProperties": _count(random)}
        case _:
            return {"not": parts[0]} if random.random() < 0.2 else {"type": ["object", "array", "string"], **parts[0]}


def _leaf(random: Random) -> dict[str, Any]:
    match random.randrange(7):
        case 0:
            return {"type": "number", "multipleOf": random.choice(NUMBERS), "minimum": random.choice(NUMBERS)}
        case 1:
            return {"type": "integer", "multipleOf": random.choice(NUMBERS), "maximum": random.choice(NUMBERS)}
        case 2:
            return {"type": "string", "minLength": _count(random), "maxLength": _count(random)}
        case 3:
            return {"type": "string", "pattern": regex(random, 3)[:3000], "maxLength": _count(random)}
        case 4:
            return {"enum": [random.choice(["é", "\u2028", "x", 1, None]) for _ in range(random.choice([1, 3000]))]}
        case 5:
            return {"$ref": random.choice(["#", "#/$defs/d0", "#/$defs/d7", "#/none", "https://example.com"])}
        case _:
            return {"type": "string", "format": random.choice(FORMATS)}


def _lark(random: Random) -> Kind:
    names = [f"r{i}" for i in range(random.choice([1, 4, 300, 990]))]
    rules = [f"{name}: {_lark_expression(random, names)}" for name in names]
    terminals = [f"T{i}: {_terminal(random, i)}" for i in range(random.choice([1, 3, 25]))]
    return {"grammar": "\n".join([f"start: {_lark_expression(random, names)}", *rules, *terminals])[:MAX_CHARS]}


def _lark_expression(random: Random, names: list[str]) -> str:
    part = random.choice([*names[:3], random.choice(names), "T0", '"a"', f"/{regex(random, 2)[:500]}/", '"é 日"i'])
    match random.randrange(6):
        case 0:
            return f"({part} | {random.choice(names)} {part})*"
        case 1:
            return f"({part}){{{_count(random)},{random.choice(COUNTS)}}}"
        case 2:
            return f"%json {json.dumps(json_schema(random, 2))[:5000]}"
        case 3:
            return " | ".join([part] * random.choice([2, 50]))
        case 4:
            return f"{random.choice(names)}? {part}? {random.choice(names)}?"
        case _:
            return part


def _terminal(random: Random, index: int) -> str:
    below = f"T{index - 1} " * random.choice([1, 2, 4]) if index else '"a"'
    return random.choice([below, f"({below})+ /b/", f"/{regex(random, 3)[:2000]}/", f"{below}& /a+/", f"~({below})"])


def _gbnf(random: Random) -> Kind:
    names = [f"rule-{i}" for i in range(random.choice([1, 5, 500]))]
    parts = ['"a"', "[a-z]", "[^é]", ".", '"日"']
    rules = []
    for index, name in enumerate(names):
        part = random.choice([*parts, names[index - 1], random.choice(names)])
        repeat = random.choice(["*", "+", "?", f"{{{_count(random)}}}", f"{{{random.choice(COUNTS)},}}", ""])
        wrap = random.choice([0, 1, 100])
        rules.append(f"{name} ::= {'(' * wrap}{part}{')' * wrap}{repeat} | {part} {random.choice(parts)}")
    return {"grammar": "\n".join([f"root ::= {random.choice(names)}", *rules])[:MAX_CHARS]}


def _choice(random: Random) -> Kind:
    length = random.choice([1, 20, 1000, 30_000])
    alphabet = random.choice(["ab", "aé日", "a.*(\\"])
    count = min(random.choice([1, 10, 20_000]), MAX_CHARS // (2 * length))
    return {"choice": ["".join(random.choices(alphabet, k=random.randint(1, length))) for _ in range(max(count, 1))]}


def _tag(random: Random) -> Kind:
    content = random.choice(
        [
            {"type": "json_schema", "json_schema": json_schema(random, 3)},
            {"type": "json_schema", "json_schema": json.dumps(json_schema(random, 3))},
            {"type": "regex", "pattern": regex(random, 4)[:10_000]},
            {"type": "any_text"},
        ]
    )
    for _ in range(random.choice([0, 3, 40])):
        content = {"type": random.choice(["sequence", "or"]), "elements": [content]}
    triggers = [f"<{i}" for i in range(random.choice([1, 300]))]
    tags = [{"type": "tag", "begin": f"{t}>", "content": content, "end": ["</", ""]} for t in triggers[:20]]
    tag = {"format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}
    return {"structural_tag": tag} if len(json.dumps(tag)) < MAX_CHARS else {"structural_tag": {"format": content}}


def _whitespace(random: Random) -> Kind:
    """Return a grammar with long runs of the same characters, which regular expressions may try in every division."""
    run = random.choice([" ", "\t", "\n", " \n", "a", "a ", "start", "start ", "[", "a[", "a.", "a.1 ", "temperature "])
    run *= random.choice([4000, 60_000]) // len(run)
    return {
        "grammar": random.choice(["", "start: T\nT: /a/\n", 'root ::= "a"\n'])
        + run
        + random.choice(["", ":", "]", "x"])
    }
