# SPDX-License-Identifier: Apache-2.0
"""What packed weights must be according to config.json: the kind, the fields and the tensors of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fastdeploy.ops.quantized_form import QuantizedForm, fields_of
from fastdeploy.ops.registry import selected_backend

DATA, BIAS = "data", "bias"  # names of tensors
TensorForm = tuple[tuple[int, ...], tuple[str, ...]]  # (shape, possible dtypes)


class ExpectedWeight(Protocol):
    """A weight as config.json implies it; its sizes are those of the selected backend, which packs weights."""

    @property
    def kind(self) -> str:
        """Return the name of its class."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return its fields that are not tensors."""

    @property
    def tensors(self) -> Mapping[str, TensorForm]:
        """Return its tensors by their names."""


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that is not packed."""

    shape: tuple[int, ...]
    dtype: str
    kind: str = "Tensor"

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return no fields."""
        return {}

    @property
    def tensors(self) -> Mapping[str, TensorForm]:
        """Return the tensor itself."""
        return {DATA: (self.shape, (self.dtype,))}


@dataclass(frozen=True)
class ExpectedGate:
    """The weight of a router, in the dtype in which the checkpoint stored it."""

    num_experts: int
    hidden_size: int
    kind: str = "Tensor"

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return no fields."""
        return {}

    @property
    def tensors(self) -> Mapping[str, TensorForm]:
        """Return the packed gate."""
        shape = selected_backend().packed_gate_shape(self.num_experts, self.hidden_size)
        return {DATA: (shape, ("bfloat16", "float32"))}


@dataclass(frozen=True)
class ExpectedLinear:
    """A linear layer; `form` is None if it is not quantized, the other attributes are those of `PackedLinear`."""

    in_features: int
    out_features: int
    dtype: str
    form: QuantizedForm | None
    is_gated: bool = False
    has_bias: bool = False
    kind: str = "PackedLinear"

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return its sizes and formats, and that it has no bias."""
        return _sizes(self) | {"is_gated": self.is_gated} | ({} if self.has_bias else {BIAS: None})

    @property
    def tensors(self) -> Mapping[str, TensorForm]:
        """Return the packed weight and the bias."""
        tensors = {DATA: _packed(self, 1)}
        if self.has_bias:
            tensors[BIAS] = ((self.out_features * (2 if self.is_gated else 1),), (self.dtype,))
        return tensors


@dataclass(frozen=True)
class ExpectedExperts:
    """One projection of all experts of a layer; the attributes are those of `ExpectedLinear` and `PackedExperts`."""

    num_experts: int
    in_features: int
    out_features: int
    dtype: str
    form: QuantizedForm | None
    is_gated: bool = False
    kind: str = "PackedExperts"

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return their number, sizes and formats."""
        return {"num_experts": self.num_experts, "is_gated": self.is_gated} | _sizes(self)

    @property
    def tensors(self) -> Mapping[str, TensorForm]:
        """Return the packed weights."""
        return {DATA: _packed(self, self.num_experts)}


@dataclass(frozen=True)
class ExpectedHeads:
    """The matrices of all heads; the attributes are those of `ExpectedLinear` and `PackedHeads`."""

    num_heads: int
    in_features: int
    out_features: int
    dtype: str
    form: QuantizedForm | None
    kind: str = "PackedHeads"

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return their number, sizes and formats."""
        return {"num_heads": self.num_heads} | _sizes(self)

    @property
    def tensors(self) -> Mapping[str, TensorForm]:
        """Return the packed weights."""
        return {DATA: _packed(self, self.num_heads)}


def _sizes(weight: ExpectedLinear | ExpectedExperts | ExpectedHeads) -> dict[str, Any]:
    fields = {name: getattr(weight, name) for name in ("in_features", "out_features", "dtype")}
    return fields | fields_of(weight.form)


def _packed(weight: ExpectedLinear | ExpectedExperts | ExpectedHeads, count: int) -> TensorForm:
    """Return the form of several packed weights, one after the other."""
    is_gated = not isinstance(weight, ExpectedHeads) and weight.is_gated
    size = selected_backend().packed_size(weight.out_features, weight.in_features, weight.form, is_gated)
    return (count * size,), (weight.dtype if weight.form is None else "uint8",)
