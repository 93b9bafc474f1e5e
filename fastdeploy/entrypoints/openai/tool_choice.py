# SPDX-License-Identifier: Apache-2.0
"""Which tools the model may call for a request, how calls are parsed, and the grammar that enforces them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.core.json_schema import SchemaError
from fastdeploy.core.json_types import shorten
from fastdeploy.core.schema_dialect import note_unknown_formats, prepare_schema
from fastdeploy.detokenize.messages import check_tools
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.parsers.argument_grammar import json_expression
from fastdeploy.entrypoints.openai.parsers.json_tool_parsers import NamedToolParser
from fastdeploy.entrypoints.openai.parsers.registry import JSON_ARRAY, ToolFormat
from fastdeploy.entrypoints.openai.parsers.tool_grammar import ToolCallGrammar
from fastdeploy.entrypoints.openai.parsers.tool_parser import ToolParser
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest
from fastdeploy.entrypoints.openai.tool_parser_choice import ToolParserChoice

MODES = ("none", "auto", "required")
ANY_ARGUMENTS = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """Use of tools in a request.

    Attributes:
        functions: the functions that may be called, by name, in OpenAI's format.
        tool_format: how the model writes calls; None if it is unknown.
        is_required: the message consists of calls only.
        is_named: the message is one call of the only function.
        is_limited: only some of the tools may be called.
        max_calls: maximum number of calls; None for any number.
        fields: function -> the field of the request that has the schema of its arguments.
    """

    functions: Mapping[str, Mapping[str, Any]]
    tool_format: ToolFormat | None
    is_required: bool = False
    is_named: bool = False
    is_limited: bool = False
    max_calls: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schema of the arguments of each function."""
        return {name: function.get("parameters") or NO_ARGUMENTS for name, function in self.functions.items()}

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser needs to see, even if they are special tokens."""
        return self.tool_format.markers if self.tool_format is not None else ()

    def make_parser(self) -> ToolParser:
        """Return a parser of one message."""
        if self.tool_format is None and self.is_named:
            return NamedToolParser(next(iter(self.functions)))
        return (self.tool_format or JSON_ARRAY).make_parser(self.schemas)

    def constraint(self, tokenizer: Tokenizer, given: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return the constraint on the output: calls if they are required, otherwise `given` or calls.

        Raises:
            InvalidRequestError: `given` cannot be combined with calls.
        """
        if self.is_required and given is not None and given.field != "response_format":  # it constrains content
            raise InvalidRequestError(given.field, "cannot be combined with a tool_choice that requires calls")
        if self.tool_format is None and self.is_named:
            ((name, schema),) = self.schemas.items()
            return StructuredOutputsParams(json=json.dumps(schema), source=self.fields.get(name, "tools"))
        tool_format = self.tool_format or JSON_ARRAY
        special_ids = tokenizer.find_special_ids(tool_format.markers)
        if self.is_required:
            grammar = ToolCallGrammar(tool_format, self.schemas, special_ids, self.max_calls, self.fields)
            return _lark(grammar.required(), self._schemas_by_field(self.functions))
        strict = {name for name, function in self.functions.items() if function.get("strict")}
        schemas = {name: schema if name in strict else ANY_ARGUMENTS for name, schema in self.schemas.items()}
        grammar = ToolCallGrammar(tool_format, schemas, special_ids, self.max_calls, self.fields)
        followed = self._schemas_by_field(strict)
        if given is not None:
            schema = _answer_schema(given)
            return _lark(grammar.optional(_answer_expression(given, schema)), {given.field: schema, **followed})
        return _lark(grammar.within_text(), followed) if strict or self.is_limited else None

    def _schemas_by_field(self, names: Collection[str]) -> dict[str, Any]:
        """Return the schemas of these functions by the fields of the request that have them, in their order."""
        return {place: self.schemas[name] for name, place in self.fields.items() if name in names}


def _lark(grammar: str, schemas: Mapping[str, Any]) -> StructuredOutputsParams:
    texts = {name: json.dumps(schema, ensure_ascii=False) for name, schema in schemas.items()}
    return StructuredOutputsParams(grammar=grammar, source="tools", schemas=texts)


def _answer_schema(given: StructuredOutputsParams) -> Any:
    """Return the schema of an answer that the model may give instead of calls."""
    if given.kind == "json":
        return json.loads(given.json)
    if given.kind == "json_object":
        return {"type": "object"}
    raise InvalidRequestError(given.field, "with tools, expected a JSON schema or json_object")


def _answer_expression(given: StructuredOutputsParams, schema: Any) -> str:
    unknown_formats = set[str]()
    prepared = prepare_schema(schema, unknown_formats)
    note_unknown_formats(unknown_formats)
    try:
        return json_expression(prepared, given.json_options)
    except SchemaError as error:
        raise InvalidRequestError(given.field, str(error)) from None


def tool_use(body: ChatCompletionRequest, parser: ToolParserChoice) -> ToolUse | None:
    """Return the use of tools in a request; None if no tool may be called.

    Args:
        parser: the format of the server's calls.

    Raises:
        InvalidRequestError: the tools or `tool_choice` are invalid; names the field.
    """
    tools = check_tools(body.tools or [])
    if not tools:
        _check_no_tools(body)
        return None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    mode, names = _choice(body.tool_choice if body.tool_choice is not None else "auto", functions)
    tool_format = parser.tool_format
    if mode == "none":
        return None
    if mode == "auto" and tool_format is None:
        raise parser.unknown_error()
    return ToolUse(
        functions={name: functions[name] for name in names},
        tool_format=tool_format,
        is_required=mode in ("required", "named"),
        is_named=mode == "named",
        is_limited=len(names) < len(functions),
        max_calls=1 if mode == "named" or body.parallel_tool_calls is False else None,
        fields={tool["function"]["name"]: f"tools[{i}].function.parameters" for i, tool in enumerate(tools)},
    )


def _check_no_tools(body: ChatCompletionRequest) -> None:
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequestError("tool_choice", "needs tools")
    if body.parallel_tool_calls is not None:
        raise InvalidRequestError("parallel_tool_calls", "needs tools")


def _choice(choice: str | dict[str, Any], known: Collection[str]) -> tuple[str, list[str]]:
    """Return the mode (none, auto, required, named) and the functions that may be called."""
    match choice:
        case str() if choice in MODES:
            return choice, list(known)
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", [_check_name("tool_choice.function.name", name, known)]
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            field = "tool_choice.allowed_tools.tools"
            return mode, list(dict.fromkeys(_check_name(field, _name(field, tool), known) for tool in tools))
    raise InvalidRequestError(
        "tool_choice",
        f'expected {", ".join(MODES)}, {{"type": "function", "function": {{"name": ...}}}} or '
        f'{{"type": "allowed_tools", "allowed_tools": {{"mode": ..., "tools": [...]}}}}, got {shorten(choice)}',
    )


def _name(field: str, tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidRequestError(field, f"expected objects of type function with a name, got {shorten(tool)}")


def _check_name(field: str, name: str, known: Collection[str]) -> str:
    if name not in known:
        raise InvalidRequestError(field, f"{shorten(name)} is not one of the tools: {', '.join(known)}"[:300])
    return name
