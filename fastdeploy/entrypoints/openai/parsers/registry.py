# SPDX-License-Identifier: Apache-2.0
"""The formats of tool calls: how to read one, and how to write one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.tool_formats import TOOL_CALL_FORMATS
from fastdeploy.entrypoints.openai.parsers import deepseek
from fastdeploy.entrypoints.openai.parsers.deepseek import DeepSeekParser
from fastdeploy.entrypoints.openai.parsers.json_calls import HermesParser, JsonArrayParser, Llama3Parser
from fastdeploy.entrypoints.openai.parsers.tagged import TaggedCallParser
from fastdeploy.entrypoints.openai.parsers.tool_calls import ToolCallParser

Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing calls.

    Attributes:
        make_parser: from the functions' schemas to a parser of one message.
        markers: texts that may be special tokens of the model and must not vanish.
        begin, end: around the arguments of a call; `{name}` stands for the function's name.
        list_begin, separator, list_end: around and between calls.
        is_bare: a call has no marker that sets it apart from text.
        is_tagged: the arguments are tags, not JSON.
    """

    make_parser: Callable[[Schemas], ToolCallParser]
    begin: str
    end: str
    markers: tuple[str, ...] = ()
    list_begin: str = ""
    separator: str = ""
    list_end: str = ""
    is_bare: bool = False
    is_tagged: bool = False


_DEEPSEEK_MARKERS = (
    deepseek.LIST_BEGIN,
    deepseek.LIST_END,
    deepseek.CALL_BEGIN,
    deepseek.CALL_END,
    deepseek.SEPARATOR,
)
_HERMES = ToolFormat(
    lambda schemas: HermesParser(),
    markers=("<tool_call>", "</tool_call>"),
    begin='<tool_call>\n{"name": "{name}", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
)

FORMATS = {
    "hermes": _HERMES,
    "ernie": _HERMES,
    "qwen3_coder": ToolFormat(
        TaggedCallParser,
        markers=("<tool_call>", "</tool_call>"),
        begin="<tool_call>\n<function={name}>\n",
        end="</function>\n</tool_call>",
        separator="\n",
        is_tagged=True,
    ),
    "llama3_json": ToolFormat(
        lambda schemas: Llama3Parser(),
        markers=("<|python_tag|>",),
        begin='{"name": "{name}", "parameters": ',
        end="}",
        separator="; ",
        is_bare=True,
    ),
    "deepseek_v3": ToolFormat(
        lambda schemas: DeepSeekParser(),
        markers=_DEEPSEEK_MARKERS,
        list_begin=deepseek.LIST_BEGIN,
        begin=f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}{{name}}\n```json\n",
        end=f"\n```{deepseek.CALL_END}",
        separator="\n",
        list_end=deepseek.LIST_END,
    ),
    "deepseek_v31": ToolFormat(
        lambda schemas: DeepSeekParser(),
        markers=_DEEPSEEK_MARKERS,
        list_begin=deepseek.LIST_BEGIN,
        begin=f"{deepseek.CALL_BEGIN}{{name}}{deepseek.SEPARATOR}",
        end=deepseek.CALL_END,
        list_end=deepseek.LIST_END,
    ),
}

JSON_ARRAY = ToolFormat(
    lambda schemas: JsonArrayParser(),
    list_begin="[",
    begin='{"name": "{name}", "parameters": ',
    end="}",
    separator=", ",
    list_end="]",
    is_bare=True,
)
"""Of servers without `--tool-call-parser`, for calls that the grammar makes certain."""


def tool_format(name: str) -> ToolFormat | None:
    """Return the format by a name of `--tool-call-parser`, which the configuration has checked; None for none."""
    return FORMATS[TOOL_CALL_FORMATS[name]] if name else None
