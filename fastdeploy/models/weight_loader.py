# SPDX-License-Identifier: Apache-2.0
"""Reads and packs the tensors of a checkpoint, one at a time; the parts of a model say which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import paddle
from paddle import Tensor

from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.layers.embedding import Table
from fastdeploy.models.balanced_keys import Factors, scale_outputs, scale_vector
from fastdeploy.models.expected_weights import ExpectedLinear, ExpectedTensor
from fastdeploy.models.own_codes import keeps_codes, packed_form, packing_format, table_format
from fastdeploy.models.packed_store import MadeWeights, PackedStore, Progress
from fastdeploy.models.weight_source import WeightSource
from fastdeploy.ops.coded_piece import Codes
from fastdeploy.ops.linear import PackedLinear, WeightPiece, pack_linear
from fastdeploy.ops.quantized_form import QuantizedForm
from fastdeploy.ops.registry import selected_backend

Shapes = dict[str, tuple[int, ...]]
LinearKind = Literal["qkv", "latent_down", "query", "latent_up", "output", "gate_up", "down", "head"]
NO_FACTORS: Mapping[str, Factors] = {}


@dataclass(frozen=True)
class StoredLinear:
    """A linear layer as a checkpoint in torch layout stores it; its name omits .weight and .bias."""

    name: str
    out_features: int


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer of the model, which is packed from stored layers that have the same input.

    Attributes:
        kind: its place in the model; `gate_up` is packed as a gated layer.
        stored: the stored layers in order.
        in_features: the input's width.
        has_bias: whether each stored layer has a bias.
        split: [outputs, inputs] of the matrices into which the stored weight is split before it is packed, for which
            its codes are widened; empty if it is packed whole.
    """

    kind: LinearKind
    stored: tuple[StoredLinear, ...]
    in_features: int
    has_bias: bool = False
    split: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """Return a name of the packed layer: that of the first stored layer, and the last parts of the others'."""
        first, *others = (stored.name for stored in self.stored)
        return "+".join([first, *(name.rpartition(".")[2] for name in others)])

    @property
    def out_features(self) -> int:
        """Return the number of columns that the layer writes."""
        return sum(stored.out_features for stored in self.stored) // (2 if self.kind == "gate_up" else 1)

    @property
    def weight_names(self) -> list[str]:
        """Return the name of each stored weight."""
        return [f"{stored.name}.weight" for stored in self.stored]

    @property
    def shapes(self) -> Shapes:
        """Return the name and shape of every tensor that is packed."""
        shapes = Shapes()
        for stored in self.stored:
            shapes[f"{stored.name}.weight"] = (stored.out_features, self.in_features)
            if self.has_bias:
                shapes[f"{stored.name}.bias"] = (stored.out_features,)
        return shapes


class WeightLoader:
    """Reads, converts and packs tensors whose names and shapes have been checked.

    Attributes:
        dtype: of weights and activations in this run.
        source: the tensors.
        quantization: weight format of each part of the model.
        store: where packed weights come from or go.
        balances_keys: whether keys are divided by powers of two, for a cache of eight bits (`models.balanced_keys`).
    """

    def __init__(
        self,
        dtype: str,
        source: WeightSource,
        shapes: Mapping[str, tuple[int, ...]],
        on_progress: Progress | None,
        quantization: QuantizationConfig,
        store: PackedStore | None = None,
        has_int8_cache: bool = False,
    ) -> None:
        """Store where the tensors are.

        Args:
            shapes: of all tensors that will be read, for the progress.
            on_progress: called with (name of the phase, fraction done) after each tensor.
            store: None if every weight is made from the source, and stays in memory.
            has_int8_cache: whether keys and values are cached in eight bits.
        """
        self.dtype = dtype
        self.source = source
        self.quantization = quantization
        self.store = store or MadeWeights()
        self.balances_keys = dtype == "bfloat16" and (has_int8_cache or self.store.serves_any_cache)
        self._shapes = shapes
        self._on_progress = on_progress
        self._num_total = sum(map(prod, shapes.values()))
        self._num_done = 0

    def copy(self, name: str, factors: Mapping[str, Factors] = NO_FACTORS) -> Tensor:
        """Return a copy of one tensor on the device.

        Args:
            factors: powers of two by tensor names; each element of a tensor of such a name is multiplied by its own.
        """

        def make() -> Tensor:
            tensor = self.read(name)
            return selected_backend().place(scale_vector(tensor, factors[name]) if name in factors else tensor)

        return self.store.keep(name, make, ExpectedTensor(self._shapes[name], self.dtype))

    def table_form(self, name: str, quantization: str) -> QuantizedForm | None:
        """Return the form of an embedding: that of the head if the head keeps codes of the embedding, else its own.

        Args:
            quantization: format of the head.
        """

        def choose() -> QuantizedForm | None:
            stored = self._stored_forms([name])
            return packed_form(stored, self._table_format(name, quantization))

        return self.store.form(name, choose)

    def _table_format(self, name: str, quantization: str) -> str:
        return table_format(self.source.form(name), quantization)

    def table(self, name: str, quantization: str) -> Table:
        """Return an embedding: packed if the checkpoint stores codes, else a tensor.

        Args:
            quantization: format of the head.
        """
        form = self.table_form(name, quantization)
        if form is None:
            return self.copy(name)

        def pack() -> PackedLinear:
            packed = self.pack_table(name, self._table_format(name, quantization))
            self.finish([name])
            return packed

        vocab_size, hidden_size = self._shapes[name]
        return self.store.keep(name, pack, ExpectedLinear(hidden_size, vocab_size, self.dtype, form))

    def pack_table(self, name: str, quantization: str) -> PackedLinear:
        """Return a matrix packed in a format as a linear layer without a bias."""
        stored = self._stored_forms([name])
        keeps = keeps_codes(stored, quantization)
        pieces = [self.source.coded(name)] if keeps else self.source.pieces(name, self.dtype)
        return pack_linear(pieces, None, packing_format(stored, quantization))

    def peek(self, name: str) -> Tensor:
        """Return one tensor on the host, which is read again later."""
        return self.source.read(name).astype(self.dtype)

    def read(self, name: str, dtype: str | None = None) -> Tensor:
        """Return a copy of one tensor on the host, which does not depend on the mapped file.

        Args:
            dtype: None for the model's.
        """
        tensor = self.source.read(name).astype(dtype or self.dtype).clone()
        self.finish([name])
        return tensor

    def form(self, name: str, weight_names: Sequence[str], quantization: str) -> QuantizedForm | None:
        """Return the form in which a layer is packed in a format.

        Args:
            name: of the packed layer.
            weight_names: of the weights from which it is packed.
        """
        return self.store.form(name, lambda: self.packed_form(weight_names, quantization))

    def packed_form(self, weight_names: Sequence[str], quantization: str) -> QuantizedForm | None:
        """Return the form in which weights that get one form are packed from the source."""
        return packed_form(self._stored_forms(weight_names), quantization)

    def linear(self, spec: LinearSpec, quantization: str, factors: Mapping[str, Factors] = NO_FACTORS) -> PackedLinear:
        """Return a linear layer in a weight format.

        Args:
            factors: powers of two by names of stored layers; each output of such a layer is multiplied by its own.
        """
        return self.store.keep(
            spec.name,
            lambda: self._pack(spec, quantization, factors),
            ExpectedLinear(
                spec.in_features,
                spec.out_features,
                self.dtype,
                self.form(spec.name, spec.weight_names, quantization),
                is_gated=spec.kind == "gate_up",
                has_bias=spec.has_bias,
            ),
        )

    def _pack(self, spec: LinearSpec, quantization: str, factors: Mapping[str, Factors]) -> PackedLinear:
        bias = paddle.concat([self._bias(stored.name, factors) for stored in spec.stored]) if spec.has_bias else None
        pieces, format = self.pieces(spec, quantization, factors), self.packing_format(spec.weight_names, quantization)
        packed = pack_linear(pieces, bias, format, is_gated=spec.kind == "gate_up")
        self.finish(spec.weight_names)
        return packed

    def _bias(self, name: str, factors: Mapping[str, Factors]) -> Tensor:
        bias = self.read(f"{name}.bias")
        return scale_vector(bias, factors[name]) if name in factors else bias

    def pieces(
        self,
        spec: LinearSpec,
        quantization: str,
        factors: Mapping[str, Factors] = NO_FACTORS,
        keeps: bool | None = None,
    ) -> list[WeightPiece] | list[Codes]:
        """Return a linear layer's weight as pieces in order, in the model's dtype or as codes; `finish` follows.

        Args:
            quantization, factors: as `linear` takes them.
            keeps: whether codes are kept, if the weights of other layers count, too; None if only those of this one do.
        """
        if self.keeps_codes(spec.weight_names, quantization) if keeps is None else keeps:
            return [self._coded(one.name, factors) for one in spec.stored]
        pieces: list[WeightPiece] = []
        for one in spec.stored:
            found = self.source.pieces(f"{one.name}.weight", self.dtype)
            pieces += scale_outputs(found, factors[one.name]) if one.name in factors else found
        return pieces

    def keeps_codes(self, weight_names: Sequence[str], quantization: str) -> bool:
        """Return whether weights that get one form keep their codes."""
        return keeps_codes(self._stored_forms(weight_names), quantization)

    def packing_format(self, weight_names: Sequence[str], quantization: str) -> str:
        """Return the format with which the pieces of weights that get one form are packed."""
        return packing_format(self._stored_forms(weight_names), quantization)

    def _stored_forms(self, names: Sequence[str]) -> list[QuantizedForm | None]:
        return [self.source.form(name) for name in names]

    def _coded(self, name: str, factors: Mapping[str, Factors]) -> Codes:
        coded = self.source.coded(f"{name}.weight")
        return coded.scaled(paddle.to_tensor(factors[name])) if name in factors else coded

    def finish(self, names: list[str]) -> None:
        """Give back the memory of tensors that have been packed, and report the progress."""
        for name in names:
            self.source.release(name)
        self._num_done += sum(prod(self._shapes[name]) for name in names)
        if self._on_progress is not None:
            self._on_progress("loading weights", self._num_done / self._num_total)
