# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with latent attention whose linear layers are stored as codes, made from plain ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from tests.models.awq_gptq_files import AWQ_ORDER, packed
from tests.models.compressed_tensors_files import StoredTensor, Tensors, quantized, read_tensors, write_tensors
from tests.models.latent_forms import write_form

LINEAR = re.compile(r"model\.layers\..*_(proj|with_mqa)\.weight")
SIZE = 32  # inputs that share a scale
SIZES: dict[str, int] = {
    **{"q_lora_rank": 136, "kv_lora_rank": 160, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 40},
    **{"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
}
"""Of attention 176 = 1.4 x 128 latent values, 192 and 288 outputs; of the experts, few, of which none is near a tie."""
Parts = Mapping[str, StoredTensor]  # the tensors of a module, by the last parts of their names


def _fp8(values: NDArray[np.float32], block: tuple[int, int]) -> tuple[StoredTensor, StoredTensor]:
    """Return codes and a scale per block."""
    height, width = block
    rows, columns = -(-values.shape[0] // height), -(-values.shape[1] // width)
    scales = np.empty((rows, columns), np.float32)
    wide = np.empty_like(values)
    for row in range(rows):
        for column in range(columns):
            place = np.s_[row * height : (row + 1) * height, column * width : (column + 1) * width]
            scales[row, column] = np.abs(values[place]).max() / 448
            wide[place] = values[place] / scales[row, column]
    codes = paddle.to_tensor(wide).astype("float8_e4m3fn").view(paddle.uint8).numpy()
    return StoredTensor("F8_E4M3", codes), StoredTensor("F32", scales)


def fp8_blocks(weight: StoredTensor) -> Parts:
    codes, scales = _fp8(weight.floats(), (128, 128))
    return {"weight": codes, "weight_scale_inv": scales}


def fp8_outputs(weight: StoredTensor) -> Parts:
    codes, scales = _fp8(weight.floats(), (1, weight.values.shape[1]))
    return {"weight": codes, "weight_scale": scales}


def four_bits(weight: StoredTensor) -> Parts:
    return quantized(weight, 4, SIZE)


def _grouped(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float16]]:
    """Return codes of four bits [in, out], zeros and scales [groups, out]."""
    groups = values.T.reshape(-1, SIZE, len(values))
    low, high = groups.min(1), groups.max(1)
    scales = np.maximum((high - low) / 15, 1e-4).astype(np.float16)
    zeros = np.rint(-low / scales).clip(0, 15).astype(np.int64)
    codes = np.rint(groups / scales[:, None].astype(np.float32)) + zeros[:, None]
    return codes.clip(0, 15).astype(np.int64).reshape(-1, len(values)), zeros, scales


def awq(weight: StoredTensor) -> Parts:
    codes, zeros, scales = _grouped(weight.floats())
    return {
        "qweight": StoredTensor("I32", packed(codes, 4, AWQ_ORDER)),
        "qzeros": StoredTensor("I32", packed(zeros, 4, AWQ_ORDER)),
        "scales": StoredTensor("F16", scales),
    }


def gptq(weight: StoredTensor) -> Parts:
    codes, zeros, scales = _grouped(weight.floats())
    return {
        "qweight": StoredTensor("I32", np.ascontiguousarray(packed(codes.T, 4).T)),
        "qzeros": StoredTensor("I32", packed(zeros, 4)),
        "scales": StoredTensor("F16", scales),
        "g_idx": StoredTensor("I32", (np.arange(len(codes)) // SIZE).astype(np.int32)),
    }


_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": SIZE, "strategy": "group"}}
_FLOATS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
_COMPRESSED = {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mlp\\.gate$"]}
METHODS: Mapping[str, tuple[Callable[[StoredTensor], Parts], dict[str, Any]]] = {
    "fp8": (fp8_blocks, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "fp8 per output": (
        fp8_outputs,
        {**_COMPRESSED, "format": "float-quantized", "config_groups": {"group_0": _FLOATS}},
    ),
    "compressed-tensors": (
        four_bits,
        {**_COMPRESSED, "format": "pack-quantized", "config_groups": {"group_0": _GROUP}},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": SIZE, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "desc_act": False, "sym": False}),
}
"""What makes the tensors of a module from its weight, and `quantization_config`, by the name of a method."""


def write_plain(folder: Path) -> Path:
    """Write a checkpoint in bfloat16 with a layer for multi-token prediction, all of whose experts are chosen.

    Blocks of 128 x 128 end within all weights of its attention, and groups of 32 inputs end with the inputs of the
    up-projection. The layer repeats the block of the last one.
    """
    write_form(folder, "groups of V3", **SIZES)
    tensors = read_tensors(folder)
    last, layer = (f"model.layers.{index}." for index in (1, 2))
    tensors |= {name.replace(last, layer): tensor for name, tensor in tensors.items() if name.startswith(last)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}{name}.weight"] = tensors[f"{last}input_layernorm.weight"]
    halves = [tensors[f"{last}self_attn.o_proj.weight"].values[:, begin : begin + 32] for begin in (0, 32)]
    tensors[f"{layer}eh_proj.weight"] = StoredTensor("BF16", np.concatenate(halves, axis=1))
    write_tensors(folder, tensors)
    return folder


def write_codes(source: Path, folder: Path, method: str, plain: str = "$^") -> Path:
    """Write a checkpoint with the codes of a method in all linear layers whose inputs are whole groups.

    Args:
        source: a plain checkpoint in one file.
        plain: regular expression that the names of weights match which stay plain.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.npz"))
    encode, quantization = METHODS[method]
    tensors: Tensors = {}
    for name, tensor in read_tensors(source).items():
        takes = method.startswith("fp8") or (tensor.values.ndim == 2 and tensor.values.shape[1] % SIZE == 0)
        if takes and LINEAR.fullmatch(name) and not re.search(plain, name):
            parts = encode(tensor)
            tensors |= {f"{name.removesuffix('weight')}{part}": stored for part, stored in parts.items()}
        else:
            tensors[name] = tensor
    write_tensors(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder
