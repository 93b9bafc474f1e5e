# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint as a GGUF file, as llama.cpp's converter does: its names, types, shapes and order of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from gguf_blocks import encode
from gguf_metadata import write_metadata, write_tokenizer


@dataclass(frozen=True)
class File:
    """One file to write.

    Attributes:
        name: of the file.
        family: `general.architecture`.
        kinds: types of its matrices, one after the other.
        config: keys of config.json beside those that all files have.
        table: type of the embedding, where it differs.
        tokenizer: as `write_tokenizer` takes it.
        extra: further metadata.
    """

    name: str
    family: str
    kinds: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    tokenizer: str = "llama-bpe"
    extra: dict[str, Any] = field(default_factory=dict)


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows of q or k in the order of interleaved pairs, as files of llama have them."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo `permute`."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def num_permuted_heads(file: File, name: str, config: Any) -> int | None:
    """Return the heads of a tensor whose rows are permuted, or None."""
    if file.family != "llama" or not any(f"{part}_proj." in name for part in "qk"):
        return None
    return int(config.num_attention_heads if "q_proj." in name else config.num_key_value_heads)


def grouped(tensors: dict[str, np.ndarray]) -> Iterator[list[str]]:
    """Yield the names of a checkpoint's tensors, those of all experts of a layer together."""
    for name in tensors:
        if ".experts.0." in name:
            names = (name.replace(".experts.0.", f".experts.{index}.") for index in range(len(tensors)))
            yield [other for other in names if other in tensors]
        elif ".mlp.experts." not in name:
            yield [name]


def gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    """Return the name in the file, as the converter finds it."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(".experts.0.", ".experts.")
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def kind_of(name: str, shape: tuple[int, ...], wanted: str) -> str:
    """Return the type of a tensor: float32 for norms, biases and routers; another one if rows are no whole blocks."""
    if len(shape) == 1 or not name.endswith(".weight") or "_norm" in name or "ffn_gate_inp" in name:
        return "F32"
    if shape[-1] % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[wanted]][0] == 0:
        return wanted
    fallback = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}.get(wanted, "IQ4_NL")
    return fallback if shape[-1] % 32 == 0 else "F16"


class Converter:
    """Writes one file, and collects what its tensors are once they are dequantized."""

    def __init__(self, file: File, path: Path, config: Any, num_blocks: int, seed: int) -> None:
        self.file, self.config = file, config
        architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == file.family)
        self.names = gguf.get_tensor_name_map(architecture, num_blocks)
        self.writer = gguf.GGUFWriter(path, file.family)
        self.rng = np.random.default_rng(seed)
        self.dequantized: dict[str, np.ndarray] = {}

    def add(self, names: list[str], values: np.ndarray, wanted: str) -> str:
        """Write a tensor of the checkpoint, or all experts of a layer, of which `names` are in order.

        Returns:
            its type, which is another one than `wanted` if that does not fit.
        """
        name, heads = gguf_name(self.names, names[0]), num_permuted_heads(self.file, names[0], self.config)
        kind = GGMLQuantizationType[kind_of(name, values.shape, wanted)]
        stored = permute(values, heads) if heads else values
        data = encode(stored, kind, self.rng)
        self.writer.add_tensor(name, data, raw_dtype=kind)
        found = np.asarray(quants.dequantize(data, kind), np.float32).reshape(values.shape)
        found = unpermute(found, heads) if heads else found
        for index, of_checkpoint in enumerate(names):
            self.dequantized[of_checkpoint] = found[index] if len(names) > 1 else found
        return str(kind.name)

    def finish(self) -> None:
        """Write the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def llama3_factors(config: Any) -> np.ndarray | None:
    """Return rope_freqs of the converter for rope type llama3: what divides each inverse frequency."""
    params = config.rope_parameters
    if params["rope_type"] != "llama3":
        return None
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    original, factor = params["original_max_position_embeddings"], params["factor"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    factors = []
    for frequency in 1.0 / (params["rope_theta"] ** exponents):
        rotations = original / (2 * math.pi / frequency)
        smooth = min(1.0, max(0.0, (rotations - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors, dtype=torch.float32).numpy()


def convert(file: File, path: Path, tensors: dict[str, np.ndarray], config: Any, kinds: list[str]) -> Converter:
    """Write a file from a checkpoint's tensors."""
    num_blocks = config.num_hidden_layers + (getattr(config, "num_nextn_predict_layers", 0) or 0)
    converter = Converter(file, path, config, num_blocks, seed=1)
    write_metadata(converter.writer, file.family, config, num_blocks)
    write_tokenizer(converter.writer, file.tokenizer, config)
    for key, value in file.extra.items():
        (converter.writer.add_uint32 if isinstance(value, int) else converter.writer.add_float32)(key, value)
    if (factors := llama3_factors(config)) is not None:
        converter.writer.add_tensor("rope_freqs.weight", factors)
    turn = cycle(kinds)
    wanted = next(turn)
    for names in grouped(tensors):
        values = np.stack([tensors[name] for name in names]) if len(names) > 1 else tensors[names[0]]
        if file.table and kinds == file.kinds and names[0] == "model.embed_tokens.weight":
            converter.add(names, values, file.table)
        elif converter.add(names, values, wanted) == wanted:
            wanted = next(turn)
    converter.finish()
    return converter
