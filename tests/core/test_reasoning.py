# SPDX-License-Identifier: Apache-2.0
"""Where the reasoning of an output begins, by the markers of its prompt."""

from __future__ import annotations

import pytest

from fastdeploy.core.reasoning import REASONING_FORMATS, ReasoningState

OPEN, CLOSED, UNDECIDED = ReasoningState.OPEN, ReasoningState.CLOSED, ReasoningState.UNDECIDED


@pytest.mark.parametrize("form", ["qwen3", "deepseek_r1", "glm45"])
@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("", UNDECIDED),
        ("the sky", UNDECIDED),
        ("the sky<think>", OPEN),
        ("<think>\nhm", OPEN),
        ("<think>a <tool_call> is", OPEN),
        ("<think>hm</think>", CLOSED),
        ("<think>hm</think>\n\n", CLOSED),
        ("<think>hm</think>yes", UNDECIDED),
        ("<think>hm</think>yes<think>", OPEN),
        ("hm</think>", CLOSED),
    ],
)
def test_only_the_markers_of_a_text_without_a_template_open_its_reasoning(
    form: str, text: str, state: ReasoningState
) -> None:
    assert REASONING_FORMATS[form].state_in(text) is state
