# SPDX-License-Identifier: Apache-2.0
"""The weights of a decoder: which tensors they need, and their loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b

from paddle import Tensor

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.layers.embedding import Table, num_table_bytes
from fastdeploy.models.architecture import Architecture, TensorNames
from fastdeploy.models.balanced_keys import digest_exponents
from fastdeploy.models.expected_weights import ExpectedLinear
from fastdeploy.models.layer_parts import LayerWeights
from fastdeploy.models.packed_store import PackedStore, Progress
from fastdeploy.models.weight_loader import LinearSpec, Shapes, StoredLinear, WeightLoader
from fastdeploy.models.weight_source import WeightSource, listed
from fastdeploy.ops.experts import PackedExperts
from fastdeploy.ops.head_products import PackedHeads
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.quantized_form import form_of


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder.

    Attributes:
        embedding: [vocab_size, hidden_size]; if the head serves as the table, the head itself.
    """

    embedding: Table
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: PackedLinear

    @property
    def key_balance(self) -> str:
        """Return a digest of what the keys of all layers are divided by; empty if they are not balanced."""
        return digest_exponents(layer.attention.key_exponents for layer in self.layers)

    @property
    def forms(self) -> str:
        """Return a digest of the forms of all packed layers."""
        found = [str(form_of(packed)) for packed in _packed_layers(self)]
        return blake2b("\n".join(found).encode(), digest_size=8).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of the embedding and of every packed layer, without the norms; a table that is the head counts once."""
        embedding = 0 if self.embedding is self.head else num_table_bytes(self.embedding)
        return embedding + sum(layer.num_bytes for layer in self.layers) + self.head.num_bytes

    @property
    def num_streamed_bytes(self) -> int:
        """Bytes that a step of one row reads: all but a table that is not the head, of which only few rows are read."""
        return sum(layer.num_streamed_bytes for layer in self.layers) + self.head.num_bytes


def _packed_layers(weights: object) -> Iterator[PackedLinear | PackedExperts | PackedHeads]:
    """Yield the packed layers within an object of weights, in the order of its fields."""
    if isinstance(weights, (PackedLinear, PackedExperts, PackedHeads)):
        yield weights
    elif isinstance(weights, tuple):
        for part in weights:
            yield from _packed_layers(part)
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from _packed_layers(getattr(weights, field.name))


def expected_shapes(config: ModelConfig, architecture: Architecture) -> Shapes:
    """Return the name and shape of every tensor that a checkpoint of this configuration must contain."""
    names = architecture.names
    shapes: Shapes = {
        names.embedding: (config.vocab_size, config.hidden_size),
        names.final_norm: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[f"{names.head}.weight"] = (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        shapes.update(architecture.layer(config, index).shapes)
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
    # The values of a tied head are those of the embedding, if the files have it at all.
    tied = f"{architecture.names.head}.weight" if config.tie_word_embeddings else ""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected and name != tied]
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
        raise ConfigError("model", f"{config.name}: tensors do not match config.json: {'; '.join(mismatches)}{hint}")


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
    store: PackedStore | None = None,
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
        store: as `WeightLoader` takes it.

    Raises:
        ConfigError: tensors are missing, unexpected or of a wrong shape, or a dtype other than bfloat16 is quantized.
    """
    check_quantization(config, quantization)
    expected = expected_shapes(config, architecture)
    check_shapes(source.shapes, expected, config, architecture, layout)
    loader = WeightLoader(config.dtype, source, expected, on_progress, quantization, store, config.has_int8_cache)
    return collect_weights(loader, config, architecture)


def collect_weights(loader: WeightLoader, config: ModelConfig, architecture: Architecture) -> DecoderWeights:
    """Return all weights of a decoder, of which a loader makes those that its store does not have."""
    names = architecture.names
    embedding, head = _tied(loader, names, config) if config.tie_word_embeddings else _untied(loader, names, config)
    layers = tuple(architecture.layer(config, index).load(loader) for index in range(config.num_layers))
    return DecoderWeights(embedding, layers, loader.copy(names.final_norm), head)


def check_quantization(config: ModelConfig, quantization: QuantizationConfig) -> None:
    """Raise ConfigError if weights of the model's dtype cannot be quantized."""
    if not quantization.is_none and config.dtype != "bfloat16":
        raise ConfigError("quantization", f"{quantization} needs dtype bfloat16, got {config.dtype}")


def _tied(loader: WeightLoader, names: TensorNames, config: ModelConfig) -> tuple[Table, PackedLinear]:
    """Return embedding and head, which share their memory unless only the head is quantized, or quantized anew."""
    name, quantization = names.embedding, loader.quantization.head
    form = loader.form(f"{name}.head", [name], quantization)
    is_shared = loader.table_form(name, quantization) == form

    def pack() -> PackedLinear:
        packed = loader.pack_table(name, quantization)
        if is_shared:
            loader.finish([name])
        return packed

    expected = ExpectedLinear(config.hidden_size, config.vocab_size, loader.dtype, form)
    head = loader.store.keep(f"{name}.head", pack, expected)
    return head if is_shared else loader.table(name, quantization), head


def _untied(loader: WeightLoader, names: TensorNames, config: ModelConfig) -> tuple[Table, PackedLinear]:
    head = LinearSpec("head", (StoredLinear(names.head, config.vocab_size),), config.hidden_size)
    packed = loader.linear(head, loader.quantization.head)
    return loader.table(names.embedding, loader.quantization.head), packed
