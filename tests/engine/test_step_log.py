# SPDX-License-Identifier: Apache-2.0
"""What FD_LOG_LEVEL=DEBUG shows of steps and requests, and that nothing runs for it otherwise."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.engine.step_log import LoggedRunner
from fastdeploy.worker.model_runner import ModelRunner
from tests.entrypoints.server_process import real_server
from tests.exactness.engines import config

STEP = re.compile(
    r"step (\d+): (\d+) rows of (\d+) requests \((\d+) admitted\), (\d+) drafts \((\d+) accepted\), (\d+) tokens, "
    r"\d+\.\d\d ms(, \d+\.\d\d ms after the step before)?"
)
PROMPT = re.compile(r"step (\d+): (\S+)\[(\d)\]: tokens (\d+) to (\d+) of (\d+)(, admitted .*)?")


def run(engine: Engine, num_prompt_tokens: int = 40, max_tokens: int = 12) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(GenerationRequest("r1", [5, 6, 7, 8] * (num_prompt_tokens // 4), params))
    while engine.has_unfinished():
        engine.step()


def test_an_engine_without_debug_lines_has_the_plain_runner() -> None:
    assert isinstance(make_engine(config()).runner, ModelRunner)


def test_steps_and_prompts_are_logged_with_their_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fastdeploy.engine")
    cfg = config("ngram", 3)
    engine = make_engine(replace(cfg, scheduler=replace(cfg.scheduler, max_num_batched_tokens=16)))
    assert isinstance(engine.runner, LoggedRunner)
    caplog.clear()
    run(engine)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    prompts = [found.groups() for line in lines if (found := PROMPT.fullmatch(line))]
    steps = [found.groups() for line in lines if (found := STEP.fullmatch(line))]
    assert len(prompts) + len(steps) == len(lines)
    assert [prompt[:6] for prompt in prompts] == [
        ("1", "r1", "0", "0", "16", "40"), ("2", "r1", "0", "16", "32", "40"), ("3", "r1", "0", "32", "40", "40"),
    ]  # fmt: skip
    assert re.fullmatch(r", admitted \d+\.\d{4} s after its arrival", prompts[0][6])
    assert [prompt[6] for prompt in prompts[1:]] == [None, None]
    assert [step[1:4] for step in steps[:3]] == [("16", "1", "1"), ("16", "1", "0"), ("8", "1", "0")]
    assert steps[0][7] is None and all(step[7] for step in steps[1:])
    stats = engine.stats()
    totals = [sum(int(step[column]) for step in steps) for column in (4, 5)]
    assert totals == [stats.num_draft_tokens, stats.num_accepted_tokens] and totals[1] > 0
    assert sum(int(step[6]) for step in steps) >= 12


def test_a_request_that_was_preempted_is_admitted_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fastdeploy.engine")
    cfg = config()
    engine = make_engine(replace(cfg, cache=replace(cfg.cache, block_size=16, num_blocks=8, kv_cache_memory=None)))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for name in ("r1", "r2"):
        engine.add_request(GenerationRequest(name, [*map(ord, name)] * 20, params))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().num_preemptions > 0
    assert "r2[0]: tokens 0 to " in caplog.text and ", admitted again after 1 preemptions" in caplog.text


def test_a_server_shows_the_lines_and_no_prompt_and_no_key(tmp_path: Path) -> None:
    env = {"FD_LOG_LEVEL": "DEBUG", "FD_LOG_DIR": str(tmp_path)}
    flags = ["demo", "--api-key", "sesame", "--hf-overrides", '{"rope_theta": 5e5}']
    with real_server(*flags, env=env) as server:
        body = {"prompt": "zanzibar", "max_tokens": 4, "request_id": "r1"}
        assert server.post("/v1/completions", body, headers={"Authorization": "Bearer sesame"}).status_code == 200
        server.terminate()
        server.wait_end()
        assert any(STEP.search(line) for line in server.stderr.splitlines())
    lines = (tmp_path / "engine.log").read_text().splitlines()
    debug = [line.partition("DEBUG fastdeploy.engine: ")[2] for line in lines if "DEBUG" in line]
    assert any(STEP.fullmatch(line) for line in debug) and any(": cmpl-r1[0]: tokens 0 to " in line for line in debug)
    logs = "".join(file.read_text() for file in tmp_path.iterdir())
    assert "zanzibar" not in logs and "sesame" not in logs
