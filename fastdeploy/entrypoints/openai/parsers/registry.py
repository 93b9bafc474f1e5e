# SPDX-License-Identifier: Apache-2.0
"""The formats of tool calls: the parser of each, and the texts around a call, from which grammars are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastdeploy.core.tool_formats import TOOL_CALL_FORMATS
from fastdeploy.entrypoints.openai.parsers.json_tool_parsers import (
    DEEPSEEK_CALL_BEGIN,
    DEEPSEEK_CALL_END,
    DEEPSEEK_LIST_BEGIN,
    DEEPSEEK_LIST_END,
    DEEPSEEK_SEPARATOR,
    DeepSeekToolParser,
    HermesToolParser,
    JsonArrayToolParser,
    Llama3JsonToolParser,
)
from fastdeploy.entrypoints.openai.parsers.pythonic_tool_parser import PYTHON_END, PYTHON_START, PythonicToolParser
from fastdeploy.entrypoints.openai.parsers.tagged_tool_parsers import Glm45ToolParser, Qwen3CoderToolParser
from fastdeploy.entrypoints.openai.parsers.tool_parser import Schemas, ToolParser


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        make_parser: returns a parser for one message, given the schema of each function's parameters.
        markers: texts that may be special tokens of the model, and that the parser needs in the text.
        begin, end: text before and after the arguments of a call; `{name}` is replaced by the function's name.
        list_begin, separator, list_end: text before, between and after calls.
        bare_begin, bare_end: text around the arguments of a call without its first marker, which parsers accept, too;
            empty for formats without such calls.
        is_unmarked: no marker distinguishes a call from other text.
        arguments: how arguments are written: a key of `argument_grammar.WRITERS`.
    """

    make_parser: Callable[[Schemas], ToolParser]
    begin: str
    end: str
    markers: tuple[str, ...] = ()
    list_begin: str = ""
    separator: str = ""
    list_end: str = ""
    bare_begin: str = ""
    bare_end: str = ""
    is_unmarked: bool = False
    arguments: str = "json"

    @property
    def opening(self) -> str:
        """Text before the arguments of the first call."""
        return self.list_begin + self.begin


_DEEPSEEK_MARKERS = (
    DEEPSEEK_LIST_BEGIN,
    DEEPSEEK_LIST_END,
    DEEPSEEK_CALL_BEGIN,
    DEEPSEEK_CALL_END,
    DEEPSEEK_SEPARATOR,
)
_HERMES = ToolFormat(
    HermesToolParser,
    markers=("<tool_call>", "</tool_call>"),
    begin='<tool_call>\n{"name": "{name}", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
)

FORMATS = {
    "hermes": _HERMES,
    "ernie": _HERMES,
    "qwen3_coder": ToolFormat(
        Qwen3CoderToolParser,
        markers=("<tool_call>", "</tool_call>"),
        begin="<tool_call>\n<function={name}>\n",
        end="</function>\n</tool_call>",
        separator="\n",
        bare_begin="<function={name}>\n",
        bare_end="</function>",
        arguments="qwen3_coder",
    ),
    "glm45": ToolFormat(
        Glm45ToolParser,
        markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        begin="<tool_call>{name}\n",
        end="</tool_call>",
        separator="\n",
        arguments="glm45",
    ),
    "pythonic": ToolFormat(
        PythonicToolParser,
        markers=(PYTHON_START, PYTHON_END),
        list_begin="[",
        begin="{name}(",
        end=")",
        separator=", ",
        list_end="]",
        is_unmarked=True,
        arguments="python",
    ),
    "llama3_json": ToolFormat(
        Llama3JsonToolParser,
        markers=("<|python_tag|>",),
        begin='{"name": "{name}", "parameters": ',
        end="}",
        separator="; ",
        is_unmarked=True,
    ),
    "deepseek_v3": ToolFormat(
        DeepSeekToolParser,
        markers=_DEEPSEEK_MARKERS,
        list_begin=DEEPSEEK_LIST_BEGIN,
        begin=f"{DEEPSEEK_CALL_BEGIN}function{DEEPSEEK_SEPARATOR}{{name}}\n```json\n",
        end=f"\n```{DEEPSEEK_CALL_END}",
        separator="\n",
        list_end=DEEPSEEK_LIST_END,
    ),
    "deepseek_v31": ToolFormat(
        DeepSeekToolParser,
        markers=_DEEPSEEK_MARKERS,
        list_begin=DEEPSEEK_LIST_BEGIN,
        begin=f"{DEEPSEEK_CALL_BEGIN}{{name}}{DEEPSEEK_SEPARATOR}",
        end=DEEPSEEK_CALL_END,
        list_end=DEEPSEEK_LIST_END,
    ),
}

JSON_ARRAY = ToolFormat(
    JsonArrayToolParser,
    list_begin="[",
    begin='{"name": "{name}", "parameters": ',
    end="}",
    separator=", ",
    list_end="]",
    is_unmarked=True,
)
"""Format of servers without `--tool-call-parser`, for calls that a grammar enforces."""


def get_tool_format(name: str) -> ToolFormat | None:
    """Return the format of a value of `--tool-call-parser`; None for an empty one."""
    return FORMATS[TOOL_CALL_FORMATS[name]] if name else None
