# SPDX-License-Identifier: Apache-2.0
"""Unsupported checkpoints are refused with one line that names the folder and the format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.foreign_formats import find_quantization, with_quantization_file
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.refused_methods import REFUSED_METHODS
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.loader import load_model
from fastdeploy.models.weight_source import SafetensorsSource
from tests.models.model_driver import GOLDEN, MAX_MODEL_LEN


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(ModelConfig.from_pretrained(folder), max_rows=64, max_model_len=MAX_MODEL_LEN)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


def folder_with(tmp_path: Path, files: list[str], **config: Any) -> Path:
    """Make a folder with the config.json of a good checkpoint, changed, and empty files or folders."""
    raw = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **config}))
    for file in files:
        if file.endswith("/"):
            (tmp_path / file).mkdir()
        else:
            (tmp_path / file).write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["model.gguf"], "GGUF checkpoints are not supported"),
        (["pytorch_model.bin"], "PyTorch pickle (.bin) checkpoints are not supported"),
        (["consolidated.00.pth"], "PyTorch pickle (.pth)"),
        (["model.pt"], "PyTorch pickle (.pt)"),
        (["model_state.pdparams"], "Paddle pickle (.pdparams)"),
        (["model.pdmodel", "model.pdiparams"], "Paddle inference program (.pdiparams)"),
        (["model.onnx"], "ONNX"),
        (["tf_model.h5"], "TensorFlow (.h5)"),
        (["flax_model.msgpack"], "Flax (.msgpack)"),
        (["rank0.engine"], "TensorRT engine (.engine)"),
        (["rank_0/"], "sharded for tensor parallelism (rank_0/)"),
        (["adapter_config.json", "adapter_model.safetensors"], "is a LoRA adapter (adapter_config.json)"),
        (["lora_config.json", "lora_model_state.pdparams"], "is a LoRA adapter (lora_config.json)"),
        (
            ["hf_quant_config.json"],
            "is quantized with ModelOpt (hf_quant_config.json), which is not supported; use plain weights with "
            "--quantization w8a8",
        ),
        (
            ["quant_model_description.json"],
            "is quantized with msmodelslim (quant_model_description.json), which is not supported; use plain weights",
        ),
        (["quant_model_description_w8a8_dynamic.json"], "is quantized with msmodelslim"),
        (["a.safetensors", "b.safetensors"], "contains 2 safetensors files but no model.safetensors.index.json"),
        ([], "contains no *.safetensors"),
    ],
)
def test_files_of_unsupported_formats_are_refused(tmp_path: Path, files: list[str], message: str) -> None:
    assert message in refusal(folder_with(tmp_path, files))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 3}}, "AWQ with 3 bits is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "GPTQ without bits is not supported"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups: expected a scheme"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "config_groups: expected a scheme"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized with 'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "gguf"}}, "quantized with 'gguf'"),
        ({"quantization_config": {"quant_method": "brand-new"}}, "quantized with 'brand-new'"),
        ({"quantization_config": {"quantization": "wint2"}}, "quantized with 'wint2'"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
            "compressed-tensors of format 'nvfp4-pack-quantized' is not supported; expected plain weights",
        ),
        (
            {"quantization_config": {"quantization": "mix_quant", "is_moe_quantized": True}},
            "quantized with 'mix_quant' (offline by FastDeploy: is_moe_quantized)",
        ),
        (
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 2}},
            "'Qwen2_5_VLForConditionalGeneration' is multimodal (vision_config), which is not supported (supported: ",
        ),
        (
            {"architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "clip"},
            "is multimodal (mm_vision_tower), which is not supported",
        ),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "does not generate text"),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported (supported: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, ",
        ),
        ({"architectures": None}, "None is not supported (supported: LlamaForCausalLM"),
    ],
)
def test_unsupported_configurations_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    assert message in refusal(folder_with(tmp_path, ["model.safetensors"], **config))


INSTEAD_OF = {
    "ascend": "plain weights with --quantization w8a8",
    "bitnet": "a GGUF file of type TQ1_0 or TQ2_0",
    "bitsandbytes": "plain weights with --quantization wint8 or wint4",
    "fbgemm_fp8": "plain weights with --quantization w8a8, or FP8 with a scale per block or output",
    "modelopt": "plain weights with --quantization w8a8, or FP8 with a scale per block or output",
    "mxfp4": "a GGUF file of type MXFP4, or plain weights with --quantization wint4",
    "quanto": "plain weights with --quantization wint8 or wint4",
    "torchao": "plain weights with --quantization wint8 or wint4",
    **{method: "plain weights with --quantization wint8 or w8a8" for method in ("eetq", "experts_int8")},
    **{
        method: "plain weights with --quantization wint4 or w4a8, or weights in AWQ, GPTQ or GGUF"
        for method in ("aqlm", "exl2", "exl3", "higgs", "hqq", "modelopt_fp4", "nvfp4", "sinq", "spqr", "vptq")
    },
}


@pytest.mark.parametrize("method", REFUSED_METHODS)
def test_every_other_method_is_refused_by_its_name_as_config_json_and_as_a_flag(method: str, tmp_path: Path) -> None:
    instead = f"'{method}' are not supported; use {INSTEAD_OF.get(method, REFUSED_METHODS[method])}"
    folder = folder_with(tmp_path, ["model.safetensors"], quantization_config={"quant_method": method})
    assert f"{folder}/config.json: checkpoints quantized with {instead}" in refusal(folder)
    with pytest.raises(ConfigError, match=f"^quantization: '{method}' is not supported; use ") as caught:
        QuantizationConfig.from_value(method)
    assert str(caught.value).endswith(REFUSED_METHODS[method])
    assert set(INSTEAD_OF) <= set(REFUSED_METHODS)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"load_in_8bit": True}, "'bitsandbytes' are not supported; use plain weights with --quantization wint8"),
        ({"_load_in_4bit": True, "load_in_4bit": True, "quant_method": "bitsandbytes"}, "'bitsandbytes' are not"),
        ({"quant_method": "intel/auto-round"}, "'intel/auto-round' are not supported; use plain weights, which"),
        ({"quantization": "wint4", "is_quantized": True}, "'wint4' (offline by FastDeploy: is_quantized) are not"),
        ({"quantization": "block_wise_fp8"}, "'block_wise_fp8' are not supported; use plain weights, which"),
    ],
)
def test_methods_are_told_by_other_keys_too(quantization: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(folder_with(tmp_path, ["model.safetensors"], quantization_config=quantization))


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("quantize_config.json", {"bits": 4}, {"quant_method": "gptq", "bits": 4}),
        ("quantize_config.json", {"quant_method": "x", "bits": 4}, {"quant_method": "x", "bits": 4}),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 128, "version": "GEMM"},
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"},
        ),
        (
            "quantize_config.json",
            {"w_bit": 4, "zero_point": True},
            {"quant_method": "awq", "w_bit": 4, "zero_point": True},
        ),
        ("quant_config.json", {}, None),
    ],
)
def test_older_files_say_what_quantization_config_would(
    file: str, content: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    assert find_quantization(with_quantization_file({"x": 1}, tmp_path)) == expected
    own = {"quantization_config": {"quant_method": "fp8"}}
    assert with_quantization_file(own, tmp_path) == own
    (tmp_path / file).write_text("{")
    with pytest.raises(ConfigError, match=file):
        with_quantization_file({}, tmp_path)


def test_an_older_file_is_named_and_does_not_refuse_a_folder(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "qwen3", tmp_path, dirs_exist_ok=True)
    (tmp_path / "quant_config.json").write_text("{}")
    load_model(ModelConfig.from_pretrained(tmp_path), max_rows=64, max_model_len=MAX_MODEL_LEN)
    (tmp_path / "quantize_config.json").write_text('{"quant_method": "hqq"}')
    assert f"{tmp_path}/quantize_config.json: checkpoints quantized with 'hqq' are" in refusal(tmp_path)


def test_an_older_file_tells_how_weights_are_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "fp8" / "qwen3", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(ModelConfig.from_pretrained(tmp_path), max_rows=64, max_model_len=MAX_MODEL_LEN)
    assert model.config.quantization_method == "fp8"


INDEXED = "needs latent attention with an indexer (index_topk), which is not supported"
LINEAR = "needs linear attention, which is not supported"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("DeepseekV32ForCausalLM", f"{INDEXED}; DeepSeek-V3.1 (DeepseekV3ForCausalLM) runs instead (supported: "),
        ("DeepseekV4ForCausalLM", "needs compressed sparse attention and hyper-connections"),
        ("Ernie4_5_VLMoeForConditionalGeneration", "needs images and experts for each modality"),
        ("Ernie4_5_VLForConditionalGeneration", "needs images and experts for each modality"),
        ("GlmMoeDsaForCausalLM", INDEXED),
        ("GptOssForCausalLM", "needs attention sinks, experts with biases and MXFP4 weights"),
        ("Llama4ForCausalLM", "needs attention in chunks and layers without rotary embedding"),
        ("Llama4ForConditionalGeneration", "needs attention in chunks and layers without rotary embedding"),
        ("MiniMaxText01ForCausalLM", LINEAR),
        ("MiniMaxM1ForCausalLM", LINEAR),
        ("MiniMaxM2ForCausalLM", "needs query and key norms over all heads"),
        ("Qwen3NextForCausalLM", LINEAR),
        ("Qwen3_5MoeForConditionalGeneration", LINEAR),
        ("Qwen3_5MoeForCausalLM", LINEAR),
    ],
)
def test_mixtures_of_experts_that_are_not_supported_say_what_is_missing(
    tmp_path: Path, name: str, missing: str
) -> None:
    files = {"architectures": [name], "quantization_config": {"quant_method": "fp8"}, "vision_config": {"depth": 2}}
    assert f"architectures: {tmp_path}/config.json: '{name}' {missing}" in refusal(folder_with(tmp_path, [], **files))


def test_kimi_k2_is_told_from_deepseek_by_its_model_type(tmp_path: Path) -> None:
    message = refusal(folder_with(tmp_path, [], architectures=["DeepseekV3ForCausalLM"], model_type="kimi_k2"))
    assert "'DeepseekV3ForCausalLM' of model_type 'kimi_k2' needs a tokenizer other than its tiktoken.model" in message


def test_an_adapter_without_config_json_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is a LoRA adapter" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("key", "neutral"), [("alibi", False), ("use_long_sequence_strategies", False), ("use_rmsnorm", True)]
)
def test_settings_that_only_paddle_checkpoints_have_are_refused_by_key(tmp_path: Path, key: str, neutral: bool) -> None:
    ModelConfig.from_pretrained(folder_with(tmp_path, [], **{key: neutral}))
    with pytest.raises(ConfigError, match=f"^{key}: .*config.json: only {neutral} is supported, got {not neutral}"):
        ModelConfig.from_pretrained(folder_with(tmp_path, [], **{key: not neutral}))


def sharded(tmp_path: Path, edit_index: dict[str, str | None]) -> Path:
    """Copy a sharded checkpoint; None takes a tensor out of the index."""
    shutil.copytree(GOLDEN / "paddlenlp_llama", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    for name, shard in edit_index.items():
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    file.write_text(json.dumps(index))
    return tmp_path


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path, {"llama.norm.weight": "model-9.safetensors"})
    assert "names files that do not exist: model-9.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    "edit_index",
    [
        {"llama.norm.weight": None},
        {"llama.x.weight": "model-00001-of-00004.safetensors"},
        {"llama.norm.weight": "model-00001-of-00004.safetensors"},
    ],
)
def test_an_index_only_tells_the_files(tmp_path: Path, edit_index: dict[str, str | None]) -> None:
    folder = sharded(tmp_path, edit_index)
    found = SafetensorsSource(folder).shapes
    assert found == SafetensorsSource(GOLDEN / "paddlenlp_llama").shapes and "llama.norm.weight" in found


@pytest.mark.parametrize("golden", ["paddlenlp_llama", "llama_rope_llama3"])
def test_a_missing_shard_is_named_in_both_layouts(tmp_path: Path, golden: str) -> None:
    shutil.copytree(GOLDEN / golden, tmp_path, dirs_exist_ok=True)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"names files that do not exist: {shard.name}" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/outside.safetensors", "x" * 5000])
def test_an_index_cannot_name_files_outside_of_its_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "outside.safetensors").touch()
    shutil.copytree(GOLDEN / "paddlenlp_llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    assert f"names files that do not exist: {file[:120]}" in refusal(tmp_path / "model")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a"]}'])
def test_a_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    shutil.copytree(GOLDEN / "paddlenlp_llama", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "cannot read" in refusal(tmp_path)


def test_a_long_list_of_names_is_truncated_and_says_how_many_are_left_out(tmp_path: Path) -> None:
    raw = json.loads((GOLDEN / "paddlenlp_llama_rope_linear" / "config.json").read_text())
    shutil.copy(GOLDEN / "paddlenlp_llama_rope_linear" / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 6}))
    with pytest.raises(ConfigError) as caught:
        load_model(ModelConfig.from_pretrained(tmp_path), max_rows=64, max_model_len=MAX_MODEL_LEN)
    message = caught.value.message
    assert "36 missing (llama.layers.2.input_layernorm.weight, " in message and ", and 12 more)" in message
