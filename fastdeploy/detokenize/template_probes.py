# SPDX-License-Identifier: Apache-2.0
"""Finds out what a chat template prints of a conversation, by rendering small conversations with marked texts.

A syntax tree would not tell: templates pass messages through macros, filters and variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from fastdeploy.core.errors import InvalidRequestError, TemplateLimitError

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Mapping[str, Any]], str]
"""Renders a template with messages and further variables; raises InvalidRequestError if it rejects them."""

INSTRUCTION_ROLES = ("system", "developer")
TOOL_NAME, TOOL_PARAMETER, TOOL_ARGUMENTS = "look_up_entry", "entry_name", '{"entry_name":"first"}'
CALL_ID = "callabcde"  # nine letters or digits, which some templates require
_CALL = {"id": CALL_ID, "type": "function", "function": {"name": TOOL_NAME, "arguments": TOOL_ARGUMENTS}}
_TOOL_NAME = "probed_tool_name"
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "probed tool",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "a key"}}},
    },
}
_CALL_ROLE = "assistant with a call"
_PRINTED_KEY = "probedkey"


class ContentForm(StrEnum):
    """How a template reads the content of messages of one role."""

    TEXT = "text"
    PARTS = "parts"
    ONE_PART = "one part"  # a list, of which it prints the first part only
    BOTH = "both"


@dataclass(frozen=True)
class TemplateTraits:
    """What a template prints of a conversation.

    Attributes:
        forms: role -> how the content of its messages is read; other roles are read like `user`.
        leading_roles: `system` and `developer`, if their messages are printed at the beginning of a conversation.
        takes_several_leading: several of these messages are all printed.
        later_roles: the same roles, if their messages are printed at their place after other messages.
        may_precede_user: roles, of `user` and `tool`, that a message of the user may follow.
        shows_tools: the names of tools are printed.
        prints_calls: the calls of the assistant's messages are printed.
        prints_calls_beside_content: they are printed beside a content, too.
        needs_content: the content beside them must not be None.
        prints_results: the results of calls are printed.
        rendered_call: a conversation with a call of `TOOL_NAME`; empty if it is rejected.
        constants: see `constant_text`.
    """

    forms: Mapping[str, ContentForm] = field(default_factory=lambda: {"user": ContentForm.TEXT})
    leading_roles: tuple[str, ...] = INSTRUCTION_ROLES
    takes_several_leading: bool = True
    later_roles: tuple[str, ...] = INSTRUCTION_ROLES
    may_precede_user: tuple[str, ...] = ("user", "tool")
    shows_tools: bool = True
    prints_calls: bool = True
    prints_calls_beside_content: bool = True
    needs_content: bool = False
    prints_results: bool = True
    rendered_call: str = ""
    constants: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TemplateTraits:
        """Return the traits that `to_dict` returned, after their way through JSON."""
        forms = {role: ContentForm(form) for role, form in values["forms"].items()}
        names = ("leading_roles", "later_roles", "may_precede_user")
        return cls(**{**values, "forms": forms, **{name: tuple(values[name]) for name in names}})

    def to_dict(self) -> dict[str, Any]:
        """Return the traits as values of JSON."""
        return asdict(self)

    def form(self, role: str) -> ContentForm:
        """Return how contents of a role are read."""
        return self.forms.get(role, self.forms["user"])

    @property
    def description(self) -> str:
        """What happens to messages that the template cannot take; "" if it takes all."""
        texts = []
        if not self.leading_roles:
            texts.append("takes no system messages: they are sent in messages of the user")
        elif "system" not in self.later_roles:
            texts.append("takes system messages only at the beginning: later ones are sent as messages of the user")
        elif not self.takes_several_leading:
            texts.append("takes one system message at the beginning: several are joined")
        if self.shows_tools and not self.prints_calls:
            texts.append("prints no calls of tools: they are sent as text")
        return "; it ".join(texts)


def probe_template(render: Render, constants: str, knows_developer: bool) -> TemplateTraits:
    """Return the traits of a template.

    One that does not print a single message of a user is taken to print everything: what it lacks is found when a
    conversation is rendered.

    Args:
        render: renders the template.
        constants: the constants that it can print.
        knows_developer: the role `developer` is one of its constants.

    Raises:
        TemplateLimitError: the template exceeds a limit.
    """
    return _Prober(render).traits(constants, knows_developer)


class _Prober:
    """Renders conversations in which every text is a mark."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._forms: dict[str, ContentForm] = {}
        self._tools: list[Any] | None = None
        self._absent_content: str | None = None

    def traits(self, constants: str, knows_developer: bool) -> TemplateTraits:
        if self._find_form("user", ()) is None:
            self._tools = [_TOOL]  # a template for conversations with tools may fail without any
            if self._find_form("user", ()) is None:
                return TemplateTraits(constants=constants, rendered_call=self._rendered_call())
        self._find_form("assistant", ("user",), ("user",))
        rendered_call = self._find_call()
        prints_results = self._find_form("tool", ("user", _CALL_ROLE)) is not None
        roles = INSTRUCTION_ROLES if knows_developer else ("system",)
        leading = tuple(role for role in roles if self._is_printed_first(role))
        return TemplateTraits(
            forms=self._forms,
            leading_roles=leading,
            takes_several_leading=all(self.prints(one, other, "user") for one in leading for other in leading),
            later_roles=tuple(role for role in leading if self._is_printed_later(role, prints_results)),
            may_precede_user=self._may_precede_user(prints_results),
            shows_tools=self._shows_tools(leading),
            prints_calls=TOOL_NAME in rendered_call,
            prints_calls_beside_content=TOOL_NAME in self._rendered_call("text"),
            needs_content=self._absent_content is not None,
            prints_results=prints_results,
            rendered_call=rendered_call,
            constants=constants,
        )

    def _find_call(self) -> str:
        """Return a rendered call, after finding whether an empty text must stand beside it in place of a content."""
        text = self._rendered_call()
        if TOOL_NAME in text:
            return text
        self._absent_content = ""
        with_text = self._rendered_call()
        if TOOL_NAME in with_text:
            return with_text
        self._absent_content = None
        return text

    def _is_printed_first(self, role: str) -> bool:
        """Return whether a message at the beginning is printed, and the user's after it as well."""
        return self._find_form(role, (), ("user",)) is not None and min(self._places(role, "user")) >= 0

    def prints(self, *roles: str) -> bool:
        """Return whether the texts of a conversation with messages of these roles are printed in their order."""
        places = self._places(*roles)
        return min(places) >= 0 and places == sorted(places)

    def _places(self, *roles: str) -> list[int]:
        """Return where the texts of a conversation are printed; -1 for one that is not."""
        marks = ["" if role == _CALL_ROLE else _mark(i) for i, role in enumerate(roles)]
        text = self._text([self._message(role, mark) for role, mark in zip(roles, marks, strict=True)], self._tools)
        return [text.find(mark) for mark in marks if mark]

    def _find_form(self, role: str, before: Sequence[str], after: Sequence[str] = ()) -> ContentForm | None:
        """Find how contents of a role are read, between messages of other roles; None if they are not printed."""
        parts = [{"type": "text", "text": _mark(i), "key": _PRINTED_KEY} for i in range(2)]
        reads_text = self._prints_content(role, before, _mark(0), after)
        if self._prints_content(role, before, parts, after):
            form = ContentForm.BOTH if reads_text else ContentForm.PARTS
        elif reads_text:
            form = ContentForm.TEXT
        elif self._prints_content(role, before, parts[:1], after):
            form = ContentForm.ONE_PART
        else:
            return None
        self._forms[role] = form
        return form

    def _prints_content(self, role: str, before: Sequence[str], content: Any, after: Sequence[str]) -> bool:
        """Return whether a content is printed; a list that is printed as it is, with all keys, does not count."""
        others = [
            [self._message(other, "" if other == _CALL_ROLE else "text") for other in side] for side in (before, after)
        ]
        message = {**self._message(role, ""), "content": content}
        tools = [_TOOL] if role == "tool" else self._tools
        text = self._text([*others[0], message, *others[1]], tools)
        num_marks = 1 if isinstance(content, str) else len(content)
        return all(_mark(i) in text for i in range(num_marks)) and _PRINTED_KEY not in text

    def _is_printed_later(self, role: str, prints_results: bool) -> bool:
        """Return whether messages of a role are printed at their place wherever they are."""
        orders = [("user", role), ("user", role, "assistant", "user"), ("user", "assistant", role, "user")]
        if prints_results:
            orders.append(("user", _CALL_ROLE, "tool", role))
        return all(self.prints(*order) for order in orders)

    def _may_precede_user(self, prints_results: bool) -> tuple[str, ...]:
        roles = ["user"] if self.prints("user", "user") else []
        if not prints_results or self.prints("user", _CALL_ROLE, "tool", "user"):
            roles.append("tool")
        return tuple(roles)

    def _shows_tools(self, leading: Sequence[str]) -> bool:
        for roles in (("user",), (*leading[:1], "user")):
            if _TOOL_NAME in self._text([self._message(role, "text") for role in roles], [_TOOL]):
                return True
        return False

    def _rendered_call(self, content: str = "") -> str:
        return self._text([self._message("user", "Hello"), self._message(_CALL_ROLE, content)], self._tools, False)

    def _message(self, role: str, text: str) -> Message:
        if role == _CALL_ROLE:
            content = self._content("assistant", text) if text else self._absent_content
            return {"role": "assistant", "content": content, "tool_calls": [_CALL]}
        message = {"role": role, "content": self._content(role, text)}
        return {**message, "tool_call_id": CALL_ID, "name": TOOL_NAME} if role == "tool" else message

    def _content(self, role: str, text: str) -> Any:
        form = self._forms.get(role, self._forms.get("user", ContentForm.TEXT))
        return text if form in (ContentForm.TEXT, ContentForm.BOTH) else [{"type": "text", "text": text}]

    def _text(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = True) -> str:
        """Return the rendered conversation; "" if the template rejects it."""
        try:
            return self._render(messages, {"tools": tools, "add_generation_prompt": add_generation_prompt})
        except TemplateLimitError:
            raise
        except InvalidRequestError:
            return ""


def _mark(i: int) -> str:
    return f"probed{'abcdefgh'[i]}text"
