# SPDX-License-Identifier: Apache-2.0
"""config.json and generation_config.json in the spellings of transformers 4 and 5."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.cache_spec import CacheSpec
from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.hub.model_path import resolve_model_path

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def parse(**changes: Any) -> ModelConfig:
    return parse_model_config({**MINIMAL, **changes}, {})


def refusal(**changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    return caught.value


YARN = {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16}
BAD_FACTORS = (0.0, -1.0, float("nan"), float("inf"), True, "1", None)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("kind", "values"),
    [("default", {}), ("linear", {"factor": 2.0}), ("dynamic", {"factor": 2.0}), ("yarn", YARN), ("llama3", LLAMA3)],
)
def test_both_spellings_of_rope_mean_the_same(kind: str, values: dict[str, Any]) -> None:
    new = parse(rope_parameters={"rope_type": kind, "rope_theta": 5000.0, "partial_rotary_factor": 0.5, **values})
    old = parse(rope_theta=5000.0, partial_rotary_factor=0.5, rope_scaling={"rope_type": kind, **values})
    older = parse(rope_theta=5000.0, partial_rotary_factor=0.5, rope_scaling={"type": kind, **values})
    assert new.rope == old.rope == older.rope
    assert (new.rope.kind, new.rope.theta, new.rope.rotary_dim) == (kind, 5000.0, 8)


def test_both_spellings_of_dtype_mean_the_same() -> None:
    assert parse(dtype="bfloat16") == parse(torch_dtype="bfloat16")
    assert parse(dtype="bfloat16").dtype == "bfloat16" and parse(dtype="float32").dtype == "float32"


def test_the_cache_spec_has_the_heads_of_keys_and_the_type_of_the_cache() -> None:
    config = parse(num_attention_heads=8, num_key_value_heads=2, head_dim=24, dtype="bfloat16")
    assert config.cache_spec == CacheSpec("grouped", 2, 24, "bfloat16")
    assert replace(config, has_int8_cache=True).cache_spec == CacheSpec("grouped", 2, 24, "int8")


def test_dtype_flag_overrides_the_checkpoint() -> None:
    config = parse_model_config({**MINIMAL, "dtype": "bfloat16"}, {}, dtype="float32")
    assert config.dtype == "float32"
    with pytest.raises(ConfigError, match="float16"):
        parse_model_config(MINIMAL, {}, dtype="float16")


@pytest.mark.parametrize(
    ("architecture", "theta", "eps", "tied", "head_dim"),
    [
        ("LlamaForCausalLM", 10000.0, 1e-6, False, 16),
        ("Qwen2ForCausalLM", 10000.0, 1e-6, False, 16),
        ("Qwen3ForCausalLM", 10000.0, 1e-6, False, 128),
        ("Ernie4_5ForCausalLM", 500000.0, 1e-5, True, 128),
    ],
)
def test_silent_keys_take_the_defaults_of_the_architecture(
    architecture: str, theta: float, eps: float, tied: bool, head_dim: int
) -> None:
    config = parse(architectures=[architecture], num_key_value_heads=4)
    assert (config.rope.theta, config.rms_norm_eps, config.tie_word_embeddings) == (theta, eps, tied)
    assert config.head_dim == head_dim


def test_head_dim_may_differ_from_hidden_size_over_heads() -> None:
    assert parse(head_dim=40).head_dim == 40
    assert parse(head_dim=None).head_dim == 16


@pytest.mark.parametrize(("value", "expected"), [(5, (5,)), ([5, 7], (5, 7)), ([], ()), (None, ())])
def test_end_tokens_of_both_files_are_read_as_an_id_or_a_list(value: Any, expected: tuple[int, ...]) -> None:
    config = parse_model_config({**MINIMAL, "eos_token_id": value}, {"eos_token_id": 2})
    assert (config.eos_token_ids, config.generation_eos_token_ids) == (expected, (2,))
    config = parse_model_config({**MINIMAL, "eos_token_id": 2}, {"eos_token_id": value})
    assert (config.eos_token_ids, config.generation_eos_token_ids) == ((2,), expected)


def test_sampling_defaults_are_read_and_can_be_ignored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 9}')
    config = ModelConfig.from_pretrained(tmp_path)
    assert (config.generation.temperature, config.generation.top_k, config.generation.top_p) == (0.6, 20, None)
    assert config.generation_eos_token_ids == (9,)
    ignored = ModelConfig.from_pretrained(tmp_path, generation_config="none")
    assert ignored.generation.temperature is None and ignored.generation_eos_token_ids == ()


@pytest.mark.parametrize(
    ("generation", "temperature"),
    [
        ({"decode_strategy": "greedy_search", "temperature": 0.6}, 0.0),
        ({"decode_strategy": "sampling", "temperature": 0.6}, 0.6),
        ({"decode_strategy": "greedy_search", "do_sample": True, "temperature": 0.6}, 0.6),
        ({"temperature": 0.6}, 0.6),
    ],
)
def test_the_strategy_that_paddlenlp_names_decides_whether_to_sample(
    generation: dict[str, Any], temperature: float
) -> None:
    values = parse_model_config(MINIMAL, generation).generation.sampling_values()
    assert values["temperature"] == temperature


def test_unknown_architectures_are_refused_with_the_supported_ones() -> None:
    error = refusal(architectures=["GPT2LMHeadModel"])
    assert error.field == "architectures" and "GPT2LMHeadModel" in error.message and "Qwen3ForCausalLM" in error.message
    assert "None" in refusal(architectures=None).message


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes"])
def test_quantized_checkpoints_are_refused_by_the_name_of_their_format(method: str) -> None:
    error = refusal(quantization_config={"quant_method": method, "bits": 4})
    assert error.field == "quantization_config" and f"'{method}'" in error.message


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", "proportional"])
def test_other_rope_rules_are_refused_by_name(kind: str) -> None:
    assert f"'{kind}'" in refusal(rope_scaling={"rope_type": kind, "factor": 2.0}).message
    assert f"'{kind}'" in refusal(rope_parameters={"rope_type": kind, "rope_theta": 1e4}).message


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention", "sliding_attention"]])
def test_rope_per_layer_type_is_refused(kinds: list[str]) -> None:
    settings = {kind: {"rope_type": "default"} for kind in kinds}
    assert ", ".join(kinds) in refusal(rope_parameters=settings).message


@pytest.mark.parametrize(
    ("values", "culprit"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "llama3", "factor": 2}, "low_freq_factor"),
    ],
)
def test_incomplete_rope_rules_name_the_missing_value(values: dict[str, Any], culprit: str) -> None:
    assert culprit in refusal(rope_scaling=values).message


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"rope_type": "freq_factors"}, "needs the list 'freq_factors'"),
        ({"rope_type": "freq_factors", "freq_factors": [1.0] * 7}, "expected 8 freq_factors"),
        ({"rope_type": "freq_factors", "freq_factors": [1.0] * 9}, "expected 8 freq_factors"),
        ({"rope_type": "freq_factors", "freq_factors": []}, "expected 8 freq_factors"),
        ({"rope_type": "freq_factors", "freq_factors": 2.0}, "a list of numbers"),
        *(
            ({"rope_type": "freq_factors", "freq_factors": [1.0] * 7 + [bad]}, "a list of numbers")
            for bad in BAD_FACTORS
        ),
        ({"rope_type": "default", "freq_factors": [1.0] * 8}, "rope type 'default' has no 'freq_factors'"),
        ({"freq_factors": [1.0] * 8}, "rope type 'default' has no 'freq_factors'"),
        ({"rope_type": "llama3", **LLAMA3, "freq_factors": [1.0] * 8}, "rope type 'llama3' has no 'freq_factors'"),
        ({"rope_type": "linear", "factor": 2.0, "freq_factors": []}, "rope type 'linear' has no 'freq_factors'"),
    ],
)
def test_factors_of_frequencies_that_are_not_valid_are_refused(values: dict[str, Any], problem: str) -> None:
    assert problem in refusal(rope_parameters=values).message


def test_factors_of_frequencies_leave_the_context_as_it_is() -> None:
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8, 8, 8.0]
    config = parse(rope_parameters={"rope_type": "freq_factors", "rope_theta": 5000.0, "freq_factors": factors})
    assert (config.rope.kind, config.rope.freq_factors) == ("freq_factors", tuple(factors))
    assert config.max_context_len == config.max_position_embeddings


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": 512}, "head_dim"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": "100"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.35}, "partial_rotary_factor"),
        ({"dtype": "int8"}, "dtype"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ],
)
def test_impossible_values_are_refused_by_key(changes: dict[str, Any], field: str) -> None:
    assert refusal(**changes).field == field


def qwen2(**changes: Any) -> ModelConfig:
    return parse(architectures=["Qwen2ForCausalLM"], num_key_value_heads=4, sliding_window=32, **changes)


def test_a_sliding_window_counts_only_where_a_layer_uses_it() -> None:
    assert qwen2().sliding_window is None
    assert qwen2(use_sliding_window=False).sliding_window is None
    assert qwen2(use_sliding_window=True, max_window_layers=3).sliding_window is None
    assert qwen2(use_sliding_window=True, max_window_layers=2).sliding_window == 32
    assert qwen2(use_sliding_window=True, layer_types=["full_attention"] * 3).sliding_window is None
    mixed = ["full_attention", "sliding_attention", "full_attention"]
    assert qwen2(use_sliding_window=True, layer_types=mixed).sliding_window == 32


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"sliding_window": 32}, "sliding_window 32 has no effect: LlamaForCausalLM has no sliding windows"),
        ({"sliding_window": None}, None),
        (
            {"rope_parameters": {"rope_theta": 77.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling replaces rope_parameters, whose rope_theta 77.0 has no effect: 10000.0 is used",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"rope_parameters": {"rope_theta": 77.0}, "rope_theta": 5000.0}, None),
        (
            {**QWEN3_MOE, "num_local_experts": 4},
            "num_experts 8 has no effect beside num_local_experts 4",
        ),
        ({**QWEN3_MOE, "num_local_experts": 8}, None),
    ],
)
def test_keys_without_effect_are_said_in_one_line(keys: dict[str, Any], note: str | None) -> None:
    config = parse_model_config({**MINIMAL, **keys}, {}, path="/m")
    assert config.sliding_window is None
    assert config.notes == (() if note is None else (f"/m/config.json: {note}",))


def test_a_context_within_the_sliding_window_is_accepted_and_beyond_refused() -> None:
    config = qwen2(use_sliding_window=True, max_window_layers=0)
    config.check_max_model_len(32)
    with pytest.raises(ConfigError, match="sliding_window"):
        config.check_max_model_len(33)


def test_context_length_counts_the_scaling() -> None:
    def context(**scaling: Any) -> int:
        return parse(max_position_embeddings=1024, rope_scaling=scaling or None).max_context_len

    assert context() == 1024
    assert context(rope_type="linear", factor=2.0) == context(rope_type="dynamic", factor=2.0) == 2048
    assert context(rope_type="yarn", factor=4.0, original_max_position_embeddings=512) == 2048
    assert context(rope_type="llama3", **LLAMA3) == 1024


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="GGUF"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="list"):
        ModelConfig.from_pretrained(tmp_path)


def test_local_directories_and_the_demo_resolve_without_a_network(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)
    assert Path(resolve_model_path("demo")).parts[-2:] == ("assets", "demo_model")
    assert Path(resolve_model_path("demo/moe")).parts[-2:] == ("demo_model", "moe")
    for name in (str(tmp_path / "nothing"), "./nothing", "a/b/c", str(tmp_path / "model.gguf")):
        with pytest.raises(ConfigError, match=r"^model: "):
            resolve_model_path(name)
        with pytest.raises(ConfigError, match=r"^tokenizer: "):
            resolve_model_path(name, field="tokenizer")


def test_reading_a_configuration_does_not_import_paddle() -> None:
    code = "import sys, fastdeploy.config.model_config; sys.exit('paddle' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        ({"rope_scaling_type": None, "rope_scaling_factor": 1.0}, {}),
        ({"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_scaling_type": "dynamic_ntk", "rope_scaling_factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}),
    ],
)
def test_rope_in_the_spelling_of_paddlenlp(spelled: dict[str, Any], meant: dict[str, Any]) -> None:
    assert parse(**spelled).rope == parse(rope_scaling=meant).rope


def test_ntk_rope_of_paddlenlp_is_a_larger_base_and_a_longer_context() -> None:
    rope = parse(rope_scaling_type="ntk", rope_scaling_factor=8.0, max_position_embeddings=1024).rope
    assert (rope.kind, rope.max_context_len) == ("default", 8192)
    assert rope.theta == pytest.approx(10000.0 * 8.0 ** (16 / 14))
    assert "'ntk'" in refusal(rope_scaling={"rope_type": "ntk", "factor": 8.0}).message, "nobody else has it"
    assert "'yarn2'" in refusal(rope_scaling_type="yarn2", rope_scaling_factor=8.0).message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": "x"}, "rope_theta: {}: expected a number in [0.0, 1e+30], got 'x'"),
        ({"rope_theta": 0.5}, "rope_theta: {}: expected a base above 1, got 0.5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: {}: expected an integer in [1, 4096], got 1000000000"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers: {}: expected an integer in [1, 4096], got 2.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: {}: expected a number in [1e-12, 1.0], got nan"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps: {}: expected a number in [1e-12, 1.0], got -1e-06"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: {}: expected a number in [1e-12, 1.0], got 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: {}: expected true or false, got 'no'"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id: {}: expected a token id or a list of them, got [2, '3']"),
        ({"layer_types": [5]}, "layer_types: {}: expected a list of strings, got [5]"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": float("inf")}},
            "rope_scaling: rope_scaling.factor: {}: expected a number in [1.0, 1000000.0], got inf",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "rope_scaling: {}: expected a low_",
        ),
    ],
)
def test_values_of_other_types_and_ranges_are_refused_by_key_file_and_range(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MINIMAL, **changes}))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_pretrained(tmp_path)
    assert str(caught.value).startswith(message.format(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": "hot"}, "temperature: {}: expected a number in [0, 2e+09], got 'hot'"),
        ({"top_k": 1.5}, "top_k: {}: expected an integer in [-1, 2147483647], got 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens: {}: expected an integer in [1, 2147483647], got 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty: {}: expected a number in [1e-06, 1e+06], got nan"),
        ({"do_sample": "yes"}, "do_sample: {}: expected true or false, got 'yes'"),
        ({"eos_token_id": "2"}, "eos_token_id: {}: expected a token id or a list of them, got '2'"),
    ],
)
def test_sampling_defaults_of_other_types_and_ranges_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL))
    (tmp_path / "generation_config.json").write_text(json.dumps(changes))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_pretrained(tmp_path)
    assert str(caught.value) == message.format(tmp_path / "generation_config.json")
    assert ModelConfig.from_pretrained(tmp_path, generation_config="none").generation_eos_token_ids == ()


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"hidden_size":' * 100_000, '{"x": ' + "[" * 5000 + "]" * 5000 + "}"]
)
def test_deep_brackets_are_refused_with_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"^model: cannot read .*config\.json: its brackets are nested too deeply$"):
        ModelConfig.from_pretrained(tmp_path)
