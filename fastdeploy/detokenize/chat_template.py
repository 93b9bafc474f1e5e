# SPDX-License-Identifier: Apache-2.0
"""The chat templates of a tokenizer: which one is used, and what it makes of a conversation."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, Protocol

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import check_unicode, shorten
from fastdeploy.detokenize.message_shapes import NO_TOOLS, ToolsAsText, shape_messages, with_text
from fastdeploy.detokenize.messages import ROLES
from fastdeploy.detokenize.template_probes import INSTRUCTION_ROLES, TemplateTraits
from fastdeploy.detokenize.template_renderer import MAX_OUTPUT_LENGTH, Messages, render_template, template_traits

DEFAULT, WITH_TOOLS = "default", "tool_use"


@dataclass
class Conversation:
    """The input of a template.

    Attributes:
        messages: as `check_messages` returns them.
        add_generation_prompt: end with the start of the assistant's message.
        continue_final_message: end within the last message, which the output continues.
        tools: function definitions in OpenAI's format; None for none.
        variables: further variables of the template.
        tools_as_text: tools, calls and results that the template does not print.
        content_format: the form of contents: a key of `CONTENT_FORMATS`.
        is_sent_as_given: the template gets the messages as they are, as in transformers.
    """

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools_as_text: ToolsAsText = NO_TOOLS
    content_format: str = "auto"
    is_sent_as_given: bool = False


class Renderer(Protocol):
    """Runs templates: this process, or another one."""

    def render(self, template: str, messages: Messages, variables: Mapping[str, Any], max_length: int) -> str:
        """See `render_template`."""

    def probe(self, template: str, special_tokens: Mapping[str, str]) -> TemplateTraits:
        """See `template_traits`."""


class LocalRenderer:
    """Runs templates in this process."""

    def render(self, template: str, messages: Messages, variables: Mapping[str, Any], max_length: int) -> str:
        """See `render_template`."""
        return render_template(template, messages, variables, max_length)

    def probe(self, template: str, special_tokens: Mapping[str, str]) -> TemplateTraits:
        """See `template_traits`."""
        return template_traits(template, special_tokens)


Run = Callable[[Messages, int], str]
"""Renders messages with the template and the variables of a conversation, up to a number of characters."""
Shape = Callable[[Messages], Messages]
"""Brings messages into the form that a template prints."""
CHECKED_ROLES = ("system", "developer", "user", "tool")
"""Roles whose texts must be in the prompt; templates may leave out what the assistant said."""

LOCAL_RENDERER = LocalRenderer()
MAX_CACHED_TRAITS = 16  # templates
MAX_SEARCHES = 8  # for texts of messages in a whole prompt, before they are searched by marks
logger = logging.getLogger("fastdeploy.server")


class ChatTemplates:
    """The templates of a tokenizer, by name. Thread-safe."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Keep templates by name (`default`, `tool_use`, ...) and special tokens by name (`bos_token`, ...)."""
        self.templates = dict(templates)
        self._special_tokens = special_tokens
        self._traits: dict[str, TemplateTraits] = {}
        self._lock = Lock()

    @property
    def has_default(self) -> bool:
        """Whether there is a template for conversations without tools."""
        return DEFAULT in self.templates

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

    def traits(self, template: str, renderer: Renderer = LOCAL_RENDERER) -> TemplateTraits:
        """Return what a template prints, which is found once and logged if it does not take all messages.

        Raises:
            InvalidRequestError: the template cannot be compiled, or exceeds a limit.
        """
        with self._lock:
            known = self._traits.get(template)
        if known is not None:
            return known
        traits = renderer.probe(template, self._special_tokens)
        if traits.description:
            logger.info("the chat template %s %s", self._shown_name(template), traits.description)
        with self._lock:
            if len(self._traits) >= MAX_CACHED_TRAITS:
                del self._traits[next(iter(self._traits))]
            self._traits[template] = traits
        return traits

    def render(
        self,
        conversation: Conversation,
        template: str,
        renderer: Renderer = LOCAL_RENDERER,
        max_length: int = MAX_OUTPUT_LENGTH,
    ) -> str:
        """Return the text of the prompt.

        Args:
            max_length: maximum length of the text, in characters.

        Raises:
            InvalidRequestError: the template cannot be compiled, rejects the messages, leaves out the text of one that
                is not the assistant's, or fails, or the text is too long or not valid Unicode.
        """
        variables = {**self._special_tokens, **conversation.variables, "tools": conversation.tools}
        variables["add_generation_prompt"] = conversation.add_generation_prompt

        def render(shape: Shape) -> tuple[str, set[int]]:
            return _render(
                conversation, lambda m, limit: renderer.render(template, shape(m), variables, limit), max_length
            )

        if conversation.is_sent_as_given:
            text, missing = render(list)
        else:
            traits = self.traits(template, renderer)
            text, missing = render(_shape(conversation, traits))
            if missing and all(conversation.messages[i]["role"] in INSTRUCTION_ROLES for i in missing):
                # some templates print them in the user's last message, and not at all after a result
                text, missing = render(_shape(conversation, replace(traits, leading_roles=(), later_roles=())))
        if missing:
            raise self._missing_error(min(missing), conversation.messages, template)
        return text

    def _missing_error(self, index: int, messages: Messages, template: str) -> InvalidRequestError:
        role = messages[index].get("role")
        hint = "" if role in ROLES else "; send them as system or user"
        return InvalidRequestError(
            f"messages[{index}].role",
            f"the chat template {self._shown_name(template)} leaves out messages of role {shorten(role)}{hint}",
        )

    def _shown_name(self, template: str) -> str:
        return shorten(next((name for name in self.templates if self.templates[name] == template), template))


def _shape(conversation: Conversation, traits: TemplateTraits) -> Shape:
    """Return the function that brings messages into the form that a template prints."""
    return partial(
        shape_messages,
        traits=traits,
        tools=conversation.tools_as_text,
        content_format=conversation.content_format,
    )


def _render(conversation: Conversation, run: Run, max_length: int) -> tuple[str, set[int]]:
    """Return the text of the prompt, and the indexes of the messages whose text is missing in it."""
    messages = conversation.messages
    if conversation.continue_final_message:
        text = _render_continued(run, messages, max_length)
    else:
        text = run(messages, max_length)
    check_unicode("messages", text)  # a template can write parts of characters
    return text, _missing_texts(text, run, conversation, max_length)


def _missing_texts(text: str, run: Run, conversation: Conversation, max_length: int) -> set[int]:
    """Return which messages, except for the assistant's, have a text that is missing in the prompt.

    Texts are searched first. If one is not found, which may be written with escapes, the conversation is rendered once
    more, with a mark at the end of each text. Messages of roles that are not in `ROLES` always have marks, because
    their text could be in the prompt by chance.
    """
    messages = conversation.messages
    others = {i for i, message in enumerate(messages) if message.get("role") not in ROLES}
    checked = () if conversation.is_sent_as_given else CHECKED_ROLES
    expected = {i for i, message in enumerate(messages) if message.get("role") in checked}
    if not others and _has_texts(text, [messages[i] for i in sorted(expected)]):
        return set()
    return _find_missing(run, messages, others | expected, max_length)


def _has_texts(prompt: str, messages: Messages) -> bool:
    """Return whether the texts of messages are found in a prompt, where most of them are in their order."""
    place, num_searches = 0, 1
    for message in messages:
        content = message.get("content")
        for piece in (content,) if isinstance(content, str) else tuple(part["text"] for part in content or ()):
            found = prompt.find(piece.strip(), place)
            if found < 0:
                num_searches += 1
                found = prompt.find(piece.strip()) if num_searches <= MAX_SEARCHES else -1
            if found < 0:
                return False
            place = found + len(piece.strip())
    return True


def _find_missing(run: Run, messages: Messages, indexes: Collection[int], max_length: int) -> set[int]:
    """Return which of some messages are missing in the prompt, by marks at the end of their texts."""
    mark = f"end of {secrets.token_hex(8)} "
    marked = [with_text(message, f"{mark}{i};") if i in indexes else message for i, message in enumerate(messages)]
    num_added = sum(len(f"{mark}{i};") for i in indexes)
    text = run(marked, max_length + num_added)
    return set(indexes) - {int(index) for index in re.findall(f"{mark}([0-9]+);", text)}


def _render_continued(run: Run, messages: Messages, max_length: int) -> str:
    """Return the text up to the end of the last message's content."""
    marker = f"<continue {secrets.token_hex(8)}>"
    marked = [*messages[:-1], with_text(messages[-1], marker)]
    text, separator, _ = run(marked, max_length + len(marker)).partition(marker)
    if not separator:
        raise InvalidRequestError("continue_final_message", "the chat template omits the last message's content")
    return text
