# SPDX-License-Identifier: Apache-2.0
"""Translates the tools of POST /v1/responses into functions of a chat, and their names back.

A chat has no namespaces: the model sees the function NAME of NAMESPACE as `NAMESPACE__NAME`, and its calls are returned
with `namespace` and `name`. Tools of types that this server does not have are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import shorten
from fastdeploy.entrypoints.openai.responses_api.tool_fields import ALLOWED_TOOLS, NAMESPACE_TOOLS, TOOL_CHOICES, TOOLS

SEPARATOR = "__"


def joined_name(name: Any, namespace: str | None) -> Any:
    """Return a function's name as the model sees it; without a namespace it is the name itself."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def check_texts(place: str, given: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Check that keys are texts, if they are there.

    Raises:
        InvalidRequestError: one is not; names it.
    """
    for key in keys:
        if not isinstance(given.get(key, ""), str):
            raise InvalidRequestError(f"{place}.{key}", f"expected text, got {shorten(given[key])}")


@dataclass(frozen=True)
class _Function:
    """A function, and the place in the body where it is; without a namespace, that is empty."""

    place: str
    namespace: str
    fields: Mapping[str, Any]
    introduction: str = ""

    @property
    def shown_name(self) -> Any:
        return joined_name(self.fields["name"], self.namespace)

    def for_chat(self) -> dict[str, Any]:
        """Return the function as the template gets it."""
        fields = {key: value for key, value in self.fields.items() if key != "type" and value is not None}
        fields["name"] = self.shown_name
        if self.introduction:
            check_texts(self.place, fields, ("description",))
            fields["description"] = "\n\n".join(filter(None, (self.introduction, fields.get("description"))))
        return {"type": "function", "function": fields}


class ToolSet:
    """The tools of a request.

    Attributes:
        repeated: the tools as the answer repeats them.
    """

    def __init__(self, given: Sequence[Any], ignores_unknown: bool) -> None:
        """Read the field `tools`.

        Args:
            ignores_unknown: leave unknown keys of objects out.

        Raises:
            InvalidRequestError: a value is invalid; names the field.
            ApiError: 400, a key is unknown, or refused by name.
        """
        self.repeated: list[dict[str, Any]] = []
        self._functions: list[_Function] = []
        self._ignores_unknown = ignores_unknown
        for i, tool in enumerate(given):
            if not TOOLS.leaves_out("/v1/responses: tools", tool):
                self._add(f"tools[{i}]", tool)

    @property
    def chat_tools(self) -> list[dict[str, Any]]:
        """The functions in the format of a chat."""
        return [function.for_chat() for function in self._functions]

    @property
    def places(self) -> list[str]:
        """The place of each function in the body."""
        return [function.place for function in self._functions]

    def split_name(self, shown_name: str) -> tuple[str | None, str]:
        """Return namespace and name of the function that the model calls so; None for a function without namespace."""
        for function in self._functions:
            if function.namespace and function.shown_name == shown_name:
                return function.namespace, function.fields["name"]
        return None, shown_name

    def chat_choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Return `tool_choice` in the format of a chat.

        Raises:
            InvalidRequestError: a value is invalid; names the field.
            ApiError: 400, a type is not supported, or a key is unknown.
        """
        if not isinstance(choice, dict):
            return choice
        kind, keys = TOOL_CHOICES.read("tool_choice", choice, self._ignores_unknown)
        if kind == "function":
            check_texts("tool_choice", keys, ("name", "namespace"))
            return _chat_function(joined_name(keys["name"], keys.get("namespace")))
        tools = keys["tools"]
        if not isinstance(tools, list):
            raise InvalidRequestError("tool_choice.tools", f"expected a list of functions, got {shorten(tools)}")
        names = [name for i, tool in enumerate(tools) for name in self._allowed(f"tool_choice.tools[{i}]", tool)]
        allowed = {"mode": keys["mode"], "tools": [_chat_function(name) for name in names]}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    def _add(self, place: str, given: Any) -> None:
        kind, keys = TOOLS.read(place, given, self._ignores_unknown)
        if kind == "function":
            self._functions.append(_Function(place, "", keys))
            self.repeated.append(_repeated(keys))
            return
        functions = [*self._namespace(place, keys)]
        self._functions += functions
        self.repeated.append({**keys, "type": kind, "tools": [_repeated(function.fields) for function in functions]})

    def _namespace(self, place: str, given: Mapping[str, Any]) -> Iterator[_Function]:
        """Yield the functions of a namespace, whose description is shown once, in front of the first one's."""
        check_texts(place, given, ("name", "description"))
        name, tools, description = given["name"], given["tools"], given.get("description")
        if not name:
            raise InvalidRequestError(f"{place}.name", "expected a name of at least one character")
        if not isinstance(tools, list):
            raise InvalidRequestError(f"{place}.tools", f"expected a list of functions, got {shorten(tools)}")
        introduction = f"Functions {name}{SEPARATOR}*: {description}" if description else ""
        for i, tool in enumerate(tools):
            if NAMESPACE_TOOLS.leaves_out("/v1/responses: tools in namespaces", tool):
                continue
            _, keys = NAMESPACE_TOOLS.read(f"{place}.tools[{i}]", tool, self._ignores_unknown)
            check_texts(f"{place}.tools[{i}]", keys, ("name",))
            yield _Function(f"{place}.tools[{i}]", name, keys, introduction)
            introduction = ""

    def _allowed(self, place: str, given: Any) -> list[str]:
        """Return the names, as the model sees them, of one of the allowed tools."""
        kind, keys = ALLOWED_TOOLS.read(place, given, self._ignores_unknown)
        check_texts(place, keys, ("name", "namespace"))
        if kind == "function":
            return [joined_name(keys["name"], keys.get("namespace"))]
        names = [function.shown_name for function in self._functions if function.namespace == keys["name"]]
        if not names:
            raise InvalidRequestError(f"{place}.name", f"{shorten(keys['name'])} is no namespace with functions")
        return names


def _repeated(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function as the answer repeats it."""
    return {**function, "parameters": function.get("parameters"), "strict": function.get("strict"), "type": "function"}


def _chat_function(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
