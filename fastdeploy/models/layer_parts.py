# SPDX-License-Identifier: Apache-2.0
"""A decoder layer as two parts that do not know each other: attention and a feed-forward block, each of some kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paddle import Tensor

from fastdeploy.layers.attention import SelfAttention
from fastdeploy.models.attention_part import AttentionContext
from fastdeploy.models.experts_part import ExpertsPart, ExpertsWeights
from fastdeploy.models.mlp_part import MLPPart, MLPWeights
from fastdeploy.models.step_buffers import StepBuffers
from fastdeploy.models.weight_loader import LinearSpec, Shapes, WeightLoader


class SelfAttentionWeights(Protocol):
    """Weights of one layer's attention."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed layers, all of which a step of one row reads."""

    @property
    def key_exponents(self) -> Tensor | None:
        """Powers of two by which keys are divided, as `AttentionWeights` has them; None if they are not balanced."""

    def make_layer(self, context: AttentionContext, buffers: StepBuffers, num_masked_prefix: int) -> SelfAttention:
        """Return the layer.

        Args:
            num_masked_prefix: number of leading positions that are masked for every row but their own.
        """


class SelfAttentionPart(Protocol):
    """The attention of one layer, as a checkpoint stores it."""

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Return all linear layers."""

    @property
    def shapes(self) -> Shapes:
        """Return the name and shape of every tensor."""

    def load(self, loader: WeightLoader) -> SelfAttentionWeights:
        """Return the weights, in the weight format of attention."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer."""

    attention: SelfAttentionWeights
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

    attention: SelfAttentionPart
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
