# SPDX-License-Identifier: Apache-2.0
"""Per-request control of speculation, what responses report about it, and outputs shared by suffix decoding."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy.core.outputs import CompletionOutput
from fastdeploy.core.sampling_params import SpeculativeParams
from tests.drafting_models import SERVED_METHODS, speculation
from tests.entrypoints.server_process import ServerProcess, real_server
from tests.entrypoints.test_lifecycle import metric

PROMPT = "x = 1\nx = 1\nx = 1\nx = 1\nx = "


@pytest.fixture(scope="module", params=[method for method in SERVED_METHODS if method != "naive"])
def llm(request: pytest.FixtureRequest) -> LLM:
    config = speculation(request.param, num_speculative_tokens=4, adaptive=False)
    return LLM("demo", max_model_len=256, speculative_config=config)


def generate(llm: LLM, speculative: SpeculativeParams | None) -> CompletionOutput:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, speculative=speculative)
    outputs = llm.generate(PROMPT, params, use_tqdm=False)
    assert isinstance(outputs, list)
    return outputs[0].outputs[0]


def test_request_may_lower_its_draft_length_or_disable_drafts_without_changing_the_text(llm: LLM) -> None:
    free, short, none, off, more = (
        generate(llm, speculative)
        for speculative in (
            None,
            SpeculativeParams(num_speculative_tokens=2),
            SpeculativeParams(num_speculative_tokens=0),
            SpeculativeParams(method="off"),
            SpeculativeParams(num_speculative_tokens=16),
        )
    )
    heads = [len(response.speculate_metrics.accepted_tokens_per_head) for response in (free, short, none, off, more)]  # type: ignore[union-attr]
    assert heads == [4, 2, 0, 0, 4], "never above the server's"
    assert {tuple(response.token_ids) for response in (short, none, off, more)} == {tuple(free.token_ids)}


def test_offline_results_have_speculate_metrics(llm: LLM) -> None:
    metrics = generate(llm, None).speculate_metrics
    assert metrics is not None and metrics.accepted_tokens > 0
    assert metrics.drafted_tokens == metrics.accepted_tokens + metrics.rejected_tokens == sum(metrics.source.values())
    assert metrics.accepted_tokens == sum(metrics.accepted_tokens_per_head)
    assert metrics.accepted_tokens == sum(n * count for n, count in enumerate(metrics.acceptance_histogram))
    assert len(metrics.acceptance_histogram) == 4 + 1 and 0 < sum(metrics.acceptance_histogram) <= metrics.num_steps
    assert metrics.accept_ratio == metrics.accepted_tokens / metrics.drafted_tokens
    assert metrics.average_accept_length == (60 - 1) / metrics.num_steps
    assert len(metrics.accept_ratio_per_head) == 4 and max(metrics.accept_ratio_per_head) <= 1
    plain = generate(llm, SpeculativeParams(method="off")).speculate_metrics
    assert plain is not None
    assert (plain.num_steps, plain.average_accept_length, plain.source) == (59, 1.0, {})


def complete_command(server: ServerProcess, *flags: str) -> list[str]:
    complete = ["complete", "--url", server.url + "/v1", "-q", PROMPT, "--temperature", "0", "--max-tokens", "40"]
    return [sys.executable, "-m", "fastdeploy.entrypoints.cli.main", *complete, *flags]


def on_terminal(command: list[str], **variables: str) -> str:
    """Run a command whose output is a terminal; return what it wrote."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, env={**os.environ, **variables}) as process:
        os.close(theirs)
        written = b""
        while piece := _read(ours):
            written += piece
    os.close(ours)
    assert process.returncode == 0
    return written.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux says so when the other side has closed
        return b""


def test_verbose_view_colours_accepted_drafts_by_proposer(drafting_server: ServerProcess) -> None:
    plain = subprocess.run(
        complete_command(drafting_server), capture_output=True, text=True, check=True, timeout=120
    ).stdout
    shown = on_terminal(complete_command(drafting_server, "--verbose"))
    *response, figures = shown.rstrip("\n").split("\n")
    painted = re.findall(r"\033\[30;42m(.*?)\033\[0m", "\n".join(response))
    assert re.sub(r"\033\[[0-9;]*m", "", "\n".join(response)) + "\n" == plain
    counts = re.fullmatch(
        r"\(40 tokens: \033\[30;42mngram\033\[0m (\d+), target (\d+); mean acceptance length (\d\.\d\d); "
        r"(\d+) of (\d+) drafts accepted; \d+\.\d tokens/s; time to first token \d+ ms\)",
        figures,
    )
    assert counts is not None
    drafts, own, length, accepted, drafted = (float(value) for value in counts.groups())
    assert drafts == accepted > 20 and drafts + own == 40 and drafted >= accepted
    assert length == pytest.approx(39 / (own - 1), abs=0.01), "all steps but the first token's end in a target token"
    assert len("".join(painted)) > 20


def test_verbose_view_has_no_colour_with_no_color(drafting_server: ServerProcess) -> None:
    command = complete_command(drafting_server, "--verbose")
    piped = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    for text in (piped, on_terminal(command, NO_COLOR="1")):
        assert "\033" not in text
        assert re.search(r"^\(40 tokens: ngram \d+, target \d+; ", text, re.MULTILINE)


def test_verbose_chat_shows_the_answer_once(drafting_server: ServerProcess) -> None:
    flags = ["chat", "--url", drafting_server.url + "/v1", "-q", "hello", "--temperature", "0", "--max-tokens", "20"]
    command = [sys.executable, "-m", "fastdeploy.entrypoints.cli.main", *flags]
    plain = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    verbose = subprocess.run([*command, "--verbose"], capture_output=True, text=True, check=True, timeout=120).stdout
    text, _, figures = verbose.removesuffix("\n").rpartition("\n")
    assert text + "\n" == plain and figures.startswith("(20 tokens: ")


def complete(server: ServerProcess, key: str) -> dict[str, Any]:
    """Return a choice whose text repeats nothing of its prompt, so that drafts come from shared outputs."""
    body = {"prompt": "def parse(", "max_tokens": 60, "temperature": 1, "seed": 3, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    response = server.post("/v1/completions", {**body, "collect_metrics": True}, headers=headers)
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_outputs_are_shared_within_one_api_key_only() -> None:
    flags = ["--api-key", "alice", "--api-key", "bob", "--max-model-len", "256"]
    with real_server("demo", *flags, "--speculative-config", '{"method": "suffix", "adaptive": false}') as server:
        first, stranger, again = (complete(server, key) for key in ("alice", "bob", "alice"))
        assert metric(server, "suffix_cache_num_outputs") == 3
        assert metric(server, "suffix_cache_num_tokens") == 180
        assert metric(server, 'suffix_cache_drafts_total{text="shared"}') > 0
        assert metric(server, "suffix_cache_bytes") > 0
    assert first["text"] == stranger["text"] == again["text"]
    accepted = [choice["speculate_metrics"]["accepted_tokens"] for choice in (first, stranger, again)]
    assert accepted[0] == accepted[1] < accepted[2] - 20
