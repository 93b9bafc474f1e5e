# SPDX-License-Identifier: Apache-2.0
"""Wrong command lines never set a flag that was not typed and never end in a traceback; foreign ones start."""

from __future__ import annotations

import random
import re
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.args import parse_serve_args
from fastdeploy.config.flag import FlagClass
from fastdeploy.config.flags import FLAG_BY_NAME, FLAGS, HONOURED_FLAGS
from fastdeploy.core.errors import ConfigError, error_lines
from fastdeploy.entrypoints.cli.show_config import resolved_values
from fastdeploy.hub.model_path import local_folder
from tests.entrypoints.server_process import mock_server

NUM_COMMANDS = 200
RIGHT = (
    *("--max-model-len 1k", "--max-num-seqs 8", "--port 8123", "--seed 7", "--block-size 32", "--workers 2"),
    *("--served-model-name a b", "--no-enable-prefix-caching", "--host 127.0.0.1", "--max-output-tokens 99"),
    *("--request-timeout 5", "--api-key sesame", "--kv-cache-memory 64Mi", "--reasoning-parser qwen3", "-tp 1"),
    *("--speculative-config.method ngram", "--enable-force-include-usage", "--logprobs-mode raw_logprobs"),
)
NAMES = [flag.option for flag in HONOURED_FLAGS]
SPELLINGS = {spelling for flag in FLAGS for spelling in flag.spellings}
SPELLINGS |= {f"--no-{flag.option.removeprefix('--')}" for flag in FLAGS if flag.kind == "bool"}
BAD_NUMBERS = ("x", "", "1.5.2", "--", "nan", "1e999", "0x10", "-9999999999999999999999", "９９x", "${SIZE}", "[1]")
BAD_MAPPINGS = ("{", "[1]", "x", '{"a": 1, "a": 2}', '{"no_such_key": 1}', "{'method': 'ngram'}", "", "null", "7")


def misspelt(name: str, rng: random.Random) -> str:
    """Return a name with a letter that is missing, doubled, changed, or in the place of the next one."""
    place = rng.randrange(3, len(name) - 1)
    before, letter, after = name[:place], name[place], name[place + 1 :]
    changed = ("", 2 * letter, rng.choice(string.ascii_lowercase), after[:1] + letter)
    kind = rng.randrange(4)
    return before + changed[kind] + (after[1:] if kind == 3 else after)


def unknown_name(rng: random.Random) -> list[str]:
    name = rng.choice(NAMES)
    make: list[Callable[[], str]] = [
        lambda: misspelt(name, rng),
        lambda: name[: rng.randrange(3, len(name))],
        lambda: name[1 : rng.randrange(3, len(name))],
        lambda: f"-{rng.choice(string.ascii_letters)}{rng.choice(string.digits)}",
        lambda: f"--{''.join(rng.choices(string.ascii_lowercase + '-_', k=8))}",
        lambda: f"--no-{name.removeprefix('--')}x",
    ]
    wrong = rng.choice(make)()
    while wrong in SPELLINGS or not wrong.strip("-_") or wrong.startswith("-O"):
        wrong = f"{wrong}x"
    return [wrong, *rng.choice(([], ["5"], ["abc"]))]


def wrong_value(rng: random.Random) -> list[str]:
    kinds = {"int": BAD_NUMBERS, "float": BAD_NUMBERS[:4], "bytes": BAD_NUMBERS, "json": BAD_MAPPINGS}
    kinds |= {"tokens_or_auto": BAD_NUMBERS, "tokens": BAD_NUMBERS, "ports": BAD_NUMBERS[:2]}
    flag = rng.choice([flag for flag in HONOURED_FLAGS if flag.kind in kinds or flag.choices])
    return [f"{flag.option}={rng.choice(kinds.get(flag.kind, ('no such choice',)))}"]


def refused_flag(rng: random.Random) -> list[str]:
    samples = {"int": "7", "float": "0.5", "json": '{"a": 1}', "str": "x", "list": "x"}
    refused = [flag for flag in FLAGS if flag.flag_class is FlagClass.REFUSED and flag.kind in samples]
    flag = rng.choice(refused)
    return [f"{flag.option}={samples[flag.kind]}"]


def wrong_form(rng: random.Random) -> list[str]:
    switch = rng.choice([flag.option for flag in HONOURED_FLAGS if flag.kind == "bool"])
    return rng.choice(
        (
            [f"{switch}=maybe"],
            ["one", "two"],
            ["--speculative-config.no_such_key", "3"],
            ["--speculative-config", '{"method": "ngram"}', "--speculative-config.method", "suffix"],
            ["--hf-overrides.hidden_size=3"],
            ["--max-model-len", "4M"],  # more than the model's limit, which its config.json has
            ["--config", "/no/such/file.yaml"],
            ["--chat-template-content-format"],
        )
    )


def wrong_command(seed: int) -> tuple[list[str], list[str]]:
    """Return right flags, and what makes the command wrong."""
    rng = random.Random(seed)
    make = (unknown_name, unknown_name, wrong_value, wrong_value, refused_flag, wrong_form)[seed % 6]
    wrong = make(rng)
    right = [
        flag for flag in rng.sample(RIGHT, 5) if flag.split()[0].split(".")[0] != wrong[0].split("=")[0].split(".")[0]
    ]
    return [word for flag in right for word in flag.split()], wrong


def values_of(argv: list[str]) -> dict[str, Any]:
    """Return the value of each flag; the origin of a value is not part of it."""
    args = parse_serve_args(["demo", *argv], find_folder=local_folder)
    return {name: value for name, (value, _) in resolved_values(args).items()}


@pytest.mark.parametrize("seed", range(NUM_COMMANDS))
def test_a_wrong_command_is_an_error_of_what_is_wrong_or_changes_this_flag_alone(seed: int) -> None:
    right, wrong = wrong_command(seed)
    name = wrong[0].split("=")[0]
    try:
        found = values_of([*right, *wrong])
    except ConfigError as error:
        lines = error_lines(error).splitlines()
        assert all(line.startswith("fastdeploy: error: ") for line in lines)
        own = name.split(".")[0].replace("_", "-")
        named = {own, own.replace("--no-", "--"), "command line"}
        assert all(named & set(re.split(r"[:.=,'] ?|(?<!command) ", line)) for line in lines), (wrong, lines)
        return
    plain = values_of(right)
    changed = {key for key in plain if plain[key] != found.get(key)}
    flag = FLAG_BY_NAME.get(name.removeprefix("--").replace("-", "_"))
    assert flag is not None and changed <= {flag.name}, (wrong, changed)


def test_the_commands_are_wrong_in_all_these_ways() -> None:
    outcomes = []
    for seed in range(NUM_COMMANDS):
        right, wrong = wrong_command(seed)
        try:
            values_of([*right, *wrong])
            outcomes.append("accepted")
        except ConfigError as error:
            outcomes += [kind for kind in ("unknown", "refused", "expected", "limit") if kind in str(error)][:1]
    assert outcomes.count("accepted") < NUM_COMMANDS / 20
    assert {"unknown", "refused", "expected"} <= set(outcomes)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "demo", "-t", "4", "--max-modle-len", "5", "--max-num-seqs", "${SEQS}", "--enable-lora"],
        ["serve", "demo", "--speculative-config", "{'method': 'ngram'}", "--max-model-len", "4M", "--device", "tpu"],
        ["config", "demo", "--hf-overrides", '{"hidden_size": 3}', "--kv-cache-memory", "lots"],
        ["bench", "latency", "demo", "--block-size", "17", "--max-model-len", "4M"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_wrong_commands_end_with_status_2_and_one_line_per_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "fastdeploy.entrypoints.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines) >= 2) == (2, "", True), done.stderr
    assert all(line.startswith("fastdeploy: error: -") for line in lines), lines


FOREIGN = {
    "vLLM": (
        "--trust-remote-code --enforce-eager --swap-space 4 --max-seq-len-to-capture 8192 -O3 --async-scheduling "
        "--guided-decoding-backend xgrammar --distributed-executor-backend mp --enable-auto-tool-choice "
        "--scheduling-policy fcfs --use-v2-block-manager --disable-custom-all-reduce --pipeline-parallel-size 1 "
        "--api-server-count 1"
    ),
    "FastDeploy": "--engine-worker-queue-port 8002 --cache-queue-port 8003 --enable-logprob",
    "llama.cpp": "-c 2048 -np 4 -ngl 99",
}


def test_a_command_of_20_foreign_flags_starts(tmp_path: Path) -> None:
    words = " ".join(FOREIGN.values()).split()
    assert sum(word.startswith("-") for word in words) == 20
    with mock_server(tmp_path, *words) as server:
        assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 3}).status_code == 200
        values = server.get("/config-info").json()
        notes = [line for line in server.stdout.splitlines() if " has no effect: " in line]
    engine = values["engine_config"]
    assert (engine["max_model_len"], engine["scheduler"]["max_num_seqs"]) == (2048, 4)
    assert len(notes) == 16, notes  # all but --pipeline-parallel-size 1, --api-server-count, -c and -np
