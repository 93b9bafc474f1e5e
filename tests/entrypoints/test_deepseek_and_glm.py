# SPDX-License-Identifier: Apache-2.0
"""Unusual calls of DeepSeek V3 and V3.1, with and without reasoning, and reasoning and calls of GLM-4.5 and ERNIE."""

from __future__ import annotations

import pytest

from fastdeploy.core.reasoning import REASONING_FORMATS, ReasoningState
from fastdeploy.entrypoints.openai.parsers.message import Message, ToolCall
from tests.entrypoints.message_texts import CALL, CALL_END, LIST, LIST_END, SEP, read

OPEN, CLOSED, UNDECIDED = ReasoningState.OPEN, ReasoningState.CLOSED, ReasoningState.UNDECIDED
FORMS = ("deepseek_v3", "deepseek_v31")
F, G = ToolCall("f", '{"a": 1}'), ToolCall("g", "{}")


def v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEP}{arguments}{CALL_END}"


F3, G3, F31, G31 = v3("f", '{"a": 1}'), v3("g", "{}"), v31("f", '{"a": 1}'), v31("g", "{}")
FENCED = '{"code": "```json\\n{}```", "end": "<｜tool▁call▁end｜>"}'
NESTED = '{"a": {"b": [{}]}}'


def in_pieces(text: str, *formats: str, **options: ReasoningState) -> Message:
    """Return the message of a text, which must be the same in pieces of any size."""
    whole = read([text], *formats, **options)
    for size in (1, 2, 5, 13):
        assert read([text[at : at + size] for at in range(0, len(text), size)], *formats, **options) == whole
    return whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # either form of a call, also one after the other
        (f"{LIST}{F3}\n{G31}{LIST_END}", Message(calls=[F, G])),
        (f"{LIST}\n{F31}\n\n{G3}\n{LIST_END}\n", Message(calls=[F, G])),
        # a fence without its language, without an end, or without both
        (f'{LIST}{CALL}function{SEP}f\n```\n{{"a": 1}}\n```{CALL_END}{LIST_END}', Message(calls=[F])),
        (f'{LIST}{CALL}function{SEP}f\n```json\n{{"a": 1}}{CALL_END}{LIST_END}', Message(calls=[F])),
        (f'{LIST}{CALL}function{SEP}f\n```json\n{{"a": 1}}\n``', Message(calls=[F])),
        # a missing end of the call, or of the list
        (f'{LIST}{CALL}f{SEP}{{"a": 1}}{LIST_END}', Message(calls=[F])),
        (f'{LIST}{CALL}f{SEP}{{"a": 1}}{G31}{LIST_END}', Message(calls=[F, G])),
        (f"{LIST}{F31}", Message(calls=[F])),
        (f"{LIST}{F31}{G31}<｜tool▁calls", Message(calls=[F, G])),
        # an output that ends within a character of an end, or of a text behind the calls
        (f"{LIST}{F31}{G31}<｜tool▁calls▁end\ufffd", Message(calls=[F, G])),
        (f"{LIST}{F3}{G31}{CALL_END}<\ufffd", Message(calls=[F, G])),
        (f"{LIST}{F31}{G3[: -len(CALL_END)]}<｜tool\ufffd", Message(calls=[F, G])),
        (f"{LIST}{F31}<｜tool▁\ufffd", Message("", "<｜tool▁\ufffd", [F])),
        (f"{LIST}{F31}{LIST_END}\ufffd", Message("", "\ufffd", [F])),
        # text around and behind, and a second list
        (f"One.\n\n{LIST}{F31}{LIST_END}\n\nTwo.\n{LIST}{G3}{LIST_END}", Message("", "One.\n\nTwo.", [F, G])),
        # markers and fences within a text
        (f"{LIST}{v3('f', FENCED)}{v31('f', FENCED)}{LIST_END}", Message(calls=[ToolCall("f", FENCED)] * 2)),
        (f"{LIST}{v31('f', NESTED)}{LIST_END}", Message(calls=[ToolCall("f", NESTED)])),
        (f"{LIST}{v31('ns.get-one_2', '{}')}{LIST_END}", Message(calls=[ToolCall("ns.get-one_2", "{}")])),
        # truncated
        (f'{LIST}{CALL}f{SEP}{{"a": "x', Message(calls=[ToolCall("f", '{"a": "x')])),
        (f"{LIST}{CALL}f{SEP}", Message(content=f"{LIST}{CALL}f{SEP}")),
        (f"{LIST}{CALL}function{SEP}f\n```js", Message(content=f"{LIST}{CALL}function{SEP}f\n```js")),
        (LIST, Message(content=LIST)),
        # not calls
        (f"{LIST}{LIST_END}", Message(content=f"{LIST}{LIST_END}")),
        (f"{LIST}{CALL}f{SEP}[1]{CALL_END}{LIST_END}", Message(content=f"{LIST}{CALL}f{SEP}[1]{CALL_END}{LIST_END}")),
        (f"{LIST}{CALL}{SEP}{{}}{CALL_END}{LIST_END}", Message(content=f"{LIST}{CALL}{SEP}{{}}{CALL_END}{LIST_END}")),
        (f"{CALL}f{SEP}{{}}{CALL_END}", Message(content=f"{CALL}f{SEP}{{}}{CALL_END}")),
        ("<｜tool calls begin｜> {}", Message(content="<｜tool calls begin｜> {}")),
        # a call behind one that is none
        (
            f"{LIST}{CALL}no call{CALL_END}{LIST_END}{LIST}{F31}{LIST_END}",
            Message("", f"{LIST}{CALL}no call{CALL_END}{LIST_END}", [F]),
        ),
    ],
)
def test_unusual_calls_of_deepseek(form: str, text: str, expected: Message) -> None:
    assert in_pieces(text, form) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("reasoning", "state", "text", "expected"),
    [
        ("deepseek_r1", OPEN, f"hm\n</think>\n\n{LIST}{F3}{LIST_END}", Message("hm", "", [F])),
        ("deepseek_r1", OPEN, f"<think>\nhm</think>So:\n{LIST}{F31}{LIST_END}", Message("hm", "So:", [F])),
        ("deepseek_v3", UNDECIDED, f"{LIST}{F31}{LIST_END}", Message("", "", [F])),
        ("deepseek_v3", CLOSED, f"{LIST}{F31}{LIST_END}", Message("", "", [F])),
        # these models end their reasoning before they call
        ("deepseek_r1", OPEN, f"hm {LIST}{F3}{LIST_END}", Message(f"hm {LIST}{F3}{LIST_END}")),
        ("deepseek_v3", OPEN, f"{LIST}{F31}{LIST_END}</think>{LIST}{G31}", Message(f"{LIST}{F31}{LIST_END}", "", [G])),
    ],
)
def test_deepseek_reasons_and_calls(
    form: str, reasoning: str, state: ReasoningState, text: str, expected: Message
) -> None:
    assert in_pieces(text, form, reasoning, state=state) == expected


@pytest.mark.parametrize(
    ("form", "prompt", "state"),
    [
        ("deepseek_v3", "<｜User｜>hi<｜Assistant｜><think>", OPEN),
        ("deepseek_v3", "<｜User｜>hi<｜Assistant｜></think>", CLOSED),
        ("deepseek_v3", "<｜User｜>hi<｜Assistant｜>", UNDECIDED),
        ("deepseek_r1", "<｜User｜>hi<｜Assistant｜><think>\n", OPEN),
        ("glm45", "<|user|>\nhi<|assistant|>", UNDECIDED),
        ("glm45", "<|user|>\nhi/nothink<|assistant|>\n<think></think>", CLOSED),
        ("glm45", "<|user|>\nhi<|assistant|>\n<think>", OPEN),
    ],
)
def test_end_of_the_prompt_decides(form: str, prompt: str, state: ReasoningState) -> None:
    assert REASONING_FORMATS[form].state_after(prompt) is state


GLM_CALL = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("state", "text", "expected"),
    [
        (UNDECIDED, "\n<think>hm</think>\nyes", Message("hm", "yes")),
        (UNDECIDED, f"\n<think>\nhm\n</think>\n{GLM_CALL}", Message("hm", "", [F])),
        (UNDECIDED, f"\n<think></think>\nSo:\n{GLM_CALL}\n", Message("", "So:", [F])),
        (UNDECIDED, f"\n{GLM_CALL}\n{GLM_CALL}", Message("", "", [F, F])),
        (UNDECIDED, "\n<think>hm <think> hm</think>yes</think>", Message("hm <think> hm", "yes</think>")),
        (UNDECIDED, "yes</think>no", Message("", "yes</think>no")),
        (UNDECIDED, "\n<thin", Message("", "\n<thin")),
        (UNDECIDED, "<think>hm</thin", Message("hm</thin")),
        (UNDECIDED, "<think>  </think>  ", Message()),
        (OPEN, f"hm</think>{GLM_CALL}", Message("hm", "", [F])),
        (OPEN, f"\n<think>\nhm {GLM_CALL}", Message(f"hm {GLM_CALL}")),
        (CLOSED, f"\nyes {GLM_CALL}", Message("", "\nyes", [F])),
    ],
)
def test_glm_reasons_and_calls(state: ReasoningState, text: str, expected: Message) -> None:
    assert in_pieces(text, "glm45", "glm45", state=state) == expected


ERNIE_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"hm\n</think>\n\n\n{ERNIE_CALL}", Message("hm", "", [F])),
        (f"hm\n</think>\n\n\n{ERNIE_CALL}\n{ERNIE_CALL}", Message("hm", "", [F, F])),
        (f"hm\n</think>\n<response>\nOne moment.\n</response>\n\n\n{ERNIE_CALL}", Message("hm", "One moment.", [F])),
        ("hm\n</think>\n<response>\nno <tool_call>\n</response>\n", Message("hm", "no <tool_call>")),
        (f"hm {ERNIE_CALL}</think>\n<response>\nyes\n</response>", Message(f"hm {ERNIE_CALL}".rstrip(), "yes")),
    ],
)
def test_ernie_reasons_answers_and_calls(text: str, expected: Message) -> None:
    assert in_pieces(text, "ernie", "ernie-x1", state=OPEN) == expected
