# SPDX-License-Identifier: Apache-2.0
"""A decoder layer as two parts that do not know each other: attention, and a feed-forward block of some kind."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy.models.attention_part import AttentionPart, AttentionWeights
from fastdeploy.models.experts_part import ExpertsPart, ExpertsWeights
from fastdeploy.models.mlp_part import MLPPart, MLPWeights
from fastdeploy.models.weight_loader import LinearSpec, Shapes, WeightLoader


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer."""

    attention: AttentionWeights
    mlp: MLPWeights | ExpertsWeights

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed layers."""
        return self.attention.num_bytes + self.mlp.num_bytes

    @property
    def num_streamed_bytes(self) -> int:
        """Bytes that a step of one row reads."""
        return self.attention.num_bytes + self.mlp.num_streamed_bytes


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer, as a checkpoint stores it."""

    attention: AttentionPart
    mlp: MLPPart | ExpertsPart

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Return all linear layers."""
        return *self.attention.linears, *self.mlp.linears

    @property
    def shapes(self) -> Shapes:
        """Return the name and shape of every tensor."""
        return self.attention.shapes | self.mlp.shapes

    def load(self, loader: WeightLoader) -> LayerWeights:
        """Return the weights."""
        return LayerWeights(self.attention.load(loader), self.mlp.load(loader))
