# SPDX-License-Identifier: Apache-2.0
"""A step of the real engine replays two graphs, which are captured again when a buffer has moved."""

from __future__ import annotations

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

    def record(self: OpGraph, num_rows: int, num_seqs: int) -> None:
        replayed.append(self.describe())
        replay(self, num_rows, num_seqs)

    engine.add_request(request("warm", TEXT * 2, temperature=1.0, seed=1))
    engine.add_request(request("other", TEXT * 4))
    engine.step()
    monkeypatch.setattr(OpGraph, "replay", record)
    calls = record_operator_calls(monkeypatch)
    while engine.has_unfinished():
        engine.step()
        forward, sample_and_verify = replayed
        assert calls == []
        assert forward[:2] == ["VirtualPadding", "Gather"]
        launches = [launch.split()[0] for launch in sample_and_verify]
        assert launches == ["Gather", "Linear", "Sample", "VerifyDrafts"]
        replayed.clear()


def test_a_list_that_was_moved_because_it_outgrew_its_memory_is_read_at_its_new_address(engine: Engine) -> None:
    long = request("long", TEXT * 80, temperature=1.0, seed=5, repetition_penalty=1.5, frequency_penalty=0.5)
    expected = run_alone(build(), [long])
    short = request("short", TEXT, repetition_penalty=1.2)
    run_alone(engine, [short])  # captures the rows of its short history
    assert isinstance(engine.runner, ModelRunner)
    assert len(engine.runner.sampling.history.array) < len(long.prompt_token_ids)
    assert run_alone(engine, [long]) == expected


def test_rows_that_do_not_fit_the_logits_buffer_are_sampled_in_several_batches(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_logprobs = request("prompt", TEXT * 3, prompt_logprobs=1, logprobs=1)
    expected = run_alone(engine, [with_logprobs])
    monkeypatch.setattr(model_runner, "LOGITS_BYTES", 0)
    small = build()
    assert isinstance(small.runner, ModelRunner) and small.runner.logits_capacity == 16
    assert run_alone(small, [with_logprobs]) == expected
