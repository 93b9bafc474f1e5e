# SPDX-License-Identifier: Apache-2.0
"""The experts of a decoder layer: their tensors in a checkpoint, their weights, and the layer that they make."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import overload

import paddle
from paddle import Tensor

from fastdeploy.config.experts_config import ExpertsConfig, RouterRule
from fastdeploy.layers.experts import SparseMLP
from fastdeploy.models.expected_weights import ExpectedExperts, ExpectedGate, ExpectedTensor
from fastdeploy.models.mlp_part import down_spec, gate_up_spec
from fastdeploy.models.step_buffers import StepBuffers
from fastdeploy.models.weight_loader import LinearSpec, Shapes, WeightLoader
from fastdeploy.ops.experts import PackedExperts, Router, SharedExpert, pack_experts, pack_gate
from fastdeploy.ops.linear import PackedLinear, Pieces
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import NO_QUANTIZATION, form_of
from fastdeploy.ops.registry import selected_backend

_VALUES_AT_ONCE = 1 << 22  # of experts that are read together, per thread


@dataclass(frozen=True)
class ExpertsWeights:
    """Weights of one block of experts.

    Attributes:
        norm: of the norm before the router and the experts.
        gate: packed, of the router.
        correction_bias: [num_experts] float32, or None.
        rule: how the router chooses.
        gate_up, down: of the routed experts; gate_up is gated.
        shared: gate_up and down of the shared expert, or None.
    """

    norm: Tensor
    gate: Tensor
    correction_bias: Tensor | None
    rule: RouterRule
    gate_up: PackedExperts
    down: PackedExperts
    shared: tuple[PackedLinear, PackedLinear] | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the gate and of the packed layers."""
        return self._num_bytes_beside_experts + self.gate_up.num_bytes + self.down.num_bytes

    @property
    def num_streamed_bytes(self) -> int:
        """Bytes that a step of one row reads: as many experts as it chooses, and the rest."""
        routed = self.gate_up.num_bytes + self.down.num_bytes
        return self._num_bytes_beside_experts + routed * self.rule.num_chosen // self.gate_up.num_experts

    @property
    def _num_bytes_beside_experts(self) -> int:
        shared = sum(linear.num_bytes for linear in self.shared or ())
        return int(self.gate.size) * int(self.gate.element_size()) + shared

    def make_layer(self, eps: float, buffers: StepBuffers) -> SparseMLP:
        """Return the layer; eps is that of its norm."""
        rule, num_experts = self.rule, self.gate_up.num_experts
        load = paddle.zeros([2], "int32") if buffers.expert_load is None else buffers.expert_load.next_layer()
        router = Router(self.gate, num_experts, self.correction_bias, rule, NormParams(self.norm, eps), load)
        routed = buffers.routed_rows(num_experts, rule.num_chosen)
        activated = buffers.scratch("experts", self.gate_up.out_features, rows=buffers.max_rows * rule.num_chosen)
        return SparseMLP(router, self.gate_up, self.down, self._shared_expert(buffers), routed, activated)

    def _shared_expert(self, buffers: StepBuffers) -> SharedExpert | None:
        if self.shared is None:
            return None
        gate_up, down = self.shared
        activated = buffers.scratch("shared expert", gate_up.out_features)
        if (form_of(gate_up), form_of(down)) == (form_of(self.gate_up), form_of(self.down)):
            return SharedExpert(gate_up, down, activated)
        return SharedExpert(gate_up, down, activated, buffers.scratch("summed", down.out_features, dtype="float32"))


@dataclass(frozen=True)
class ExpertsPart:
    """A block of experts, as a checkpoint stores it.

    Attributes:
        norm: name of the weight of the norm before the block.
        prefix: what the names of its other tensors begin with.
        hidden_size: width of its input and output.
        config: the experts.
        correction_bias: name of the router's bias for the choice; "" if it has none.
        bias_shape: shape of that bias.
    """

    norm: str
    prefix: str
    hidden_size: int
    config: ExpertsConfig
    correction_bias: str
    bias_shape: tuple[int, ...]

    @property
    def gate(self) -> str:
        """Return the name of the router's weight."""
        return f"{self.prefix}gate.weight"

    @property
    def gate_up(self) -> list[LinearSpec]:
        """Return the layers gate and up of each expert, as one."""
        return [gate_up_spec(prefix, self.hidden_size, self.config.width) for prefix in self._expert_prefixes]

    @property
    def down(self) -> list[LinearSpec]:
        """Return the layer down of each expert."""
        return [down_spec(prefix, self.hidden_size, self.config.width) for prefix in self._expert_prefixes]

    @property
    def shared(self) -> tuple[LinearSpec, ...]:
        """Return the layers gate and up, as one, and down of the shared expert, if there is one."""
        prefix, width = f"{self.prefix}shared_experts.", self.config.shared_width
        if not width:
            return ()
        return gate_up_spec(prefix, self.hidden_size, width), down_spec(prefix, self.hidden_size, width)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Return all linear layers but the router."""
        return *self.gate_up, *self.down, *self.shared

    @property
    def shapes(self) -> Shapes:
        """Return the name and shape of every tensor."""
        shapes: Shapes = {self.norm: (self.hidden_size,), self.gate: (self.config.num_experts, self.hidden_size)}
        if self.correction_bias:
            shapes[self.correction_bias] = self.bias_shape
        for spec in self.linears:
            shapes.update(spec.shapes)
        return shapes

    def load(self, loader: WeightLoader) -> ExpertsWeights:
        """Return the weights; the router's are not quantized, and the shared expert has the weight format of MLPs."""
        shared = tuple(loader.linear(spec, loader.quantization.mlp) for spec in self.shared)
        keep, shape = loader.store.keep, (self.config.num_experts,)
        bias = None
        if self.correction_bias:
            bias = keep(self.correction_bias, lambda: self._read_bias(loader), ExpectedTensor(shape, "float32"))
        return ExpertsWeights(
            norm=loader.copy(self.norm),
            gate=keep(
                self.gate,
                lambda: pack_gate(loader.read(self.gate, _gate_dtype(loader, self.gate))),
                ExpectedGate(self.config.num_experts, self.hidden_size),
            ),
            correction_bias=bias,
            rule=self.config.rule,
            gate_up=self._load_experts(loader, self.gate_up),
            down=self._load_experts(loader, self.down),
            shared=(shared[0], shared[1]) if shared else None,
        )

    def _read_bias(self, loader: WeightLoader) -> Tensor:
        return selected_backend().place(loader.read(self.correction_bias, "float32").reshape([-1]))

    def _load_experts(self, loader: WeightLoader, specs: list[LinearSpec]) -> PackedExperts:
        """Return one projection of all experts."""
        quantization, first = loader.quantization.experts or NO_QUANTIZATION, specs[0]
        name = f"{self.prefix}experts.{first.kind}"
        return loader.store.keep(
            name,
            lambda: _pack(loader, specs, quantization),
            ExpectedExperts(
                len(specs),
                first.in_features,
                first.out_features,
                loader.dtype,
                loader.form(name, weight_names(specs), quantization),
                is_gated=first.kind == "gate_up",
            ),
        )

    @property
    def _expert_prefixes(self) -> list[str]:
        return [f"{self.prefix}experts.{index}." for index in range(self.config.num_experts)]


def _gate_dtype(loader: WeightLoader, name: str) -> str:
    """Return the dtype in which a router's weight is kept: bfloat16 if it is stored so, else float32."""
    return "bfloat16" if loader.source.read(name).dtype == paddle.bfloat16 else "float32"


def weight_names(specs: Sequence[LinearSpec]) -> list[str]:
    """Return the names of all weights of one projection of all experts, which get one form."""
    return [name for spec in specs for name in spec.weight_names]


def _pack(loader: WeightLoader, specs: Sequence[LinearSpec], quantization: str) -> PackedExperts:
    """Pack one projection of all experts."""
    names, is_gated = weight_names(specs), specs[0].kind == "gate_up"
    weights, format = _ReadOneByOne(loader, specs, quantization), loader.packing_format(names, quantization)
    packed = pack_experts(weights, format, is_gated, loader.packed_form(names, quantization))
    weights.finish()
    return packed


class _ReadOneByOne(Sequence[Pieces]):
    """The weights of one projection of all experts, each read when it is asked for.

    The memory of a file's tensors is given back when the next expert is asked for. Experts are announced to the source
    some at a time, since one is too small to be read by all threads.
    """

    def __init__(self, loader: WeightLoader, specs: Sequence[LinearSpec], quantization: str) -> None:
        self._loader, self._specs, self._quantization = loader, specs, quantization
        self._current: LinearSpec | None = None
        self._keeps = loader.keeps_codes(weight_names(specs), quantization)
        self._num_announced = 0
        values = max(1, sum(map(prod, specs[0].shapes.values())))
        self._num_at_once = max(1, _VALUES_AT_ONCE * len(os.sched_getaffinity(0)) // values)

    def __len__(self) -> int:
        return len(self._specs)

    @overload
    def __getitem__(self, index: int) -> Pieces: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Pieces]: ...

    def __getitem__(self, index: int | slice) -> Pieces | Sequence[Pieces]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        spec = self._specs[index]
        if index >= self._num_announced:
            self._announce(index)
        if spec is not self._current:
            self.finish()
            self._current = spec
        return self._loader.pieces(spec, self._quantization, keeps=self._keeps)

    def _announce(self, first: int) -> None:
        specs = self._specs[first : first + self._num_at_once]
        self._loader.source.prepare([name for spec in specs for name in spec.weight_names])
        self._num_announced = first + len(specs)

    def finish(self) -> None:
        """Give back the memory of the expert that was read last."""
        if self._current is not None:
            self._loader.finish(self._current.weight_names)
            self._current = None
