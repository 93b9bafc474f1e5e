# SPDX-License-Identifier: Apache-2.0
"""Chooses the format of a server's tool calls: the configured one, or that of the calls in its chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.tool_formats import AUTO, TOOL_CALL_FORMATS
from fastdeploy.detokenize.template_probes import TOOL_ARGUMENTS, TOOL_NAME, TOOL_PARAMETER, TemplateTraits
from fastdeploy.detokenize.template_text import EXPRESSION
from fastdeploy.entrypoints.openai.parsers.argument_grammar import argument_beginning
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS, ToolFormat, get_tool_format

GENERIC = "hermes"
"""The format of calls of models whose template says nothing about tools."""


@dataclass(frozen=True)
class ToolParserChoice:
    """The format of a server's tool calls.

    Attributes:
        name: as in `--tool-call-parser`; "" if it is unknown.
        is_found: the chat template names it.
        candidates: formats of calls in the chat template if it has several; none if `name` is known.
        shows_tools: the chat template shows tools; otherwise the system message describes them.
        writes_calls: the chat template prints calls of earlier messages; otherwise they become text.
        writes_results: the chat template prints their results; otherwise they become messages of the user.
    """

    name: str = ""
    is_found: bool = False
    candidates: tuple[str, ...] = ()
    shows_tools: bool = True
    writes_calls: bool = True
    writes_results: bool = True

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format; None if it is unknown."""
        return get_tool_format(self.name)

    @property
    def description(self) -> str:
        """What the start-up summary says; "" for nothing."""
        text = f"{self.name}, found in the chat template" if self.is_found else self.name
        if self.shows_tools:
            return text
        return f"{text}; the chat template shows no tools, so the system message describes them"

    def unknown_error(self) -> InvalidRequestError:
        """Return the error of a request that needs the format, if it is unknown."""
        reason = "calls in several formats" if self.candidates else "no call in a known format"
        names = ", ".join(self.candidates or _distinct_formats())
        return InvalidRequestError(
            "tool_choice",
            f"auto needs a server with --tool-call-parser, because its chat template has {reason}: "
            f"expected one of {names}; required needs none",
        )


def choose_tool_parser(configured: str, traits: TemplateTraits | None) -> ToolParserChoice:
    """Return the choice for a chat template.

    Args:
        configured: the value of `--tool-call-parser`.
        traits: of the template; None without one.
    """
    if traits is None:  # the model is not for chats
        return ToolParserChoice(configured if configured != AUTO else "")
    names = _formats_in(traits)
    if not traits.shows_tools:
        return _choose_without_tools(configured, names, traits)
    if configured != AUTO:
        choice = ToolParserChoice(configured)
    elif len(names) == 1:
        choice = ToolParserChoice(names[0], is_found=True)
    else:
        choice = ToolParserChoice(candidates=tuple(names))
    return replace(choice, writes_calls=traits.prints_calls, writes_results=traits.prints_results)


def _choose_without_tools(configured: str, names: list[str], traits: TemplateTraits) -> ToolParserChoice:
    """Return the choice for a template that shows no tools, but may print calls and results in one of the formats."""
    name = configured
    if configured == AUTO:
        name = names[0] if len(names) == 1 and traits.prints_calls and traits.prints_results else GENERIC
    is_printed = traits.prints_results and traits.prints_calls and TOOL_CALL_FORMATS[name] in names
    return ToolParserChoice(
        name,
        is_found=configured == AUTO and is_printed,
        shows_tools=False,
        writes_calls=is_printed,
        writes_results=is_printed,
    )


def _formats_in(traits: TemplateTraits) -> list[str]:
    """Return the formats in which a template writes a call, in its text or when it renders one."""
    constants, rendered = _without_space(traits.constants), _without_space(traits.rendered_call)
    return [
        name
        for name, tool_format in _distinct_formats().items()
        if _call(tool_format, EXPRESSION, EXPRESSION, EXPRESSION) in constants
        or _call(tool_format, TOOL_NAME, TOOL_PARAMETER, TOOL_ARGUMENTS) in rendered
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
