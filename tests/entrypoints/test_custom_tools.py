# SPDX-License-Identifier: Apache-2.0
"""Chats with tools of type `custom`, which are left out, and with a wish for the length of the answer."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import completion_create_params

from fastdeploy.entrypoints.openai.custom_tools import NOTE
from fastdeploy.entrypoints.openai.field_rules import VERBOSITIES
from tests.entrypoints.chat_server import says
from tests.entrypoints.client_types import keys_of, literals
from tests.entrypoints.server_process import ServerProcess
from tests.entrypoints.test_tools import CALL, TOOLS

CUSTOM: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "changes files"}}
CHATS = "/v1/chat/completions"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_custom_tools_are_left_out_of_the_prompt_and_of_the_calls(parsing_server: ServerProcess, choice: str) -> None:
    body = {"messages": says(CALL), "tool_choice": choice, "parallel_tool_calls": False}
    answers = [parsing_server.post(CHATS, {**body, "tools": tools}).json() for tools in ([CUSTOM, *TOOLS], TOOLS)]
    assert answers[0]["usage"] == answers[1]["usage"]
    assert [call["function"]["name"] for call in answers[0]["choices"][0]["message"]["tool_calls"]] == ["weather"]
    counts = [
        parsing_server.post("/tokenize", {"messages": says("a"), "tools": tools}).json()["count"]
        for tools in ([CUSTOM, *TOOLS], TOOLS)
    ]
    assert counts[0] == counts[1]
    assert parsing_server.stderr.count(NOTE) == 1


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none", "parallel_tool_calls": True}])
def test_a_chat_with_custom_tools_only_is_one_without_tools(
    parsing_server: ServerProcess, fields: dict[str, Any]
) -> None:
    plain = parsing_server.post(CHATS, {"messages": says("Hello.")}).json()
    answer = parsing_server.post(CHATS, {"messages": says("Hello."), "tools": [CUSTOM], **fields}).json()
    assert answer["usage"] == plain["usage"] and answer["choices"][0]["message"] == plain["choices"][0]["message"]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [CUSTOM], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [CUSTOM, *TOOLS], "tool_choice": CUSTOM}, "tool_choice", "expected none, auto, required, "),
    ({"tools": [CUSTOM, TOOLS[0], CUSTOM, TOOLS[0]]}, "tools[3].function.name", "'weather' is not unique"),
    ({"tools": [CUSTOM, {"type": "retrieval"}]}, "tools[1].type", "expected function"),
    ({"verbosity": "loud"}, "verbosity", "expected one of low, medium, high, got 'loud'"),
    ({"verbosity": 1}, "verbosity", "expected one of low, medium, high, got 1"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
def test_errors_name_the_tools_as_they_were_sent(
    parsing_server: ServerProcess, fields: dict[str, Any], param: str, message: str
) -> None:
    response = parsing_server.post(CHATS, {"messages": says("a"), **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert message in response.json()["error"]["message"]


def test_a_wish_for_the_length_is_accepted_and_logged_once(parsing_server: ServerProcess) -> None:
    hints = keys_of(completion_create_params.CompletionCreateParamsBase)
    assert set(literals(hints["verbosity"])) == set(VERBOSITIES)
    for value in (*VERBOSITIES, None):
        assert parsing_server.post(CHATS, {"messages": says("a"), "verbosity": value}).status_code == 200
    assert parsing_server.stderr.count("the field verbosity has no effect: ") == 1
