# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/guide/request-fields.md and errors.md: python -m scripts.make_request_tables

With --renew-openapi, at a release, it also writes the paths, fields and ranges with which later ones are compared.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fastdeploy.entrypoints.openai.errors import ABSENT_ROUTES
from fastdeploy.entrypoints.openai.field_rules import REFUSED, WITHOUT_EFFECT
from fastdeploy.entrypoints.openai.messages_api.errors import ERROR_TYPES
from fastdeploy.entrypoints.openai.messages_api.fields import OBJECTS as MESSAGES_OBJECTS
from fastdeploy.entrypoints.openai.messages_api.protocol import MessagesRequest
from fastdeploy.entrypoints.openai.openapi import describe_fields
from fastdeploy.entrypoints.openai.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    GenerationFields,
)
from fastdeploy.entrypoints.openai.responses_api.protocol import OBJECTS, ResponsesRequest
from scripts.protocol_tables import protocol_tables, table
from tests.entrypoints.error_table import BODIES, BOTH, ONE, ROUTES, Row, wrong
from tests.entrypoints.openapi_fields import RELEASED, document_lines, make_document, range_text

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guide"
MARKS = ("<!-- {}: made by scripts/make_request_tables.py -->", "<!-- end of {} -->")
TITLES: dict[type, tuple[str, type]] = {
    GenerationFields: ("All of these endpoints", CompletionRequest),
    CompletionRequest: ("`/v1/completions`", CompletionRequest),
    ChatFields: ("`/v1/chat/completions` and `/v1/chat/completions/batch`", ChatCompletionRequest),
    ChatCompletionRequest: ("`/v1/chat/completions`", ChatCompletionRequest),
    BatchChatCompletionRequest: ("`/v1/chat/completions/batch`", BatchChatCompletionRequest),
}
"""Struct with fields of its own -> title of their table, and a body that has them."""


def field_tables() -> str:
    """Return the tables of fields: honoured, without effect, refused."""
    schemas = make_document()["components"]["schemas"]
    tables = []
    for model, (title, body) in TITLES.items():
        properties = schemas[body.__name__]["properties"]
        inherited = [] if model is GenerationFields else describe_fields(model.__bases__[0])
        rows = [
            (f"`{name}`", text, range_text(properties[name]))
            for name, text in describe_fields(model).items()
            if name not in inherited
        ]
        tables.append(table(f"**{title}**", ("field", "", "range"), rows))
    rows_without_range = [(f"`{name}`", reason) for name, reason in WITHOUT_EFFECT.items()]
    tables.append(table("**Accepted without effect**", ("field", "why"), rows_without_range))
    rows_without_range = [(f"`{name}`", reason) for name, (reason, _) in REFUSED.items()]
    tables.append(
        table("**Refused by name**, except for values that request nothing", ("field", "why"), rows_without_range)
    )
    return "\n\n".join(tables)


def error_tables() -> str:
    """Return the tables of errors and of routes that do not exist."""
    shared = [wrong("/v1/completions", *args) for args in BOTH]
    fields = [_cells(row, "both endpoints") for row in shared] + [_cells(row, f"`{row.path}`") for row in ONE]
    others = [_cells(row, f"`{row.method} {row.path}`") for row in [*BODIES, *ROUTES] if row.path not in ABSENT_ROUTES]
    header = ("request", "wrong", "status", "message (a part)", "`param`", "`code`")
    types = [(str(status), f"`{name}`") for status, name in ERROR_TYPES.items()]
    absent = [(f"`{path}`", reason) for path, reason in ABSENT_ROUTES.items()]
    return "\n\n".join(
        [
            table("**Fields**", header, fields),
            table("**Bodies, headers, models, routes**", header, others),
            table("**Routes of FastDeploy, vLLM and OpenAI that do not exist** (404)", ("route", ""), absent),
            table("**Types of errors below `/v1/messages`**", ("status", "`type`"), types),
        ]
    )


def with_tables(name: str, page: str, tables: str) -> str:
    """Return the page with fresh tables between its marks."""
    begin, end = (mark.format(name) for mark in MARKS)
    before, rest = page.split(begin)
    return f"{before}{begin}\n{tables}\n{end}{rest.split(end)[1]}"


def fresh_pages() -> dict[Path, str]:
    """Return the pages as they should be."""
    fields, errors, responses = (GUIDE / f"{name}.md" for name in ("request-fields", "errors", "responses-fields"))
    messages = GUIDE / "messages-fields.md"
    return {
        messages: with_tables("messages", messages.read_text(), protocol_tables(MessagesRequest, MESSAGES_OBJECTS)),
        responses: with_tables("responses", responses.read_text(), protocol_tables(ResponsesRequest, OBJECTS)),
        fields: with_tables("fields", fields.read_text(), field_tables()),
        errors: with_tables("errors", errors.read_text(), error_tables()),
    }


def _cells(row: Row, where: str) -> tuple[str, ...]:
    param = f"`{row.param}`" if row.param else ""
    message = row.message + ("…" if row.message.endswith(" ") else "")
    return where, _escaped(row.wrong), str(row.status), _escaped(message), param, f"`{row.code}`"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    for path, page in fresh_pages().items():
        path.write_text(page)
    if "--renew-openapi" in sys.argv:
        RELEASED.write_text("\n".join([*document_lines(make_document()), ""]))
