# SPDX-License-Identifier: Apache-2.0
"""Safetensors checkpoints whose linear layers are stored as codes: their weights under the usual names and shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paddle import Tensor

from fastdeploy.config.checkpoint_json import read_json_object
from fastdeploy.config.coded.awq_config import METHOD as AWQ
from fastdeploy.config.coded.compressed_tensors_config import METHOD as COMPRESSED_TENSORS
from fastdeploy.config.coded.fp8_config import FP8
from fastdeploy.config.coded.gptq_config import METHOD as GPTQ
from fastdeploy.config.foreign_formats import find_quantization, quantization_method, with_quantization_file
from fastdeploy.config.model_config import DType
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.coded.awq import find_awq
from fastdeploy.models.coded.compressed_tensors import find_compressed_tensors
from fastdeploy.models.coded.fp8 import find_fp8_modules
from fastdeploy.models.coded.gptq import find_gptq
from fastdeploy.models.weight_source import CODE_DTYPES, CheckpointFiles, Fidelity, SafetensorsSource, whole_matrix
from fastdeploy.ops.coded_piece import Codes
from fastdeploy.ops.linear import WeightPiece
from fastdeploy.ops.quantized_form import QuantizedForm


class CodedModule(Protocol):
    """A linear layer whose weight the files store as codes."""

    @property
    def companions(self) -> tuple[str, ...]:
        """Return the names of the tensors in the files that make up its weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the weight, [out, in]."""

    @property
    def kind(self) -> str:
        """Return what the codes are, as reports name it."""

    @property
    def fidelity(self) -> Fidelity:
        """Return what becomes of the weight's values when it is read as codes."""

    @property
    def form(self) -> QuantizedForm | None:
        """Return the form that keeps the codes, with inputs of as many bits as the checkpoint intends; or None."""

    def coded(self, files: SafetensorsSource) -> Codes:
        """Return the codes, [out, in].

        Raises:
            ConfigError: a value is not valid; names file and tensor.
        """

    def widen(self, files: SafetensorsSource, dtype: DType) -> Tensor:
        """Return the weight [out, in], computed in fp32 and rounded once.

        Raises:
            ConfigError: a value is not valid; names file and tensor.
        """


FindModules = Callable[[Mapping[str, Any], SafetensorsSource], Mapping[str, CodedModule]]
"""Takes quantization_config and the files; returns the modules by the names of their weights, such as X.weight."""

METHODS: Mapping[str, FindModules] = {
    COMPRESSED_TENSORS: find_compressed_tensors,
    AWQ: find_awq,
    GPTQ: find_gptq,
    FP8: find_fp8_modules,
}
"""By the `quant_method` of config.json."""


class CodedSource:
    """The tensors of quantized safetensors files. A layer's weight has its usual name and shape.

    Attributes:
        header_formats: values of `format` in the files' headers.
    """

    def __init__(self, files: SafetensorsSource, modules: Mapping[str, CodedModule], dtype: DType) -> None:
        """Hide the tensors of which weights consist.

        Args:
            modules: by the names of their weights.
            dtype: to which codes are widened.

        Raises:
            ConfigError: a tensor that is not part of a module's weight does not consist of floating-point numbers.
        """
        self.header_formats = files.header_formats
        self._files, self._modules, self._dtype = files, dict(modules), dtype
        hidden = {name for module in modules.values() for name in module.companions}
        self._shapes = {name: shape for name, shape in files.shapes.items() if name not in hidden}
        if stray := next((name for name in self._shapes if files.kind(name) in CODE_DTYPES), None):
            raise ConfigError(
                "model", f"{files.where(stray)} is stored as {files.kind(stray)}, but belongs to no codes"
            )
        self._shapes |= {name: module.shape for name, module in modules.items()}
        self._num_users = Counter(name for module in modules.values() for name in module.companions)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor that is not left out."""
        return self._shapes

    def kind(self, name: str) -> str:
        """Return how a tensor is stored."""
        return self._modules[name].kind if name in self._modules else self._files.kind(name)

    def fidelity(self, name: str) -> Fidelity:
        """Return what becomes of a weight that is read as codes."""
        return self._modules[name].fidelity if name in self._modules else "plain"

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave out tensors that belong to another part of the model."""
        for name in names:
            self._shapes.pop(name, None)
            if name in self._modules:
                self._files.leave_out(self._last_used(name))
                del self._modules[name]
            else:
                self._files.leave_out([name])

    def rename(self, name: str, new_name: str) -> None:
        """Give a tensor another name."""
        if name in self._shapes:
            self._shapes[new_name] = self._shapes.pop(name)
        if name in self._modules:
            self._modules[new_name] = self._modules.pop(name)
        else:
            self._files.rename(name, new_name)

    def form(self, name: str) -> QuantizedForm | None:
        """Return the form that keeps the codes of a weight."""
        return self._modules[name].form if name in self._modules else None

    def coded(self, name: str) -> Codes:
        """Return the codes of a weight that has a form."""
        return self._modules[name].coded(self._files)

    def read(self, name: str) -> Tensor:
        """Return a tensor in the dtype in which it is stored, or widened from codes."""
        if name in self._modules:
            return self._modules[name].widen(self._files, self._dtype)
        return self._files.read(name)

    def pieces(self, name: str, dtype: str) -> list[WeightPiece]:
        """Return the whole matrix in this dtype."""
        if name in self._modules:
            return whole_matrix(self._modules[name].widen(self._files, "float32" if dtype == "float32" else "bfloat16"))
        return self._files.pieces(name, dtype)

    def prepare(self, names: Sequence[str]) -> None:
        """Check several tensors at once, those of codes included."""
        stored = [self._modules[name].companions if name in self._modules else (name,) for name in names]
        self._files.prepare(list(dict.fromkeys(name for companions in stored for name in companions)))

    def release(self, name: str) -> None:
        """Give back the pages of the mapped file."""
        for stored in self._last_used(name) if name in self._modules else [name]:
            self._files.release(stored)

    def _last_used(self, name: str) -> list[str]:
        """Return the tensors of a weight that no further weight uses."""
        companions = self._modules[name].companions
        self._num_users.subtract(companions)
        return [stored for stored in companions if not self._num_users[stored]]


def open_safetensors(folder: Path, dtype: DType) -> CheckpointFiles:
    """Return the tensors of a folder's safetensors files, quantized or not.

    Raises:
        ConfigError: there are no weights, a file is not valid, or config.json and the files contradict each other.
    """
    config = with_quantization_file(read_json_object(folder / "config.json", "model") or {}, folder)
    find_modules = METHODS.get(quantization_method(config))
    if find_modules is None:
        return SafetensorsSource(folder)
    files = SafetensorsSource(folder, is_quantized=True)
    return CodedSource(files, find_modules(find_quantization(config) or {}, files), dtype)
