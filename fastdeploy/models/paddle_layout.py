# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in Paddle layout: linear layers are [in, out] and may be fused, and names have another prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paddle import Tensor

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.layer_parts import LayerParts
from fastdeploy.models.weight_loader import LinearKind, LinearSpec, Shapes
from fastdeploy.models.weight_source import (
    ROUTER_WEIGHT,
    CheckpointFiles,
    Fidelity,
    StoredTensors,
    WeightSource,
    whole_matrix,
)
from fastdeploy.models.weights import check_shapes, expected_shapes
from fastdeploy.ops.coded_piece import Codes
from fastdeploy.ops.linear import WeightPiece
from fastdeploy.ops.quantized_form import QuantizedForm

Layout = Literal["torch", "paddle"]
_HEADER_FORMATS: dict[str, Layout] = {"pt": "torch", "np": "paddle", "pd": "paddle"}
_FUSED_NAMES: dict[LinearKind, tuple[str, ...]] = {
    "qkv": ("qkv_proj",),
    "gate_up": ("gate_up_fused_proj", "up_gate_proj"),
}


@dataclass(frozen=True)
class Stored:
    """Where a checkpoint stores one tensor of the decoder: as a whole, or as columns of a fused tensor.

    Attributes:
        name: name of the tensor in the files.
        shape: shape of that tensor; a linear layer's weight is [in, out].
        is_linear: whether it is a linear layer's weight, which the decoder expects transposed.
        num_groups: 0 for a whole tensor. For a fused tensor, its columns form this many equal groups, and the decoder's
            tensor consists of the columns [begin, end) of each group.
    """

    name: str
    shape: tuple[int, ...]
    is_linear: bool = False
    num_groups: int = 0
    begin: int = 0
    end: int = 0

    def read(self, source: WeightSource) -> Tensor:
        """Return the tensor; a linear layer's weight is [in, out]."""
        tensor = source.read(self.name)
        if not self.num_groups:
            return tensor
        rows = list(self.shape[:-1])
        groups = tensor.reshape([*rows, self.num_groups, -1])
        return groups[..., self.begin : self.end].reshape([*rows, -1])

    def pieces(self, source: WeightSource, dtype: str) -> list[WeightPiece]:
        """Return a linear layer's weight as column ranges of the stored matrix."""
        matrix = source.read(self.name).astype(dtype)
        if not self.num_groups:
            return [WeightPiece(matrix, 0, self.shape[1], True)]
        width = self.shape[1] // self.num_groups
        starts = range(0, self.shape[1], width)
        return [WeightPiece(matrix, start + self.begin, start + self.end, True) for start in starts]


class StoredSource:
    """Tensors by their names and shapes in torch layout, wherever the files store them."""

    def __init__(self, source: StoredTensors, shapes: Shapes, stored: dict[str, Stored]) -> None:
        """Store where the tensors are in the files.

        Args:
            shapes: shapes of the tensors in torch layout.
            stored: tensor name -> where it is stored.
        """
        self._source, self._shapes, self._stored = source, shapes, stored
        self._num_unreleased = Counter(place.name for place in stored.values())

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes that the decoder expects."""
        return self._shapes

    @property
    def stored_shapes(self) -> Shapes:
        """Return the name and shape of every tensor that the files must contain."""
        return {stored.name: stored.shape for stored in self._stored.values()}

    def read(self, name: str) -> Tensor:
        """Return one tensor in the dtype in which it is stored."""
        stored = self._stored[name]
        tensor = stored.read(self._source)
        return tensor.t() if stored.is_linear else tensor

    def pieces(self, name: str, dtype: str) -> list[WeightPiece]:
        """Return a linear layer's weight in this dtype, as column ranges of the stored matrix."""
        stored = self._stored[name]
        return stored.pieces(self._source, dtype) if stored.is_linear else whole_matrix(self.read(name).astype(dtype))

    def kind(self, name: str) -> str:
        """Return the name of the type in which a tensor is stored."""
        return self._source.kind(self._stored[name].name)

    def fidelity(self, name: str) -> Fidelity:
        """Return what becomes of a weight that is read as codes."""
        return self._source.fidelity(self._stored[name].name)

    def form(self, name: str) -> QuantizedForm | None:
        """Return the form that keeps the codes of a weight, which files have only of whole matrices [out, in]."""
        stored = self._stored[name]
        return None if stored.is_linear or stored.num_groups else self._source.form(stored.name)

    def coded(self, name: str) -> Codes:
        """Return the codes of a weight that has a form."""
        return self._source.coded(self._stored[name].name)

    def prepare(self, names: Sequence[str]) -> None:
        """Announce that the tensors will be read next."""
        self._source.prepare(list(dict.fromkeys(self._stored[name].name for name in names)))

    def release(self, name: str) -> None:
        """Give back the memory of the stored tensor, if all the tensors that it holds are released."""
        stored = self._stored[name].name
        self._num_unreleased[stored] -= 1
        if not self._num_unreleased[stored]:
            self._source.release(stored)


class PaddleSource(StoredSource):
    """The tensors of a Paddle checkpoint by their names and shapes in torch layout."""

    def __init__(self, source: StoredTensors, config: ModelConfig, architecture: Architecture, layout: str) -> None:
        """Find how the files name and fuse the tensors, without reading any.

        Args:
            layout: how Paddle layout was detected, for error messages.

        Raises:
            ConfigError: tensors are missing, unexpected or of a wrong shape; the message has their names in the files.
        """
        prefix = name_prefix(source, architecture)
        shapes, names = expected_shapes(config, architecture), architecture.names
        layers = [architecture.layer(config, index) for index in range(config.num_layers)]
        stored = dict(stored_whole(source, shapes, prefix, {names.embedding}))
        stored.update(stored_fused(source, config, architecture, prefix, layers))
        super().__init__(source, shapes, stored)
        check_shapes(source.shapes, self.stored_shapes, config, architecture, layout)


def name_prefix(source: WeightSource, architecture: Architecture) -> str:
    """Return the first part of the tensor names: the Paddle prefix of the architecture, or `model`."""
    own = architecture.paddle_prefix
    return own if any(name.startswith(f"{own}.") for name in source.shapes) else "model"


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is an embedding or the weight of a linear layer; biases may be matrices of one row."""
    return len(shape) == 2 and name.endswith(".weight")


def renamed(name: str, prefix: str) -> str:
    """Return a tensor's name with another prefix than `model`."""
    return f"{prefix}{name.removeprefix('model')}" if name.startswith("model.") else name


def stored_whole(
    source: WeightSource, shapes: Shapes, prefix: str, embeddings: Collection[str]
) -> Iterator[tuple[str, Stored]]:
    """Yield each tensor with its place if it is not fused; all weights but the embeddings are linear layers.

    Newer versions of PaddleFormers store the weights of routers as in torch layout, which their shapes show.
    """
    for name, shape in shapes.items():
        place = renamed(name, prefix)
        is_torch_router = name.endswith(ROUTER_WEIGHT) and source.shapes.get(place) == shape != shape[::-1]
        is_linear = _is_linear(name, shape) and name not in embeddings and not is_torch_router
        yield name, Stored(place, shape[::-1] if is_linear else shape, is_linear)


def stored_fused(
    source: WeightSource, config: ModelConfig, architecture: Architecture, prefix: str, layers: Iterable[LayerParts]
) -> Iterator[tuple[str, Stored]]:
    """Yield the parts of the linear layers that the files store fused."""
    for spec in (spec for layer in layers for spec in layer.linears):
        module = renamed(spec.stored[0].name, prefix).rpartition(".")[0]
        for fused in _FUSED_NAMES.get(spec.kind, ()):
            if f"{module}.{fused}.weight" in source.shapes:
                num_groups = _num_qkv_groups(config, architecture) if spec.kind == "qkv" else 1
                yield from _parts_of(f"{module}.{fused}", spec, num_groups)


def _num_qkv_groups(config: ModelConfig, architecture: Architecture) -> int:
    is_grouped = architecture.has_grouped_qkv or config.num_heads == config.num_kv_heads
    return config.num_kv_heads if is_grouped else 1


def _parts_of(fused: str, spec: LinearSpec, num_groups: int) -> Iterator[tuple[str, Stored]]:
    total, begin = sum(stored.out_features for stored in spec.stored), 0
    for stored in spec.stored:
        end = begin + stored.out_features // num_groups
        shape = (spec.in_features, total)
        yield f"{stored.name}.weight", Stored(f"{fused}.weight", shape, True, num_groups, begin, end)
        if spec.has_bias:
            yield f"{stored.name}.bias", Stored(f"{fused}.bias", (total,), False, num_groups, begin, end)
        begin = end


def find_layout(source: CheckpointFiles, config: ModelConfig, architecture: Architecture) -> tuple[Layout, str]:
    """Return how linear layers are stored, and how that was determined.

    The evidence is, in this order: the `format` in the files' headers, tensor names that only Paddle checkpoints have,
    config.json, and the shapes of layers that are not square.

    Raises:
        ConfigError: there is no evidence, or files contradict each other.
    """
    formats = {_HEADER_FORMATS[name]: name for name in source.header_formats if name in _HEADER_FORMATS}
    if len(formats) > 1:
        raise ConfigError("model", f"{config.name}: the safetensors files name different formats, pt and np or pd")
    for layout, name in formats.items():
        return layout, f"the safetensors header has format '{name}'"
    prefix = name_prefix(source, architecture)
    if prefix != "model":
        return "paddle", f"tensor names begin with '{prefix}.'"
    if config.layout_mark is not None:
        layout = "paddle" if config.layout_mark == "paddlenlp_version" else "torch"
        return layout, f"config.json has {config.layout_mark}"
    return _layout_by_shape(source, config, architecture)


def _layout_by_shape(source: WeightSource, config: ModelConfig, architecture: Architecture) -> tuple[Layout, str]:
    for name, shape in expected_shapes(config, architecture).items():
        is_linear = _is_linear(name, shape) and name != architecture.names.embedding
        if is_linear and shape[0] != shape[1] and source.shapes.get(name) in (shape, shape[::-1]):
            return ("torch" if source.shapes[name] == shape else "paddle"), f"{name} is {list(source.shapes[name])}"
    raise ConfigError(
        "model",
        f"{config.name}: cannot tell whether linear layers are in torch or Paddle layout: expected a format in the "
        "safetensors header (pt or np), or paddlenlp_version, transformers_version or torch_dtype in config.json; "
        "FD_FOR_TORCH_MODEL_FORMAT=1 selects torch layout",
    )
