# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a checkpoint: which files hold its weights, and what their headers tell without Paddle."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from fastdeploy.config.checkpoint_json import read_json_object
from fastdeploy.config.packed_checkpoint import HEADER_FILE
from fastdeploy.core.errors import ConfigError

GGUF_STEM = "model"  # of the links in a folder that was made from a GGUF file
INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_FOREIGN_FORMATS = {
    "*.gguf": "GGUF",
    "*.bin": "PyTorch pickle (.bin)",
    "*.pt": "PyTorch pickle (.pt)",
    "*.pth": "PyTorch pickle (.pth)",
    "*.ckpt": "PyTorch pickle (.ckpt)",
    "*.pdparams": "Paddle pickle (.pdparams)",
    "*.pdiparams": "Paddle inference program (.pdiparams)",
    "*.onnx": "ONNX",
    "*.h5": "TensorFlow (.h5)",
    "*.msgpack": "Flax (.msgpack)",
    "*.engine": "TensorRT engine (.engine)",
}
FLOAT_BYTES = {"BF16": 2, "U16": 2, "F16": 2, "F32": 4, "F64": 8}
_WITHOUT_PREFIX = re.compile(r"(?:layers|embed_tokens|norm|mtp_\w+)\.")
_WITH_SURPLUS_PREFIX = re.compile(r"model\.(?:model|lm_head)\.")
_BUFFER = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.(?:(?:original_)?inv_freq|cos_cached|sin_cached)"
    r"|position_ids|attention_mask|causal_mask|masked_bias)"
)
_ACTIVATION_SCALE = re.compile(r".*[._](?:input|output|activation|[qkv])_(?:(?:global_)?scale|zero_point)")
_LAYER = re.compile(r"\w+\.layers\.(\d{1,6})\.(eh_proj\.q?weight)?")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, as the file's header describes it.

    Attributes:
        dtype: as safetensors spells it: BF16, F32, ...
        begin: offset of its first byte in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def fills(self, num_bytes: int) -> bool:
        """Return whether its shape is valid, and as large as these bytes if its dtype is one of floats."""
        if not all(type(size) is int and size >= 0 for size in self.shape):
            return False
        return self.dtype not in FLOAT_BYTES or num_bytes == prod(self.shape) * FLOAT_BYTES[self.dtype]


def usual_name(name: str) -> str:
    """Return a tensor's name with the prefix `model.` of decoders, which files of a bare decoder lack."""
    if _WITHOUT_PREFIX.match(name):
        return f"model.{name}"
    return name.removeprefix("model.") if _WITH_SURPLUS_PREFIX.match(name) else name


def is_buffer(name: str) -> bool:
    """Return whether a tensor holds what follows from config.json or the request, and is never read from a file."""
    return _BUFFER.fullmatch(name) is not None


def is_activation_scale(name: str) -> bool:
    """Return whether a tensor is a static scale or zero point of activations or cached keys and values, never read."""
    return _ACTIVATION_SCALE.fullmatch(name) is not None


def unused_tensors(names: Collection[str], num_layers: int) -> list[str]:
    """Return the names of the tensors that no part of a model reads: buffers, and layers beyond the last one.

    A layer beyond the last one with an `eh_proj`, whose weight may be codes, is for multi-token prediction.
    """
    layers = {name: match for name in names if (match := _LAYER.match(name))}
    drafting = {match[1] for match in layers.values() if match[2]}
    beyond = {name for name, match in layers.items() if int(match[1]) >= num_layers and match[1] not in drafting}
    return [name for name in names if name in beyond or is_buffer(name)]


def find_linked_gguf(directory: Path) -> Path | None:
    """Return the GGUF file, or the first of its parts, to which a folder that was made from it has a link; or None."""
    links = [directory / f"{GGUF_STEM}.gguf", *directory.glob(f"{GGUF_STEM}-00001-of-*.gguf")]
    return next((Path(os.readlink(link)) for link in links if link.is_symlink()), None)


def find_weight_files(directory: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights.

    They are model.safetensors, else the shards that the index names, else the only safetensors file. The index only
    tells the files: a stale one beside model.safetensors is not read, and tensors are those that the shards hold.

    Raises:
        ConfigError: there are no such files; names another format that the directory holds.
    """
    if (directory / _SINGLE_FILE).exists():
        return [directory / _SINGLE_FILE]
    if (directory / INDEX_FILE).exists():
        return find_shards(directory / INDEX_FILE)
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ConfigError("model", f"{directory} contains {len(found)} safetensors files but no {INDEX_FILE}")
    if (directory / HEADER_FILE).exists():
        raise ConfigError("model", f"{directory} has packed weights, expected plain ones (*.safetensors)")
    for pattern, name in _FOREIGN_FORMATS.items():
        if any(directory.glob(pattern)):
            raise ConfigError("model", f"{directory}: {name} checkpoints are not supported, only safetensors")
    raise ConfigError("model", f"{directory} contains no *.safetensors")


def has_safetensors(directory: Path) -> bool:
    """Return whether a directory has safetensors files, or an index that names some."""
    return (directory / INDEX_FILE).exists() or any(directory.glob("*.safetensors"))


def find_shards(index: Path) -> list[Path]:
    """Return the files that an index names.

    Raises:
        ConfigError: the index is not valid, or a file does not exist.
    """
    weight_map = (read_json_object(index, "model") or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ConfigError("model", f"cannot read {index}: expected a weight_map from tensor to file")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if "/" in name or not os.path.exists(index.parent / name)]
    if missing or not names:
        listed = ", ".join(name[:120] for name in missing[:24]) or "none"
        raise ConfigError("model", f"{index} names files that do not exist: {listed}")
    return [index.parent / name for name in names]


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Return what the headers of a checkpoint's files tell, by the usual names of the tensors, in order.

    Files that cannot be read tell nothing: loading reports what is wrong with them.
    """
    try:
        files = find_weight_files(directory)
    except ConfigError:
        files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in _read_header(file)}


def _read_header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the usual name and the description of each tensor that a file's header describes well, by name."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        num_bytes = file.stat().st_size
    except (OSError, ValueError, OverflowError, MemoryError, RecursionError):
        return
    for name, entry in sorted(header.items()) if isinstance(header, dict) else ():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
                tensor = StoredTensor(file, dtype, tuple(shape), 8 + length + begin)
                if 0 <= begin <= end <= num_bytes - 8 - length and tensor.fills(end - begin):
                    yield usual_name(name), tensor
