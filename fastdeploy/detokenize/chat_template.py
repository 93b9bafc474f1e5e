# SPDX-License-Identifier: Apache-2.0
"""Chat templates: Jinja in a sandbox, with the few helpers that published templates expect."""

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
    """What a template renders.

    Attributes:
        messages: mappings with `role` and `content`.
        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: end within the last message, so that the output goes on with it.
        tools: the functions that may be called, in OpenAI's shape; None for none.
        names: further names that the template may read.
    """

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    names: Mapping[str, Any] = field(default_factory=dict)


Render = Callable[[str, Messages, Mapping[str, Any]], str]
"""(source, messages, further names) -> text: `render_source`, or what runs it elsewhere."""


class ChatTemplates:
    """The templates that a tokenizer brings, by name."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Take sources by name (`default`, `tool_use`, ...) and special tokens by name (`bos_token`, ...)."""
        self.sources = dict(sources)
        self._special_tokens = special_tokens

    def source(self, given: str | None, has_tools: bool) -> str:
        """Return the source of a template: given itself or by its name, or the one for conversations with tools.

        Raises:
            InvalidRequestError: there is none.
        """
        if given is not None:
            return self.sources.get(given, given)
        source = self.sources.get(WITH_TOOLS) if has_tools else None
        source = source or self.sources.get(DEFAULT)
        if source is None:
            raise InvalidRequestError(
                "messages", "this model has no chat template; use /v1/completions or send chat_template"
            )
        return source

    def render(self, conversation: Conversation, source: str, run: Render | None = None) -> str:
        """Return the prompt's text.

        Args:
            run: renders instead of this process.

        Raises:
            InvalidRequestError: the source cannot be compiled, refuses the messages or fails on them.
        """
        names = {**self._special_tokens, **conversation.names, "tools": conversation.tools}
        names["add_generation_prompt"] = conversation.add_generation_prompt
        run = run or render_source
        if not conversation.continue_final_message:
            return run(source, conversation.messages, names)
        marker = f"<continue {secrets.token_hex(8)}>"
        text, found, _ = run(source, _with_marker(conversation.messages, marker), names).partition(marker)
        if not found:
            raise InvalidRequestError(
                "continue_final_message", "the chat template leaves out the last message's content"
            )
        return text


def _with_marker(messages: Messages, marker: str) -> Messages:
    last = messages[-1]
    return [*messages[:-1], {**last, "content": (last.get("content") or "") + marker}]


def render_source(source: str, messages: Messages, names: Mapping[str, Any]) -> str:
    """Compile (kept for the next call) and render a template.

    Raises:
        InvalidRequestError: as `ChatTemplates.render`.
    """
    template = _compile(source)
    try:
        return template.render(**{**names, "messages": [_for_template(message) for message in messages]})
    except jinja2.TemplateError as error:
        raise InvalidRequestError("messages", f"the chat template refuses them: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InvalidRequestError("messages", f"the chat template fails on them: {error}") from error


def check_source(source: str) -> None:
    """Raise InvalidRequestError unless `source` can be compiled."""
    _compile(source)


class Arguments(dict[str, Any]):
    """A call's arguments: a mapping for templates that read one, the JSON text for templates that append it."""

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
    """Return a message with the arguments of its calls as templates expect them."""
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
        return text  # a call that the model did not finish
    return Arguments(text, values) if isinstance(values, dict) else text


class _GenerationTag(Extension):
    """Lets `{% generation %}...{% endgeneration %}` pass its content through; training code marks spans with it."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
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
