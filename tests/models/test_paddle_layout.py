# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in Paddle layout: how they are detected, and how their tensors are converted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import Tensor
from safetensors.paddle import load_file, save_file

from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.loader import load_model
from fastdeploy.models.paddle_layout import PaddleSource
from fastdeploy.models.registry import ARCHITECTURES, find_architecture
from fastdeploy.models.weights import expected_shapes
from tests.models.model_driver import GOLDEN, MAX_MODEL_LEN, Driver, Logits, load_golden

TOKENS = list(range(20))
Tensors = dict[str, Tensor]


@dataclass
class TensorsInMemory:
    """A WeightSource."""

    tensors: Tensors
    shapes: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def small_config(architecture: str, num_heads: int, num_kv_heads: int) -> ModelConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 20, "head_dim": 4}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    return parse_model_config({"architectures": [architecture], "use_bias": True, **sizes, **heads}, {})


def random_tensors(config: ModelConfig) -> Tensors:
    generator = np.random.default_rng(0)
    shapes = expected_shapes(config, find_architecture(config))
    return {name: paddle.to_tensor(generator.random(shape, np.float32)) for name, shape in shapes.items()}


def grouped(parts: list[Tensor], num_groups: int) -> Tensor:
    """Fuse along the last axis: for each group a share of every part."""
    lead = parts[0].shape[:-1]
    shares = [part.reshape([*lead, num_groups, -1]) for part in parts]
    return paddle.concat(shares, -1).reshape([*lead, -1])


def as_paddle_writes_it(tensors: Tensors, prefix: str, fused: dict[str, tuple[list[str], int]]) -> Tensors:
    """Transpose linear layers, put `prefix` for `model`, and fuse name -> (parts, number of groups)."""
    stored = {
        name.replace("model.", f"{prefix}.", 1): (
            tensor.t().contiguous() if tensor.ndim == 2 and "embed" not in name else tensor
        )
        for name, tensor in tensors.items()
    }
    for name in list(stored):
        module, _, last = name.rpartition(".")
        module, _, linear = module.rpartition(".")
        for fused_name, (parts, num_groups) in fused.items():
            if linear == parts[0]:
                pieces = [stored.pop(f"{module}.{part}.{last}") for part in parts]
                stored[f"{module}.{fused_name}.{last}"] = grouped(pieces, num_groups)
    return stored


QKV, GATE_UP = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]


@pytest.mark.parametrize(
    ("architecture", "heads", "prefix", "fused"),
    [
        ("LlamaForCausalLM", (4, 2), "llama", {}),
        ("LlamaForCausalLM", (4, 2), "model", {}),
        ("LlamaForCausalLM", (4, 2), "llama", {"qkv_proj": (QKV, 2), "gate_up_fused_proj": (GATE_UP, 1)}),
        ("LlamaForCausalLM", (4, 4), "llama", {"qkv_proj": (QKV, 4)}),
        ("Qwen2ForCausalLM", (6, 3), "qwen2", {"qkv_proj": (QKV, 3)}),
        ("Qwen3ForCausalLM", (4, 2), "qwen3", {}),
        ("Ernie4_5ForCausalLM", (4, 2), "ernie", {}),
        ("Ernie4_5ForCausalLM", (4, 2), "ernie", {"qkv_proj": (QKV, 1), "up_gate_proj": (GATE_UP, 1)}),
        ("Ernie4_5ForCausalLM", (4, 4), "ernie", {"qkv_proj": (QKV, 4), "up_gate_proj": (GATE_UP, 1)}),
    ],
)
def test_renamed_transposed_and_fused_tensors_are_read(
    architecture: str, heads: tuple[int, int], prefix: str, fused: dict[str, tuple[list[str], int]]
) -> None:
    config = small_config(architecture, *heads)
    tensors = random_tensors(config)
    stored = TensorsInMemory(as_paddle_writes_it(tensors, prefix, fused))
    found = PaddleSource(stored, config, ARCHITECTURES[architecture], "a test")
    assert found.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found.read(name).numpy(), tensor.numpy(), err_msg=name)


def test_missing_and_wrongly_shaped_tensors_are_reported_by_their_names_in_the_files() -> None:
    config = small_config("Ernie4_5ForCausalLM", 4, 2)
    stored = as_paddle_writes_it(random_tensors(config), "ernie", {"qkv_proj": (QKV, 1)})
    del stored["ernie.norm.weight"]
    stored["ernie.layers.1.self_attn.qkv_proj.weight"] = paddle.zeros([16, 31])
    with pytest.raises(ConfigError) as caught:
        PaddleSource(TensorsInMemory(stored), config, ARCHITECTURES["Ernie4_5ForCausalLM"], "a test")
    assert "1 missing (ernie.norm.weight)" in caught.value.message
    assert "ernie.layers.1.self_attn.qkv_proj.weight is [16, 31], expected [16, 32]" in caught.value.message


def test_an_ernie_checkpoint_gives_the_same_logits_in_paddle_and_torch_layout(
    tmp_path: Path,
) -> None:
    config = json.loads((GOLDEN / "ernie4_5" / "config.json").read_text())
    del config["transformers_version"], config["torch_dtype"]
    released = {**config, "architectures": ["Ernie4_5_ForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(released))
    tensors = load_file(GOLDEN / "ernie4_5" / "model.safetensors")
    fused = {"qkv_proj": (QKV, 1), "up_gate_proj": (GATE_UP, 1)}
    save_file(as_paddle_writes_it(tensors, "ernie", fused), tmp_path / "model.safetensors", {"format": "np"})
    np.testing.assert_array_equal(logits_of(tmp_path), Driver(load_golden("ernie4_5", "bfloat16")).run_alone(TOKENS))


@pytest.mark.parametrize("has_transposed_routers", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_routers_are_read_in_either_layout(tmp_path: Path, name: str, has_transposed_routers: bool) -> None:
    tensors = load_file(GOLDEN / name / "model.safetensors")
    stored = as_paddle_writes_it(tensors, "model", {})
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert routers and all(len(set(tensors[router].shape)) == 2 for router in routers), "no router is square"
    if not has_transposed_routers:
        stored |= {router: tensors[router] for router in routers}
    config = json.loads((GOLDEN / name / "config.json").read_text())
    np.testing.assert_array_equal(logits_of(write(tmp_path, config, stored, "np")), logits_of(GOLDEN / name))


def logits_of(path: Path) -> Logits:
    model = load_model(ModelConfig.from_pretrained(path), max_rows=64, max_model_len=MAX_MODEL_LEN)
    return Driver(model).run_alone(TOKENS)


def write(folder: Path, config: dict[str, Any], tensors: Tensors, header_format: str | None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": header_format} if header_format else None)
    return folder


def no_change(_config: dict[str, Any], _tensors: Tensors) -> None:
    pass


def without_marks(config: dict[str, Any], tensors: Tensors) -> None:
    del config["paddlenlp_version"]
    for name in list(tensors):
        tensors[name.replace("qwen2.", "model.", 1)] = tensors.pop(name)


def with_version_only(config: dict[str, Any], tensors: Tensors) -> None:
    without_marks(config, tensors)
    config["paddlenlp_version"] = "3.0.0b4"
    config["transformers_version"] = "4.52.4"  # copied from the original checkpoint


@pytest.mark.parametrize(
    ("header_format", "edit"),
    [("np", without_marks), ("pd", without_marks), (None, no_change), (None, with_version_only)],
)
def test_one_piece_of_evidence_is_enough_if_all_matrices_are_square(
    tmp_path: Path, header_format: str | None, edit: Callable[[dict[str, Any], Tensors], None]
) -> None:
    golden = GOLDEN / "paddlenlp_qwen2_square"
    config, tensors = json.loads((golden / "config.json").read_text()), load_file(golden / "model.safetensors")
    edit(config, tensors)
    found = logits_of(write(tmp_path, config, tensors, header_format))
    np.testing.assert_array_equal(found, logits_of(golden))


def test_square_matrices_without_evidence_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = GOLDEN / "paddlenlp_qwen2_square"
    config, tensors = json.loads((golden / "config.json").read_text()), load_file(golden / "model.safetensors")
    without_marks(config, tensors)
    folder = write(tmp_path, config, tensors, None)
    with pytest.raises(ConfigError, match=r"cannot tell whether.*FD_FOR_TORCH_MODEL_FORMAT=1"):
        logits_of(folder)
    monkeypatch.setenv("FD_FOR_TORCH_MODEL_FORMAT", "1")
    as_torch = logits_of(folder)
    assert (as_torch != logits_of_paddle(golden, monkeypatch)).mean() > 0.9, "both layouts give the same logits"


def logits_of_paddle(golden: Path, monkeypatch: pytest.MonkeyPatch) -> Logits:
    monkeypatch.delenv("FD_FOR_TORCH_MODEL_FORMAT")
    return logits_of(golden)


def test_shapes_decide_if_there_is_no_other_evidence(tmp_path: Path) -> None:
    golden = GOLDEN / "paddlenlp_llama_rope_linear"
    config, tensors = json.loads((golden / "config.json").read_text()), load_file(golden / "model.safetensors")
    del config["paddlenlp_version"]
    renamed = {name.replace("llama.", "model.", 1): tensor for name, tensor in tensors.items()}
    np.testing.assert_array_equal(logits_of(write(tmp_path, config, renamed, None)), logits_of(golden))


def test_a_torch_header_overrides_config_json_and_shapes_must_agree(tmp_path: Path) -> None:
    golden = GOLDEN / "paddlenlp_llama_rope_linear"
    config, tensors = json.loads((golden / "config.json").read_text()), load_file(golden / "model.safetensors")
    renamed = {name.replace("llama.", "model.", 1): tensor for name, tensor in tensors.items()}
    with pytest.raises(ConfigError, match=r"transposed, contrary to the layout \(.* format 'pt'"):
        logits_of(write(tmp_path, config, renamed, "pt"))


def test_a_numpy_header_on_torch_layout_is_refused_and_the_error_names_the_variable_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = GOLDEN / "qwen3"
    config, tensors = json.loads((golden / "config.json").read_text()), load_file(golden / "model.safetensors")
    folder = write(tmp_path, config, tensors, "np")
    with pytest.raises(
        ConfigError, match=r"transposed, contrary .* format 'np'; FD_FOR_TORCH_MODEL_FORMAT=1 selects torch"
    ):
        logits_of(folder)
    monkeypatch.setenv("FD_FOR_TORCH_MODEL_FORMAT", "1")
    np.testing.assert_array_equal(logits_of(folder), logits_of(golden))


def test_shards_that_name_different_formats_are_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "paddlenlp_llama", tmp_path, dirs_exist_ok=True)
    shard = tmp_path / "model-00002-of-00004.safetensors"
    save_file(load_file(shard), shard, {"format": "pt"})
    with pytest.raises(ConfigError, match="different formats"):
        logits_of(tmp_path)


@pytest.mark.parametrize("golden", ["paddlenlp_qwen2_fused", "paddlenlp_llama_rope_linear"])
def test_files_may_change_after_the_model_is_loaded(tmp_path: Path, golden: str) -> None:
    shutil.copytree(GOLDEN / golden, tmp_path, dirs_exist_ok=True)
    model = load_model(ModelConfig.from_pretrained(tmp_path), max_rows=64, max_model_len=MAX_MODEL_LEN)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert np.isfinite(Driver(model).run_alone(TOKENS)).all()
