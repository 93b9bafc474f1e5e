# SPDX-License-Identifier: Apache-2.0
"""Which tools a request lets the model call, how calls are told from text, and the grammar that makes them certain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.detokenize.messages import check_tools
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.parsers.json_tool_parsers import NamedToolParser
from fastdeploy.entrypoints.openai.parsers.registry import JSON_ARRAY, ToolFormat, get_tool_format
from fastdeploy.entrypoints.openai.parsers.tool_grammar import ToolCallGrammar, json_expression
from fastdeploy.entrypoints.openai.parsers.tool_parser import ToolParser
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest

MODES = ("none", "auto", "required")
ANY_ARGUMENTS = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools; `tool_use` makes it.

    Attributes:
        functions: those that may be called, in OpenAI's shape, by name.
        form: how this model writes calls; None if the server does not say.
        is_required: the message is calls and nothing else.
        is_named: it is one call of the only function.
        is_limited: only some of the tools may be called.
        max_calls: most calls; None for any number.
    """

    functions: Mapping[str, Mapping[str, Any]]
    form: ToolFormat | None
    is_required: bool = False
    is_named: bool = False
    is_limited: bool = False
    max_calls: int | None = None

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Function -> the schema of its arguments."""
        return {name: function.get("parameters") or NO_ARGUMENTS for name, function in self.functions.items()}

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see."""
        return self.form.markers if self.form is not None else ()

    def make_parser(self) -> ToolParser:
        """Return a parser of one message."""
        if self.form is None and self.is_named:
            return NamedToolParser(next(iter(self.functions)))
        return (self.form or JSON_ARRAY).make_parser(self.schemas)

    def constraint(self, tokenizer: Tokenizer, given: GuidedDecodingParams | None) -> GuidedDecodingParams | None:
        """Return the form of the output: calls if they are required, else `given` or calls.

        Raises:
            InvalidRequestError: `given` cannot stand beside calls.
        """
        if self.is_required and given is not None and given.field != "response_format":  # that is for answers only
            raise InvalidRequestError(given.field, "has no meaning with a tool_choice that requires calls")
        if self.form is None and self.is_named:
            schema = next(iter(self.schemas.values()))
            return GuidedDecodingParams(json=json.dumps(schema), source="tools")
        form = self.form or JSON_ARRAY
        special_ids = tokenizer.special_ids_of(form.markers)
        if self.is_required:
            return _lark(ToolCallGrammar(form, self.schemas, special_ids, self.max_calls).required())
        strict = {name for name, function in self.functions.items() if function.get("strict")}
        schemas = {name: schema if name in strict else ANY_ARGUMENTS for name, schema in self.schemas.items()}
        grammar = ToolCallGrammar(form, schemas, special_ids, self.max_calls)
        if given is not None:
            return _lark(grammar.optional(_expression(given)))
        return _lark(grammar.within_text()) if strict or self.is_limited else None


def _lark(grammar: str) -> GuidedDecodingParams:
    return GuidedDecodingParams(grammar=grammar, source="tools")


def _expression(given: GuidedDecodingParams) -> str:
    if given.kind == "json":
        return json_expression(json.loads(given.json))
    if given.kind == "json_object":
        return json_expression({"type": "object"})
    raise InvalidRequestError(given.field, "beside tools, expected a JSON schema or json_object")


def tool_use(body: ChatCompletionRequest, parser_name: str) -> ToolUse | None:
    """Return what the request says of tools; None if none may be called.

    Args:
        parser_name: the server's `--tool-call-parser`.

    Raises:
        InvalidRequestError: naming the field.
    """
    tools = check_tools(body.tools or [])
    if not tools:
        _check_no_tools(body)
        return None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    mode, names = _choice(body.tool_choice if body.tool_choice is not None else "auto", list(functions))
    form = get_tool_format(parser_name)
    if mode == "none":
        return None
    if mode == "auto" and form is None:
        raise InvalidRequestError("tool_choice", "auto needs a server with --tool-call-parser; required does not")
    return ToolUse(
        functions={name: functions[name] for name in names},
        form=form,
        is_required=mode in ("required", "named"),
        is_named=mode == "named",
        is_limited=len(names) < len(functions),
        max_calls=1 if mode == "named" or body.parallel_tool_calls is False else None,
    )


def _check_no_tools(body: ChatCompletionRequest) -> None:
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequestError("tool_choice", "needs tools")
    if body.parallel_tool_calls is not None:
        raise InvalidRequestError("parallel_tool_calls", "needs tools")


def _choice(choice: str | dict[str, Any], known: Sequence[str]) -> tuple[str, list[str]]:
    """Return the mode (none, auto, required, named) and the functions that may be called."""
    match choice:
        case str() if choice in MODES:
            return choice, list(known)
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", [_known("tool_choice.function.name", name, known)]
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            where = "tool_choice.allowed_tools.tools"
            return mode, list(dict.fromkeys(_known(where, _name(where, tool), known) for tool in tools))
    raise InvalidRequestError(
        "tool_choice",
        f'expected {", ".join(MODES)}, {{"type": "function", "function": {{"name": ...}}}} or '
        f'{{"type": "allowed_tools", "allowed_tools": {{"mode": ..., "tools": [...]}}}}, got {choice!r:.80}',
    )


def _name(where: str, tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidRequestError(where, f"expected objects of type function with a name, got {tool!r:.64}")


def _known(where: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise InvalidRequestError(where, f"{name[:64]!r} is none of the tools: {', '.join(known)}"[:300])
    return name
