# SPDX-License-Identifier: Apache-2.0
"""A model whose weights do not fit is refused before it is loaded, with the bytes of its parts in each format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.config.packed_checkpoint import PackedHeader
from fastdeploy.config.quantization import FORMATS, UNQUANTIZED, QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.engine.weight_memory import check_weights_fit, weight_bytes
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.loader import load_model
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weights import expected_shapes
from fastdeploy.ops.registry import select_backend

DEMO = ModelConfig.from_pretrained(resolve_model_path("demo"))
MEBIBYTE = 1 << 20
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "dtype": "bfloat16",
}
SMALL_GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "dtype": "bfloat16",
}
SHAPES = Path(__file__).resolve().parents[2] / "benchmarks" / "shapes"
FEW = {
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
"""Changes under which a shape has little beside its attention, of which a layer of experts is needed."""
LARGE = replace(
    DEMO,
    path="large",
    num_layers=8,
    hidden_size=4096,
    intermediate_size=16384,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    monkeypatch.setattr(type(select_backend("cpu")), "free_memory_bytes", lambda self: int(num_bytes))


def refusal(config: ModelConfig, quantization: QuantizationConfig = UNQUANTIZED) -> str:
    with pytest.raises(ConfigError) as caught:
        check_weights_fit(config, quantization)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("format", [*FORMATS, {"attention": "wint8", "mlp": "wint4"}, {"head": "w8a8"}])
def test_bytes_are_those_of_the_loaded_weights(format: str | dict[str, str], is_tied: bool) -> None:
    select_backend("cpu")
    quantization, config = QuantizationConfig.from_value(format), replace(DEMO, tie_word_embeddings=is_tied)
    model = load_model(config, max_rows=16, max_model_len=64, load_choices="dummy", quantization=quantization)
    shapes = expected_shapes(config, find_architecture(config)).values()
    norm_bytes = sum(2 * shape[0] for shape in shapes if len(shape) == 1)
    sizes = weight_bytes(config, quantization)
    assert sum(sizes.values()) == model.num_weight_bytes + norm_bytes
    assert set(sizes) == {"mlp", "attention", "head", "other"} and sizes["mlp"] > sizes["attention"] > sizes["head"]


@pytest.mark.parametrize("format", ["none", "wint8", "wint4", {"attention": "wint4", "experts": "w8a8"}])
def test_bytes_of_experts_are_those_of_the_loaded_ones(format: str | dict[str, str]) -> None:
    select_backend("cpu")
    quantization, config = QuantizationConfig.from_value(format), parse_model_config(SMALL_GLM, {})
    model = load_model(config, max_rows=16, max_model_len=64, load_choices="dummy", quantization=quantization)
    shapes = expected_shapes(config, find_architecture(config)).values()
    vector_bytes = sum(2 * shape[0] for shape in shapes if len(shape) == 1)
    gate_bytes = 2 * 2 * 16 * 256  # of two layers; they are counted as bfloat16, and generated as float32
    sizes = weight_bytes(config, quantization)
    assert sum(sizes.values()) == model.num_weight_bytes + vector_bytes - gate_bytes
    scales = 256 // 32 * 2 + 4  # of groups, and the factor
    num_bytes = {"none": 2 * 256, "wint8": 256 + 4, "wint4": 256 // 2 + scales}.get(str(format), 256 + scales)
    assert sizes["experts"] == 2 * 16 * 3 * 256 * num_bytes


@pytest.mark.parametrize("format", ["none", "wint8", {"attention": "wint4", "head": "w8a8"}, {"attention": "w4a8_min"}])
@pytest.mark.parametrize("shape", ["deepseek-v2-lite", "glm-4.7-flash"])
def test_the_two_parts_of_an_up_projection_are_counted_as_they_are_packed(
    shape: str, format: str | dict[str, str]
) -> None:
    select_backend("cpu")
    raw = json.loads((SHAPES / shape / "config.json").read_text()) | FEW
    quantization, config = QuantizationConfig.from_value(format), parse_model_config(raw, {})
    model = load_model(config, max_rows=16, max_model_len=64, load_choices="dummy", quantization=quantization)
    shapes, (of_gate, hidden) = expected_shapes(config, find_architecture(config)), (16, 2048)
    vector_bytes = sum(2 * shape[0] for shape in shapes.values() if len(shape) == 1)
    gate_bytes = 4 * of_gate * hidden  # in float32, and filled up to a panel
    sizes = weight_bytes(config, quantization)
    assert sum(sizes.values()) == model.num_weight_bytes + vector_bytes - gate_bytes + 2 * 8 * hidden
    streamed = sizes["attention"] + sizes["mlp"] + sizes["head"] + sizes["experts"] // 4
    assert model.num_streamed_bytes == streamed + gate_bytes


def test_deepseek_v2_lite_takes_what_the_index_of_its_released_files_says(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.loads((SHAPES / "deepseek-v2-lite" / "config.json").read_text())
    config = replace(parse_model_config(raw, {}), path="v2-lite")
    assert sum(weight_bytes(config, UNQUANTIZED).values()) == 31_412_968_448
    free(monkeypatch, 12 * 2**30)
    message = refusal(config)
    assert "the weights take 29.26 GiB, and 12.00 GiB are free: --quantization wint4_min fits (" in message
    assert "bfloat16: 29.26 GiB = experts 26.81, mlp 0.96, attention 0.69, head 0.39, other 0.40; " in message


def test_refusal_of_a_model_with_experts_names_their_bytes_and_four_bits_for_all_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(parse_model_config(QWEN3_30B, {}), path="qwen3")
    free(monkeypatch, 18 * 2**30)
    four_bits = '--quantization \'{"attention": "wint4", "mlp": "wint4", "experts": "wint4", "head": "wint8"}\''
    assert refusal(config) == (
        "model: qwen3: the weights take 56.87 GiB, and 18.00 GiB are free: --quantization wint4 fits ("
        "bfloat16: 56.87 GiB = experts 54.00, attention 1.69, head 0.58, other 0.60; "
        "--quantization wint8: 28.82 GiB = experts 27.08, attention 0.85, head 0.29, other 0.60; "
        "--quantization wint4_min: 18.70 GiB = experts 16.96, attention 0.85, head 0.29, other 0.60; "
        "--quantization wint4: 17.01 GiB = experts 15.27, attention 0.85, head 0.29, other 0.60; "
        f"{four_bits}: 16.64 GiB = experts 15.27, attention 0.48, head 0.29, other 0.60)"
    )
    free(monkeypatch, 16.8 * 2**30)
    assert f"{four_bits} fits (" in refusal(config)


def test_refusal_names_the_bytes_of_each_format_and_the_first_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1.1 * 2**30)
    assert refusal(LARGE) == (
        "model: large: the weights take 3.66 GiB, and 1.10 GiB are free: --quantization wint4 fits ("
        "bfloat16: 3.66 GiB = mlp 3.00, attention 0.62, head 0.03; "
        "--quantization wint8: 1.86 GiB = mlp 1.50, attention 0.31, head 0.02, other 0.03; "
        "--quantization wint4_min: 1.18 GiB = mlp 0.94, attention 0.20, head 0.02, other 0.03; "
        "--quantization wint4: 1.07 GiB = mlp 0.84, attention 0.18, head 0.02, other 0.03)"
    )
    free(monkeypatch, 3 * 2**30)
    assert ": --quantization wint8 fits (" in refusal(LARGE)
    free(monkeypatch, 0.9 * 2**30)
    assert ": no format fits (" in refusal(LARGE)
    free(monkeypatch, 4 * 2**30)
    check_weights_fit(LARGE, UNQUANTIZED)


def test_refusal_lists_only_formats_that_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**30)
    message = refusal(LARGE, QuantizationConfig.from_value({"attention": "wint8", "mlp": "wint8"}))
    assert "(attention wint8, mlp wint8, head none: 1.85 GiB = " in message
    assert "--quantization wint4: 1.07 GiB" in message and "wint8: 1.86" not in message and "bfloat16" not in message


def test_formats_of_config_json_count_if_no_flag_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1.5 * 2**30)
    config = replace(LARGE, quantization=QuantizationConfig.from_value("wint8"))
    assert "1.86 GiB, and 1.50 GiB are free: --quantization wint4_min fits (wint8: 1.86 GiB" in refusal(config)
    check_weights_fit(config, QuantizationConfig.from_value("wint4"))


def test_packed_weights_have_to_be_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1.5 * 2**30)
    formats = QuantizationConfig.from_value("wint8").for_model(has_experts=False)
    header = PackedHeader("", "bfloat16", formats, "", 0, 0, (), UNQUANTIZED, {})
    message = refusal(replace(LARGE, quantization=formats, packed=header))
    assert ": fastdeploy quantize with --quantization wint4_min fits (wint8: 1.86 GiB" in message


def test_float32_weights_are_offered_as_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 5 * 2**30)
    message = refusal(replace(LARGE, dtype="float32"))
    assert ": --dtype bfloat16 --quantization none fits (float32: 7.31 GiB" in message
    assert "; --dtype bfloat16 --quantization wint8: 1.86 GiB = " in message


def test_engine_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 20 * MEBIBYTE)
    with pytest.raises(ConfigError, match=r"the weights take 0.02 GiB.* --quantization wint8 fits"):
        make_engine(EngineConfig(model="demo"))
