# SPDX-License-Identifier: Apache-2.0
"""Chooses the format of a server's tool calls: the configured one, or that of the calls in its chat template."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.tool_formats import AUTO
from fastdeploy.detokenize.chat_template import ChatTemplates, Conversation, template_constants
from fastdeploy.detokenize.messages import check_messages
from fastdeploy.detokenize.template_text import EXPRESSION
from fastdeploy.entrypoints.openai.parsers.argument_grammar import argument_beginning
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS, ToolFormat, get_tool_format

FUNCTION, PARAMETER, ARGUMENTS = "look_up_entry", "entry_name", '{"entry_name":"first"}'
CALL = {"id": "callabcde", "type": "function", "function": {"name": FUNCTION, "arguments": ARGUMENTS}}
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


@dataclass(frozen=True)
class ToolParserChoice:
    """The format of a server's tool calls.

    Attributes:
        name: as in `--tool-call-parser`; "" if it is unknown.
        is_found: the chat template names it.
        candidates: formats of calls in the chat template if it has several; none if `name` is known.
    """

    name: str = ""
    is_found: bool = False
    candidates: tuple[str, ...] = ()

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format; None if it is unknown."""
        return get_tool_format(self.name)

    @property
    def description(self) -> str:
        """What the start-up summary says; "" for nothing."""
        return f"{self.name}, found in the chat template" if self.is_found else self.name

    def unknown_error(self) -> InvalidRequestError:
        """Return the error of a request that needs the format, if it is unknown."""
        reason = "calls in several formats" if self.candidates else "no call in a known format"
        names = ", ".join(self.candidates or _distinct_formats())
        return InvalidRequestError(
            "tool_choice",
            f"auto needs a server with --tool-call-parser, because its chat template has {reason}: "
            f"expected one of {names}; required needs none",
        )


def choose_tool_parser(configured: str, templates: ChatTemplates, chat_template: str | None) -> ToolParserChoice:
    """Return the choice of a server.

    Args:
        configured: the value of `--tool-call-parser`.
        chat_template: the server's template, or the name of one of the tokenizer's; None for the tokenizer's.
    """
    if configured != AUTO:
        return ToolParserChoice(configured)
    try:
        template = templates.select(chat_template, has_tools=True)
    except InvalidRequestError:  # the model has none, and is not for chats
        return ToolParserChoice()
    names = _formats_in(templates, template)
    return ToolParserChoice(names[0], is_found=True) if len(names) == 1 else ToolParserChoice(candidates=tuple(names))


def _formats_in(templates: ChatTemplates, template: str) -> list[str]:
    """Return the formats in which a template writes a call, in its text or when it renders one."""
    constants = rendered = ""
    with contextlib.suppress(InvalidRequestError):  # the template rejects calls, or cannot be compiled at all
        constants = _without_space(template_constants(template))
        rendered = _without_space(templates.render(Conversation(check_messages(MESSAGES), False), template))
    return [
        name
        for name, tool_format in _distinct_formats().items()
        if _call(tool_format, EXPRESSION, EXPRESSION, EXPRESSION) in constants
        or _call(tool_format, FUNCTION, PARAMETER, ARGUMENTS) in rendered
    ]


def _call(tool_format: ToolFormat, name: str, parameter: str, arguments: str) -> str:
    """Return a call up to its first argument, or with all of them if they are JSON, without white space."""
    beginning = argument_beginning(tool_format.arguments, parameter)
    rest = arguments + tool_format.end if beginning is None else beginning
    return _without_space(tool_format.opening.replace("{name}", name) + rest)


def _distinct_formats() -> dict[str, ToolFormat]:
    """Return the formats by name, without those that equal an earlier one."""
    names = {tool_format: name for name, tool_format in reversed(FORMATS.items())}
    return {name: tool_format for name, tool_format in FORMATS.items() if names[tool_format] == name}


def _without_space(text: str) -> str:
    return "".join(text.split())
