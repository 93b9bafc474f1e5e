# SPDX-License-Identifier: Apache-2.0
"""A model loaded from FP8 equals transformers' on the dequantized weights, and one loaded from its widened copy."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.paddle import save_file

from fastdeploy.config.args import parse_serve_args
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import DType, ModelConfig
from fastdeploy.config.quantization import FORMATS, QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.description import weight_notes
from fastdeploy.engine.weight_memory import check_weights_fit, weight_bytes
from fastdeploy.entrypoints.cli.show_config import with_known_model
from fastdeploy.models import mtp
from fastdeploy.models.coded.fp8 import Fp8Module
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.files import open_files
from fastdeploy.models.finite import bits_of
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import load_mtp_layers
from fastdeploy.models.packing import pack_checkpoint
from fastdeploy.models.weight_report import weight_fates
from fastdeploy.models.weight_source import SafetensorsSource
from fastdeploy.ops.backends.cpu.backend import BACKEND
from tests.models.fp8_folders import (
    EXPERT,
    FP8_GOLDEN,
    NAMES,
    QUERY,
    Tensors,
    changed,
    read_tensors,
    stack_experts,
    widened,
)
from tests.models.gguf_weights import Formats, formats
from tests.models.model_driver import MAX_MODEL_LEN, MAX_ROWS, Driver, log_softmax
from tests.models.test_packed_weights import leaves
from tests.models.test_row_independence import assert_same_bits

EVERY_FORMAT: list[Formats] = ["", *FORMATS, "own", {"attention": "own", "head": "w8a8", "mlp": "wint4"}]
"""`own` stands for the name of the checkpoint's codes."""


def load(folder: Path, wanted: Formats = "", dtype: str = "auto", kv_cache_dtype: str = "auto") -> CausalLM:
    config = ModelConfig.from_pretrained(folder, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    return load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=formats(wanted))


def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(FP8_GOLDEN / name / "reference.npz") as values:
        return dict(values)


def logits_of(model: CausalLM) -> np.ndarray:
    tokens = reference("qwen3")["tokens"]
    return Driver(model).run_alone(tokens)


def folder_of(name: str, folder: Path) -> Path:
    return changed("glm4_moe", folder, stack_experts) if name == "stacked" else FP8_GOLDEN / name


@pytest.mark.parametrize("name", [*NAMES, "stacked"])
def test_logprobs_are_those_of_transformers_with_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    expected = reference("glm4_moe" if name == "stacked" else name)
    model = load(folder_of(name, tmp_path), dtype="float32")
    found = log_softmax(Driver(model).run_alone(expected["tokens"]))
    assert np.abs(found - expected["logprobs_float32"]).max() <= 1e-4


@pytest.mark.parametrize("name", [*NAMES, "stacked"])
def test_the_widened_weights_are_torchs(name: str, tmp_path: Path) -> None:
    expected = reference("glm4_moe" if name == "stacked" else name)
    files = open_files(folder_of(name, tmp_path), "bfloat16")
    tensors = {weight: files.read(weight) for weight in files.shapes}  # whose memory is digested
    digests = {
        f"digest.{weight}": hashlib.blake2b(bits_of(tensor).tobytes(), digest_size=8).hexdigest()
        for weight, tensor in tensors.items()
    }
    assert digests == {key: str(value) for key, value in expected.items() if key.startswith("digest.")}
    assert sum(files.kind(weight) == "F8_E4M3" for weight in files.shapes) >= 7


@pytest.mark.parametrize("wanted", EVERY_FORMAT, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_and_its_packed_folder_equal_the_widened_copy_bit_for_bit(
    name: str, wanted: Formats, tmp_path: Path
) -> None:
    own = "compressed-tensors" if name == "qwen3_per_output" else "fp8"
    copy, wanted = load(widened(FP8_GOLDEN / name, tmp_path / "wide"), with_own(wanted, "none")), with_own(wanted, own)
    model = load(FP8_GOLDEN / name, wanted)
    expected = logits_of(copy)
    assert_same_bits(logits_of(model), expected)
    assert (model.num_weight_bytes, model.forms) == (copy.num_weight_bytes, copy.forms)
    pack_checkpoint(ModelConfig.from_pretrained(FP8_GOLDEN / name), tmp_path / "packed", formats(wanted))
    assert_same_bits(logits_of(load(tmp_path / "packed")), expected)


def with_own(wanted: Formats, own: str) -> Formats:
    if isinstance(wanted, str):
        return own if wanted == "own" else wanted
    return {part: own if format == "own" else format for part, format in wanted.items()}


@pytest.mark.parametrize(("dtype", "cache"), [("float32", "auto"), ("bfloat16", "int8")])
@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes_and_caches_equal_the_widened_copy_bit_for_bit(
    name: str, dtype: DType, cache: str, tmp_path: Path
) -> None:
    copy = load(widened(FP8_GOLDEN / name, tmp_path / "wide", dtype), dtype=dtype, kv_cache_dtype=cache)
    model = load(FP8_GOLDEN / name, dtype=dtype, kv_cache_dtype=cache)
    assert_same_bits(logits_of(model), logits_of(copy))


@pytest.mark.parametrize("wanted", ["", "w8a8"])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_layers_for_drafts_equal_those_of_the_widened_copy_and_share_what_they_repeat(
    is_stacked: bool, wanted: Formats, tmp_path: Path, loaded: list[list[mtp.MTPWeights]]
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        for end in ("", "_scale_inv"):  # the target's head is plain, and the layer's is in FP8
            source = f"model.layers.1.mlp.shared_experts.gate_proj.weight{end}"
            tensors[f"model.layers.2.shared_head.head.weight{end}"] = tensors[source][:96].clone()
        if is_stacked:
            stack_experts(tensors)

    folder = changed("glm4_moe", tmp_path / "fp8", edit)
    for path in (folder, widened(folder, tmp_path / "wide")):
        config = ModelConfig.from_pretrained(path)
        requested = config.weight_formats(formats(wanted)).for_mtp_layers(config.dtype)
        (layer,) = load_mtp_layers(load(path, wanted), None, "default_v1", requested)
        assert layer.own_head is not None
    assert leaves(tuple(loaded[0])) == leaves(tuple(loaded[1]))
    assert loaded[0][0].embedding is None


def test_a_head_for_drafts_that_repeats_the_targets_widened_values_is_shared_in_float32(
    tmp_path: Path, loaded: list[list[mtp.MTPWeights]]
) -> None:
    name = "model.layers.2.shared_head.head.weight"

    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = paddle.ones([96, 40], "bfloat16")
        tensors[name] = paddle.full([96, 40], 0x38, "uint8").view(paddle.float8_e4m3fn)  # 1.0
        tensors[f"{name}_scale_inv"] = paddle.ones([1, 1])

    config = ModelConfig.from_pretrained(changed("glm4_moe", tmp_path, edit), dtype="float32")
    model = load(tmp_path, dtype="float32")
    (layer,) = load_mtp_layers(model, None, "default_v1", config.weight_formats(formats("")))
    assert layer.own_head is None


def test_fp8_is_served_in_bfloat16_if_config_json_names_no_dtype(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("lm_head.weight").astype("float32")

    folder = changed("glm4_moe", tmp_path, edit)
    text = (folder / "config.json").read_text().replace('"dtype": "bfloat16"', '"dtype": null')
    (folder / "config.json").write_text(text)
    assert ModelConfig.from_pretrained(folder).dtype == "bfloat16"


def test_a_start_says_what_bfloat16_takes_and_which_format_takes_less() -> None:
    model = ModelConfig.from_pretrained(FP8_GOLDEN / "qwen3")
    config = EngineConfig(model=str(FP8_GOLDEN / "qwen3"))
    widened_line = "weights of qwen3: widened: F8_E4M3 (0.2 MiB); plain: BF16 (0.0 MiB); "
    assert weight_notes(config, model) == [f"{widened_line}--quantization wint8 takes 0.1 MiB in all"]
    (note,) = weight_notes(replace(config, quantization=QuantizationConfig.from_value("w8a8")), model)
    assert "quantized anew: " in note and "--quantization" not in note
    assert weight_notes(replace(config, load_choices="dummy"), model) == []


def test_the_bytes_that_are_told_are_those_of_the_widened_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig.from_pretrained(FP8_GOLDEN / "glm4_moe")
    copy = ModelConfig.from_pretrained(widened(FP8_GOLDEN / "glm4_moe", tmp_path / "wide"))
    for wanted in EVERY_FORMAT:
        sizes = weight_bytes(model, formats(with_own(wanted, "fp8")))
        assert sizes == weight_bytes(copy, formats(with_own(wanted, "none")))
    num_bytes = sum(weight_bytes(model, formats("")).values())
    monkeypatch.setattr(type(BACKEND), "free_memory_bytes", lambda self: num_bytes - 1)
    with pytest.raises(ConfigError, match="--quantization wint8 fits"):
        check_weights_fit(model, formats(""))


def test_the_report_has_a_weight_for_every_expert_stacked_or_not(tmp_path: Path) -> None:
    configs = [ModelConfig.from_pretrained(folder_of(name, tmp_path)) for name in ("glm4_moe", "stacked")]
    of_experts, of_stacks = (weight_fates(config, config.weight_formats(formats("wint4"))) for config in configs)
    assert of_experts == of_stacks
    fates = {fate.name: (fate.kind, fate.what) for fate in of_experts}
    assert fates[EXPERT] == ("F8_E4M3", "quantized") and fates["lm_head.weight"] == ("BF16", "quantized")


def test_stacks_that_are_not_quantized_stay_plain_beside_fp8(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        stack_experts(tensors)
        for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
            codes, scales = tensors[name].astype("float32"), tensors.pop(f"{name}_scale_inv")
            blocks = scales.repeat_interleave(128, 1)[:, : codes.shape[1]].repeat_interleave(128, 2)
            tensors[name] = (codes * blocks[:, :, : codes.shape[2]]).astype("bfloat16")

    folder = changed("glm4_moe", tmp_path, edit)
    assert_same_bits(logits_of(load(folder)), logits_of(load(FP8_GOLDEN / "glm4_moe")))
    config = ModelConfig.from_pretrained(folder)
    kinds = {fate.name: fate.kind for fate in weight_fates(config, config.weight_formats(formats("")))}
    assert (kinds[EXPERT], kinds[QUERY]) == ("BF16", "F8_E4M3")


def test_a_configuration_that_is_printed_says_what_becomes_of_the_weights() -> None:
    args = with_known_model(parse_serve_args([str(FP8_GOLDEN / "qwen3"), "--quantization", "fp8"]))
    assert args.engine.quantization.to_value() == "fp8"
    assert "model.layers.*.mlp.down_proj.weight: 1 x F8_E4M3, widened, floating-point numbers" in args.notes


def test_static_scales_of_activations_are_not_used_which_a_note_says(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for name in ("mlp.up_proj.input_scale", "mlp.up_proj.activation_scale", "self_attn.k_scale"):
            tensors[f"model.layers.0.{name}"] = paddle.ones([1])

    folder = changed("qwen3", tmp_path, edit, activation_scheme="static")
    (note,) = ModelConfig.from_pretrained(folder).notes
    assert note == (
        f"{folder}: 3 static scales of activations or of cached keys and values are not used: "
        "model.layers.0.mlp.up_proj.activation_scale, model.layers.0.mlp.up_proj.input_scale, "
        "model.layers.0.self_attn.k_scale"
    )
    assert_same_bits(logits_of(load(folder)), logits_of(load(FP8_GOLDEN / "qwen3")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("is_vector", [False, True])
def test_a_scale_per_output_may_be_a_vector_of_any_float_type(dtype: str, is_vector: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    codes = random.integers(0, 0x7F, (48, 80), np.uint8)
    scales = paddle.to_tensor(random.random((48, 1), np.float32) + np.float32(0.1)).astype(dtype)
    weight = paddle.to_tensor(codes).view(paddle.float8_e4m3fn)
    stored = scales.reshape([-1]) if is_vector else scales
    save_file({"x.weight": weight, "x.weight_scale": stored}, tmp_path / "model.safetensors", {"format": "pt"})
    files = SafetensorsSource(tmp_path, is_quantized=True)
    module = Fp8Module(files, "x.weight", "x.weight_scale", None)
    found = module.widen(files, "bfloat16")
    expected = (weight.astype("float32") * scales.astype("float32")).astype("bfloat16")
    assert module.shape == (48, 80) and bool((found == expected).all())


def test_the_pages_of_codes_and_scales_are_given_back_once_no_weight_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    release = SafetensorsSource.release
    monkeypatch.setattr(SafetensorsSource, "release", lambda self, name: (released.append(name), release(self, name)))
    for name in ("qwen3", "stacked"):
        released.clear()
        folder = folder_of(name, tmp_path)
        load(folder)
        assert sorted(released) == sorted(name for name in read_tensors(folder) if "layers.2." not in name)
