# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in FP8, as they are under tests/golden/fp8 and changed, and copies of them with widened weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from safetensors import safe_open
from safetensors.paddle import save_file

from fastdeploy.models.files import open_files
from tests.models.model_driver import GOLDEN

FP8_GOLDEN = GOLDEN / "fp8"
NAMES = ("qwen3", "qwen3_per_output", "glm4_moe")
Tensors = dict[str, paddle.Tensor]
EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def read_tensors(folder: Path) -> Tensors:
    with safe_open(folder / "model.safetensors", framework="paddle") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def changed(
    name: str, folder: Path, edit: Callable[[Tensors], None] = lambda tensors: None, **quantization: Any
) -> Path:
    """Write a folder of tests/golden/fp8 with changed tensors and keys of quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((FP8_GOLDEN / name / "config.json").read_text())
    config["quantization_config"] |= quantization
    (folder / "config.json").write_text(json.dumps(config))
    tensors = read_tensors(FP8_GOLDEN / name)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def widened(source: Path, folder: Path, dtype: str = "bfloat16") -> Path:
    """Write the checkpoint as one that is not quantized."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.npz"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    files = open_files(source, dtype)  # type: ignore[arg-type]
    save_file({name: files.read(name).clone() for name in files.shapes}, folder / "model.safetensors", {"format": "pt"})
    return folder


def stack_experts(tensors: Tensors) -> None:
    """Store all experts of a layer and projection as one tensor."""
    for prefix in {name.split("experts.0.")[0] + "experts." for name in tensors if "mlp.experts.0." in name}:
        for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for end in ("", "_scale_inv"):
                rows = [
                    np.concatenate([_bits(tensors.pop(f"{prefix}{expert}.{part}.weight{end}")) for part in parts])
                    for expert in range(4)
                ]
                stacked = paddle.to_tensor(np.stack(rows))
                tensors[f"{prefix}{fused}{end}"] = stacked if end else stacked.view(paddle.float8_e4m3fn)


def _bits(tensor: paddle.Tensor) -> Any:
    return (tensor.view(paddle.uint8) if tensor.dtype == paddle.float8_e4m3fn else tensor).numpy()


def set_code(name: str, code: int) -> Callable[[Tensors], None]:
    """Set one code of a weight."""

    def edit(tensors: Tensors) -> None:
        bits = _bits(tensors[name]).copy()
        bits[-1, -1] = code
        tensors[name] = paddle.to_tensor(bits).view(paddle.float8_e4m3fn)

    return edit


def set_scale(name: str, value: float) -> Callable[[Tensors], None]:
    """Set one scale of a weight."""

    def edit(tensors: Tensors) -> None:
        tensors[f"{name}_scale_inv"][-1, -1] = value

    return edit
