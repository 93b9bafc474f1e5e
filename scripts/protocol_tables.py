# SPDX-License-Identifier: Apache-2.0
"""Tables of the documentation for a protocol: the fields of its body, and the types and keys of the objects in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fastdeploy.entrypoints.openai.field_rules import FieldRules, rules_of
from fastdeploy.entrypoints.openai.object_rules import ObjectRules, TypeRules
from fastdeploy.entrypoints.openai.openapi import describe_fields
from tests.entrypoints.openapi_fields import make_document, range_text

HONOURED, WITHOUT_EFFECT, LEFT_OUT, REFUSED = "honoured", "without effect", "left out", "refused"


def protocol_tables(body: type, objects: Mapping[str, ObjectRules | TypeRules]) -> str:
    """Return the tables of a protocol.

    Args:
        body: struct of the request.
        objects: what the table of each kind of object is called -> its rules.
    """
    properties = make_document()["components"]["schemas"][body.__name__]["properties"]
    rows = [(f"`{name}`", HONOURED, text, range_text(properties[name])) for name, text in describe_fields(body).items()]
    rows += [(*row, "") for row in _unused(rules_of(body))]
    tables = [table("**Fields**", ("field", "", "what it does or why not", "range"), rows)]
    for title, rules in objects.items():
        if isinstance(rules, TypeRules):
            tables.append(table(f"**{title}**", ("type", "key", "", "what it does or why not"), _type_rows(rules)))
        else:
            tables.append(table(f"**{title}**", ("key", "", "what it does or why not"), _key_rows(rules)))
    return "\n\n".join(tables)


def table(title: str, header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table with its title."""
    columns = list(header)
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join([title, "", *("| " + " | ".join(line) + " |" for line in lines)])


def _type_rows(rules: TypeRules) -> Iterator[tuple[str, ...]]:
    for name, keys in rules.honoured.items():
        yield from ((f"`{name}`", *row) for row in _key_rows(keys))
    yield from ((f"`{name}`", "", LEFT_OUT, reason) for name, reason in rules.left_out.items())
    yield from ((f"`{name}`", "", REFUSED, reason) for name, reason in rules.refused.items())


def _key_rows(rules: ObjectRules) -> Iterator[tuple[str, ...]]:
    yield from ((f"`{key}`", HONOURED, text) for key, text in rules.honoured.items())
    yield from _unused(rules)


def _unused(rules: FieldRules) -> Iterator[tuple[str, str, str]]:
    yield from ((f"`{name}`", WITHOUT_EFFECT, reason) for name, reason in rules.without_effect.items())
    yield from ((f"`{name}`", REFUSED, reason) for name, (reason, _) in rules.refused.items())
