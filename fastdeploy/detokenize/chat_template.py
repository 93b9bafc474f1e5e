# SPDX-License-Identifier: Apache-2.0
"""Chat templates: Jinja in a sandbox, with the helper functions that published templates use."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastdeploy.core.errors import InvalidRequestError

Messages = Sequence[Mapping[str, Any]]
DEFAULT, WITH_TOOLS = "default", "tool_use"


@dataclass
class Conversation:
    """The input of a template.

    Attributes:
        messages: mappings with `role` and `content`.
        add_generation_prompt: end with the start of the assistant's message.
        continue_final_message: end within the last message, which the output continues.
        tools: function definitions in OpenAI's format; None for none.
        variables: further variables of the template.
    """

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


Render = Callable[[str, Messages, Mapping[str, Any]], str]
"""(template, messages, variables) -> text: `render_template`, or a function that runs it in another process."""


class ChatTemplates:
    """The templates of a tokenizer, by name."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Keep templates by name (`default`, `tool_use`, ...) and special tokens by name (`bos_token`, ...)."""
        self.templates = dict(templates)
        self._special_tokens = special_tokens

    def select(self, template: str | None, has_tools: bool) -> str:
        """Return `template`, or the template of that name; for None, the one for conversations with or without tools.

        Raises:
            InvalidRequestError: the tokenizer has no template.
        """
        if template is not None:
            return self.templates.get(template, template)
        template = self.templates.get(WITH_TOOLS) if has_tools else None
        template = template or self.templates.get(DEFAULT)
        if template is None:
            raise InvalidRequestError(
                "messages", "this model has no chat template; use /v1/completions or send chat_template"
            )
        return template

    def render(self, conversation: Conversation, template: str, render: Render | None = None) -> str:
        """Return the text of the prompt.

        Args:
            render: function that renders the template; by default, `render_template`.

        Raises:
            InvalidRequestError: the template cannot be compiled, rejects the messages or fails.
        """
        variables = {**self._special_tokens, **conversation.variables, "tools": conversation.tools}
        variables["add_generation_prompt"] = conversation.add_generation_prompt
        render = render or render_template
        if not conversation.continue_final_message:
            return render(template, conversation.messages, variables)
        marker = f"<continue {secrets.token_hex(8)}>"
        messages = _with_marker(conversation.messages, marker)
        text, separator, _ = render(template, messages, variables).partition(marker)
        if not separator:
            raise InvalidRequestError("continue_final_message", "the chat template omits the last message's content")
        return text


def _with_marker(messages: Messages, marker: str) -> Messages:
    """Append `marker` to the content of the last message."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": (last.get("content") or "") + marker}]


def render_template(template: str, messages: Messages, variables: Mapping[str, Any]) -> str:
    """Compile a template, unless it is in the cache, and render it.

    Raises:
        InvalidRequestError: as `ChatTemplates.render`.
    """
    compiled = _compile(template)
    try:
        return compiled.render(**{**variables, "messages": [_for_template(message) for message in messages]})
    except jinja2.TemplateError as error:
        raise InvalidRequestError("messages", f"the chat template rejects them: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InvalidRequestError("messages", f"the chat template fails on them: {error}") from error


def check_template(template: str) -> None:
    """Raise InvalidRequestError if `template` cannot be compiled."""
    _compile(template)


class Arguments(dict[str, Any]):
    """The arguments of a call, both as a mapping and as JSON text, because templates expect one or the other."""

    def __init__(self, text: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, text: str) -> str:
        return self._text + text

    def __radd__(self, text: str) -> str:
        return text + self._text


def _for_template(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have `Arguments`."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(text: str) -> Arguments | str:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text  # an incomplete call
    return Arguments(text, values) if isinstance(values, dict) else text


class _GenerationTag(Extension):
    """Renders the content of `{% generation %}...{% endgeneration %}`, which marks spans for training."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise InvalidRequestError("chat_template", f"cannot be compiled: {error}") from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
