# SPDX-License-Identifier: Apache-2.0
"""Reasoning and answer are separated in every format, whatever the prompt ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.reasoning import REASONING_FORMATS, ReasoningState
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.text_output import TextAssembler, make_detokenizer
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.parsers.message import Message, ToolCall
from fastdeploy.entrypoints.openai.parsers.reasoning import CallsInReasoning, ReasoningCounter
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS
from tests.detokenize.tokenizers_for_tests import save_tokenizer
from tests.entrypoints.chat_server import SPECIAL_TOKENS, rendered, says
from tests.entrypoints.message_texts import make_reasoning_parser, read
from tests.entrypoints.server_process import ServerProcess

CONTINUED = "{% for m in messages %}{{ m.content }}{% endfor %}{# tools #}"
OPEN, CLOSED, UNDECIDED = ReasoningState.OPEN, ReasoningState.CLOSED, ReasoningState.UNDECIDED


@pytest.mark.parametrize(
    ("form", "state", "text", "expected"),
    [
        ("qwen3", UNDECIDED, "<think>\nhm\n</think>\n\nyes \n", Message("hm", "yes \n")),
        ("qwen3", UNDECIDED, "yes <think>", Message("", "yes <think>")),
        ("qwen3", UNDECIDED, " <th", Message("", " <th")),
        ("qwen3", OPEN, "\nhm </think>yes", Message("hm", "yes")),
        ("qwen3", CLOSED, "yes</think>", Message("", "yes</think>")),
        ("qwen3", UNDECIDED, "<think></think>yes", Message("", "yes")),
        ("deepseek-r1", OPEN, "<think>hm</think>yes", Message("hm", "yes")),
        ("deepseek-r1", OPEN, "hm", Message("hm", "")),
        ("deepseek-r1", OPEN, "hm </thi", Message("hm </thi", "")),
        ("ernie-x1", OPEN, "hm\n</think>\n\n<response>\nyes\n</response>\n", Message("hm", "yes")),
        ("ernie-x1", OPEN, "hm\n</think>\n\nyes", Message("hm", "yes")),
        ("ernie-x1", OPEN, "hm</think><response>yes", Message("hm", "yes")),
        ("ernie-x1", CLOSED, "<response>yes</response> more", Message("", "yesmore")),
    ],
)
def test_formats(form: str, state: ReasoningState, text: str, expected: Message) -> None:
    assert read([text], "", form, state) == expected
    assert read(list(text), "", form, state) == expected


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
F = ToolCall("f", "{}")


@pytest.mark.parametrize(
    ("form", "state", "text", "expected"),
    [
        ("qwen3", UNDECIDED, f"<think>hm\n{CALL}", Message("hm", "", [F])),
        ("qwen3", OPEN, f"{CALL}{CALL}", Message("", "", [F, F])),
        ("qwen3", OPEN, f"hm </think>{CALL}", Message("hm", "", [F])),
        ("qwen3", OPEN, f"hm <tool_ {CALL}</think>", Message("hm <tool_", "</think>", [F])),
        ("qwen3", OPEN, "hm <tool_call", Message("hm <tool_call", "")),
        # other models end their reasoning before they call
        ("deepseek_r1", OPEN, f"hm {CALL}</think>{CALL}", Message(f"hm {CALL}", "", [F])),
        ("glm45", UNDECIDED, f"<think>hm {CALL}</think>{CALL}", Message(f"hm {CALL}", "", [F])),
        ("ernie-x1", OPEN, f"hm {CALL}", Message(f"hm {CALL}")),
    ],
)
def test_call_ends_an_open_reasoning_in_the_form_of_qwen3(
    form: str, state: ReasoningState, text: str, expected: Message
) -> None:
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(pieces, "hermes", form, state) == expected


HEADS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {',
    "ernie": '<tool_call>{"name": "f", "arguments": {',
    "qwen3_coder": "<tool_call>\n<function=f>",
    "glm45": "<tool_call>f\n<arg_key>",
}


@pytest.mark.parametrize("tools", HEADS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "The format is <tool_call> then JSON.\n</think>\n\nThe answer is 4.",
            ("The format is <tool_call> then JSON.", 4),
        ),
        ("It is <tool_call>.</think>The answer is 4.", ("It is <tool_call>.", 4)),
        ("It is <tool_call></think>The answer is 4.", ("It is <tool_call>", 4)),
        (
            "<tool_call>\n <tool_call></tool_call> it is</think>The answer is 4.",
            ("<tool_call>\n <tool_call></tool_call> it is", 4),
        ),
        ("hm <tool_call>s are", ("hm <tool_call>s are", None)),
        ("hm <tool_call>", ("hm <tool_call>", None)),
        ("hm <tool_call>\n", ("hm <tool_call>\n", None)),
    ],
)
def test_marker_without_a_call_is_reasoning(tools: str, text: str, expected: tuple[str, int | None]) -> None:
    reasoning, answer = expected
    content = "The answer is 4." if answer else ""
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        for is_forced in (False, True) if answer else (False,):
            assert read(pieces, tools, "qwen3", OPEN, is_forced=is_forced) == Message(reasoning, content)


@pytest.mark.parametrize("tools", HEADS)
def test_reasoning_ends_where_the_parser_of_calls_finds_a_head(tools: str) -> None:
    head = HEADS[tools]
    for length in range(len("<tool_call>"), len(head)):
        cut = f"hm {head[:length]}"
        assert read([cut], tools, "qwen3", OPEN) == read(list(cut), tools, "qwen3", OPEN)
        is_call = bool(read([head[:length]], tools).calls)
        expected = "hm" if is_call else cut
        assert read([cut], tools, "qwen3", OPEN).reasoning == expected
        forced = read(list(cut), tools, "qwen3", OPEN, is_forced=True)
        assert (forced.reasoning, forced.content) == ("hm", "" if is_call else head[:length]), (
            "a grammar forces the rest"
        )
    assert read([f"hm {head}"], tools, "qwen3", OPEN).calls and read([f"hm {head}"], tools, "qwen3", OPEN).content == ""


@pytest.mark.parametrize(
    ("form", "prompt", "state"),
    [
        ("qwen3", "assistant:", UNDECIDED),
        ("qwen3", "assistant:<think>\n", OPEN),
        ("qwen3", "assistant:<think>\n\n</think>\n\n", CLOSED),
        ("deepseek_r1", "assistant:", OPEN),
        ("deepseek_r1", "assistant:</think>", CLOSED),
    ],
)
def test_prompt_s_end_decides_where_the_output_begins(form: str, prompt: str, state: ReasoningState) -> None:
    assert REASONING_FORMATS[form].state_after(prompt) is state


def test_continued_message_s_last_marker_decides() -> None:
    form = REASONING_FORMATS["deepseek_r1"]
    assert form.state_after("<think>a</think>b\nassistant: <think>hm", is_continued=True) is OPEN
    assert form.state_after("assistant: <think>hm</think>Well,", is_continued=True) is CLOSED
    assert form.state_after("assistant: Well,", is_continued=True) is CLOSED
    qwen3 = REASONING_FORMATS["qwen3"]
    assert qwen3.state_after("assistant: <think>hm <tool_call>{", is_continued=True) is CLOSED
    assert qwen3.for_tools(()).state_after("assistant: <think>hm <tool_call>{", is_continued=True) is OPEN


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("The format is <tool_call> then", OPEN),
        ("The format is <tool_call>", CLOSED),
        (f"hm {CALL} and <tool_call> then", CLOSED),
        ("hm <tool_call> then</think>", CLOSED),
        ("hm <tool_call> then <think>", OPEN),
    ],
)
def test_marker_without_a_call_leaves_a_continued_reasoning_open(text: str, state: ReasoningState) -> None:
    calls = CallsInReasoning(lambda: FORMATS["hermes"].make_parser({}))
    prompt = f"<think>a</think>assistant: <think>{text}"
    assert REASONING_FORMATS["qwen3"].state_after(prompt, True, calls.may_begin_call) is state


def test_only_a_call_ends_the_reasoning_that_an_answer_continues(parsing_client: openai.OpenAI) -> None:
    extra = {"continue_final_message": True, "add_generation_prompt": False, "chat_template": CONTINUED}
    for begun, expected in (("It is <tool_call>, ", "hm"), (f"It is {CALL}", None)):
        messages: list[Any] = [*says("hm</think>yes"), {"role": "assistant", "content": f"<think>{begun}"}]
        answer = parsing_client.chat.completions.create(
            model="default", messages=messages, tools=[TOOL], extra_body=extra
        )
        assert getattr(answer.choices[0].message, "reasoning", None) == expected


def count_tokens(
    folder: Path, special: bool, size: int, text: str, state: ReasoningState, tools: str = ""
) -> list[str]:
    """Return the texts of the tokens that count as reasoning."""
    tokenizer = Tokenizer.from_pretrained(save_tokenizer(folder, special_tokens=SPECIAL_TOKENS if special else ()))
    params = SamplingParams(visible_token_ids=list(tokenizer.find_special_ids(SPECIAL_TOKENS).values()))
    ids, assembler = tokenizer.encode(text, add_special_tokens=False), TextAssembler(tokenizer, [], params)
    counter = ReasoningCounter(make_reasoning_parser("qwen3", state, tools), make_detokenizer(tokenizer, [], params))
    for at in range(0, len(ids), size):
        is_last = at + size >= len(ids)
        delta = TokenDelta("a", 0, ids[at : at + size], finish_reason="length" if is_last else None)
        counter.push(delta.token_ids, assembler.push(delta), is_last)
    return [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids[: counter.num_tokens]]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>the quick</think>brown fox", "<think>the quick</think>"),
        ("<think>the quick", "<think>the quick"),
        (
            "<think>the <tool quick<tool_call>{}</tool_call></think>a",
            "<think>the <tool quick<tool_call>{}</tool_call></think>",
        ),
        (f"<think>the <tool quick{CALL}</think>", "<think>the <tool quick"),
        (f"<think>a <tool_call> is {CALL}", "<think>a <tool_call> is "),
        ("<think>a <tool_call>", "<think>a <tool_call>"),
        ('<think>a <tool_call>{"name": "f", "arg', '<think>a <tool_call>{"name": "f", "arg'),
        ("the quick", ""),
        ("<thi", ""),
    ],
)
def test_tokens_of_the_reasoning_are_counted_whatever_the_deltas(
    tmp_path: Path, size: int, special: bool, text: str, expected: str
) -> None:
    assert "".join(count_tokens(tmp_path, special, size, text, UNDECIDED, "hermes")) == expected
    assert count_tokens(tmp_path, special, size, text, CLOSED, "hermes") == []
    if expected:
        assert "".join(count_tokens(tmp_path, special, size, text, OPEN, "hermes")) == expected


def test_tokens_of_a_call_count_as_reasoning_if_no_tool_may_be_called(tmp_path: Path) -> None:
    assert "".join(count_tokens(tmp_path, True, 2, f"a{CALL}", OPEN)) == f"a{CALL}"


def chat(client: openai.OpenAI, text: str, extra: Any = None, **kwargs: Any) -> Any:
    extra = {"return_token_ids": True, **(extra or {})}
    return client.chat.completions.create(model="default", messages=says(text), extra_body=extra, **kwargs)


@pytest.mark.parametrize(
    ("extra", "text", "expected"),
    [
        ({}, "<think>hm</think>yes", ("hm", "yes")),
        ({}, "yes", (None, "yes")),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "hm</think>yes", ("hm", "yes")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "yes</think>", (None, "yes</think>")),
        ({"reasoning_effort": "none"}, "yes", (None, "yes")),
        ({"reasoning_effort": "low"}, "<think>hm</think>yes", ("hm", "yes")),
    ],
)
def test_reasoning_is_a_separate_field(
    parsing_client: openai.OpenAI, extra: Any, text: str, expected: tuple[str | None, str]
) -> None:
    message = chat(parsing_client, text, extra).choices[0].message
    assert (message.reasoning_content, message.content) == expected
    assert message.reasoning == expected[0]
    deltas = [chunk.choices[0].delta for chunk in chat(parsing_client, text, extra, stream=True)]
    names = [[getattr(delta, name, "") for delta in deltas] for name in ("reasoning", "reasoning_content")]
    assert names[0] == names[1], "each delta has both names"
    assert ("".join(names[0]) or None, "".join(delta.content or "" for delta in deltas)) == expected


TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("text", "expected", "num_calls"),
    [
        (
            "<think>\nThe format is <tool_call> then JSON.\n</think>\n\nThe answer is 4.",
            "The format is <tool_call> then JSON.",
            0,
        ),
        (f"<think>\nIt is <tool_call>.\n{CALL}", "It is <tool_call>.", 1),
        ("<think>\nIt is <tool_call>.", "It is <tool_call>.", 0),
    ],
)
def test_only_a_call_ends_the_reasoning_of_an_answer(
    parsing_client: openai.OpenAI, text: str, expected: str, num_calls: int
) -> None:
    whole = chat(parsing_client, text, tools=[TOOL])
    message, details = whole.choices[0].message, whole.usage.completion_tokens_details
    assert (message.reasoning, len(message.tool_calls or [])) == (expected, num_calls)
    assert (message.content or "") == text.partition("</think>\n\n")[2]
    chunks = list(chat(parsing_client, text, tools=[TOOL], stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == expected
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    assert chunks[-1].usage.completion_tokens_details == details
    stopped = chat(parsing_client, text, tools=[TOOL], stop=["</tool_call>", '"arguments"', "</think>"])
    assert stopped.choices[0].message.tool_calls is None and not stopped.choices[0].message.content
    num_reasoning = stopped.usage.completion_tokens_details.reasoning_tokens
    assert num_reasoning == stopped.usage.completion_tokens >= details.reasoning_tokens - 1


def test_reasoning_comes_before_the_answer(parsing_client: openai.OpenAI) -> None:
    chunks = chat(parsing_client, "<think>the quick brown fox</think>the lazy dog", stream=True)
    kinds = [
        "reasoning" if getattr(chunk.choices[0].delta, "reasoning_content", None) else "content"
        for chunk in chunks
        if chunk.choices[0].delta.content or getattr(chunk.choices[0].delta, "reasoning_content", None)
    ]
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"reasoning", "content"}


def test_effort_reaches_the_template(parsing_client: openai.OpenAI, parsing_model: Path) -> None:
    prompts = {
        effort: rendered(
            parsing_model, chat(parsing_client, "x", {"reasoning_effort": effort}).choices[0].prompt_token_ids
        )
        for effort in ("none", "high", "max")
    }
    assert prompts["max"].endswith("assistant: effort max")
    assert prompts["high"].endswith("assistant: effort high")
    assert prompts["none"].endswith("assistant: effort none<think>\n\n</think>\n\n")


def test_prompt_of_token_ids_is_checked_for_markers(parsing_client: openai.OpenAI) -> None:
    opened = chat(parsing_client, "hm</think>yes", {"chat_template_kwargs": {"enable_thinking": True}})
    extra = {"prompt_token_ids": opened.choices[0].prompt_token_ids}
    assert chat(parsing_client, "", extra).choices[0].message.reasoning_content == "hm"


def test_include_reasoning_false_leaves_the_reasoning_out_of_the_answer(parsing_client: openai.OpenAI) -> None:
    text, extra = "<think>the quick brown fox</think>the lazy dog", {"include_reasoning": False}
    whole = chat(parsing_client, text, extra)
    assert whole.choices[0].message.content == "the lazy dog"
    message = whole.choices[0].message
    assert (message.reasoning, message.reasoning_content) == (None, None)
    assert whole.usage.completion_tokens_details.reasoning_tokens > 2
    chunks = list(chat(parsing_client, text, extra, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "the lazy dog"
    assert not any({"reasoning", "reasoning_content"} & delta.model_dump().keys() for delta in deltas)
    ids = [token_id for chunk in chunks for token_id in getattr(chunk.choices[0], "completion_token_ids", None) or ()]
    assert ids == whole.choices[0].completion_token_ids, "the ids of all tokens are there"


def test_a_prompt_whose_end_is_cut_off_decides_where_the_output_begins(parsing_client: openai.OpenAI) -> None:
    """The template opens the reasoning at the end of the prompt, which truncation on the right removes."""
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    assert chat(parsing_client, "hm</think>yes", extra).choices[0].message.reasoning == "hm"
    num_tokens = chat(parsing_client, "hm</think>yes", extra).usage.prompt_tokens
    cut = {**extra, "truncate_prompt_tokens": num_tokens - 1, "truncation_side": "right"}
    message = chat(parsing_client, "hm</think>yes", cut).choices[0].message
    assert (message.reasoning, message.content) == (None, "hm</think>yes")
    whole = {**extra, "truncate_prompt_tokens": num_tokens, "truncation_side": "right"}
    assert chat(parsing_client, "hm</think>yes", whole).choices[0].message.reasoning == "hm"


@pytest.mark.parametrize("given", [{"thinking_token_budget": 3}, {"logits_processors_args": {"thinking_budget": 3}}])
def test_a_budget_of_a_completion_needs_a_reasoning_parser(server: ServerProcess, given: dict[str, Any]) -> None:
    error = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, **given}).json()["error"]
    (name,) = given
    assert (error["param"], error["message"]) == (name, f"{name}: requires a server with --reasoning-parser")


@pytest.mark.parametrize(
    "given",
    [
        {"reasoning_max_tokens": 3},
        {"thinking_token_budget": 3},
        {"logits_processors_args": {"thinking_budget": 3}},
        {"thinking_token_budget": -1},
    ],
)
def test_a_budget_needs_a_reasoning_parser_and_the_error_names_its_field(
    server: ServerProcess, given: dict[str, Any]
) -> None:
    response = server.post("/v1/chat/completions", {"messages": says("x"), "max_tokens": 1, **given})
    (name,), (value,) = given.keys(), given.values()
    if value == -1:
        assert response.status_code == 200
    else:
        error = response.json()["error"]
        assert (error["param"], error["message"]) == (name, f"{name}: requires a server with --reasoning-parser")


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort", "expected one of none, minimal, low"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs",
            "'enable_thinking' contradicts",
        ),
        ({"reasoning_max_tokens": -1}, "reasoning_max_tokens", "[0, "),
        ({"response_max_tokens": 0}, "response_max_tokens", "[1, "),
    ],
)
def test_wrong_reasoning_fields_are_400(
    parsing_server: ServerProcess, change: dict[str, Any], param: str, message: str
) -> None:
    response = parsing_server.post("/v1/chat/completions", {"messages": says("x"), **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and message in error["message"]
