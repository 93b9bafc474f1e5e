# SPDX-License-Identifier: Apache-2.0
"""Loading takes the memory of the packed weights and of one tensor, not that of the files as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import paddle
import pytest
from safetensors.paddle import save_file

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.gguf.folder import gguf_folder
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weights import expected_shapes
from tests.config.torch_writer import Stored, write_torch_file
from tests.gguf.files import Tensor, make_gguf, num_bytes
from tests.models.model_driver import GOLDEN

MIB = 1 << 20
SIZES = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 3}
LOAD = """
import sys
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.models.loader import load_model
from fastdeploy.ops.registry import selected_backend

def kib(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

config = ModelConfig.from_pretrained(sys.argv[1])
selected_backend()
before = kib("VmRSS")
formats = QuantizationConfig.from_value(sys.argv[2]) if sys.argv[2] else UNQUANTIZED
model = load_model(config, max_rows=16, max_model_len=64, quantization=formats)
print("ADDED", kib("VmHWM") - before, kib("VmRSS") - before, model.num_weight_bytes // 1024)
"""
READ_HEAD = """
import sys
from pathlib import Path
from fastdeploy.models.files import open_head_files
from fastdeploy.ops.registry import selected_backend

def kib(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

selected_backend()
before = kib("VmRSS")
source = open_head_files(Path(sys.argv[1]))
for name in list(source.shapes):
    for piece in source.pieces(name, "bfloat16"):
        assert piece.matrix.dtype.name == "BFLOAT16"
    del piece
    source.release(name)
print("ADDED", kib("VmHWM") - before, kib("VmRSS") - before)
"""
GGUF_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "none",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 512,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
OTHERS_MIB = 24  # buffers of the model, codes that are being packed, and what Python and Paddle allocate


def write_model(folder: Path) -> None:
    """Write a checkpoint of about 100 MiB, most of it experts."""
    raw = json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text()) | SIZES
    (folder / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_pretrained(folder)
    shapes = expected_shapes(config, find_architecture(config))
    tensors = {name: paddle.full(list(shape), 0.01, "bfloat16") for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_gguf(path: Path, vocab_size: int, width: int, table: str, layers: str) -> None:
    """Write a file of zeros in which the largest tensor is the embedding, which is tied.

    Args:
        width: of the feed-forward layers.
        table, layers: types of the embedding and of the layers.
    """
    metadata = GGUF_METADATA | {"llama.vocab_size": vocab_size, "llama.feed_forward_length": width}
    tensors: list[Tensor] = [("token_embd.weight", (vocab_size, 512), table), ("output_norm.weight", (512,), "F32")]
    matrices = {"attn_q": (512, 512), "attn_k": (256, 512), "attn_v": (256, 512), "attn_output": (512, 512)}
    matrices |= {"ffn_gate": (width, 512), "ffn_up": (width, 512), "ffn_down": (512, width)}
    for block in (0, 1):
        tensors += [(f"blk.{block}.{name}.weight", shape, layers) for name, shape in matrices.items()]
        tensors += [(f"blk.{block}.{name}_norm.weight", (512,), "F32") for name in ("attn", "ffn")]
    path.write_bytes(make_gguf(metadata, tensors))


def write_fp8_model(folder: Path) -> None:
    """Write the checkpoint of `write_model` with linear layers in FP8."""
    raw = json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text()) | SIZES
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_pretrained(folder)
    tensors = {}
    for name, shape in expected_shapes(config, find_architecture(config)).items():
        if name.endswith("_proj.weight"):
            tensors[name] = paddle.full(list(shape), 0x38, "uint8").view(paddle.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = paddle.full([-(-size // 128) for size in shape], 0.01)
        else:
            tensors[name] = paddle.full(list(shape), 0.01, "bfloat16")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_word_model(folder: Path, method: str) -> None:
    """Write the checkpoint of `write_model` with linear layers of four bits in AWQ's or GPTQ's layout."""
    raw = json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text()) | SIZES
    quantization = {"quant_method": method, "bits": 4, "group_size": 128}
    raw["quantization_config"] = quantization | (
        {"version": "gemm", "zero_point": True} if method == "awq" else {"desc_act": False, "sym": False}
    )
    (folder / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_pretrained(folder)
    tensors = {}
    for name, (outputs, *inputs) in expected_shapes(config, find_architecture(config)).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = paddle.full([outputs, *inputs], 0.01, "bfloat16")
            continue
        module, width = name.removesuffix(".weight"), inputs[0]
        num_groups = -(-width // 128)
        words = [width, outputs // 8] if method == "awq" else [width // 8, outputs]
        tensors[f"{module}.qweight"] = paddle.full(words, 0x12345678, "int32")
        tensors[f"{module}.qzeros"] = paddle.full([num_groups, outputs // 8], 0x12345678, "int32")
        tensors[f"{module}.scales"] = paddle.full([num_groups, outputs], 0.01, "float16")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def added_by_loading(folder: Path, quantization: str = "") -> tuple[int, int, int]:
    """Return the bytes by which memory grew at most and in the end, and those of the packed weights.

    Args:
        quantization: a format for all parts; those of the checkpoint if it is empty.
    """
    arguments = [sys.executable, "-c", LOAD, str(folder), quantization]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
    peak, kept, weights = (int(value) * 1024 for value in done.stdout.split("ADDED")[1].split())
    return peak, kept, weights


def test_the_peak_of_loading_is_far_below_two_copies_of_the_experts(tmp_path: Path) -> None:
    write_model(tmp_path)
    peak, _, weights = added_by_loading(tmp_path)
    assert weights > 96 * MIB
    assert peak < 1.5 * weights


@pytest.mark.parametrize(
    ("vocab_size", "width", "table", "layers"),
    [(100_000, 1024, "Q6_K", "Q4_1"), (50_000, 6144, "BF16", "BF16")],
    ids=["codes", "plain values"],
)
def test_a_gguf_file_is_loaded_with_the_packed_weights_and_the_pages_of_one_tensor_in_memory(
    vocab_size: int, width: int, table: str, layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_gguf(tmp_path / "model.gguf", vocab_size, width, table, layers)
    peak, kept, weights = added_by_loading(gguf_folder(tmp_path / "model.gguf"))
    pages = num_bytes((vocab_size, 512), table)
    assert weights > pages
    assert peak < weights + pages + OTHERS_MIB * MIB
    assert kept < weights + OTHERS_MIB * MIB


@pytest.mark.parametrize(("quantization", "weights_mib"), [("none", 96), ("wint8", 48)])
def test_fp8_is_loaded_with_the_packed_weights_and_less_than_a_layer_of_the_files_in_memory(
    quantization: str, weights_mib: int, tmp_path: Path
) -> None:
    write_fp8_model(tmp_path)  # 48 MiB of codes in layers of 16
    peak, kept, weights = added_by_loading(tmp_path, quantization)
    assert weights > weights_mib * MIB
    assert peak < weights + OTHERS_MIB * MIB
    assert kept < weights + OTHERS_MIB * MIB


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_codes_in_words_are_loaded_with_the_packed_weights_and_less_than_a_layer_of_the_files_in_memory(
    method: str, tmp_path: Path
) -> None:
    write_word_model(tmp_path, method)
    peak, kept, weights = added_by_loading(tmp_path)
    assert 24 * MIB < weights < 32 * MIB
    assert peak < weights + OTHERS_MIB * MIB
    assert kept < weights + OTHERS_MIB * MIB


def test_a_draft_head_in_a_pytorch_file_is_read_with_the_pages_of_one_tensor_in_memory(tmp_path: Path) -> None:
    shapes = {f"layers.{index}.x": (6144, 4096) for index in range(4)}  # 48 MiB each
    write_torch_file(tmp_path / "x.bin", {name: Stored("BF16", shape) for name, shape in shapes.items()})
    arguments = [sys.executable, "-c", READ_HEAD, str(tmp_path)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
    peak, kept = (int(value) / 1024 for value in done.stdout.split("ADDED")[1].split())
    assert 48 < peak < 48 + OTHERS_MIB
    assert kept < OTHERS_MIB
