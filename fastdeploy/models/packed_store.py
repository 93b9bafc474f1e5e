# SPDX-License-Identifier: Apache-2.0
"""Where the packed weights of a model come from and go: made from plain tensors, written to a file, mapped from one.

A loader gets each packed weight from `PackedStore.keep`, under a name, and says how it is made if it is not there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from paddle import Tensor

from fastdeploy.config.env import read_env
from fastdeploy.config.packed_checkpoint import AGAIN, DATA_FILE, PAGE, PackedEntry, PackedHeader, PackedTensor
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.expected_weights import DATA, ExpectedWeight
from fastdeploy.models.weight_source import WithoutCodes
from fastdeploy.ops.backend import MappedFile
from fastdeploy.ops.checksums import digest_memory
from fastdeploy.ops.experts import PackedExperts
from fastdeploy.ops.head_products import PackedHeads
from fastdeploy.ops.linear import PackedLinear, WeightPiece, dtype_name
from fastdeploy.ops.quantized_form import NO_QUANTIZATION, QuantizedForm
from fastdeploy.ops.registry import selected_backend

Packed = TypeVar("Packed", Tensor, PackedLinear, PackedExperts, PackedHeads)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (PackedLinear, PackedExperts, PackedHeads)}
Progress = Callable[[str, float], None]  # (name of the phase, fraction done)
_TENSOR = "Tensor"
_FORM_FIELDS = {"quantization": str, "group_size": int, "has_minimum": bool}
Form = QuantizedForm | None  # of a linear layer; None if it is not quantized


class PackedStore(Protocol):
    """Takes or provides packed weights.

    Attributes:
        serves_any_cache: whether the weights are for engines with any type of KV cache.
    """

    serves_any_cache: bool

    def form(self, name: str, choose: Callable[[], Form]) -> Form:
        """Return the form of the linear layer of this name, which `choose` tells if it is not there."""

    def keep(self, name: str, make: Callable[[], Packed], expected: ExpectedWeight) -> Packed:
        """Return the weight of this name, which `make` makes if it is not there.

        Args:
            name: unique in the model.
            expected: what it is, which a weight that is there is compared with.
        """


class MadeWeights:
    """Keeps nothing: every weight is made, for one engine."""

    serves_any_cache = False

    def form(self, name: str, choose: Callable[[], Form]) -> Form:
        """Return the form that `choose` tells."""
        return choose()

    def keep(self, name: str, make: Callable[[], Packed], expected: ExpectedWeight) -> Packed:
        """Return the weight that `make` makes."""
        return make()


class NoTensors(WithoutCodes):
    """The source of a loader whose store has all weights: it has no tensor."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return no shapes."""
        return {}

    def read(self, name: str) -> Tensor:
        """Raise AssertionError."""
        raise AssertionError(f"{name} is read although all weights are packed")

    def pieces(self, name: str, dtype: str) -> list[WeightPiece]:
        """Raise AssertionError."""
        raise AssertionError(f"{name} is read although all weights are packed")

    def prepare(self, names: Sequence[str]) -> None:
        """Raise AssertionError."""
        raise AssertionError(f"{names} are read although all weights are packed")

    def release(self, name: str) -> None:
        """Raise AssertionError."""
        raise AssertionError(f"{name} is released although it was not read")


class PackedWriter:
    """Writes packed weights to a file while they are made.

    A weight that it returns is mapped from the file, so that the memory in which it was made can be given back.

    Attributes:
        entries: where the weights are.
        num_bytes: bytes written so far.
    """

    serves_any_cache = True

    def __init__(self, file: BinaryIO, path: Path) -> None:
        """Write to `file`, whose path this is."""
        self.entries: dict[str, PackedEntry] = {}
        self.num_bytes = 0
        self._file = file
        self._path = path

    def form(self, name: str, choose: Callable[[], Form]) -> Form:
        """Return the form that `choose` tells."""
        return choose()

    def keep(self, name: str, make: Callable[[], Packed], expected: ExpectedWeight) -> Packed:
        """Return the weight that `make` makes, after it was written.

        Raises:
            OSError: the file cannot be written.
        """
        assert name not in self.entries, f"two weights with the name {name}"
        weight: Any = make()
        parts = {field.name: getattr(weight, field.name) for field in fields(weight)} if is_dataclass(weight) else {}
        tensors = {key: part for key, part in (parts or {DATA: weight}).items() if isinstance(part, Tensor)}
        entry = PackedEntry(
            kind=type(weight).__name__ if parts else _TENSOR,
            fields={key: part for key, part in parts.items() if key not in tensors},
            tensors={key: self._write(tensor) for key, tensor in tensors.items()},
        )
        self.entries[name] = entry
        self._file.flush()
        mapped: Packed = _assemble(entry, selected_backend().map_file(self._path, self.num_bytes))
        return mapped

    def _write(self, tensor: Tensor) -> PackedTensor:
        """Append a tensor at the start of a page."""
        padding = -self.num_bytes % PAGE
        self._file.write(bytes(padding))
        self.num_bytes += padding
        tensor = tensor.contiguous()
        address, num_bytes = tensor.data_ptr(), int(tensor.size) * int(tensor.element_size())
        self._file.write(memoryview((ctypes.c_ubyte * num_bytes).from_address(address)))
        offset, self.num_bytes = self.num_bytes, self.num_bytes + num_bytes
        return PackedTensor(dtype_name(tensor), tuple(tensor.shape), offset, digest_memory(address, num_bytes))


class PackedReader:
    """Provides packed weights whose memory is the mapped file.

    Every tensor is compared with its checksum when it is provided, unless the environment turns that off.
    """

    serves_any_cache = True

    def __init__(
        self, header: PackedHeader, folder: Path, on_progress: Progress | None = None, has_own_codes: bool = False
    ) -> None:
        """Map the file.

        Args:
            has_own_codes: whether the checkpoint had codes, so that each layer has a form of its own.
            on_progress: called with (name of the phase, fraction done) after each weight.

        Raises:
            ConfigError: the selected backend packs weights in another way, or cannot map them.
        """
        backend, layout = selected_backend(), selected_backend().weight_layout
        self._path = folder / DATA_FILE
        if not layout:
            problem = f"packed weights are for --device cpu; give --device {backend.device} the model that was packed"
            raise ConfigError("model", f"{folder}: {problem}")
        if header.layout != layout:
            raise ConfigError("model", f"{self._path}: has layout {header.layout!r:.60}, expected {layout}; {AGAIN}")
        self._entries, self._verifies = header.entries, read_env().verifies_weights
        self._file = backend.map_file(self._path, header.num_bytes)
        self._on_progress, self._num_total, self._num_done = on_progress, header.decoder_bytes, 0
        self._has_own_codes = has_own_codes

    def form(self, name: str, choose: Callable[[], Form]) -> Form:
        """Return the form in which a layer was packed, or that of the head for the embedding that is tied to it.

        Raises:
            ConfigError: it is none that exists.
        """
        entry = self._entries.get(name, self._entries.get(f"{name}.head"))
        if entry is None or not self._has_own_codes:
            return choose()
        try:
            return _form_of_entry(entry)
        except (TypeError, ValueError):
            raise ConfigError("model", f"{self._path}: {name} has an unknown form; {AGAIN}") from None

    def keep(self, name: str, make: Callable[[], Packed], expected: ExpectedWeight) -> Packed:
        """Return the weight of this name.

        Raises:
            ConfigError: there is no such weight, it does not fit config.json, or its bytes were changed.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ConfigError("model", f"{self._path}: {name} is missing; {AGAIN}")
        problem = _difference(entry, expected)
        if problem:
            raise ConfigError("model", f"{self._path}: {name} {problem}; {AGAIN}")
        weight: Packed = _assemble(entry, self._file)
        if self._verifies:
            self._verify(name, entry, weight)
        self._num_done += sum(tensor.num_bytes for tensor in entry.tensors.values())
        if self._on_progress is not None:
            self._on_progress("loading weights", self._num_done / self._num_total)
        return weight

    def _verify(self, name: str, entry: PackedEntry, weight: Any) -> None:
        """Compare the bytes of a weight with the checksums of the header."""
        for key, stored in entry.tensors.items():
            tensor = weight if entry.kind == _TENSOR else getattr(weight, key)
            if digest_memory(tensor.data_ptr(), stored.num_bytes) != stored.checksum:
                raise ConfigError("model", f"{self._path}: the bytes of {name} were changed; {AGAIN}")


def _form_of_entry(entry: PackedEntry) -> Form:
    """Return the form that the fields of an entry name; raise ValueError or TypeError if there is no such form."""
    values = {name: entry.fields[name] for name in _FORM_FIELDS if name in entry.fields}
    if any(type(value) is not _FORM_FIELDS[name] for name, value in values.items()):
        raise TypeError(f"unknown form: {values}")
    return None if values.get("quantization", NO_QUANTIZATION) == NO_QUANTIZATION else QuantizedForm(**values)


def _difference(entry: PackedEntry, expected: ExpectedWeight) -> str:
    """Return what a weight has that it should not have, as the rest of a sentence; empty if it is as expected."""
    if entry.kind != expected.kind:
        return f"is a {entry.kind:.60}, expected a {expected.kind}"
    names_differ = _names_differ("tensor", entry.tensors, expected.tensors)
    if names_differ:
        return names_differ
    for field, value in expected.fields.items():
        found = entry.fields.get(field, "nothing")
        if type(found) is not type(value) or found != value:
            return f"has {field} {found!r:.60}, config.json implies {value}"
    names_differ = _names_differ("field", entry.fields, expected.fields)
    if names_differ:
        return names_differ
    for name, (shape, dtypes) in expected.tensors.items():
        stored = entry.tensors[name]
        if stored.shape != shape or stored.dtype not in dtypes:
            found = f"{stored.dtype}{list(stored.shape)!s:.60}"
            return f"has {name} {found}, config.json implies {' or '.join(dtypes)}{list(shape)}"
    return ""


def _names_differ(what: str, found: Collection[str], known: Collection[str]) -> str:
    """Return which field or tensor there is that should not be there, or is missing; empty if there is none."""
    unknown, missing = [name for name in found if name not in known], [name for name in known if name not in found]
    if unknown or missing:
        return f"has an unknown {what} {unknown[0]:.60}" if unknown else f"lacks the {what} {missing[0]}"
    return ""


def _assemble(entry: PackedEntry, file: MappedFile) -> Any:
    """Return a weight whose memory is the mapped file."""
    tensors = {key: file.tensor(stored.dtype, stored.shape, stored.offset) for key, stored in entry.tensors.items()}
    return tensors[DATA] if entry.kind == _TENSOR else _KINDS[entry.kind](**entry.fields, **tensors)
