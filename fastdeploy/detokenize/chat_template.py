# SPDX-License-Identifier: Apache-2.0
"""Chat templates: Jinja in a sandbox, with the helper functions that published templates use."""

from __future__ import annotations

import json
import re
import resource
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import check_unicode, parse_json, replace_surrogates, shorten
from fastdeploy.detokenize.messages import ROLES
from fastdeploy.detokenize.null_content import compares_content_with_none
from fastdeploy.detokenize.template_text import constant_text

Messages = Sequence[Mapping[str, Any]]
DEFAULT, WITH_TOOLS = "default", "tool_use"


@dataclass
class Conversation:
    """The input of a template.

    Attributes:
        messages: mappings with `role` and `content`, which is text, or None for a message that has none.
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


Render = Callable[[str, Messages, Mapping[str, Any], int], str]
"""`render_template`, or a function with these parameters that runs it in another process."""
Run = Callable[[Messages, Mapping[str, Any], int], str]
"""The same for one template."""

MAX_CPU_S = 2.0  # for rendering one conversation
MAX_OUTPUT_LENGTH = 2**24  # characters, for callers without a limit of their own
MAX_ERROR_LENGTH = 500  # characters
PIECES_PER_CHECK = 1024  # of the processor time; a piece is what one expression of the template prints


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

    def render(
        self,
        conversation: Conversation,
        template: str,
        render: Render | None = None,
        max_length: int = MAX_OUTPUT_LENGTH,
    ) -> str:
        """Return the text of the prompt.

        Args:
            render: function that renders the template; by default, `render_template`.
            max_length: maximum length of the text, in characters.

        Raises:
            InvalidRequestError: the template cannot be compiled, rejects the messages, leaves out one of a role that
                it does not know, or fails, or the text is too long or not valid Unicode.
        """
        variables = {**self._special_tokens, **conversation.variables, "tools": conversation.tools}
        variables["add_generation_prompt"] = conversation.add_generation_prompt
        run = partial(render or render_template, template)
        if conversation.continue_final_message:
            text = _render_continued(run, conversation.messages, variables, max_length)
        else:
            text = run(conversation.messages, variables, max_length)
        check_unicode("messages", text)  # a template can write parts of characters
        self._check_roles(template, run, conversation.messages, variables, max_length)
        return text

    def _check_roles(
        self, template: str, run: Run, messages: Messages, variables: Mapping[str, Any], max_length: int
    ) -> None:
        """Raise InvalidRequestError if the template leaves out the text of a message whose role is not in `ROLES`.

        The conversation is rendered with a marker at the end of each such text: the texts alone could be in the prompt
        by chance, or be there with escapes.
        """
        others = {i for i, message in enumerate(messages) if message.get("role") not in ROLES}
        if not others:
            return
        mark = f"end of {secrets.token_hex(8)} "
        marked = [_with_text(message, f"{mark}{i};") if i in others else message for i, message in enumerate(messages)]
        num_added = sum(len(f"{mark}{i};") for i in others)
        text = run(marked, variables, max_length + num_added)
        missing = others - {int(index) for index in re.findall(f"{mark}([0-9]+);", text)}
        if missing:
            i = min(missing)
            name = next((name for name in self.templates if self.templates[name] == template), template)
            role = shorten(messages[i].get("role"))
            raise InvalidRequestError(
                f"messages[{i}].role",
                f"the chat template {shorten(name)} leaves out messages of role {role}; send them as system or user",
            )


def _render_continued(run: Run, messages: Messages, variables: Mapping[str, Any], max_length: int) -> str:
    """Return the text up to the end of the last message's content."""
    marker = f"<continue {secrets.token_hex(8)}>"
    marked = [*messages[:-1], _with_text(messages[-1], marker)]
    text, separator, _ = run(marked, variables, max_length + len(marker)).partition(marker)
    if not separator:
        raise InvalidRequestError("continue_final_message", "the chat template omits the last message's content")
    return text


def _with_text(message: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """Append a text to the content of a message."""
    return {**message, "content": (message.get("content") or "") + text}


def render_template(
    template: str, messages: Messages, variables: Mapping[str, Any], max_length: int = MAX_OUTPUT_LENGTH
) -> str:
    """Compile a template, unless it is in the cache, and render it.

    Raises:
        InvalidRequestError: as `ChatTemplates.render`, or rendering takes more than `MAX_CPU_S` of processor time.
    """
    compiled = _compile(template)
    no_content = None if compiled.compares_content_with_none else ""
    values = {**variables, "messages": [_for_template(message, no_content) for message in messages]}
    try:
        return _join(compiled.template.generate(values), max_length)
    except (InvalidRequestError, MemoryError):
        raise
    except jinja2.TemplateError as error:
        raise InvalidRequestError("messages", f"the chat template rejects them: {_message(error)}") from error
    except Exception as error:  # a template can raise any
        raise InvalidRequestError("messages", f"the chat template fails on them: {_message(error)}") from error


def _join(pieces: Iterable[str], max_length: int) -> str:
    """Return the text of the pieces that a template prints; stop it when it exceeds a limit."""
    length, begin_s = 0, _cpu_time_s()
    text: list[str] = []
    for piece in pieces:
        text.append(piece)
        length += len(piece)
        if length > max_length:
            raise InvalidRequestError("messages", f"the chat template renders more than {max_length} characters")
        if len(text) % PIECES_PER_CHECK == 0 and _cpu_time_s() - begin_s > MAX_CPU_S:
            raise InvalidRequestError("messages", f"rendering them takes more than {MAX_CPU_S:g} s of processor time")
    return "".join(text)


def _cpu_time_s() -> float:
    """Return the processor time of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime


def _message(error: Exception) -> str:
    """Return the message of an error in a template, which can have any length and any values in it."""
    try:
        return replace_surrogates(str(error)[:MAX_ERROR_LENGTH])
    except RecursionError:
        return type(error).__name__


def check_template(template: str) -> None:
    """Raise InvalidRequestError if `template` cannot be compiled."""
    _compile(template)


def template_constants(template: str) -> str:
    """Return the constants that a template can print: see `constant_text`.

    Raises:
        InvalidRequestError: the template cannot be compiled.
    """
    return _compile(template).constants


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


def _for_template(message: Mapping[str, Any], no_content: str | None) -> Mapping[str, Any]:
    """Return a message whose calls have `Arguments`, and with `no_content` in place of a content that is None."""
    if message.get("content", "") is None:
        message = {**message, "content": no_content}
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(text: str) -> Arguments | str:
    try:
        values = parse_json("arguments", text)
    except InvalidRequestError:
        return text  # an incomplete call
    return Arguments(text, values) if isinstance(values, dict) else text


class _GenerationTag(Extension):
    """Renders the content of `{% generation %}...{% endgeneration %}`, which marks spans for training."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@dataclass(frozen=True)
class _CompiledTemplate:
    template: jinja2.Template
    compares_content_with_none: bool
    constants: str


@lru_cache(maxsize=16)
def _compile(template: str) -> _CompiledTemplate:
    try:
        tree = _environment().parse(template)
        compares, constants = compares_content_with_none(tree), constant_text(tree)
        return _CompiledTemplate(_environment().from_string(tree), compares, constants)
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise InvalidRequestError("chat_template", f"cannot be compiled: {_message(error)}") from error


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
