# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy bench`, and the requests that benchmarks of other engines send."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks import bench_serving
from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.cli.bench.datasets import file_requests, random_requests
from fastdeploy.entrypoints.cli.bench.report import (
    RequestResult,
    meets_limits,
    percentile,
    plot_latencies,
    summarize,
)
from fastdeploy.entrypoints.cli.bench.serve import BenchmarkRun, arrival_times
from fastdeploy.entrypoints.cli.bench.serve import main as serve_main
from fastdeploy.entrypoints.cli.bench.speculation import (
    SpeculationCounters,
    parse_counters,
    read_counters,
    speculation_metrics,
)
from fastdeploy.entrypoints.cli.http_client import HttpClient
from fastdeploy.entrypoints.cli.main import main
from fastdeploy.hub.model_path import resolve_model_path
from tests.entrypoints.server_process import ServerProcess
from tests.entrypoints.test_cli import run
from tests.entrypoints.test_openai_client import PROMPT, TOKENIZER, engine_text

COMPLETION_BODIES: dict[str, dict[str, Any]] = {
    "completions of vllm bench serve": {
        "model": "default",
        "prompt": PROMPT,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    },
    "completions of older ones, which name best_of": {
        "model": "default",
        "prompt": PROMPT,
        "temperature": 0.0,
        "best_of": 1,
        "max_tokens": 8,
        "logprobs": 2,
        "stream": True,
        "ignore_eos": False,
        "stream_options": {"include_usage": True},
    },
    "completions with sampling from flags": {
        "model": "default",
        "prompt": PROMPT,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "max_tokens": 8,
        "min_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}
CHAT_BODIES: dict[str, dict[str, Any]] = {
    "chat of vllm bench serve": {
        "model": "default",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "temperature": 0.0,
        "max_completion_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    },
    "chat of FastDeploy's benchmark": {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 0.8,
        "collect_metrics": True,
    },
}


def last_json(text: str) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads(text.splitlines()[-1])
    return metrics


def events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(path, body, headers={"x-request-id": "bench-1", "Authorization": "Bearer none"})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("name", COMPLETION_BODIES)
def test_completion_requests_of_other_benchmarks_are_served(server: ServerProcess, name: str) -> None:
    received = events(server, "/v1/completions", COMPLETION_BODIES[name])
    assert "".join(event["choices"][0]["text"] for event in received[:-1]) == engine_text(PROMPT, 0, 8)
    assert received[-1]["choices"] == []
    assert received[-1]["usage"]["completion_tokens"] == 8
    assert received[-1]["usage"]["prompt_tokens"] == len(TOKENIZER.encode(PROMPT))


@pytest.mark.parametrize("name", CHAT_BODIES)
def test_chat_requests_of_other_benchmarks_are_served(server: ServerProcess, name: str) -> None:
    received = events(server, "/v1/chat/completions", CHAT_BODIES[name])
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in received[:-1])
    assert text == engine_text("<s>user: hi\nassistant:", 0, 8)
    assert received[-1]["choices"] == [] and received[-1]["usage"]["completion_tokens"] == 8


def bench(server: ServerProcess, *flags: str) -> Any:
    address = ["--base-url", server.url, "--disable-tqdm"]
    return run("bench", "serve", *address, "--random-input-len", "20", "--random-output-len", "6", *flags)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve_reports_the_tokens_that_the_server_counted(
    server: ServerProcess, tmp_path: Path, backend: str
) -> None:
    flags = ["--num-prompts", "8", "--max-concurrency", "3", "--request-rate", "500", "--backend", backend]
    saved = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    done = bench(server, *flags, *saved, "--metric-percentiles", "50,99", "--metadata", "commit=abc", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    metrics = last_json(done.stdout)
    assert (metrics["completed"], metrics["failed"], metrics["total_output_tokens"]) == (8, 0, 48)
    assert metrics["output_throughput"] == pytest.approx(48 / metrics["duration"])
    assert (metrics["request_rate"], metrics["max_concurrency"], metrics["commit"]) == (500, 3, "abc")
    for name in ("ttft", "tpot", "e2el"):  # itl exists only if an answer came in several chunks
        assert metrics[f"mean_{name}_ms"] > 0
        assert metrics[f"p50_{name}_ms"] <= metrics[f"p99_{name}_ms"]
    assert metrics["mean_ttft_ms"] < metrics["mean_e2el_ms"]
    written = json.loads((tmp_path / "r.json").read_text())
    for request in written["requests"]:
        assert request["ttft_s"] + sum(request["gaps_s"]) <= request["e2e_s"]
    assert sum(request["input_tokens"] for request in written["requests"]) == metrics["total_input_tokens"]
    assert metrics == {key: value for key, value in written.items() if key != "requests"}


def test_bench_serve_counts_failed_requests(server: ServerProcess) -> None:
    done = bench(server, "--num-prompts", "3", "--extra-body", '{"temperature": -1}')
    metrics = last_json(done.stdout)
    assert (done.returncode, metrics["completed"], metrics["failed"]) == (1, 0, 3)
    assert "failed: temperature: expected a number" in done.stdout
    assert "mean_ttft_ms" not in metrics, "no request succeeded"


def test_bench_serve_sends_the_fields_of_flags_and_files(
    server: ServerProcess, client: openai.OpenAI, tmp_path: Path
) -> None:
    (tmp_path / "fields.yaml").write_text("stop: [zebra]\nmin_tokens: 2\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the quick", "output_tokens": 3}\n{"prompt": "for name"}\n')
    data = ["--dataset-name", "custom", "--dataset-path", str(tmp_path / "prompts.jsonl"), "--custom-output-len", "5"]
    done = bench(server, *data, "--hyperparameter-path", str(tmp_path / "fields.yaml"), "--temperature", "0")
    assert done.returncode == 0, done.stdout
    metrics = last_json(done.stdout)
    assert metrics["total_output_tokens"] == 8
    assert metrics["total_input_tokens"] == sum(len(TOKENIZER.encode(text)) for text in ("the quick", "for name"))


def test_goodput_counts_the_requests_within_every_limit(server: ServerProcess) -> None:
    limits = ["--goodput", "ttft:600000", "e2el:600000"]
    metrics = last_json(bench(server, "--num-prompts", "4", *limits).stdout)
    assert metrics["num_good"] == 4 and metrics["request_goodput"] == metrics["request_throughput"]
    assert metrics["goodput_limits_ms"] == {"ttft": 600000, "e2el": 600000}
    metrics = last_json(bench(server, "--num-prompts", "4", *limits, "tpot:0.000001").stdout)
    assert (metrics["completed"], metrics["num_good"], metrics["request_goodput"]) == (4, 0, 0)
    done = bench(server, "--goodput", "itl:5")
    assert (
        done.returncode == 2
        and "--goodput: expected METRIC:MILLISECONDS with one of ttft, tpot, e2el, got 'itl:5'" in done.stderr
    )


def test_bench_serve_reports_what_speculation_contributed(drafting_server: ServerProcess) -> None:
    before = parse_counters(drafting_server.get("/metrics").text)
    flags = ["--num-prompts", "4", "--num-warmups", "1", "--ignore-eos", "--temperature", "0"]
    data = ["--random-input-len", "40", "--random-output-len", "64", "--extra-body", '{"logit_bias": {"300": 100}}']
    address = ["--base-url", drafting_server.url, "--disable-tqdm"]
    done = run("bench", "serve", *address, *flags, *data)
    assert done.returncode == 0, done.stderr
    metrics = last_json(done.stdout)
    after = parse_counters(drafting_server.get("/metrics").text)
    accepted, drafted = metrics["spec_decode_accepted_tokens"], metrics["spec_decode_draft_tokens"]
    num_drafts, rates = metrics["spec_decode_num_drafts"], metrics["spec_decode_per_position_acceptance_rates"]
    assert 0 < accepted == drafted  # the text is one token again and again
    assert accepted < after.totals["accepted_tokens"] - before.totals.get(
        "accepted_tokens", 0
    )  # the warm-up is left out
    assert metrics["spec_decode_acceptance_rate"] == 100
    assert metrics["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / num_drafts)
    assert len(rates) == 4 and sum(rates) * num_drafts == pytest.approx(accepted)
    assert 1 < metrics["spec_decode_tokens_per_step"] <= metrics["spec_decode_acceptance_length"]
    shown = done.stdout.partition("\nspeculation\n")[2].splitlines()
    assert shown[0].split() == f"acceptance rate 100.0 % {accepted} of {drafted} draft tokens".split()
    assert [line.split("  ")[1] for line in shown[1:4]] == [
        "acceptance length",
        "tokens per step",
        "accepted at position 0",
    ]
    assert "spec_decode" not in done.stdout.rpartition("\n{")[0]


def test_speculation_is_the_difference_of_two_readings_of_either_server() -> None:
    page = """\
# TYPE {0}:spec_decode_num_drafts_total counter
{0}:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {1}.0
{0}:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 2.0
{0}:spec_decode_num_draft_tokens_total{{engine="0"}} {2}.0
{0}:spec_decode_num_accepted_tokens_total{{engine="0"}} {3}.0
{0}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {4}.0
{0}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {3}.0
{0}:spec_decode_num_accepted_tokens_created{{engine="0"}} 1.7e+09
"""
    expected = {
        "spec_decode_acceptance_rate": 37.5,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 40,
        "spec_decode_accepted_tokens": 15,
        "spec_decode_per_position_acceptance_rates": [1.5, 0.2],
    }
    first, second = page.format("vllm", 10, 60, 30, 5), page.format("vllm", 20, 100, 45, 7)
    assert speculation_metrics(parse_counters(first), parse_counters(second)) == expected
    steps = "fastdeploy:spec_decode_num_steps_total{{}} {}\nfastdeploy:spec_decode_num_emitted_tokens_total{{}} {}\n"
    first = page.format("fastdeploy", 10, 60, 30, 5) + steps.format(100, 130)
    second = page.format("fastdeploy", 20, 100, 45, 7) + steps.format(120, 165)
    expected["spec_decode_tokens_per_step"] = 1.75
    assert speculation_metrics(parse_counters(first), parse_counters(second)) == expected
    assert speculation_metrics(parse_counters(second), parse_counters(second)) == {}


def test_server_without_drafts_or_metrics_has_no_figures_of_speculation(server: ServerProcess) -> None:
    done = bench(server, "--num-prompts", "2")
    assert "spec_decode" not in done.stdout and "speculation" not in done.stdout
    client = HttpClient(server.url + "/v1")  # as of a server whose metrics are elsewhere
    assert asyncio.run(read_counters(client)) == SpeculationCounters()


def test_bench_serve_plots_latencies(server: ServerProcess, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    file = tmp_path / "times.png"
    done = bench(server, "--num-prompts", "3", "--goodput", "ttft:5", "--plot", str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--plot: cannot write '/nowhere/x\.png': No such file or directory"):
        plot_latencies("/nowhere/x.png", "no folder", {"": {"ttft": [1.0, 2.0]}}, {})


def test_plot_without_matplotlib_is_refused_before_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--plot: requires matplotlib: pip install 'fastdeploy\[bench\]'"):
        serve_main(["--port", "9", "--plot", "times.png"])


def test_sweep_compares_loads(server: ServerProcess) -> None:
    flags = ["--url", server.url + "/v1", "--disable-tqdm", "--num-prompts", "3", "--random-input-len", "9"]
    flags += ["--random-output-len", "4", "--ignore-eos", "--request-rates", "200", "inf", "--max-concurrencies", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_serving", *flags], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    runs = last_json(done.stdout)["runs"]
    assert list(runs) == ["200/s, 2 at once", "inf/s, 2 at once"]
    assert [run["total_output_tokens"] for run in runs.values()] == [12, 12]


def test_metric_that_a_load_of_a_sweep_lacks_leaves_an_empty_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = iter([{"completed": 3}, {"completed": 4, "median_itl_ms": 2.5}])

    async def run_benchmark(args: argparse.Namespace) -> BenchmarkRun:
        return BenchmarkRun("three answers of one chunk each, then four of several", next(loads), [])

    monkeypatch.setattr(bench_serving, "run_benchmark", run_benchmark)
    assert bench_serving.main(["--port", "9", "--request-rates", "1", "2"]) == 0
    _, _, header, *rows, _ = capsys.readouterr().out.splitlines()
    assert [line.split() for line in (header, *rows)] == [
        ["load", "completed", "median_itl_ms"], ["1/s", "3", "-"], ["2/s", "4", "2.5"],
    ]  # fmt: skip


def test_unreachable_server_of_bench_serve_is_one_line() -> None:
    done = run("bench", "serve", "--port", "9")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("fastdeploy: error: cannot reach http://127.0.0.1:9/v1: ")


def test_bench_latency_and_throughput_run_the_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def run_bench(*flags: str) -> dict[str, Any]:
        assert main(["bench", *flags, "--model", "demo", "--input-len", "12", "--output-len", "5"]) == 0
        return last_json(capsys.readouterr().out)

    file = tmp_path / "latency.json"
    batches = ["--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "3"]
    latency = run_bench("latency", *batches, "--output-json", str(file), "--speculative-config", '{"method": "ngram"}')
    assert len(latency["latencies_s"]) == 3 and latency == json.loads(file.read_text())
    assert min(latency["latencies_s"]) <= latency["median_latency_s"] <= max(latency["latencies_s"])
    for flags in ([], ["--disable-detokenize", "--n", "2"]):
        throughput = run_bench("throughput", "--num-prompts", "4", *flags)
        assert throughput["total_output_tokens"] == 20 * throughput["n"]
        tokens = throughput["output_tokens_per_second"] * throughput["elapsed_time"]
        assert tokens == pytest.approx(20 * throughput["n"])
    for length, message in (("12", "--output-len: input and output exceed the context of 16 tokens"), ("40", "prompt")):
        flags = ["--input-len", length, "--output-len", "5", "--max-model-len", "16"]
        assert main(["bench", "latency", "demo", *batches, *flags]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"fastdeploy: error: {message}")


def test_random_prompts_have_their_length_and_follow_the_seed() -> None:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    first = random_requests(tokenizer, 20, 40, 10, 0.5, 8, seed=1)
    assert first == random_requests(tokenizer, 20, 40, 10, 0.5, 8, seed=1)
    assert first != random_requests(tokenizer, 20, 40, 10, 0.5, 8, seed=2)
    assert {len(sample.token_ids) for sample in first} <= set(range(8 + 20, 8 + 60 + 1))
    assert {sample.output_len for sample in first} <= set(range(5, 16))
    assert len({tuple(sample.token_ids[:8]) for sample in first}) == 1
    assert len({tuple(sample.token_ids) for sample in first}) == 20


def test_sharegpt_file_gives_first_messages_and_the_lengths_of_their_answers(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": 2 * PROMPT}, {"from": "gpt", "value": "for name in names for name"}]
    entries = [{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": [turns[0], {"value": "x"}]}]
    (tmp_path / "chats.json").write_text(json.dumps(entries))
    args = argparse.Namespace(
        dataset_name="sharegpt", dataset_path=str(tmp_path / "chats.json"), seed=0, sharegpt_output_len=None
    )
    [sample] = file_requests(args, TOKENIZER, 10)
    assert sample.prompt == 2 * PROMPT
    assert sample.output_len == len(TOKENIZER.encode(turns[1]["value"], add_special_tokens=False))
    (tmp_path / "chats.json").write_text('[{"messages": []}]')
    with pytest.raises(ConfigError, match="is not a sharegpt file: KeyError: 'conversations'"):
        file_requests(args, TOKENIZER, 10)


def test_arrival_times_are_a_poisson_process_that_depends_on_rate_and_seed() -> None:
    times = arrival_times(4000, 50.0, seed=3)
    assert times == arrival_times(4000, 50.0, seed=3) and times[0] == 0.0
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04), "e**-1 of them"
    assert arrival_times(3, float("inf"), seed=3) == [0.0, 0.0, 0.0]


def test_statistics_of_known_values() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    random.Random(0).shuffle(values)
    assert [percentile(values, percent) for percent in (0, 50, 75, 100)] == [1.0, 2.5, 3.25, 4.0]
    assert summarize("ttft", "_ms", values, [50]) == {
        "mean_ttft_ms": 2.5,
        "median_ttft_ms": 2.5,
        "std_ttft_ms": pytest.approx(1.118, abs=1e-3),
        "p50_ttft_ms": 2.5,
    }
    assert summarize("ttft", "_ms", [], [50]) == {}
    assert RequestResult(ttft_s=1.0, e2e_s=4.0, output_tokens=4).tpot_s == 1.0
    assert RequestResult(ttft_s=1.0, e2e_s=1.0, output_tokens=1).tpot_s is None


def test_request_at_its_limit_counts_as_goodput_and_beyond_it_does_not() -> None:
    result = RequestResult(ttft_s=0.5, e2e_s=2.0, output_tokens=4)  # tpot: half a second
    assert meets_limits(result, {"ttft": 500.0, "tpot": 500.0, "e2el": 2000.0})
    for name, limit in {"ttft": 499.0, "tpot": 499.0, "e2el": 1999.0}.items():
        assert not meets_limits(result, {name: limit}), name
    assert meets_limits(RequestResult(ttft_s=0.5, e2e_s=0.5, output_tokens=1), {"tpot": 1.0}), (
        "a single token has no tpot"
    )
    assert not meets_limits(RequestResult(error="refused"), {"ttft": 500.0})
