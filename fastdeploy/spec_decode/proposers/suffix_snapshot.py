# SPDX-License-Identifier: Apache-2.0
"""A file that keeps suffix decoding's finished outputs from one run to the next.

    one line of JSON     format, version, vocabulary, salt_key, num_outputs, num_tokens, digest of what follows
    owners               [num_outputs, 16] bytes: who shares each output (a keyed hash of the salt)
    lengths              [num_outputs] uint32, tokens of each output, oldest output first
    tokens               [num_tokens] int32

All numbers are little-endian. The file appears whole or not at all, and is read whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdeploy.ops.text_batch import IntArray

FORMAT, VERSION = "fastdeploy suffix outputs", 1
SALT_KEY_BYTES, OWNER_BYTES = 16, 16
MAX_HEADER_BYTES = 4096
_BYTES_PER_OUTPUT, _BYTES_PER_TOKEN = OWNER_BYTES + 4, 4


class ForeignFileError(Exception):
    """The file is something else; it must not be overwritten."""


class UnusableSnapshotError(Exception):
    """A snapshot that cannot be used here: of another version or vocabulary, damaged, or too large."""


@dataclass(frozen=True)
class Snapshot:
    """Outputs and who shares them.

    Attributes:
        salt_key: key of the hash that makes owners of salts.
        owners: [num_outputs] hexadecimal, one per output.
        outputs: [num_outputs] arrays of tokens, oldest first.
    """

    salt_key: bytes
    owners: list[str]
    outputs: list[IntArray]


def owner_of(salt: str, salt_key: bytes) -> str:
    """Return what stands for a salt, in memory and on disk: nobody can read a salt back out of it."""
    return hashlib.blake2b(salt.encode(), digest_size=OWNER_BYTES, key=salt_key).hexdigest()


def read_snapshot(path: Path, vocabulary: str, vocab_size: int, max_bytes: int) -> Snapshot:
    """Read a snapshot that was made with this vocabulary, whose ids are below `vocab_size`.

    Raises:
        FileNotFoundError: there is none.
        ForeignFileError: the file is no snapshot.
        UnusableSnapshotError: it is one that cannot be used here, or holds more than `max_bytes`.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        header = _read_header(file.readline(MAX_HEADER_BYTES))
        _check_header(header, vocabulary)
        size = header["num_outputs"] * _BYTES_PER_OUTPUT + header["num_tokens"] * _BYTES_PER_TOKEN
        if size > max_bytes:
            raise UnusableSnapshotError(f"its {size} bytes are more than the {max_bytes} of the cache")
        payload = file.read(size + 1)
    if len(payload) != size or _digest(payload) != header["digest"]:
        raise UnusableSnapshotError("it is damaged")
    snapshot = _parse(payload, header)
    if any(len(one) and (one.min() < 0 or one.max() >= vocab_size) for one in snapshot.outputs):
        raise UnusableSnapshotError("it is damaged")
    return snapshot


def write_snapshot(path: Path, vocabulary: str, salt_key: bytes, outputs: Iterable[tuple[str, IntArray]]) -> None:
    """Write outputs, each with its owner, readable to this user only; the file appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    kept = list(outputs)
    payload = b"".join(
        [
            *(bytes.fromhex(owner) for owner, _ in kept),
            np.array([len(tokens) for _, tokens in kept], "<u4").tobytes(),
            *(tokens.astype("<i4").tobytes() for _, tokens in kept),
        ]
    )
    header = {
        "format": FORMAT,
        "version": VERSION,
        "vocabulary": vocabulary,
        "salt_key": salt_key.hex(),
        "num_outputs": len(kept),
        "num_tokens": sum(len(tokens) for _, tokens in kept),
        "digest": _digest(payload),
    }
    _replace(path, json.dumps(header).encode() + b"\n" + payload)


def _read_header(line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ForeignFileError("it holds something else")
    return header


def _check_header(header: dict[str, Any], vocabulary: str) -> None:
    if header.get("version") != VERSION:
        raise UnusableSnapshotError(f"its version is {header.get('version')}, not {VERSION}")
    if header.get("vocabulary") != vocabulary:
        raise UnusableSnapshotError("it was made with another vocabulary")
    counts = [header.get("num_outputs"), header.get("num_tokens")]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise UnusableSnapshotError("it is damaged")


def _parse(payload: bytes, header: dict[str, Any]) -> Snapshot:
    """Take apart what the digest has vouched for; the key alone stands outside of it."""
    num_outputs = header["num_outputs"]
    lengths_at = num_outputs * OWNER_BYTES
    owners = [payload[at : at + OWNER_BYTES].hex() for at in range(0, lengths_at, OWNER_BYTES)]
    lengths = np.frombuffer(payload, "<u4", num_outputs, lengths_at)
    tokens: NDArray[np.int32] = np.frombuffer(payload, "<i4", header["num_tokens"], lengths_at + 4 * num_outputs)
    try:
        salt_key = bytes.fromhex(header["salt_key"])
    except (KeyError, TypeError, ValueError):
        raise UnusableSnapshotError("it is damaged") from None
    if len(salt_key) != SALT_KEY_BYTES or int(lengths.sum(dtype=np.int64)) != len(tokens):
        raise UnusableSnapshotError("it is damaged")
    return Snapshot(salt_key, owners, list(_split(tokens, lengths.tolist())))


def _split(tokens: IntArray, lengths: list[int]) -> Iterator[IntArray]:
    at = 0
    for length in lengths:
        yield tokens[at : at + length]
        at += length


def _digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Put a file in the place of another, so that a reader finds the old one or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
