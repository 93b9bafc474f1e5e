# SPDX-License-Identifier: Apache-2.0
"""The line of statistics: when it is written, what it says, and that a flag switches it off."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from fastdeploy.config.args import engine_config_from_kwargs
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.env import Env
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.stats import EngineStats
from fastdeploy.ipc import messages
from fastdeploy.metrics.logs import engine_line, set_up_engine_logging
from fastdeploy.metrics.stats_log import StatsLog
from tests.doubles import ManualClock
from tests.entrypoints.server_process import ServerProcess
from tests.entrypoints.test_lifecycle import COMPLETION, until
from tests.frequent_stats import FACTORY
from tests.ipc.served_engines import ServedEngine
from tests.mock_engine import make_engine, save_mock_model

IDLE = EngineStats(num_blocks=8, num_free_blocks=8)
BUSY = replace(IDLE, num_running=3, num_waiting=2, num_free_blocks=5)


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fastdeploy.stats")


def test_a_line_is_written_after_every_ten_seconds_with_requests(caplog: pytest.LogCaptureFixture) -> None:
    clock, lines = ManualClock(), list[float]()
    log = StatsLog(clock=clock)
    for clock.now in range(0, 36, 3):
        log.begin()
        log.update(BUSY)
        if len(caplog.messages) > len(lines):
            lines.append(clock.now)
    assert lines == [12, 24], "with the first update after ten seconds"
    assert set(caplog.messages) == {
        "prompt 0.0 tokens/s, output 0.0 tokens/s, running 3, waiting 2, KV cache usage 37.5%"
    }


def test_time_without_requests_neither_writes_lines_nor_counts(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = StatsLog(clock=clock)
    for clock.now in (100.0, 200.0):
        log.update(IDLE)
    for begin_s in (1000.0, 2000.0, 3000.0):  # 4 s each
        clock.now = begin_s
        log.begin()
        clock.now += 4
        log.count(6)
        assert caplog.messages == []
        log.update(IDLE)
        clock.now += 500
        log.update(IDLE)
    assert caplog.messages == ["prompt 0.0 tokens/s, output 1.5 tokens/s, running 0, waiting 0, KV cache usage 0.0%"]


def test_rates_are_those_since_the_line_before(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = StatsLog(clock=clock)
    log.begin()
    first = replace(
        BUSY,
        num_prefilled_tokens=500,
        num_prefix_lookup_tokens=1000,
        num_prefix_hit_tokens=250,
        num_draft_tokens=40,
        num_accepted_tokens=30,
    )
    log.count(70)
    log.count(30)
    clock.now = 10.0
    log.update(first)
    second = replace(first, num_prefilled_tokens=900, num_draft_tokens=140, num_accepted_tokens=40)
    log.count(10)
    clock.now = 30.0
    log.update(second)
    clock.now = 40.0
    log.update(replace(second, num_prefix_lookup_tokens=1100))
    now = "running 3, waiting 2, KV cache usage 37.5%"
    assert caplog.messages == [
        f"prompt 50.0 tokens/s, output 10.0 tokens/s, {now}, prefix cache hits 25.0%, acceptance rate 0.75",
        f"prompt 20.0 tokens/s, output 0.5 tokens/s, {now}, acceptance rate 0.10",
        f"prompt 0.0 tokens/s, output 0.0 tokens/s, {now}, prefix cache hits 0.0%",
    ]


@pytest.mark.parametrize(("drafted", "end"), [(50, ", acceptance rate 0.00"), (30, "")])
def test_requests_that_were_handed_over_with_their_counts_make_no_negative_acceptance(
    drafted: int, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    log = StatsLog(clock=clock)
    log.begin()
    for clock.now, counts in ((10.0, (40, 30)), (20.0, (drafted, 10))):
        log.update(replace(BUSY, num_draft_tokens=counts[0], num_accepted_tokens=counts[1]))
    assert caplog.messages[1].endswith("KV cache usage 37.5%" + end)


def test_lines_are_documents_if_the_log_s_are(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = StatsLog(json_lines=True, clock=clock)
    log.begin()
    log.count(20)
    clock.now = 10.0
    log.update(replace(BUSY, num_prefix_lookup_tokens=10, num_prefix_hit_tokens=5))
    assert json.loads(caplog.messages[0]) == {
        "prompt_tokens_per_s": 0.0,
        "output_tokens_per_s": 2.0,
        "num_running": 3,
        "num_waiting": 2,
        "kv_cache_usage": 0.375,
        "prefix_cache_hit_rate": 0.5,
        "acceptance": None,
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_terminal_shows_the_line_beside_warnings(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_engine_logging(Env(log_format=log_format))
    for name in ("fastdeploy.stats", "fastdeploy.statistics", "fastdeploy.engine"):
        logging.getLogger(name).info("fastdeploy.stats: words")
    lines = capsys.readouterr().err.splitlines()
    assert [engine_line(line, log_format == "json")[1] for line in lines] == [True, False, False]


def test_an_engine_counts_what_it_emits_from_the_first_request_on(tmp_path: Path) -> None:
    log = StatsLog()
    engine = make_engine(EngineConfig(model=str(save_mock_model(tmp_path))))
    with zmq.Context() as context:
        one = ServedEngine(engine, context, tmp_path, "e", log)
        try:
            client = one.connect(b"reader")
            for name, count in (("a", 5), ("b", 7)):
                params = SamplingParams(max_tokens=count, ignore_eos=True)
                client.send(messages.AddRequest(GenerationRequest(name, [1, 2], params)))
                client.finish(name)
        finally:
            one.close()
    assert log._num_emitted == len(client.tokens("a")) + len(client.tokens("b")) == 12
    assert log._busy_s > 0 and log._counted_until_s is None


@pytest.mark.parametrize("flags", [[], ["--disable-log-stats"]])
def test_a_server_writes_the_line_unless_a_flag_says_no(tmp_path: Path, flags: list[str]) -> None:
    model = save_mock_model(tmp_path, step_s=0.005)
    server = ServerProcess([str(model), *flags], factory=FACTORY, env={"FD_LOG_DIR": str(tmp_path / "logs")})
    try:
        server.wait_ready()
        assert server.post("/v1/completions", {**COMPLETION, "max_tokens": 40}).status_code == 200
        line = re.compile(r"fastdeploy\.stats: prompt \S+ tokens/s, output \S+ tokens/s, running \d+, waiting \d+, KV ")
        if not flags:
            until(lambda: line.search(server.stderr) is not None, "the terminal shows the line")
        server.terminate()
        assert server.wait_end() == 0
        log = (tmp_path / "logs" / "engine.log").read_text()
        assert (line.search(log) is not None) == (line.search(server.stderr) is not None) == (not flags)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("value", "notes"),
    [
        (True, ()),
        (False, ("disable_log_stats false has no effect: LLM logs no statistics; they are in LLM.get_metrics()",)),
    ],
)
def test_llm_logs_no_statistics_which_a_script_that_wants_them_is_told(value: bool, notes: tuple[str, ...]) -> None:
    config, found = engine_config_from_kwargs({"model": "demo", "disable_log_stats": value})
    assert (config.disable_log_stats, found) == (value, notes)
