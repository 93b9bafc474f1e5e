# SPDX-License-Identifier: Apache-2.0
"""A step of the real engine is two graphs replayed, and graphs follow their buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_config import NgramConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.worker import model_runner
from fastdeploy.worker.model_runner import ModelRunner
from tests.exactness.requests import run_alone
from tests.ops.operator_calls import record_operator_calls

TEXT = [100 + i * 7 % 50 for i in range(20)]


def build() -> Engine:
    return Engine.from_config(
        EngineConfig(
            model="demo",
            max_model_len=2048,
            cache=CacheConfig(enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=4),
            speculative=NgramConfig(num_speculative_tokens=5, adaptive=False),
        )
    )


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build()


def request(name: str, prompt: list[int], **params: object) -> GenerationRequest:
    given = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    return GenerationRequest(name, prompt, SamplingParams(**given))  # type: ignore[arg-type]


def test_a_step_launches_nothing_but_its_two_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, replayed = OpGraph.replay, []

    def noted(self: OpGraph, num_rows: int, num_seqs: int) -> None:
        replayed.append(self.describe())
        replay(self, num_rows, num_seqs)

    engine.add_request(request("warm", TEXT * 2, temperature=1.0, seed=1))
    engine.add_request(request("other", TEXT * 4))
    engine.step()
    monkeypatch.setattr(OpGraph, "replay", noted)
    calls = record_operator_calls(monkeypatch)
    while engine.has_unfinished():
        engine.step()
        forward, choose = replayed
        assert calls == []
        assert forward[:2] == ["VirtualPadding", "Gather"]
        assert [launch.split()[0] for launch in choose] == ["Gather", "Linear", "Sample", "VerifyDrafts"]
        replayed.clear()


def test_a_list_that_outgrows_its_memory_is_read_where_it_lies_then(engine: Engine) -> None:
    long = request("long", TEXT * 80, temperature=1.0, seed=5, repetition_penalty=1.5, frequency_penalty=0.5)
    expected = run_alone(build(), [long])
    short = request("short", TEXT, repetition_penalty=1.2)
    run_alone(engine, [short])  # captures the rows of its short history
    assert isinstance(engine.runner, ModelRunner)
    assert len(engine.runner.sampling.history.array) < len(long.prompt_token_ids)
    assert run_alone(engine, [long]) == expected


def test_rows_that_do_not_fit_the_logits_are_chosen_in_several_goes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request("prompt", TEXT * 3, prompt_logprobs=1, logprobs=1)
    expected = run_alone(engine, [asked])
    monkeypatch.setattr(model_runner, "LOGITS_BYTES", 0)
    small = build()
    assert isinstance(small.runner, ModelRunner) and small.runner.logits_capacity == 16
    assert run_alone(small, [replace(asked, request_id="prompt")]) == expected
