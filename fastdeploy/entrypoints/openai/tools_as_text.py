# SPDX-License-Identifier: Apache-2.0
"""Describes tools in the system message, for models whose chat template does not show them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import parse_json
from fastdeploy.detokenize.message_shapes import ToolsAsText
from fastdeploy.entrypoints.openai.parsers.argument_grammar import argument_beginning, argument_end
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS, ToolFormat
from fastdeploy.entrypoints.openai.tool_parser_choice import GENERIC, ToolParserChoice

Tools = Sequence[Mapping[str, Any]]


def tools_as_text(choice: ToolParserChoice, tools: Tools) -> ToolsAsText:
    """Return what the template of a conversation does not print of its tools, calls and results.

    Args:
        tools: the functions that may be called; empty for none.
    """
    tool_format = choice.tool_format or FORMATS[GENERIC]
    instruction = "" if choice.shows_tools or not tools else _instruction(tools, tool_format)
    write_calls = None if choice.writes_calls else partial(_calls_text, tool_format=tool_format)
    return ToolsAsText(instruction, write_calls, not choice.writes_results)


def _instruction(tools: Tools, tool_format: ToolFormat) -> str:
    functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\n"
        "You may call one or more functions to help with the user's request. Their signatures are within "
        f"<tools></tools> XML tags:\n<tools>\n{functions}\n</tools>\n\n"
        f"To call a function, write its name and its arguments in this form:\n{_example(tool_format)}"
    )


def _example(tool_format: ToolFormat) -> str:
    """Return a call with names in angle brackets in place of the function and its arguments."""
    if argument_beginning(tool_format.arguments, "") is None:
        begin = tool_format.opening.replace("{name}", "<function-name>")
        return f"{begin}<args-json-object>{tool_format.end}{tool_format.list_end}"
    call = {"function": {"name": "<function-name>", "arguments": '{"<argument-name>": "<value>"}'}}
    return _calls_text([call], tool_format)


def _calls_text(calls: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    """Return calls as the model writes them."""
    texts = [_call_text(call["function"]["name"], call["function"]["arguments"], tool_format) for call in calls]
    return tool_format.list_begin + tool_format.separator.join(texts) + tool_format.list_end


def _call_text(name: str, arguments: str, tool_format: ToolFormat) -> str:
    if argument_beginning(tool_format.arguments, "") is not None:
        arguments = _members_text(arguments, tool_format)
    return tool_format.begin.replace("{name}", name) + arguments + tool_format.end


def _members_text(arguments: str, tool_format: ToolFormat) -> str:
    """Return arguments in another form than JSON; if they are no object, as one argument with their text."""
    try:
        values = parse_json("arguments", arguments)
    except InvalidRequestError:
        values = None
    members = values if isinstance(values, dict) else {"arguments": arguments}
    kind = tool_format.arguments
    end = argument_end(kind)
    texts = [f"{argument_beginning(kind, key)}{_value(kind, value)}{end}" for key, value in members.items()]
    return (", " if kind == "python" else "").join(texts)


def _value(kind: str, value: Any) -> str:
    if kind == "python":
        return repr(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
