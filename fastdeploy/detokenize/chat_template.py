# SPDX-License-Identifier: Apache-2.0
"""Chat templates: Jinja in a sandbox, with the few helpers that published templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastdeploy.core.errors import InvalidRequestError


class _GenerationTag(Extension):
    """Lets `{% generation %}...{% endgeneration %}` pass its content through; training code marks spans with it."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """One compiled template."""

    def __init__(self, template: jinja2.Template) -> None:
        self._template = template

    @staticmethod
    def compile(source: str | None) -> ChatTemplate:
        """Compile `source` (kept for the next call).

        Raises:
            InvalidRequestError: no source, or a syntax error in it.
        """
        if source is None:
            raise InvalidRequestError(
                "messages", "this model has no chat template; use /v1/completions or send chat_template"
            )
        return _compile(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, names: Mapping[str, Any]
    ) -> str:
        """Return the prompt's text.

        Raises:
            InvalidRequestError: the template refuses the messages or fails on them.
        """
        try:
            return self._template.render(
                **{**names, "messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError("messages", f"the chat template refuses them: {error}") from error
        except (TypeError, KeyError, AttributeError, ValueError, IndexError, OverflowError, ZeroDivisionError) as error:
            raise InvalidRequestError("messages", f"the chat template fails on them: {error}") from error


@lru_cache(maxsize=16)
def _compile(source: str) -> ChatTemplate:
    try:
        return ChatTemplate(_environment().from_string(source))
    except jinja2.TemplateError as error:
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
