# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates: Jinja in a sandbox, with the helper functions that published templates use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from fastdeploy.core.errors import InvalidRequestError, TemplateLimitError
from fastdeploy.core.json_types import check_json, replace_surrogates
from fastdeploy.detokenize.null_content import compares_content_with_none
from fastdeploy.detokenize.template_budget import limited
from fastdeploy.detokenize.template_guard import GuardedEnvironment
from fastdeploy.detokenize.template_probes import TemplateTraits, probe_template
from fastdeploy.detokenize.template_text import constant_text, has_constant

Messages = Sequence[Mapping[str, Any]]
MAX_CPU_S = 2.0  # for rendering one conversation
MAX_OUTPUT_LENGTH = 2**24  # characters, for callers without a limit of their own
MAX_PROBE_LENGTH = 2**18  # characters of a conversation with a few words: published templates print up to 2**14
MAX_ERROR_LENGTH = 500  # characters
MAX_TIME_PATTERN_LENGTH = 256


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
        with limited(MAX_CPU_S):
            return _join(compiled.template.generate(values), max_length)
    except (InvalidRequestError, MemoryError):
        raise
    except jinja2.TemplateError as error:
        raise InvalidRequestError("messages", f"the chat template rejects them: {_message(error)}") from error
    except Exception as error:  # a template can raise any
        raise InvalidRequestError("messages", f"the chat template fails on them: {_message(error)}") from error


def _join(pieces: Iterable[str], max_length: int) -> str:
    """Return the text of the pieces that a template prints; stop it when there are too many."""
    length = 0
    text: list[str] = []
    for piece in pieces:
        text.append(piece)
        length += len(piece)
        if length > max_length:
            raise InvalidRequestError("messages", f"the chat template renders more than {max_length} characters")
    return "".join(text)


def _message(error: Exception) -> str:
    """Return the message of an error in a template, which can have any length and any values in it."""
    try:
        return replace_surrogates(str(error)[:MAX_ERROR_LENGTH])
    except RecursionError:
        return type(error).__name__


def check_template(template: str) -> None:
    """Raise InvalidRequestError if `template` cannot be compiled."""
    _compile(template)


def template_traits(template: str, special_tokens: Mapping[str, str]) -> TemplateTraits:
    """Return what a template prints.

    Raises:
        InvalidRequestError: the template cannot be compiled, or exceeds a limit, which is an error of the template:
            the messages are ours.
    """
    compiled = _compile(template)

    def render(messages: Messages, variables: Mapping[str, Any]) -> str:
        return render_template(template, messages, {**special_tokens, **variables}, MAX_PROBE_LENGTH)

    try:
        return probe_template(render, compiled.constants, compiled.knows_developer)
    except TemplateLimitError as error:
        raise TemplateLimitError("chat_template", error.message) from error


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


class OtherArguments(Arguments):
    """Arguments that are no JSON object, such as those of a call that was cut: printed as they were sent.

    Templates that go through the members of a mapping find one, with the text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, {"arguments": text})


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


def _arguments(text: str) -> Arguments:
    try:
        values = _without_surrogates(json.loads(text))
        check_json("arguments", values)
    except (InvalidRequestError, RecursionError, ValueError):
        values = None
    return Arguments(text, values) if isinstance(values, dict) else OtherArguments(text)


def _without_surrogates(value: Any) -> Any:
    """Return a value of JSON in which lone surrogates of texts and names are written as escapes."""
    match value:
        case str():
            return replace_surrogates(value)
        case dict():
            return {replace_surrogates(key): _without_surrogates(part) for key, part in value.items()}
        case list():
            return [_without_surrogates(part) for part in value]
    return value


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
    knows_developer: bool


@lru_cache(maxsize=16)
def _compile(template: str) -> _CompiledTemplate:
    try:
        tree = _environment().parse(template)
        compares, constants = compares_content_with_none(tree), constant_text(tree)
        knows_developer = has_constant(tree, "developer")
        return _CompiledTemplate(_environment().compile_guarded(tree), compares, constants, knows_developer)
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise InvalidRequestError("chat_template", f"cannot be compiled: {_message(error)}") from error


@lru_cache(maxsize=1)
def _environment() -> GuardedEnvironment:
    environment = GuardedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.guard_filters()
    return environment


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_TIME_PATTERN_LENGTH:  # a field may have a width, and the result 256 times this length
        raise ValueError(f"strftime_now: expected a pattern of at most {MAX_TIME_PATTERN_LENGTH} characters")
    return datetime.now().strftime(pattern)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    if isinstance(value, OtherArguments):
        return str(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
