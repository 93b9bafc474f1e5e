# SPDX-License-Identifier: Apache-2.0
"""The weights of GGUF files as a model holds them, by the names of their layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.gguf.folder import gguf_folder
from fastdeploy.models.experts_part import ExpertsPart, ExpertsWeights
from fastdeploy.models.gguf_source import GGUFSource
from fastdeploy.models.loader import open_source
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weights import DecoderWeights, load_weights
from fastdeploy.ops.experts import PackedExperts
from fastdeploy.ops.linear import PackedLinear

Packed = tuple[list[str], PackedLinear]  # the names of the weights from which it is packed


Formats = str | Mapping[str, str]  # "": those of the file


def formats(wanted: Formats) -> QuantizationConfig:
    """Return weight formats."""
    return QuantizationConfig.from_value(wanted) if wanted else UNQUANTIZED


def config_of(path: Path, **options: Any) -> ModelConfig:
    """Return the configuration of a file, with bfloat16 unless the options of `from_pretrained` say something else."""
    return ModelConfig.from_pretrained(gguf_folder(path), **{"dtype": "bfloat16", **options})


def source_of(config: ModelConfig) -> GGUFSource:
    source, _ = open_source(config, find_architecture(config), "default_v1", seed=0)
    assert isinstance(source, GGUFSource)
    return source


def weights_of(config: ModelConfig, quantization: Formats = "") -> DecoderWeights:
    """Load all weights in a format."""
    wanted = config.weight_formats(formats(quantization))
    return load_weights(config, find_architecture(config), source_of(config), quantization=wanted)


def packed_layers(weights: DecoderWeights, config: ModelConfig) -> Iterator[Packed]:
    """Yield the packed layers of the blocks; of experts each by itself."""
    for index, layer in enumerate(weights.layers):
        part = find_architecture(config).layer(config, index)
        found = [layer.attention.qkv, layer.attention.output]
        specs = [*part.attention.linears]
        if isinstance(layer.mlp, ExpertsWeights):
            assert isinstance(part.mlp, ExpertsPart)
            for of_experts, packed in ((part.mlp.gate_up, layer.mlp.gate_up), (part.mlp.down, layer.mlp.down)):
                specs, found = [*specs, *of_experts], [*found, *_each(packed)]
            specs, found = [*specs, *part.mlp.shared], [*found, *(layer.mlp.shared or ())]
        else:
            specs, found = [*specs, *part.mlp.linears], [*found, layer.mlp.gate_up, layer.mlp.down]
        yield from ((spec.weight_names, packed) for spec, packed in zip(specs, found, strict=True))


def _each(experts: PackedExperts) -> Iterator[PackedLinear]:
    """Yield the layer of each expert."""
    names = [field.name for field in fields(PackedExperts) if field.name not in ("data", "num_experts")]
    values = {name: getattr(experts, name) for name in names}
    for data in experts.data.reshape([experts.num_experts, -1]):
        yield PackedLinear(data=data.clone(), bias=None, **values)
