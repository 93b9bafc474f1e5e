# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints of tests/golden/compressed_tensors, and what their tensors are by the format's definition."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.models.loader import open_source
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weights import DecoderWeights, load_weights

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "compressed_tensors"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {"F8_E4M3": "<u1", "I8": "<i1", "I32": "<i4", "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4"}


@dataclass
class StoredTensor:
    """A tensor as a safetensors file holds it.

    Attributes:
        kind: as safetensors spells the type.
        values: bfloat16 and FP8 as unsigned integers.
    """

    kind: str
    values: NDArray[Any]

    def floats(self) -> NDArray[np.float32]:
        if self.kind == "BF16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)


Tensors = dict[str, StoredTensor]


def read_tensors(folder: Path) -> Tensors:
    """Return the tensors of a checkpoint's only file."""
    content = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        values = np.frombuffer(content[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = StoredTensor(entry["dtype"], values.copy())
    return tensors


def write_tensors(folder: Path, tensors: Tensors) -> None:
    """Write tensors, whose types need not be those of their values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        content = tensor.values.tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": tensor.kind, "shape": list(tensor.values.shape), "data_offsets": offsets}
        data += content
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def copy_of(name: str, folder: Path, change: Callable[[Tensors, dict[str, Any]], None]) -> Path:
    """Return a copy of a checkpoint after a change of its tensors and of its quantization_config."""
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    tensors, config = read_tensors(folder), json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    write_tensors(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Defined:
    """What the tensors of a module stand for.

    Attributes:
        codes: [out, in], from -8 or -128 on.
        scales: [out, groups].
        zeros: as scales.
        groups: [in], the group of each input.
    """

    codes: NDArray[np.int64]
    scales: NDArray[np.float32]
    zeros: NDArray[np.int64]
    groups: NDArray[np.int64]

    def values(self) -> NDArray[np.float32]:
        """Return the weights: differences are exact, products are rounded to float32."""
        differences = (self.codes - self.zeros[:, self.groups]).astype(np.float32)
        return differences * self.scales[:, self.groups]


def unpacked(words: NDArray[Any], bits: int, count: int) -> NDArray[np.int64]:
    """Return the first codes of each row of words, the first code in the lowest bits."""
    places = np.arange(0, 32, bits)
    codes = words.astype(np.uint32)[..., None].astype(np.int64) >> places & (1 << bits) - 1
    return codes.reshape(*words.shape[:-1], -1)[..., :count] - (1 << bits - 1)


def define(tensors: Tensors, module: str, bits: int) -> Defined:
    """Return what the tensors of a module stand for, given the bits of its codes."""
    scales = tensors[f"{module}.weight_scale"].floats()
    if packed := tensors.get(f"{module}.weight_packed"):
        outputs, inputs = tensors[f"{module}.weight_shape"].values
        codes = unpacked(packed.values, bits, inputs)
    else:
        codes = tensors[f"{module}.weight"].values.astype(np.int64)
        outputs, inputs = codes.shape
    scales = np.broadcast_to(scales.reshape(-1, scales.shape[-1]), (outputs, scales.shape[-1]))
    zeros = np.zeros(scales.shape, np.int64)
    if stored := tensors.get(f"{module}.weight_zero_point"):
        zeros = unpacked(stored.values.T, bits, outputs).T if stored.kind == "I32" else stored.values.astype(np.int64)
    order = tensors.get(f"{module}.weight_g_idx")
    is_ordered = order is not None and (order.values >= 0).all()
    groups = order.values if order is not None and is_ordered else np.arange(inputs) * scales.shape[1] // inputs
    assert prod(codes.shape) == outputs * inputs
    return Defined(codes, scales, zeros, groups.astype(np.int64))


def coded_modules(tensors: Tensors) -> list[str]:
    """Return the names of the modules with codes, in order."""
    return sorted(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale"))


def config_of(folder: Path, **options: Any) -> ModelConfig:
    """Return the configuration of a folder, with bfloat16 unless the options say something else."""
    return ModelConfig.from_pretrained(folder, **{"dtype": "bfloat16", **options})


def source_of(folder: Path, **options: Any) -> Any:
    """Return the source of a checkpoint's weights."""
    config = config_of(folder, **options)
    return open_source(config, find_architecture(config), "default_v1", seed=0)[0]


def weights_of(
    folder: Path, quantization: str | Mapping[str, str] = "", **options: Any
) -> tuple[ModelConfig, DecoderWeights]:
    """Load all weights in a format, empty for that of the checkpoint."""
    config = config_of(folder, **options)
    wanted = QuantizationConfig.from_value(quantization) if quantization else UNQUANTIZED
    source, _ = open_source(config, find_architecture(config), "default_v1", seed=0)
    formats = config.weight_formats(wanted)
    return config, load_weights(config, find_architecture(config), source, quantization=formats)


def quantized(weight: StoredTensor, bits: int, size: int) -> Tensors:
    """Return the tensors of a weight as pack-quantized integers without zero points, by their last names.

    Args:
        size: inputs that share a scale; 0: all of an output.
    """
    values, largest = weight.floats(), (1 << bits - 1) - 1
    outputs, inputs = values.shape
    groups = values.reshape(outputs, -1, size or inputs)
    scales = np.maximum(np.abs(groups).max(-1) / np.float32(largest), 1e-6).astype(np.float16)
    codes = np.rint(groups / scales.astype(np.float32)[..., None]).clip(-largest - 1, largest).astype(np.int64)
    per_word = 32 // bits
    stored = np.zeros((outputs, -(-inputs // per_word) * per_word), np.int64)
    stored[:, :inputs] = codes.reshape(outputs, inputs) + largest + 1
    places = np.arange(0, 32, bits)
    words = (stored.reshape(outputs, -1, per_word) << places).sum(-1).astype(np.uint32).view(np.int32)
    return {
        "weight_packed": StoredTensor("I32", words),
        "weight_scale": StoredTensor("F16", scales),
        "weight_shape": StoredTensor("I64", np.array([outputs, inputs])),
    }
