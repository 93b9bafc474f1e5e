# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are loaded completely or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.paddle import load_file, save_file

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.packing import pack_checkpoint
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weight_source import DummySource, SafetensorsSource
from fastdeploy.models.weights import expected_shapes
from tests.models.model_driver import GOLDEN, MAX_MODEL_LEN, Driver, load_golden

Tensors = dict[str, paddle.Tensor]


def copy_of(name: str, folder: Path, edit: Callable[[Tensors], None]) -> Path:
    """Copy a single-file golden checkpoint with edited tensors."""
    shutil.copy(GOLDEN / name / "config.json", folder)
    tensors = load_file(GOLDEN / name / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(path: Path, **options: object) -> CausalLM:
    return load_model(ModelConfig.from_pretrained(path), max_rows=64, max_model_len=MAX_MODEL_LEN, **options)  # type: ignore[arg-type]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.bias"]

    message = refusal(copy_of("qwen2", tmp_path, drop))
    assert "2 missing (model.norm.weight, model.layers.1.self_attn.k_proj.bias)" in message


@pytest.mark.parametrize("size", [40, 0])
def test_unexpected_tensors_are_named(tmp_path: Path, size: int) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.o_proj.bias"] = paddle.zeros([size], "bfloat16")

    assert "1 unexpected (model.layers.0.self_attn.o_proj.bias)" in refusal(copy_of("qwen2", tmp_path, add))


def test_tensors_of_wrong_shape_are_named_with_both_shapes(tmp_path: Path) -> None:
    def shrink(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1]

    message = refusal(copy_of("qwen2", tmp_path, shrink))
    assert "1 of wrong shape (model.layers.0.mlp.up_proj.weight is [39, 40], expected [40, 40])" in message


def test_linear_layers_that_contradict_the_detected_layout_are_reported_as_transposed(tmp_path: Path) -> None:
    def transpose(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and "embed" not in name:
                tensors[name] = tensor.t().contiguous()

    message = refusal(copy_of("qwen3", tmp_path, transpose))
    assert message.endswith(
        "the linear layers are transposed, contrary to the layout (config.json has transformers_version)"
    )


@pytest.mark.parametrize(
    ("end", "dtype", "message"),
    [
        ("quant_weight", "int8", "weights quantized offline by FastDeploy"),
        ("weight_scale_inv", "float32", "weights in FP8 with a scale per block"),
        ("weight_packed", "int32", "weights quantized with compressed-tensors"),
        ("weight_scale", "float32", "weights quantized with a scale per tensor or channel"),
        ("qweight", "int32", "weights quantized with GPTQ or AWQ"),
    ],
)
def test_quantized_tensors_are_recognised_without_a_quantization_config(
    tmp_path: Path, end: str, dtype: str, message: str
) -> None:
    def quantize(tensors: Tensors) -> None:
        up = "model.layers.0.mlp.up_proj"
        tensors[f"{up}.{end}"] = tensors.pop(f"{up}.weight").astype(dtype)

    assert f"{message} (model.layers.0.mlp.up_proj.{end}) are not supported" in refusal(
        copy_of("qwen2", tmp_path, quantize)
    )


def test_tensors_of_unsupported_dtypes_are_refused(tmp_path: Path) -> None:
    def to_int8(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("int8")

    assert "model.norm.weight is stored as I8" in refusal(copy_of("qwen2", tmp_path, to_int8))


def test_tensors_that_the_decoder_does_not_need_are_ignored(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = paddle.zeros([8])
        tensors["model.layers.2.mlp.up_proj.weight"] = paddle.zeros([4, 4])
        tensors["model.mtp_block.0.mlp.up_proj.weight"] = paddle.zeros([4, 4])
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    tokens = list(range(20))
    folder = copy_of("ernie4_5", tmp_path, add)
    found = Driver(load(folder)).run_alone(tokens)
    expected = Driver(load_golden("ernie4_5", "bfloat16")).run_alone(tokens)
    np.testing.assert_array_equal(found, expected)
    unused = "model.layers.0.self_attn.rotary_emb.inv_freq, model.layers.2.mlp.up_proj.weight"
    assert ModelConfig.from_pretrained(folder).notes == (f"{folder}: 2 tensors are not used: {unused}",)


def own_head(tensors: Tensors) -> None:
    """Add a head that differs from the embedding in one value of its last row."""
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1.0
    tensors["lm_head.weight"] = head


@pytest.mark.parametrize("quantization", ["none", "wint8"])
def test_a_head_that_differs_from_the_embedding_counts_and_is_said_once(tmp_path: Path, quantization: str) -> None:
    tokens, formats = list(range(20)), QuantizationConfig.from_value(quantization)
    folder = copy_of("ernie4_5", tmp_path, own_head)
    config = ModelConfig.from_pretrained(folder)
    assert not config.tie_word_embeddings
    assert config.notes == (
        f"{folder}/model.safetensors: lm_head.weight is used, since it differs from the embedding, "
        "to which config.json ties it",
    )
    found = Driver(load(folder, quantization=formats)).run_alone(tokens)
    tied = Driver(load_golden("ernie4_5", "bfloat16", quantization)).run_alone(tokens)
    np.testing.assert_array_equal(found[:, :-1], tied[:, :-1])
    assert (found[:, -1] != tied[:, -1]).all(), "only the last token's row differs"


def test_a_head_that_counts_is_packed(tmp_path: Path) -> None:
    for name in ("model", "packed"):
        (tmp_path / name).mkdir()
    folder = copy_of("ernie4_5", tmp_path / "model", own_head)
    pack_checkpoint(ModelConfig.from_pretrained(folder), tmp_path / "packed", QuantizationConfig.from_value("wint8"))
    packed = load(tmp_path / "packed")
    plain = load(folder, quantization=QuantizationConfig.from_value("wint8"))
    np.testing.assert_array_equal(Driver(packed).run_alone([1, 2, 3]), Driver(plain).run_alone([1, 2, 3]))
    assert not packed.config.tie_word_embeddings


@pytest.mark.parametrize(("golden", "is_transposed"), [("ernie4_5_moe_paddle", True), ("ernie4_5_moe", False)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("differs", [False, True])
def test_heads_are_compared_in_both_layouts_and_across_dtypes(
    tmp_path: Path, golden: str, is_transposed: bool, dtype: str, differs: bool
) -> None:
    def add(tensors: Tensors) -> None:
        [embedding] = [tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight")]
        head = embedding.astype(dtype).clone()
        head[7, 3] += float(differs)
        tensors["lm_head.weight"] = head.t().contiguous() if is_transposed else head

    assert ModelConfig.from_pretrained(copy_of(golden, tmp_path, add)).tie_word_embeddings is not differs


def test_a_head_that_counts_in_paddle_layout_is_read_transposed(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        head = tensors["ernie.embed_tokens.weight"].clone()
        head[-1, -1] += 1.0
        tensors["lm_head.weight"] = head.t().contiguous()

    found = Driver(load(copy_of("ernie4_5_moe_paddle", tmp_path, add))).run_alone([1, 2, 3])
    tied = Driver(load(GOLDEN / "ernie4_5_moe_paddle")).run_alone([1, 2, 3])
    np.testing.assert_array_equal(found[:, :-1], tied[:, :-1])
    assert (found[:, -1] != tied[:, -1]).all()


@pytest.mark.parametrize("named", ["auto", None])
def test_a_dtype_that_config_json_does_not_name_is_that_of_the_files(tmp_path: Path, named: str | None) -> None:
    folder = copy_of("qwen3", tmp_path, lambda _tensors: None)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "dtype": named, "torch_dtype": None}))
    assert ModelConfig.from_pretrained(folder).dtype == "bfloat16"
    (folder / "model.safetensors").unlink()
    assert ModelConfig.from_pretrained(folder).dtype == "float32"


def test_files_may_change_after_the_model_is_loaded(tmp_path: Path) -> None:
    model = load(copy_of("llama_untied_bias", tmp_path, lambda _tensors: None))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert np.isfinite(Driver(model).run_alone([1, 2, 3])).all()


def test_shards_and_a_single_file_give_the_same_model(tmp_path: Path) -> None:
    sharded = GOLDEN / "llama_rope_llama3"
    tensors: Tensors = {}
    for shard in sorted(sharded.glob("*.safetensors")):
        tensors.update(load_file(shard))
    shutil.copy(sharded / "config.json", tmp_path)
    save_file(tensors, tmp_path / "weights.safetensors")
    tokens = list(range(20))
    np.testing.assert_array_equal(Driver(load(tmp_path)).run_alone(tokens), Driver(load(sharded)).run_alone(tokens))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "qwen3" / "config.json", tmp_path)
    data = (GOLDEN / "qwen3" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    assert "cannot read" in refusal(tmp_path)


def test_unknown_load_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="load_choices"):
        load(GOLDEN / "qwen3", load_choices="fast")


def test_a_context_beyond_the_sliding_window_is_refused() -> None:
    assert load_golden("qwen3", sliding_window=MAX_MODEL_LEN).max_model_len == MAX_MODEL_LEN
    with pytest.raises(ConfigError, match="sliding_window"):
        load_golden("qwen3", sliding_window=MAX_MODEL_LEN - 1)


def test_dummy_weights_need_no_files_and_depend_on_the_seed_only(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "qwen2" / "config.json", tmp_path)
    tokens = list(range(20))
    first, again, other = (
        Driver(load(tmp_path, load_choices="dummy", seed=seed)).run_alone(tokens) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.isfinite(first).all() and (first != other).mean() > 0.9


def test_dummy_tensors_do_not_depend_on_the_order_of_reading() -> None:
    config = ModelConfig.from_pretrained(GOLDEN / "qwen3")
    shapes = expected_shapes(config, find_architecture(config))
    forward, backward = DummySource(shapes, 5), DummySource(shapes, 5)
    tensors = {name: forward.read(name) for name in shapes}
    for name in reversed(shapes):
        np.testing.assert_array_equal(backward.read(name).numpy(), tensors[name].numpy())


def test_float16_checkpoints_run_in_bfloat16() -> None:
    config = ModelConfig.from_pretrained(GOLDEN / "llama_partial_rotary")
    assert config.dtype == "bfloat16"
    assert SafetensorsSource(GOLDEN / "llama_partial_rotary").read("model.norm.weight").dtype == paddle.float16
    assert np.isfinite(Driver(load(GOLDEN / "llama_partial_rotary")).run_alone([1, 2, 3])).all()


def test_progress_rises_to_one() -> None:
    seen: list[float] = []
    load(GOLDEN / "qwen2", on_progress=lambda _what, fraction: seen.append(fraction))
    assert seen == sorted(seen) and seen[0] > 0.0 and seen[-1] == 1.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tied_head_and_its_embedding_share_their_memory(dtype: str) -> None:
    model = load_golden("ernie4_5", dtype)
    assert model.config.tie_word_embeddings
    assert model._embedding.table is model._head.weight
    assert model.num_weight_bytes == model.num_streamed_bytes


def test_an_untied_embedding_has_memory_of_its_own() -> None:
    model = load_golden("llama_untied_bias", "bfloat16")
    assert model.num_weight_bytes - model.num_streamed_bytes == 2 * model.vocab_size * model.config.hidden_size
