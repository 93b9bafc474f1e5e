# SPDX-License-Identifier: Apache-2.0
"""Refuses a model whose weights do not fit into the memory, before any of them is read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weight_report import bytes_by_name, weight_fates
from fastdeploy.models.weights import expected_shapes
from fastdeploy.ops.quantized_form import FORMS, NO_QUANTIZATION, PANEL
from fastdeploy.ops.registry import selected_backend

PARTS = ("experts", "mlp", "attention", "head", "other")
_FOUR_BITS = {"attention": "wint4", "mlp": "wint4", "experts": "wint4", "head": "wint8"}
_VALUE_BYTES = {"bfloat16": 2, "float32": 4}


def check_weights_fit(config: ModelConfig, quantization: QuantizationConfig) -> None:
    """Compare the bytes of the weights, which follow from config.json, with the free memory.

    Padding and buffers come on top, so that a model that passes may still not fit.

    Raises:
        ConfigError: the weights take more; names the bytes of each part in each format, and a format that fits.
    """
    free_bytes = selected_backend().free_memory_bytes()
    used = weight_bytes(config, quantization)
    if sum(used.values()) <= free_bytes:
        return
    smaller = {flags: sizes for flags, sizes in _candidates(config).items() if sum(sizes.values()) < sum(used.values())}
    fitting = next((flags for flags, sizes in smaller.items() if sum(sizes.values()) <= free_bytes), None)
    advice = fitting if config.packed is None else f"fastdeploy quantize with {fitting}"
    given = quantization if quantization.is_given else config.quantization
    sizes = {config.dtype if config.weight_formats(quantization).is_none else str(given): used, **smaller}
    raise ConfigError(
        "model",
        f"{config.name}: the weights take {_gib(sum(used.values()))} GiB, and {_gib(free_bytes)} GiB are free: "
        f"{'no format fits' if fitting is None else f'{advice} fits'} "
        f"({'; '.join(f'{name}: {_describe(size)}' for name, size in sizes.items())})",
    )


def _candidates(config: ModelConfig) -> dict[str, Mapping[str, int]]:
    """Return flags that choose formats -> the bytes of each part with them, beginning with the most exact format."""
    # w8a8, w4a8 and w4a8_min take about the same memory as wint8, wint4 and wint4_min.
    names = "none", "wint8", "wint4_min", "wint4"
    formats: dict[str, str | dict[str, str]] = {f"--quantization {name}": name for name in names}
    if config.has_experts:
        formats[f"--quantization '{json.dumps(_FOUR_BITS)}'"] = _FOUR_BITS
    narrow = replace(config, dtype="bfloat16", packed=None)
    dtype = "" if config.dtype == "bfloat16" else "--dtype bfloat16 "
    return {
        f"{dtype}{flag}": weight_bytes(narrow, QuantizationConfig.from_value(value)) for flag, value in formats.items()
    }


def weight_bytes(config: ModelConfig, quantization: QuantizationConfig) -> Mapping[str, int]:
    """Return the bytes of each of PARTS, without padding; `other` has the embedding, the norms, biases and routers.

    Args:
        quantization: weight formats; those of config.json if none are given.
    """
    quantization = config.weight_formats(quantization)
    if config.packed is not None and config.own_codes:
        return Counter(other=config.packed.decoder_bytes)
    architecture = find_architecture(config)
    shapes, names = expected_shapes(config, architecture), architecture.names
    head = f"{names.head}.weight"
    formats = {
        "experts": quantization.experts or NO_QUANTIZATION,
        "mlp": quantization.mlp,
        "attention": quantization.attention,
        "head": quantization.head,
        "other": NO_QUANTIZATION,
    }
    known = _bytes_of_codes(config, quantization)
    if config.tie_word_embeddings:  # one table serves both, unless only the head is quantized, or quantized anew
        is_shared = head not in known if known else quantization.head == NO_QUANTIZATION
        table = shapes.pop(names.embedding) if is_shared else shapes[names.embedding]
        shapes, known = {**shapes, head: table}, {head: known.get(names.embedding, 0), **known}
    sizes, splits, value_bytes = Counter[str](), _splits(config, architecture), _VALUE_BYTES[config.dtype]
    for name, shape in shapes.items():
        part = "head" if name == head else _part(name, shape)
        matrices = splits.get(name, (shape,))
        sizes[part] += known.get(name) or sum(_tensor_bytes(each, formats[part], value_bytes) for each in matrices)
    return sizes


def _splits(config: ModelConfig, architecture: Architecture) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Return the shapes of the matrices into which weights are split before they are packed, by their names."""
    layers = (architecture.layer(config, index) for index in range(config.num_layers))
    specs = (spec for layer in layers for spec in layer.attention.linears if spec.split)
    return {name: spec.split for spec in specs for name in spec.weight_names}


def _bytes_of_codes(config: ModelConfig, formats: QuantizationConfig) -> Mapping[str, int]:
    """Return the bytes of each weight of a GGUF file; nothing for other checkpoints, whose formats tell the bytes."""
    if not config.own_codes or config.packed is not None:
        return {}
    return bytes_by_name(weight_fates(config, formats))


def _part(name: str, shape: tuple[int, ...]) -> str:
    """Return the part to which a tensor belongs, by the names of modules in the layout of Hugging Face."""
    modules = name.split(".")
    if len(shape) < 2 or modules[-1] != "weight" or modules[-2] == "gate":
        return "other"
    named = {"experts": "experts", "mlp": "mlp", "self_attn": "attention"}
    return next((part for module, part in named.items() if module in modules), "other")


def _tensor_bytes(shape: tuple[int, ...], quantization: str, value_bytes: int) -> int:
    if quantization == NO_QUANTIZATION:
        return prod(shape) * value_bytes
    num_outputs, num_inputs = shape
    return -(-num_outputs * FORMS[quantization].panel_bytes(num_inputs) // PANEL)


def _describe(sizes: Mapping[str, int]) -> str:
    parts = ", ".join(f"{part} {_gib(sizes[part])}" for part in PARTS if sizes[part] >= 0.005 * 2**30)
    return f"{_gib(sum(sizes.values()))} GiB = {parts}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
