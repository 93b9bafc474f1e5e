# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy config`: every value with its origin, without secrets."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.args import parse_serve_args
from fastdeploy.config.flags import FLAGS, FlagClass
from fastdeploy.config.model_config import local_model_path
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.cli.operators import device_line
from fastdeploy.entrypoints.cli.show_config import main


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*flags, "--output-format", "json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)["values"]
    return values


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "max_num_seqs: 3\nserved_model_name: mine\nallowed_origins: [http://a, http://b]\nkv_cache_memory: 64Mi\n"
        "speculative_config: {method: ngram, num_speculative_tokens: 4}\n"
    )
    return str(path)


def test_every_value_has_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setenv("FD_API_KEY", "sesame,open")
    values = shown(capsys, "demo", "--config", file, "--max_model_len", "100", "--served-model-name", "yours")
    assert values["max_model_len"] == {"value": 100, "from": "command line"}
    assert values["served_model_name"] == {"value": ["yours"], "from": "command line"}
    assert values["max_num_seqs"] == {"value": 3, "from": f"{file}:max_num_seqs"}
    assert values["kv_cache_memory"]["value"] == 64 * 2**20
    assert values["block_size"] == {"value": 64, "from": "default"}
    assert values["api_key"] == {"value": ["***", "***"], "from": "FD_API_KEY"}
    assert values["speculative_config"]["from"] == f"{file}:speculative_config"
    assert values["speculative_config"]["value"]["num_speculative_tokens"] == 4


def test_the_device_and_its_operators_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--output-format", "json"]) == 0
    device = json.loads(capsys.readouterr().out)["device"]
    assert (device["backend"], device["reference_operators"]) == ("cpu", [])
    assert {"linear", "sample", "append_attention", "draft"} <= set(device["native_operators"])
    assert main(["demo"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"# device: cpu \(.+\), \w+, library \S+\+\w{16}; all \d+ operators are native", line)


def test_a_device_that_cannot_be_used_is_shown_with_its_reason() -> None:
    assert device_line({"error": "there is no NVIDIA driver"}) == "not available: there is no NVIDIA driver"
    found = {"backend": "gpu", "device_name": "A", "isa": "sm_90", "operator_library": "1+a"}
    operators = {"native_operators": ["linear"], "reference_operators": ["draft", "sample"], "missing_operators": []}
    expected = "gpu (A), sm_90, library 1+a; 1 of 3 operators are native, not draft, sample"
    assert device_line({**found, **operators}) == expected
    line = device_line({**found, **operators, "missing_operators": ["experts_up", "route"]})
    assert line == f"{expected}; there is no experts_up, route, which some models need"


def test_every_honoured_flag_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    honoured = {flag.name for flag in FLAGS if flag.flag_class is FlagClass.HONOURED}
    assert honoured - set(shown(capsys, "demo")) == {
        "speculative_model",
        "spec_method",
        "num_speculative_tokens",
        "ngram_prompt_lookup_max",
        "ngram_prompt_lookup_min",
        "speculative_draft_tensor_parallel_size",
    }


def test_older_spelling_is_shown_as_the_current_one(capsys: pytest.CaptureFixture[str]) -> None:
    values = shown(capsys, "demo", "--speculative-model", "[ngram]", "--num-speculative-tokens", "2")
    assert values["speculative_config"]["value"]["method"] == "ngram"
    assert values["speculative_config"]["from"] == "command line"


def test_secrets_of_redis_are_masked_and_have_their_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_SCHEDULER_PASSWORD", "sesame")
    values = shown(capsys, "demo", "--scheduler-name", "splitwise", "--splitwise-role", "decode")
    assert values["scheduler_password"] == {"value": "***", "from": "FD_SCHEDULER_PASSWORD"}
    assert values["splitwise_role"] == {"value": "decode", "from": "command line"}
    assert values["node_id"] == {"value": "", "from": "default"}, "it is drawn when a server starts"
    assert main(["demo", "--scheduler-name", "global", "--scheduler-url", "redis://u:sesame@h/1"]) == 0
    printed = capsys.readouterr().out
    assert "# scheduler_url: redis://***@h/1  # command line" in printed.replace("'", "")
    assert "sesame" not in printed


def test_what_another_flag_replaces_is_not_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["demo", "--uds", "/tmp/s", "--shutdown-timeout", "0"]
    assert not {"host", "port", "timeout_graceful_shutdown"} & set(shown(capsys, *flags))
    assert main(flags) == 0
    copy = tmp_path / "copy.yaml"
    copy.write_text(capsys.readouterr().out)
    assert parse_serve_args(["--config", str(copy)]).server == parse_serve_args(flags).server


def test_yaml_output_is_a_file_with_the_same_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str
) -> None:
    flags = ["demo", "--config", file, "--max-waiting-time", "-1", "--no-enable-prefix-caching"]
    flags += ["--scheduler-name", "splitwise", "--splitwise-role", "decode", "--cache-transfer-protocol", "ipc,rdma"]
    flags += ["--enforce-eager", "--compilation-config", '{"cudagraph_capture_sizes": [1, 8]}']
    assert main([*flags, "--api-key", "sesame", "--scheduler-password", "sesame"]) == 0
    printed = capsys.readouterr().out
    assert "sesame" not in printed
    assert "# note: --enforce-eager True has no effect" in printed
    copy = tmp_path / "copy.yaml"
    copy.write_text(printed)
    again, before = parse_serve_args(["--config", str(copy)]), parse_serve_args(flags)
    unquantized = QuantizationConfig.from_value("none")
    engine = replace(before.engine, quantization=unquantized)  # the model is known
    assert (again.engine, again.server, again.cluster) == (engine, before.server, before.cluster)


def test_a_context_beyond_the_models_limit_is_an_error_with_its_origin(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "long.yaml"
    file.write_text("model: demo\nmax_model_len: 32K\n")
    message = f"max_model_len: 32768 is more than the model's limit of 2048 tokens ({file})"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        main(["--config", str(file)])
    assert shown(capsys, "--config", str(file), "--max-model-len", "2048")["max_model_len"] == {
        "value": 2048,
        "from": "command line",
    }


def test_the_context_that_auto_is_is_noted_once_the_model_is_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = json.loads((Path(str(local_model_path("demo"))) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 96}))
    assert shown(capsys, str(tmp_path))["max_model_len"] == {"value": "auto", "from": "default"}
    for flags, note in (([], True), (["--max-model-len", "auto"], True), (["--max-model-len", "64"], False)):
        assert main([str(tmp_path), *flags, "--output-format", "json"]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        expected = "context 96 of the model's 96, unless the KV cache or a draft model holds less"
        assert (expected in notes) == note


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("owner/name", "owner/name is not downloaded here"),
        ("smollm2", "smollm2 is not downloaded here"),
        ("{folder}", "{folder} has no config.json"),
        ("{folder}/a.gguf", "{folder}/a.gguf is neither a directory nor a GGUF file"),
    ],
)
def test_it_says_when_it_could_not_look_at_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, reason: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = [model.format(folder=tmp_path), "--max-model-len", "32K", "--output-format", "json"]
    assert main(flags) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["values"]["max_model_len"]["value"] == 32768
    assert printed["notes"] == [
        f"max_model_len was not compared with the model's limit: {reason.format(folder=tmp_path)}"
    ]
