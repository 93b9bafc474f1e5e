# SPDX-License-Identifier: Apache-2.0
"""Flags that replace values of config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.args import engine_config_from_kwargs, parse_serve_args
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.description import digest_checkpoint
from tests.config.test_model_config import MINIMAL

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def read(
    folder: Path, file: dict[str, Any] | None = None, generation: dict[str, Any] | None = None, **flags: Any
) -> ModelConfig:
    """Return the model of a folder with these files, as the engine reads it with these flags."""
    (folder / "config.json").write_text(json.dumps({**MINIMAL, **(file or {})}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return EngineConfig(str(folder), **flags).read_model(str(folder), reads_weights=False)


@pytest.mark.parametrize(
    "file",
    [
        {"rope_theta": 5000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5000.0, "rope_scaling_type": "linear", "rope_scaling_factor": 2.0},
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_an_object_replaces_the_files_and_keeps_its_base(tmp_path: Path, file: dict[str, Any], key: str) -> None:
    rope = read(tmp_path, file, hf_overrides={key: YARN}).rope
    assert (rope.kind, rope.factor, rope.theta, rope.max_context_len) == ("yarn", 4.0, 5000.0, 2048)


@pytest.mark.parametrize(
    "file",
    [
        {"rope_theta": 5000.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ],
)
def test_a_base_replaces_the_files_wherever_that_stands(tmp_path: Path, file: dict[str, Any]) -> None:
    plain, rope = read(tmp_path, file).rope, read(tmp_path, file, hf_overrides={"rope_theta": 1e6}).rope
    assert (plain.theta, rope.theta, rope.kind, rope.factor) == (5000.0, 1e6, plain.kind, plain.factor)


def test_the_original_context_of_an_object_replaces_that_of_the_file(tmp_path: Path) -> None:
    rope = read(tmp_path, {"original_max_position_embeddings": 64}, hf_overrides={"rope_scaling": YARN}).rope
    assert rope.original_max_positions == 512


def test_null_removes_the_scaling_of_the_file(tmp_path: Path) -> None:
    file = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read(tmp_path, file).rope.kind == "linear"
    assert read(tmp_path, file, hf_overrides={"rope_scaling": None}).rope.kind == "default"


def test_the_context_and_the_fingerprint_follow_an_override(tmp_path: Path) -> None:
    plain = read(tmp_path)
    longer = read(tmp_path, hf_overrides={"max_position_embeddings": 4096})
    assert (longer.max_context_len, longer.choose_max_model_len(4096)) == (4096, 4096)
    bases = [read(tmp_path, hf_overrides={"rope_theta": theta}) for theta in (1e6, 2e6)]
    assert len({digest_checkpoint(model, "dummy") for model in (plain, longer, *bases)}) == 4


def test_a_file_that_is_refused_is_served_with_an_override(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rope_theta: .*expected a base above 1"):
        read(tmp_path, {"rope_theta": 0.5})
    assert read(tmp_path, {"rope_theta": 0.5}, hf_overrides={"rope_theta": 1e4}).rope.theta == 1e4


@pytest.mark.parametrize(
    "value, message",
    [
        (
            {"hidden_size": 8},
            "hf_overrides.hidden_size: is refused, leave it out; available keys: max_position_embeddings, ",
        ),
        ({"rope_teta": 8}, "hf_overrides.rope_teta: .*; did you mean 'rope_theta'?"),
        ({"rope_theta": "x"}, "hf_overrides.rope_theta: expected a number in .*, got 'x'"),
        ({"max_position_embeddings": 0}, "hf_overrides.max_position_embeddings: expected an integer in .*, got 0"),
        ({"rope_scaling": 4}, "hf_overrides.rope_scaling: expected an object, got int"),
        ({"rope_scaling": {"factr": 4}}, "hf_overrides.rope_scaling.factr: .*; did you mean 'factor'?"),
        ({"rope_scaling": {"factor": "4"}}, "hf_overrides.rope_scaling: rope_scaling.factor: expected a number in "),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, "hf_overrides.rope_parameters: cannot be combined with "),
    ],
)
def test_other_keys_and_wrong_values_of_config_json_are_refused_by_key(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config_from_kwargs({"model": "demo", "hf_overrides": value})


def test_all_unknown_keys_are_refused_at_once() -> None:
    for flag in ("hf_overrides", "override_generation_config"):
        with pytest.raises(ConfigError) as caught:
            engine_config_from_kwargs({"model": "demo", flag: {"alpha": 1, "beta": 2}})
        assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [f"{flag}.alpha", f"{flag}.beta"]
    with pytest.raises(ConfigError) as caught:
        engine_config_from_kwargs({"model": "demo", "hf_overrides": {"rope_scaling": {"alpha": 1, "beta": 2}}})
    assert str(caught.value).count("hf_overrides.rope_scaling.") == 2


def test_what_only_the_whole_file_shows_to_be_wrong_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hf_overrides.rope_scaling: .*rope type 'yarn' needs a number 'factor'"):
        read(tmp_path, hf_overrides={"rope_parameters": {"rope_type": "yarn"}})
    with pytest.raises(ConfigError, match=r"^rope_scaling: .*rope type 'yarn' needs a number 'factor'"):
        read(tmp_path, {"rope_scaling": {"rope_type": "yarn"}}, hf_overrides={"max_position_embeddings": 64})


FILE = {"temperature": 0.7, "top_k": 20, "do_sample": True, "eos_token_id": 5}


@pytest.mark.parametrize(
    "file, value, expected",
    [
        (FILE, None, {"temperature": 0.7, "top_k": 20}),
        (FILE, {}, {"temperature": 0.7, "top_k": 20}),
        (FILE, {"temperature": 0.2}, {"temperature": 0.2, "top_k": 20}),
        (FILE, {"top_k": None, "max_new_tokens": 9}, {"temperature": 0.7, "max_tokens": 9}),
        (FILE, {"do_sample": False}, {"temperature": 0.0, "top_k": 20}),
        ({**FILE, "do_sample": False}, {"temperature": 0.2}, {"temperature": 0.2, "top_k": 20}),
        ({**FILE, "do_sample": False}, {"top_k": 3}, {"temperature": 0.0, "top_k": 3}),
        ({"decode_strategy": "greedy_search"}, {"temperature": 0.2}, {"temperature": 0.2}),
        ({"decode_strategy": "greedy_search"}, {"do_sample": True}, {}),
    ],
)
def test_defaults_replace_those_of_the_file(tmp_path: Path, file: dict[str, Any], value: Any, expected: Any) -> None:
    model = read(tmp_path, generation=file, override_generation_config=value)
    assert model.generation.sampling_values() == expected


def test_defaults_hold_without_the_file(tmp_path: Path) -> None:
    value = {"temperature": 0.2, "eos_token_id": [7, 8]}
    model = read(tmp_path, generation=FILE, generation_config="none", override_generation_config=value)
    assert model.generation.sampling_values() == {"temperature": 0.2}
    assert model.generation_eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    "value, message",
    [
        ({"temprature": 1}, "override_generation_config.temprature: .*; did you mean 'temperature'?"),
        (
            {"logit_bias": {}},
            "override_generation_config.logit_bias: is refused, leave it out; available keys: do_sample, ",
        ),
        ({"temperature": -1}, "override_generation_config.temperature: expected .*, got -1"),
        ({"do_sample": 1}, "override_generation_config.do_sample: expected true or false, got 1"),
        ({"eos_token_id": "x"}, "override_generation_config.eos_token_id: expected a token id or a list of them"),
    ],
)
def test_unknown_keys_and_wrong_values_of_defaults_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_serve_args(["demo", "--override-generation-config", json.dumps(value)])


def test_the_keys_may_be_flags_of_their_own_and_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("hf_overrides: {rope_theta: 10.0}\ndefault_chat_template_kwargs: {a: 1}\n")
    flags = ["demo", "--override-generation-config.top_p=0.5", "--config", str(tmp_path / "flags.yaml")]
    args = parse_serve_args(flags)
    assert args.engine.overrides.generation == {"top_p": 0.5} and args.engine.overrides.config == {"rope_theta": 10.0}
    assert args.server.default_chat_template_kwargs == {"a": 1}


@pytest.mark.parametrize(
    "value, message",
    [
        ('{"messages": []}', "default_chat_template_kwargs.messages: is a field of requests"),
        ("[]", "--default-chat-template-kwargs: expected a JSON mapping"),
        ('{"a": 1e999}', "default_chat_template_kwargs: expected finite numbers"),
    ],
)
def test_wrong_variables_of_the_template_are_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_serve_args(["demo", "--default-chat-template-kwargs", value])
