# SPDX-License-Identifier: Apache-2.0
"""Commands of other projects' documents run, or end with the line that docs/guide/serving.md states."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import openai
import pytest

import fastdeploy
from fastdeploy.config.args import parse_serve_args
from fastdeploy.core.errors import ConfigError
from fastdeploy.hub.model_path import resolve_model_path
from tests.entrypoints.seeds_commands import COMMANDS, SNIPPETS, SPECULATIVE_OPTIONS, Command, Snippet
from tests.entrypoints.server_process import real_server

ROOT = Path(fastdeploy.__file__).parents[1]
SERVERS = {
    "python -m fastdeploy.entrypoints.openai.api_server": 3,
    "python -m vllm.entrypoints.openai.api_server": 3,
    "vllm serve": 2,
}
NGRAM_ON_CPU = "benchmarks/yaml/demo-cpu.yaml"
DEMO_CONTEXT = ("--max-model-len", "2048")  # as docs/guide/serving.md says for a file of a longer model
PROMPT = "for name in names:\n    print(name)\nfor name in"
WHOLE_MODELS = {"facebook/opt-6.7b": "demo", "facebook/opt-125m": "demo/draft"}
PAGE = (ROOT / "docs" / "guide" / "serving.md").read_text()


def by_name(item: Command | Snippet) -> str:
    return item.name


def flags_of(text: str) -> list[str]:
    """Return the flags of a command for models and a port of this machine; both ways of starting vLLM's become ours."""
    for placeholder, value in (
        ("path_to_main_model", "demo"),
        ("path_to_FastDeploy", ""),
        ("path_to_mtp_model", "demo"),
    ):
        text = text.replace("${" + placeholder + "}", value)
    for name, value in WHOLE_MODELS.items():
        text = text.replace(name, value)
    text = text.replace("--port 8000", "--port 0")
    words = shlex.split(text.replace("\\\n", " ").replace(" /benchmarks", " benchmarks"))
    for start, count in SERVERS.items():
        if words[:count] == start.split():
            return words[count:]
    raise AssertionError(f"not a server: {text}")


def start(flags: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastdeploy.entrypoints.openai.api_server", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.outcome], ids=by_name)
def test_command_that_cannot_run_ends_with_the_documented_line(command: Command) -> None:
    done = start(flags_of(command.text))
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[0] == f"fastdeploy: error: {command.outcome}"
    assert all(line.startswith("fastdeploy: error: ") for line in lines)


@pytest.mark.parametrize(("option", "outcome"), SPECULATIVE_OPTIONS)
def test_speculative_options_are_accepted_or_refused_by_their_method(option: str, outcome: str) -> None:
    flags = ["demo", "--speculative-config", option]
    if not outcome:
        assert parse_serve_args(flags).engine.speculative.method == json.loads(option)["method"]
        return
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(flags)
    assert str(caught.value) == outcome


def test_every_line_that_a_command_ends_with_is_documented() -> None:
    promised = re.findall(r"^\| .* \| `(.+)` \|$", PAGE, re.MULTILINE)
    assert promised
    outcomes = [command.outcome for command in COMMANDS if command.outcome]
    outcomes += [outcome for _, outcome in SPECULATIVE_OPTIONS if outcome]
    for outcome in outcomes:
        reason = outcome.partition(": ")[2].partition(" (")[0].partition(";")[0]
        assert reason in promised, f"docs/guide/serving.md does not promise {reason!r}"


@pytest.mark.parametrize("command", [one for one in COMMANDS if "32k" in one.text and not one.role], ids=by_name)
def test_command_with_a_longer_context_than_the_model_has_needs_the_documented_flag(command: Command) -> None:
    file = "benchmarks/yaml/eb45t-32k-wint4-mtp-h100-tp4.yaml"
    done = start(flags_of(command.text))
    message = f"max_model_len: 32768 is more than the model's limit of 2048 tokens ({file})"
    first_line = f"FastDeploy {fastdeploy.__version__}, loading demo\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, first_line, f"fastdeploy: error: {message}\n")
    assert f"serve demo --config {file} {' '.join(DEMO_CONTEXT)}" in PAGE


def test_every_documented_line_follows_from_its_flag() -> None:
    rows = re.findall(r"^\| `(--[^`]+)`.* \| `(.+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 4
    for flags, line in rows:
        with pytest.raises(ConfigError, match=re.escape(line)):
            parse_serve_args(["demo", *flags.split()])


@pytest.mark.parametrize("command", [one for one in COMMANDS if not one.outcome + one.role], ids=by_name)
def test_command_that_can_run_serves_the_official_client(command: Command, plain_text: str) -> None:
    flags = flags_of(command.text)
    text, summary = serve_and_complete([*flags, *(DEMO_CONTEXT if "--config" in flags else ())])
    if "quantized: attention wint4, mlp wint4, head wint8" in summary:
        plain_text = serve_and_complete(["demo", "--quantization", "wint4"])[0]
    assert text == plain_text
    note = "--tensor-parallel-size 4 has no effect: on the CPU one rank uses all cores"
    assert (note in summary) == ("--tensor-parallel-size 4" in command.text)
    assert ("draft_model demo/draft (" in summary) == ("draft model" in command.name)


def test_ngram_command_runs_with_the_configuration_of_this_machine(plain_text: str) -> None:
    [command] = [one for one in COMMANDS if one.name.startswith("n-gram")]
    text = re.sub(r"benchmarks/yaml/\S+", str(ROOT / NGRAM_ON_CPU), command.text)
    text, summary = serve_and_complete(flags_of(text))
    assert text == plain_text
    assert "ngram, up to 1 draft, verify" in summary


@pytest.fixture(scope="module")
def plain_text() -> str:
    """The text of the model without speculation."""
    return serve_and_complete(["demo"])[0]


def serve_and_complete(flags: list[str]) -> tuple[str, str]:
    """Start a real server, use it as the documents' client does; return the text and the server's summary."""
    with real_server(*flags) as server:
        client = openai.OpenAI(api_key="EMPTY", base_url=server.url + "/v1")
        models = client.models.list()
        model = models.data[0].id
        stream = False
        completion = client.completions.create(
            model=model, prompt=PROMPT, echo=False, n=1, stream=stream, temperature=0, max_tokens=24
        )
        assert completion.usage is not None
        assert completion.usage.completion_tokens > 4
        return completion.choices[0].text, server.stdout


SCRIPT = """
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(**arguments)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demonstration model with a short context, since the snippets set no other end."""
    folder = tmp_path_factory.mktemp("demo")
    for file in Path(resolve_model_path("demo")).iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((Path(resolve_model_path("demo")) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 96}))
    return str(folder)


def run_snippet(snippet: Snippet, model: str) -> str:
    """Run a snippet with nothing but its import line and the models' names changed; return what it prints."""
    script = SCRIPT.replace("from vllm import", "from fastdeploy import")
    arguments = {**snippet.arguments, "model": model}
    if "speculative_model" in arguments and arguments["speculative_model"] != "[ngram]":
        arguments["speculative_model"] = snippet.drafting_model
    elif "model" in arguments.get("speculative_config", {}):
        arguments["speculative_config"] = {**arguments["speculative_config"], "model": snippet.drafting_model}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(script, {"arguments": arguments})
    return printed.getvalue()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=by_name)
def test_snippet_prints_its_text(snippet: Snippet, model: str) -> None:
    printed = run_snippet(snippet, model)
    assert re.search(r"""^Prompt: 'The future of AI is', Generated text: (['"]).+\1$""", printed, re.MULTILINE), printed


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.role], ids=by_name)
def test_command_of_a_node_is_understood(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    args = parse_serve_args([*flags_of(command.text), *DEMO_CONTEXT])
    assert (args.cluster.scheduler_name, args.cluster.splitwise_role) == ("splitwise", command.role)
    assert (args.cluster.address, args.cluster.scheduler_password) == ("redis://127.0.0.1:6379/0", "scheduler_mtp")
    assert (args.cluster.scheduler_topic, args.cluster.scheduler_ttl, args.cluster.connectors) == (
        "mtp",
        9000,
        ("ipc",),
    )
    assert (args.server.workers, args.engine.max_model_len, args.engine.speculative.method) == (2, 2048, "mtp")
    assert args.engine.hands_over and not args.engine.cache.enable_prefix_caching
    assert "scheduler_mtp" not in repr(args)
    assert sorted(note.split()[0] for note in args.notes) == [
        "--cache-queue-port",
        "--engine-worker-queue-port",
        "--tensor-parallel-size",
        "cache_transfer_protocol:",
        "gpu_memory_utilization",
        "kv_cache_ratio",
        "pd_comm_port",
        "rdma_comm_ports",
    ]


def test_decode_node_keeps_chunked_prefill_with_the_context_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    [command] = [one for one in COMMANDS if one.role == "decode"]
    monkeypatch.chdir(ROOT)
    args = parse_serve_args(flags_of(command.text))
    assert (args.engine.max_model_len, args.engine.scheduler.enable_chunked_prefill) == (32768, True)
    assert "enable_chunked_prefill false has no effect: a node of a cluster computes contexts of 32768 tokens" in (
        "\n".join(args.notes)
    )


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "yaml").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_configuration_file_is_understood(file: Path) -> None:
    flags = ["--config", str(file)]
    if "cpu" in file.stem or "demo" in file.stem:
        args = parse_serve_args(flags)
        assert args.notes == ()
        assert args.cluster.is_split == args.engine.hands_over == ("mtp" in file.stem)
        return
    args = parse_serve_args(["demo", "--scheduler-name", "splitwise", *flags])
    if "prefill" in file.stem or "decode" in file.stem:
        assert args.cluster.splitwise_role == file.stem.rpartition("-")[2]
    else:
        assert str(args.engine.quantization) == "wint4"
