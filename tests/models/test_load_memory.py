# SPDX-License-Identifier: Apache-2.0
"""Loading experts takes the memory of the packed weights, not that of the files as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import paddle
from safetensors.paddle import save_file

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weights import expected_shapes
from tests.models.model_driver import GOLDEN

MIB = 1 << 20
SIZES = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 3}
LOAD = """
import sys
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.loader import load_model
from fastdeploy.ops.registry import selected_backend

def kib(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

config = ModelConfig.from_pretrained(sys.argv[1])
selected_backend()
before = kib("VmRSS")
model = load_model(config, max_rows=16, max_model_len=64)
print("ADDED", kib("VmHWM") - before, model.num_weight_bytes // 1024)
"""


def write_model(folder: Path) -> None:
    """Write a checkpoint of about 100 MiB, most of it experts."""
    raw = json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text()) | SIZES
    (folder / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_pretrained(folder)
    shapes = expected_shapes(config, find_architecture(config))
    tensors = {name: paddle.full(list(shape), 0.01, "bfloat16") for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_the_peak_of_loading_is_far_below_two_copies_of_the_experts(tmp_path: Path) -> None:
    write_model(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], check=True, capture_output=True, text=True, timeout=120
    )
    added, weights = (int(value) * 1024 for value in done.stdout.split("ADDED")[1].split())
    assert weights > 96 * MIB
    assert added < 1.5 * weights
