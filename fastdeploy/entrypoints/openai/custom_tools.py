# SPDX-License-Identifier: Apache-2.0
"""Leaves tools of type `custom` out of chats: their input is a text in a grammar of their own, not JSON arguments."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from fastdeploy.core.notes import note_once
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest

NOTE = "tools of type custom are left out of chats: use a function with one parameter of type string"
_TOOL = re.compile(r"tools\[(\d+)\]")


def without_custom_tools(body: ChatCompletionRequest) -> tuple[ChatCompletionRequest, Callable[[str], str]]:
    """Return a chat without its custom tools, which the log says once, and a function that renames its fields.

    The function returns the field of `body` that a field of the returned chat is.
    """
    given = body.tools or []
    kept = [i for i, tool in enumerate(given) if tool.get("type") != "custom"]
    if len(kept) == len(given):
        return body, lambda name: name
    note_once(NOTE)
    tools = [given[i] for i in kept] or None
    in_parallel = body.parallel_tool_calls if tools else None
    chat = msgspec.structs.replace(body, tools=tools, parallel_tool_calls=in_parallel)

    def rename(name: str) -> str:
        found = _TOOL.match(name)
        return name if found is None else f"tools[{kept[int(found.group(1))]}]{name[found.end() :]}"

    return chat, rename
