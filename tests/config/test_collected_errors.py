# SPDX-License-Identifier: Apache-2.0
"""All errors of a command at once: those of flags together with those that a local model's config.json tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy.config.args import parse_engine_args, parse_serve_args
from fastdeploy.config.model_config import local_model_path
from fastdeploy.core.errors import ConfigError, error_lines
from fastdeploy.entrypoints.openai.lifecycle import find_model
from fastdeploy.hub.model_path import local_folder

TOO_LONG = "--max-model-len: 4194304 is more than the model's limit of 2048 tokens"


def shown(error: ConfigError) -> list[str]:
    return [line.removeprefix("fastdeploy: error: ") for line in error_lines(error).splitlines()]


def errors_of(*flags: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(flags, find_folder=local_folder)
    return shown(caught.value)


def test_errors_of_flags_come_with_those_of_the_model() -> None:
    assert errors_of(
        "demo", "--max-model-len", "4M", "--max-num-seqs", "0", "--quantizaton", "wint8", "--port", "x"
    ) == [
        "--quantizaton: unknown flag; did you mean '--quantization'?",
        "--port: expected an integer, got 'x'",
        "--max-num-seqs: expected an integer in [1, 65536], got 0",
        TOO_LONG,
    ]


def test_a_model_that_is_not_there_is_one_of_the_errors() -> None:
    assert errors_of("/nowhere", "--max-num-seqs", "0") == [
        "--max-num-seqs: expected an integer in [1, 65536], got 0",
        "--model: /nowhere is neither a directory nor a GGUF file",
    ]
    assert errors_of("some/name", "--max-num-seqs", "0") == [  # it may be downloaded, and is not
        "--max-num-seqs: expected an integer in [1, 65536], got 0",
    ]


def test_a_wrong_flag_hides_no_contradiction_between_others() -> None:
    flags = ("--max-model-len", "1000", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "100")
    assert errors_of("demo", *flags, "--max-num-seqs", "0", "--hf-overrides", '{"x": 1}', "--device", "tpu")[-1:] == [
        "--max-num-batched-tokens: expected at least --max-model-len 1000 without chunked prefill, got 100",
    ]


@pytest.mark.parametrize("value", ["0", "x"])
def test_nothing_is_said_of_the_default_of_a_flag_with_a_wrong_value(value: str) -> None:
    flags = ("--max-model-len", "4096", "--no-enable-chunked-prefill", "--max-num-batched-tokens", value)
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["some/model", *flags])
    [line] = shown(caught.value)
    assert line.startswith("--max-num-batched-tokens: expected a") and value in line


def test_all_errors_of_files_are_raised_at_once() -> None:
    flags = ("--ssl-certfile", "/c", "--ssl-keyfile", "/k", "--chat-template", "/t.jinja", "--max-model-len", "4M")
    with pytest.raises(ConfigError) as caught:
        find_model(parse_serve_args(["demo", *flags, "--quantization", '{"experts": "wint8"}']))
    assert [line.split(": ")[0] for line in shown(caught.value)] == [
        "--ssl-certfile", "--chat-template", "--max-model-len", "--quantization.experts",
    ]  # fmt: skip
    assert TOO_LONG in shown(caught.value)


def test_a_start_that_fails_anyway_downloads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdeploy.entrypoints.openai.lifecycle.resolve_model_path", lambda *_, **__: pytest.fail())
    with pytest.raises(ConfigError, match=r"^--chat-template: cannot read"):
        find_model(parse_serve_args(["some/model", "--chat-template", "/t.jinja"]))


def test_all_errors_of_the_server_are_raised_at_once() -> None:
    flags = ("--uds", "/s", "--port", "1", "--workers", "0", "--api-key-file", "/keys", "--max-waiting-time", "-3")
    assert [line.split(": ")[0] for line in errors_of("demo", *flags)] == ["--uds", "--workers", "--api-key-file"]


def test_commands_that_run_the_engine_themselves_name_all_errors_too() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_engine_args(["demo", "--max-model-len", "4M", "--max-num-seqs", "0", "--port", "1"], local_folder)
    assert [line.split(": ")[0] for line in shown(caught.value)] == ["--port", "--max-num-seqs", "--max-model-len"]


def test_a_model_that_is_read_has_no_errors() -> None:
    assert local_folder("demo") == str(local_model_path("demo"))
    assert local_folder("some/name") is None
    args = find_model(parse_serve_args(["demo", "--max-model-len", "2048"], find_folder=local_folder))
    assert Path(args.engine.model_folder) == local_model_path("demo")
