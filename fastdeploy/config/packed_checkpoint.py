# SPDX-License-Identifier: Apache-2.0
"""The header of packed weights, which `fastdeploy quantize` writes: what a folder holds, and where.

A folder has packed_weights.json, the header, and packed_weights.data, all tensors one after the other, each at the
start of a page. The header is JSON: `format`, `version`, `content` and `digest`, a digest of the content.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

from fastdeploy.config.checkpoint_json import read_json_object
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError

HEADER_FILE, DATA_FILE = "packed_weights.json", "packed_weights.data"
FORMAT, VERSION = "fastdeploy packed weights", 1
ITEM_BYTES = {"uint8": 1, "int8": 1, "bfloat16": 2, "float32": 4}
PAGE = 4096  # bytes; each tensor begins at a multiple
_KINDS = {str: "a string", int: "an integer", list: "a list", dict: "an object"}
AGAIN = "run fastdeploy quantize again"


@dataclass(frozen=True)
class PackedTensor:
    """Where one tensor is in the data file.

    Attributes:
        dtype, shape: of its elements.
        offset: of its first byte.
        checksum: of its bytes, by `fastdeploy.ops.checksums`.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: str

    @property
    def num_bytes(self) -> int:
        """Return its size."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class PackedEntry:
    """One packed weight: a tensor, or an object that holds tensors.

    Attributes:
        kind: name of its class.
        fields: the object's fields that are not tensors.
        tensors: its fields that are tensors; that of a tensor itself is called `data`.
    """

    kind: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, PackedTensor]


@dataclass(frozen=True)
class PackedHeader:
    """What a folder of packed weights holds.

    Attributes:
        layout: names how the backend that packed them lays out packed weights.
        dtype: of the model's activations.
        quantization: the format of each part.
        source: digest of the weight files that were packed.
        num_bytes: size of the data file.
        decoder_bytes: bytes of the decoder's weights, without the layers for multi-token prediction.
        mtp_tensors: names of the tensors of the layers for multi-token prediction that are among the weights.
        mtp_quantization: formats of these layers.
        entries: the weights by their names.
        embedding: digest of the embedding before it was packed; empty if it was stored as codes, or in older headers.
    """

    layout: str
    dtype: str
    quantization: QuantizationConfig
    source: str
    num_bytes: int
    decoder_bytes: int
    mtp_tensors: tuple[str, ...]
    mtp_quantization: QuantizationConfig
    entries: Mapping[str, PackedEntry]
    embedding: str = ""

    def to_json(self) -> str:
        """Return the text of the header file."""
        content = asdict(self)
        header = {"format": FORMAT, "version": VERSION, "digest": _digest(content), "content": content}
        return json.dumps(header, indent=1)


def read_packed_header(folder: Path) -> PackedHeader | None:
    """Return the header of the packed weights in a folder, or None if it has none.

    The sizes of both files and the digest of the header are checked, not the tensors.

    Raises:
        ConfigError: a file is missing, incomplete, changed, of another version, or something else.
    """
    file, data = folder / HEADER_FILE, folder / DATA_FILE
    raw = read_json_object(file, "model")
    if raw is None:
        if data.exists():
            _refuse(data, f"has no {HEADER_FILE} beside it; {AGAIN}")
        return None
    if raw.get("format") != FORMAT:
        _refuse(file, f"expected the format {FORMAT!r}, got {raw.get('format')!r:.80}")
    if raw.get("version") != VERSION:
        _refuse(file, f"has version {raw.get('version')!r:.20}, expected {VERSION}; {AGAIN}")
    content = raw.get("content")
    if not isinstance(content, dict) or raw.get("digest") != _digest(content):
        _refuse(file, f"was changed after it was written; {AGAIN}")
    try:
        header = _parse(content)
    except (TypeError, ValueError, ConfigError) as error:
        _refuse(file, f"is not valid: {error!s:.300}; {AGAIN}")
    if misplaced := _find_misplaced(header):
        _refuse(file, f"{misplaced:.200} has bytes of another tensor, or bytes that are not in {DATA_FILE}; {AGAIN}")
    try:
        num_bytes = data.stat().st_size
    except OSError as error:
        _refuse(data, f"{error.strerror}; {AGAIN}")
    if num_bytes != header.num_bytes:
        _refuse(data, f"has {num_bytes} bytes, expected {header.num_bytes}; {AGAIN}")
    return header


def _parse(content: Mapping[str, Any]) -> PackedHeader:
    """Return what a header says.

    Raises:
        ValueError, TypeError, ConfigError: something is missing or of another type; names the entry.
    """

    def value(key: str, kind: type) -> Any:
        return _expect(key, content.get(key), kind)

    return PackedHeader(
        layout=value("layout", str),
        dtype=value("dtype", str),
        source=value("source", str),
        num_bytes=_size("num_bytes", content.get("num_bytes")),
        decoder_bytes=_size("decoder_bytes", content.get("decoder_bytes")),
        mtp_tensors=tuple(_expect("mtp_tensors", name, str) for name in value("mtp_tensors", list)),
        entries={name: _entry(name, entry) for name, entry in value("entries", dict).items()},
        quantization=_formats("quantization", content.get("quantization")),
        mtp_quantization=_formats("mtp_quantization", content.get("mtp_quantization")),
        embedding=_expect("embedding", content.get("embedding", ""), str),
    )


def _expect(where: str, value: Any, kind: type) -> Any:
    """Return a value of exactly this type."""
    if type(value) is not kind:
        raise ValueError(f"{where:.200}: expected {_KINDS[kind]}, got {value!r:.60}")
    return value


def _formats(where: str, value: Any) -> QuantizationConfig:
    parts: dict[str, Any] = _expect(where, value, dict)
    for part, format in parts.items():
        if format is not None:
            _expect(f"{where}.{part}", format, str)
    return QuantizationConfig(**parts)


def _size(where: str, value: Any, smallest: int = 1) -> int:
    size: int = _expect(where, value, int)
    if size < smallest:
        raise ValueError(f"{where:.200}: expected at least {smallest}, got {size}")
    return size


def _entry(name: str, value: Any) -> PackedEntry:
    entry = _known(name, value, {"kind": str, "fields": dict, "tensors": dict})
    tensors = {key: _tensor(f"{name:.120}, tensor {key}", tensor) for key, tensor in entry["tensors"].items()}
    return PackedEntry(entry["kind"], entry["fields"], tensors)


def _tensor(where: str, value: Any) -> PackedTensor:
    tensor = _known(where, value, {"dtype": str, "shape": list, "offset": int, "checksum": str})
    if tensor["dtype"] not in ITEM_BYTES:
        raise ValueError(f"{where:.200}: expected a dtype of {', '.join(ITEM_BYTES)}, got {tensor['dtype']!r:.60}")
    if _size(f"{where}, offset", tensor["offset"], 0) % PAGE:
        raise ValueError(f"{where:.200}: expected an offset that is a multiple of {PAGE}, got {tensor['offset']}")
    shape = tuple(_size(f"{where}, shape", size) for size in tensor["shape"])
    return PackedTensor(tensor["dtype"], shape, tensor["offset"], tensor["checksum"])


def _known(where: str, value: Any, kinds: Mapping[str, type]) -> Mapping[str, Any]:
    """Return an object that has exactly these keys, of these types."""
    found: Mapping[str, Any] = _expect(where, value, dict)
    if unknown := [key for key in found if key not in kinds]:
        raise ValueError(f"{where:.200}: unknown key {unknown[0]!r:.60}")
    for key, kind in kinds.items():
        _expect(f"{where}, {key}", found.get(key), kind)
    return found


def _find_misplaced(header: PackedHeader) -> str | None:
    """Return the name of a weight with a tensor that overlaps another one or ends beyond the file."""
    tensors = ((tensor, name) for name, entry in header.entries.items() for tensor in entry.tensors.values())
    end = 0
    for tensor, name in sorted(tensors, key=lambda item: item[0].offset):
        if tensor.offset < end or tensor.offset + tensor.num_bytes > header.num_bytes:
            return name
        end = tensor.offset + tensor.num_bytes
    return None


def _digest(content: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _refuse(file: Path, problem: str) -> NoReturn:
    raise ConfigError("model", f"{file}: {problem}")
