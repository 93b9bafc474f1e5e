# SPDX-License-Identifier: Apache-2.0
"""The dense feed-forward block of a decoder layer: its tensors, its weights, and the layer that they make."""

from __future__ import annotations

from dataclasses import dataclass

from paddle import Tensor

from fastdeploy.layers.linear import Linear
from fastdeploy.layers.mlp import GatedMLP
from fastdeploy.models.step_buffers import StepBuffers
from fastdeploy.models.weight_loader import LinearSpec, Shapes, StoredLinear, WeightLoader
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.norm import NormParams


@dataclass(frozen=True)
class MLPWeights:
    """Weights of one dense block; gate_up is gated."""

    norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed layers."""
        return self.gate_up.num_bytes + self.down.num_bytes

    @property
    def num_streamed_bytes(self) -> int:
        """Bytes that a step of one row reads: all of them."""
        return self.num_bytes

    def make_layer(self, eps: float, buffers: StepBuffers) -> GatedMLP:
        """Return the layer; eps is that of its norm."""
        gate_up = Linear(self.gate_up, NormParams(self.norm, eps))
        return GatedMLP(gate_up, Linear(self.down), buffers.scratch("activated", self.down.in_features))


@dataclass(frozen=True)
class MLPPart:
    """A dense gated block, as a checkpoint stores it.

    Attributes:
        norm: name of the weight of the norm before the block.
        prefix: what the names of its linear layers begin with.
        hidden_size: width of its input and output.
        width: number of its neurons.
        has_bias: whether the linear layers have a bias.
    """

    norm: str
    prefix: str
    hidden_size: int
    width: int
    has_bias: bool

    @property
    def gate_up(self) -> LinearSpec:
        """Return the layers gate and up, as one."""
        return gate_up_spec(self.prefix, self.hidden_size, self.width, self.has_bias)

    @property
    def down(self) -> LinearSpec:
        """Return the layer down."""
        return down_spec(self.prefix, self.hidden_size, self.width, self.has_bias)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Return all linear layers."""
        return self.gate_up, self.down

    @property
    def shapes(self) -> Shapes:
        """Return the name and shape of every tensor."""
        return {self.norm: (self.hidden_size,)} | self.gate_up.shapes | self.down.shapes

    def load(self, loader: WeightLoader) -> MLPWeights:
        """Return the weights, in the weight format of MLPs."""
        quantization = loader.quantization.mlp
        return MLPWeights(
            norm=loader.copy(self.norm),
            gate_up=loader.linear(self.gate_up, quantization),
            down=loader.linear(self.down, quantization),
        )


def gate_up_spec(prefix: str, hidden_size: int, width: int, has_bias: bool = False) -> LinearSpec:
    """Return the layers gate and up of a gated block as one; their names begin with `prefix`."""
    stored = (StoredLinear(f"{prefix}gate_proj", width), StoredLinear(f"{prefix}up_proj", width))
    return LinearSpec("gate_up", stored, hidden_size, has_bias)


def down_spec(prefix: str, hidden_size: int, width: int, has_bias: bool = False) -> LinearSpec:
    """Return the layer down of a gated block; its name begins with `prefix`."""
    return LinearSpec("down", (StoredLinear(f"{prefix}down_proj", hidden_size),), width, has_bias)
