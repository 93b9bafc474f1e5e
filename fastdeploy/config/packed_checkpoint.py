# SPDX-License-Identifier: Apache-2.0
"""The header of packed weights, which `fastdeploy quantize` writes: what a folder holds, and where.

A folder has packed_weights.json, the header, and packed_weights.data, all tensors one after the other, each at the
start of a page. The header is JSON: `format`, `version`, `content` and `digest`, a digest of the content.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
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
        are_apart = _are_apart(header)
    except (AttributeError, KeyError, TypeError, ValueError, ConfigError) as error:
        _refuse(file, f"is not valid ({error!s:.120}); {AGAIN}")
    if not are_apart:
        _refuse(file, f"names bytes twice, or bytes that are not in {DATA_FILE}; {AGAIN}")
    try:
        num_bytes = data.stat().st_size
    except OSError as error:
        _refuse(data, f"{error.strerror}; {AGAIN}")
    if num_bytes != header.num_bytes:
        _refuse(data, f"has {num_bytes} bytes, expected {header.num_bytes}; {AGAIN}")
    return header


def _parse(content: Mapping[str, Any]) -> PackedHeader:
    entries = {
        str(name): PackedEntry(
            entry["kind"], entry["fields"], {key: _tensor(value) for key, value in entry["tensors"].items()}
        )
        for name, entry in content["entries"].items()
    }
    formats = {name: QuantizationConfig(**content[name]) for name in ("quantization", "mtp_quantization")}
    return PackedHeader(
        layout=str(content["layout"]),
        dtype=str(content["dtype"]),
        source=str(content["source"]),
        num_bytes=int(content["num_bytes"]),
        decoder_bytes=int(content["decoder_bytes"]),
        mtp_tensors=tuple(content["mtp_tensors"]),
        entries=entries,
        **formats,
    )


def _tensor(value: Mapping[str, Any]) -> PackedTensor:
    shape = tuple(int(size) for size in value["shape"])
    return PackedTensor(str(value["dtype"]), shape, int(value["offset"]), str(value["checksum"]))


def _tensors(header: PackedHeader) -> Iterator[PackedTensor]:
    for entry in header.entries.values():
        yield from entry.tensors.values()


def _are_apart(header: PackedHeader) -> bool:
    """Return whether no tensor is empty, overlaps another one or ends beyond the file."""
    end = 0
    for tensor in sorted(_tensors(header), key=lambda tensor: tensor.offset):
        if tensor.offset < end or min(tensor.shape, default=1) < 1:
            return False
        end = tensor.offset + tensor.num_bytes
    return end <= header.num_bytes


def _digest(content: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _refuse(file: Path, problem: str) -> NoReturn:
    raise ConfigError("model", f"{file}: {problem}")
