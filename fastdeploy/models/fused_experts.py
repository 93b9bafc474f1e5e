# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in torch layout that store all experts of a layer fused, as modules of transformers 5 hold them.

`mlp.experts.gate_up_proj` is [experts, 2 * width, in], each expert's gate before its up; `mlp.experts.down_proj` is
[experts, out, width].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paddle import Tensor

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.experts_part import ExpertsPart
from fastdeploy.models.layer_parts import LayerParts
from fastdeploy.models.paddle_layout import Stored, StoredSource
from fastdeploy.models.weight_loader import LinearSpec
from fastdeploy.models.weight_source import StoredTensors, WeightSource
from fastdeploy.models.weights import check_shapes, expected_shapes


@dataclass(frozen=True)
class StoredExpert(Stored):
    """One weight of one expert: rows [begin, end) of a matrix of the fused tensor."""

    expert: int = 0

    def read(self, source: WeightSource) -> Tensor:
        """Return a copy of the weight."""
        return source.read(self.name)[self.expert, self.begin : self.end]


class FusedExpertsSource(StoredSource):
    """The tensors of a checkpoint with fused experts, by the names of each expert's weights."""

    def __init__(self, source: StoredTensors, config: ModelConfig, architecture: Architecture, layout: str) -> None:
        """Find the experts, without reading any.

        Args:
            layout: how torch layout was detected, for error messages.

        Raises:
            ConfigError: tensors are missing, unexpected or of a wrong shape; the message has their names in the files.
        """
        shapes = expected_shapes(config, architecture)
        layers = [architecture.layer(config, index) for index in range(config.num_layers)]
        stored = {name: Stored(name, shape) for name, shape in shapes.items()}
        super().__init__(source, shapes, {**stored, **dict(stored_experts(source, layers))})
        check_shapes(source.shapes, self.stored_shapes, config, architecture, layout)


def has_fused_experts(source: WeightSource) -> bool:
    """Return whether the experts of a layer are fused."""
    return any(name.endswith(".mlp.experts.gate_up_proj") for name in source.shapes)


def stored_experts(source: WeightSource, layers: Iterable[LayerParts]) -> Iterator[tuple[str, Stored]]:
    """Yield the weights of the experts in layers that the files store fused."""
    for experts in (layer.mlp for layer in layers if isinstance(layer.mlp, ExpertsPart)):
        for fused, specs in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down)):
            if f"{experts.prefix}experts.{fused}" in source.shapes:
                yield from _parts_of(f"{experts.prefix}experts.{fused}", specs)


def _parts_of(fused: str, specs: list[LinearSpec]) -> Iterator[tuple[str, Stored]]:
    num_rows = sum(part.out_features for part in specs[0].stored)
    shape = (len(specs), num_rows, specs[0].in_features)
    for expert, spec in enumerate(specs):
        begin = 0
        for part in spec.stored:
            end = begin + part.out_features
            yield f"{part.name}.weight", StoredExpert(fused, shape, begin=begin, end=end, expert=expert)
            begin = end
