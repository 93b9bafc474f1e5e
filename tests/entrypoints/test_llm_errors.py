# SPDX-License-Identifier: Apache-2.0
"""What a script with `LLM` shows: errors that it does not catch, and the note of another version of Paddle."""

from __future__ import annotations

import traceback
from typing import Any

import paddle
import pytest

from fastdeploy import LLM
from fastdeploy.core.errors import ConfigError


@pytest.mark.parametrize(
    "arguments", [{"max_model_length": 10}, {"max_model_len": "8K"}, {"model": "/nowhere"}, {"quantization": "awq"}]
)
def test_a_wrong_argument_has_no_traceback_into_the_package(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**{"model": "demo", **arguments})
    here, *inside = traceback.extract_tb(caught.value.__traceback__)
    assert (here.filename, [frame.name for frame in inside]) == (__file__, ["__init__"])
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    monkeypatch.setenv("FD_DEBUG", "1")
    with pytest.raises(ConfigError) as caught:
        LLM(**{"model": "demo", **arguments})
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 3


def test_another_version_of_paddle_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(paddle, "__version__", "3.9.0")
    LLM(model="demo", max_num_seqs=1, num_gpu_blocks_override=4, max_model_len=256)
    assert caplog.messages[-1].startswith("Paddle 3.9.0 is imported, but the operators were built with Paddle 3")
