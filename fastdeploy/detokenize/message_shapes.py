# SPDX-License-Identifier: Apache-2.0
"""Brings the messages of a conversation into the form that its chat template prints, without losing any text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy.detokenize.template_probes import INSTRUCTION_ROLES, ContentForm, TemplateTraits

Message = Mapping[str, Any]
CONTENT_FORMATS = {"auto": None, "string": ContentForm.TEXT, "openai": ContentForm.PARTS}
"""Value of --chat-template-content-format -> the form of all contents; None for what the template reads."""
_MOVED = "moved"  # key of messages of the user that were made of other messages


@dataclass(frozen=True)
class ToolsAsText:
    """How tools are shown to a model whose template does not show them.

    Attributes:
        instruction: the tools, and how to call them, for the system message; empty for none.
        write_calls: returns the text of the calls of an assistant's message; None if the template prints them.
        has_results_as_text: the results of calls become messages of the user.
    """

    instruction: str = ""
    write_calls: Callable[[Sequence[Mapping[str, Any]]], str] | None = None
    has_results_as_text: bool = False


NO_TOOLS = ToolsAsText()


def shape_messages(
    messages: Sequence[Message], traits: TemplateTraits, tools: ToolsAsText = NO_TOOLS, content_format: str = "auto"
) -> list[Message]:
    """Return messages that the template prints whole.

    System and developer messages before all others are joined if the template does not take several, and become the
    beginning of the user's text if it takes none. Where the template does not take later ones, they become messages of
    the user at their place: the beginning of a prompt stays as it was in earlier turns, and is found in the prefix
    cache. Contents become what the template reads.

    Args:
        tools: tools, calls and results that the template does not print.
        content_format: a key of `CONTENT_FORMATS`.
    """
    shaper = _Shaper(traits, tools)
    num_leading = next((i for i, m in enumerate(messages) if m.get("role") not in INSTRUCTION_ROLES), len(messages))
    shaper.add_leading(messages[:num_leading])
    for message in messages[num_leading:]:
        shaper.add(message)
    form = CONTENT_FORMATS[content_format]
    return [_with_form(message, form or traits.form(str(message.get("role")))) for message in shaper.messages]


class _Shaper:
    def __init__(self, traits: TemplateTraits, tools: ToolsAsText) -> None:
        self._traits = traits
        self._tools = tools
        self.messages: list[Message] = []

    def add_leading(self, messages: Sequence[Message]) -> None:
        """Add the messages before all others, and the tools."""
        traits, instruction = self._traits, self._tools.instruction
        messages = [{**message, "role": self._role(message)} for message in messages]
        is_taken = all(message["role"] in traits.leading_roles for message in messages)
        if is_taken and not instruction and (len(messages) < 2 or traits.takes_several_leading):
            self.messages += messages
            return
        text = "\n\n".join(filter(None, [*(content_text(m.get("content")) for m in messages), instruction]))
        first = dict(messages[0]) if messages else {"role": "system"}
        if not traits.leading_roles:
            self.messages.append({"role": "user", "content": text, _MOVED: ""})
            return
        role = first["role"] if first["role"] in traits.leading_roles else traits.leading_roles[0]
        self.messages.append({**first, "role": role, "content": text})

    def add(self, message: Message) -> None:
        """Add one of the other messages."""
        role = message.get("role")
        if role in INSTRUCTION_ROLES:
            message = {**message, "role": self._role(message)}
            if message["role"] in self._traits.later_roles:
                self.messages.append(message)
            else:
                self._add_moved(content_text(message.get("content")))
        elif role == "tool" and self._tools.has_results_as_text:
            self._add_moved(f"<tool_response>\n{content_text(message.get('content'))}\n</tool_response>", "\n")
        elif role == "assistant" and message.get("tool_calls"):
            self.messages.append(self._with_calls(message))
        elif role == "user" and self._is_moved_to_next_user():
            self._append(content_text(message.get("content")))
        else:
            self.messages.append(message)

    def _with_calls(self, message: Message) -> Message:
        """Return a message whose calls are printed; its content is left out if calls are not printed beside one."""
        if self._tools.write_calls is not None:
            calls = self._tools.write_calls(message["tool_calls"])
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            return {**others, "content": "\n".join(filter(None, (content_text(message.get("content")), calls)))}
        if message.get("content") and self._traits.prints_calls_beside_content:
            return message
        return {**message, "content": "" if self._traits.needs_content else None}

    def _role(self, message: Message) -> str:
        """Return `system` for a developer's message unless the template takes this role."""
        is_developer = message["role"] == "developer" and "developer" in self._traits.leading_roles
        return "developer" if is_developer else "system"

    def _add_moved(self, text: str, separator: str = "") -> None:
        """Add a text as a message of the user, or to the message before it if the user's must not follow that one.

        Args:
            separator: between two texts that have the same one, which are one message.
        """
        last = self.messages[-1] if self.messages else {"role": ""}
        if separator and last.get(_MOVED) == separator:
            self._append(text, separator)
        elif last["role"] in ("user", "tool") and last["role"] not in self._traits.may_precede_user:
            self._append(text)
        else:
            self.messages.append({"role": "user", "content": text, _MOVED: separator})

    def _is_moved_to_next_user(self) -> bool:
        """Return whether the last message was made of others, and the user's next text belongs to it."""
        last = self.messages[-1] if self.messages else {}
        is_instruction = len(self.messages) == 1 and not self._traits.leading_roles
        return _MOVED in last and (is_instruction or "user" not in self._traits.may_precede_user)

    def _append(self, text: str, separator: str = "\n\n") -> None:
        last = self.messages[-1]
        self.messages[-1] = {**last, "content": f"{content_text(last.get('content'))}{separator}{text}"}


def content_text(content: Any) -> str:
    """Return a content as text: parts are joined by new lines, and None is empty."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or ())


def is_text(content: Any) -> bool:
    """Return whether a content is a text or a list of text parts; a template may know others."""
    if isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def with_text(message: Message, text: str) -> Message:
    """Append a text to the last text of a message."""
    content = message.get("content")
    if isinstance(content, list) and content and is_text(content):
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + text}]}
    return {**message, "content": (content if isinstance(content, str) else "") + text}


def _with_form(message: Message, form: ContentForm) -> Message:
    """Return a message whose content has a form, without the keys of this module."""
    if _MOVED in message:
        message = {key: value for key, value in message.items() if key != _MOVED}
    content = message.get("content")
    if form is ContentForm.BOTH or not is_text(content) or _has_form(content, form):
        return message
    text = content_text(content)
    return {**message, "content": text if form is ContentForm.TEXT else [{"type": "text", "text": text}]}


def _has_form(content: Any, form: ContentForm) -> bool:
    if isinstance(content, str):
        return form is ContentForm.TEXT
    return form is ContentForm.PARTS or (form is ContentForm.ONE_PART and len(content) == 1)
