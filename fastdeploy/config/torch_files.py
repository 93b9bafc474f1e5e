# SPDX-License-Identifier: Apache-2.0
"""The PyTorch files of a draft head: which files hold its weights, and what they tell without Paddle or torch.

Such a file is a zip container with a pickle, `data.pkl`, and one uncompressed member per storage.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from fastdeploy.config.torch_pickle import MAX_PICKLE_BYTES, Storage, View, read_pickle
from fastdeploy.config.weight_files import (
    StoredTensor,
    find_shards,
    has_safetensors,
    is_buffer,
    read_headers,
    usual_name,
)
from fastdeploy.core.errors import ConfigError

INDEX_FILE = "pytorch_model.bin.index.json"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
_SINGLE_FILE = "pytorch_model.bin"
_SUFFIXES = (".bin", ".pt")
_TRAINING_STATE = ("optimizer", "scheduler", "scaler", "sampler", "rng_state", "random_states", "training_args")
_MAX_READ = 1 << 22  # of what describes a file; 40,000 members are described by less
_ZIP_START, _LOCAL_HEADER_BYTES = b"PK\x03\x04", 30
_PICKLE_START = b"\x80"
_PICKLE = "data.pkl"
_PICKLE_PATH = re.compile(r"([^/]+/)data\.pkl")
_CONVERT = "load it with torch and write it with safetensors.torch.save_file"


@dataclass(frozen=True)
class StridedTensor(StoredTensor):
    """A tensor of a PyTorch file.

    Attributes:
        strides: distance between neighbors of each dimension, in elements.
        span: number of elements from the first to the last one.
    """

    strides: tuple[int, ...]
    span: int

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes from the first to the last element."""
        return self.span * ITEM_BYTES[self.dtype]


def torch_weight_names(names: Iterable[str]) -> list[str]:
    """Return the names of PyTorch files that may hold weights: not those in subfolders, and no state of a training."""
    return sorted(
        name for name in names if name.endswith(_SUFFIXES) and "/" not in name and not name.startswith(_TRAINING_STATE)
    )


def list_torch_files(directory: Path) -> list[Path]:
    """Return the PyTorch files of a directory that may hold weights, sorted."""
    return [
        directory / name for name in torch_weight_names(file.name for file in directory.glob("*") if file.is_file())
    ]


def find_torch_files(directory: Path) -> list[Path]:
    """Return the PyTorch files that hold a head's weights; none if there are no such files.

    They are pytorch_model.bin, else the shards that its index names, else the only file.

    Raises:
        ConfigError: there are several files and no index, or the index is wrong.
    """
    files = list_torch_files(directory)
    if directory / _SINGLE_FILE in files:
        return [directory / _SINGLE_FILE]
    if (directory / INDEX_FILE).exists():
        return find_shards(directory / INDEX_FILE)
    if len(files) > 1:
        raise ConfigError("model", f"{directory} contains {len(files)} PyTorch files but no {INDEX_FILE}")
    return files


def read_head_headers(directory: Path) -> dict[str, StoredTensor]:
    """Return what the files of a drafting model tell, by the usual names of the tensors.

    These are safetensors files if there are any, else PyTorch files. A folder with a GGUF file is a whole model, of
    which nothing is told.

    Raises:
        ConfigError: a PyTorch file is not valid. Safetensors files that cannot be read tell nothing.
    """
    if has_safetensors(directory):
        return read_headers(directory)
    return {} if any(directory.glob("*.gguf")) else dict(read_torch_headers(directory))


def read_torch_headers(directory: Path) -> dict[str, StridedTensor]:
    """Return the tensors of a head's PyTorch files by their usual names, without buffers, in order.

    Raises:
        ConfigError: a file is not valid, or two hold the same tensor.
    """
    found: dict[str, StridedTensor] = {}
    for file in find_torch_files(directory):
        for stored_name, tensor in sorted(read_torch_file(file).items()):
            name = usual_name(stored_name)
            if is_buffer(name):
                continue
            if name in found:
                raise ConfigError("model", f"tensor {name:.120} is in both {found[name].file.name} and {file}")
            found[name] = tensor
    return found


def read_torch_file(file: Path) -> dict[str, StridedTensor]:
    """Return the tensors of a PyTorch file by name.

    Raises:
        ConfigError: it is not a file of tensors only, as torch.save writes it.
    """
    try:
        with _BoundedFile(file) as stream:
            _check_format(stream, file)
            with ZipFile(stream) as archive:
                return _Container(file, stream, archive.infolist()).tensors()
    except OSError as error:
        raise ConfigError("model", f"cannot read {file}: {error.strerror or error}") from None
    except (BadZipFile, ValueError, OverflowError, NotImplementedError, struct.error) as error:
        raise ConfigError("model", f"cannot read {file}: the zip container is damaged: {error!s:.200}") from None


class _BoundedFile(io.FileIO):
    """A file of which only small parts are read, whatever sizes it says to have."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes.

        Raises:
            ValueError: they are too many.
        """
        if size is None or size < 0:
            size = _MAX_READ
        if size > _MAX_READ:
            raise ValueError(f"a description of {size} bytes, expected at most {_MAX_READ}")
        return super().read(size)


def _check_format(stream: _BoundedFile, file: Path) -> None:
    """Refuse files that are no zip containers, those of old versions by name."""
    start = stream.read(len(_ZIP_START))
    if start.startswith(_PICKLE_START):
        problem = "is a bare pickle, the format of PyTorch before 1.6, which is not supported"
        raise ConfigError("model", f"{file} {problem}; {_CONVERT}")
    if start != _ZIP_START:
        raise ConfigError("model", f"{file} is not a file of torch.save: it is no zip container")


class _Container:
    """The members of a PyTorch file."""

    def __init__(self, file: Path, stream: _BoundedFile, members: list[ZipInfo]) -> None:
        self._file, self._stream = file, stream
        self._num_bytes = file.stat().st_size
        self._members = {member.filename: member for member in members}
        roots = [
            name.removesuffix(_PICKLE) for name in self._members if name.count("/") == 1 and name.endswith(_PICKLE)
        ]
        if len(roots) != 1 or not roots[0].endswith("/"):
            raise ConfigError("model", f"{file} is not a file of torch.save: it has no {_PICKLE} in its only folder")
        self._root = roots[0]

    def tensors(self) -> dict[str, StridedTensor]:
        """Return the tensors by name."""
        if f"{self._root}byteorder" in self._members and (order := self._read("byteorder")) != b"little":
            raise ConfigError("model", f"{self._file} has the byte order {order!r:.40}, expected little")
        views = read_pickle(self._read(_PICKLE), str(self._file))
        begins = {
            storage: self._begin_of(storage) for storage in dict.fromkeys(view.storage for view in views.values())
        }
        return {name: self._tensor(view, begins[view.storage]) for name, view in views.items()}

    def _tensor(self, view: View, begin: int) -> StridedTensor:
        dtype = view.storage.dtype
        begin += view.offset * ITEM_BYTES[dtype]
        return StridedTensor(self._file, dtype, view.shape, begin, view.strides, view.span)

    def _begin_of(self, storage: Storage) -> int:
        """Return where the bytes of a storage begin."""
        name = f"data/{storage.key}"
        begin, num_bytes = self._find(name)
        expected = storage.num_elements * ITEM_BYTES[storage.dtype]
        if num_bytes != expected:
            raise ConfigError("model", f"{self._file}: {name} has {num_bytes} bytes, expected {expected}")
        return begin

    def _read(self, name: str) -> bytes:
        begin, num_bytes = self._find(name)
        if num_bytes > MAX_PICKLE_BYTES:
            raise ConfigError(
                "model", f"{self._file}: {name} has {num_bytes} bytes, expected at most {MAX_PICKLE_BYTES}"
            )
        self._stream.seek(begin)
        return self._stream.read(num_bytes)

    def _find(self, name: str) -> tuple[int, int]:
        """Return where the bytes of a member begin, and their number."""
        member = self._members.get(f"{self._root}{name}")
        if member is None:
            raise ConfigError("model", f"{self._file} has no member {name}")
        if member.compress_type != ZIP_STORED or member.compress_size != member.file_size or member.flag_bits & 1:
            raise ConfigError(
                "model", f"{self._file}: {name} is compressed or encrypted, expected plain bytes; {_CONVERT}"
            )
        self._stream.seek(member.header_offset)
        header = self._stream.read(_LOCAL_HEADER_BYTES)
        if len(header) != _LOCAL_HEADER_BYTES or not header.startswith(_ZIP_START):
            raise BadZipFile(f"{name} has no header")
        begin = member.header_offset + _LOCAL_HEADER_BYTES + sum(struct.unpack("<HH", header[26:]))
        if begin + member.file_size > self._num_bytes:
            raise BadZipFile(f"{name} ends beyond the end of the file")
        return begin, member.file_size
