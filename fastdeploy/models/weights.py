# SPDX-License-Identifier: Apache-2.0
"""Loading of a decoder's packed weights, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import paddle
from paddle import Tensor

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.architecture import Architecture, DecoderTraits, LayerNames, nextn_layers
from fastdeploy.models.weight_source import WeightSource, listed
from fastdeploy.ops.linear import NO_QUANTIZATION, PackedLinear, pack_linear
from fastdeploy.ops.registry import selected_backend

Shapes = dict[str, tuple[int, ...]]
Progress = Callable[[str, float], None]  # (name of the phase, fraction done)


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer: qkv holds q | k | v, gate_up is gated."""

    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedLinear
    post_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder.

    Attributes:
        embedding: [vocab_size, hidden_size]; if it is tied to a head that is not quantized, that head itself.
    """

    embedding: Tensor | PackedLinear
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: PackedLinear

    @property
    def num_bytes(self) -> int:
        """Bytes of the embedding and of every packed layer, without the norms."""
        table = self.embedding
        embedding = 0 if isinstance(table, PackedLinear) else int(table.size) * int(table.element_size())
        return embedding + self.num_streamed_bytes

    @property
    def num_streamed_bytes(self) -> int:
        """Bytes that every step reads: all but the embedding, of which only a few rows are read."""
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return sum(linear.num_bytes for linear in (*linears, self.head))


@dataclass(frozen=True)
class LinearPart:
    """One of the stored linear layers that are packed into one."""

    name: str
    out_features: int


def layer_linears(
    config: ModelConfig, traits: DecoderTraits, names: LayerNames
) -> dict[str, tuple[tuple[LinearPart, ...], int, bool]]:
    """Return field of LayerWeights -> (stored parts in order, in_features, whether it has a bias)."""
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = (LinearPart(names.q, query), LinearPart(names.k, key_value), LinearPart(names.v, key_value))
    return {
        "qkv": (qkv, hidden, traits.qkv_bias),
        "output": ((LinearPart(names.output, hidden),), query, traits.output_bias),
        "gate_up": ((LinearPart(names.gate, inner), LinearPart(names.up, inner)), hidden, traits.mlp_bias),
        "down": ((LinearPart(names.down, hidden),), inner, traits.mlp_bias),
    }


def expected_shapes(config: ModelConfig, architecture: Architecture) -> Shapes:
    """Return the name and shape of every tensor that a checkpoint of this configuration must contain."""
    traits, names = architecture.traits(config), architecture.names
    shapes: Shapes = {
        names.embedding: (config.vocab_size, config.hidden_size),
        names.final_norm: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[f"{names.head}.weight"] = (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        shapes.update(layer_shapes(config, traits, names.layer(index)))
    return shapes


def layer_shapes(config: ModelConfig, traits: DecoderTraits, names: LayerNames) -> Shapes:
    """Return the name and shape of every tensor of one decoder layer."""
    shapes: Shapes = {names.input_norm: (config.hidden_size,), names.post_norm: (config.hidden_size,)}
    if traits.qk_norm:
        shapes[names.q_norm] = shapes[names.k_norm] = (config.head_dim,)
    for parts, in_features, has_bias in layer_linears(config, traits, names).values():
        for part in parts:
            shapes[f"{part.name}.weight"] = (part.out_features, in_features)
            if has_bias:
                shapes[f"{part.name}.bias"] = (part.out_features,)
    return shapes


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Shapes, config: ModelConfig, architecture: Architecture, layout: str
) -> None:
    """Compare the tensors of a checkpoint with those that its configuration implies.

    Args:
        layout: how the layout of linear layers was determined, for the error message.

    Raises:
        ConfigError: tensors are missing, unexpected or of a wrong shape; the message lists their names.
    """
    ignorable = architecture.ignorable + ((f"{architecture.names.head}.weight",) if config.tie_word_embeddings else ())
    missing = [name for name in expected if name not in found]
    ignorable += tuple(f"model.layers.{index}." for index in nextn_layers(found) if index >= config.num_layers)
    unexpected = [name for name in found if name not in expected and not any(part in name for part in ignorable)]
    of_wrong_shape = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    mismatches = [
        f"{len(names)} {kind} ({listed(names)})"
        for kind, names in (
            ("missing", missing),
            ("unexpected", sorted(unexpected)),
            ("of wrong shape", of_wrong_shape),
        )
        if names
    ]
    if mismatches:
        hint = _hint(found, expected, layout)
        raise ConfigError("model", f"{config.path}: tensors do not match config.json: {'; '.join(mismatches)}{hint}")


def _hint(found: Mapping[str, tuple[int, ...]], expected: Shapes, layout: str) -> str:
    """Return a likely reason for the mismatch, if names or shapes suggest one."""
    matrices = [(found[name], shape) for name, shape in expected.items() if len(shape) == 2 and name in found]
    wrong = [(shape, expected_shape) for shape, expected_shape in matrices if shape != expected_shape]
    if wrong and all(shape == expected_shape[::-1] for shape, expected_shape in wrong):
        return f"; the linear layers are transposed, contrary to the layout ({layout or 'unknown'})"
    return ""


def load_weights(
    config: ModelConfig,
    architecture: Architecture,
    source: WeightSource,
    on_progress: Progress | None = None,
    layout: str = "",
    quantization: QuantizationConfig = UNQUANTIZED,
) -> DecoderWeights:
    """Read, convert, quantize and pack every tensor of a checkpoint.

    Besides the packed weights, at most the unpacked form of one layer is in memory at a time.

    Args:
        config: the sizes of the model and its dtype.
        architecture: tensor names and options.
        source: the tensors.
        on_progress: called with (name of the phase, fraction done) after each tensor.
        layout: how the layout of linear layers was determined, for error messages.
        quantization: weight format of each part; formats other than none need bfloat16.

    Raises:
        ConfigError: tensors are missing, unexpected or of a wrong shape, or a dtype other than bfloat16 is quantized.
    """
    check_quantization(config, quantization)
    expected = expected_shapes(config, architecture)
    check_shapes(source.shapes, expected, config, architecture, layout)
    return WeightLoader(config, architecture, source, expected, on_progress, quantization).load()


def check_quantization(config: ModelConfig, quantization: QuantizationConfig) -> None:
    """Raise ConfigError if weights of the model's dtype cannot be quantized."""
    if not quantization.is_none and config.dtype != "bfloat16":
        raise ConfigError("quantization", f"{quantization} needs dtype bfloat16, got {config.dtype}")


class WeightLoader:
    """Reads, converts and packs the tensors of a checkpoint whose names and shapes have been checked."""

    def __init__(
        self,
        config: ModelConfig,
        architecture: Architecture,
        source: WeightSource,
        shapes: Shapes,
        on_progress: Progress | None,
        quantization: QuantizationConfig,
    ) -> None:
        self.config = config
        self.architecture = architecture
        self.traits = architecture.traits(config)
        self.source = source
        self.shapes = shapes
        self.on_progress = on_progress
        attention, mlp = quantization.attention, quantization.mlp
        self.formats = {"qkv": attention, "output": attention, "gate_up": mlp, "down": mlp}
        self.head_format = quantization.head
        self.num_total = sum(map(prod, shapes.values()))
        self.num_done = 0

    def load(self) -> DecoderWeights:
        """Return all weights of a decoder."""
        names, config = self.architecture.names, self.config
        embedding, head = self._tied() if config.tie_word_embeddings else self._untied()
        layers = tuple(self.layer(names.layer(index)) for index in range(config.num_layers))
        return DecoderWeights(embedding, layers, self.copy(names.final_norm), head)

    def _tied(self) -> tuple[Tensor | PackedLinear, PackedLinear]:
        """Return embedding and head, which share their memory unless the head is quantized."""
        name = self.architecture.names.embedding
        if self.head_format != NO_QUANTIZATION:
            table = self.read(name)
            return selected_backend().place(table), pack_linear(table, None, self.head_format)
        head = pack_linear(self.source.pieces(name, self.config.dtype))
        self._advance([name])
        return head, head

    def _untied(self) -> tuple[Tensor, PackedLinear]:
        names = self.architecture.names
        part = LinearPart(names.head, self.config.vocab_size)
        head = self.linear((part,), self.config.hidden_size, False, self.head_format)
        return self.copy(names.embedding), head

    def layer(self, names: LayerNames) -> LayerWeights:
        """Return the weights of one decoder layer."""
        specs = layer_linears(self.config, self.traits, names)
        linears = {
            field: self.linear(*spec, self.formats[field], is_gated=field == "gate_up") for field, spec in specs.items()
        }
        qk_norm = self.traits.qk_norm
        return LayerWeights(
            input_norm=self.copy(names.input_norm),
            q_norm=self.copy(names.q_norm) if qk_norm else None,
            k_norm=self.copy(names.k_norm) if qk_norm else None,
            post_norm=self.copy(names.post_norm),
            **linears,
        )

    def copy(self, name: str) -> Tensor:
        """Return a copy of one tensor on the device."""
        return selected_backend().place(self.read(name))

    def read(self, name: str) -> Tensor:
        """Return a copy of one tensor in the model's dtype on the host, which does not depend on the mapped file."""
        self._advance([name])
        return self.source.read(name).astype(self.config.dtype).clone()

    def linear(
        self,
        parts: tuple[LinearPart, ...],
        in_features: int,
        has_bias: bool,
        quantization: str,
        is_gated: bool = False,
    ) -> PackedLinear:
        """Pack stored layers that have the same input into one layer."""
        names = [f"{part.name}.weight" for part in parts]
        pieces = [piece for name in names for piece in self.source.pieces(name, self.config.dtype)]
        bias = paddle.concat([self.read(f"{part.name}.bias") for part in parts]) if has_bias else None
        packed = pack_linear(pieces, bias, quantization, is_gated)
        self._advance(names)
        return packed

    def _advance(self, names: list[str]) -> None:
        self.num_done += sum(prod(self.shapes[name]) for name in names)
        if self.on_progress is not None:
            self.on_progress("loading weights", self.num_done / self.num_total)
