# SPDX-License-Identifier: Apache-2.0
"""Reads a SentencePiece model file: pieces, and the settings that decide how text becomes them.

The file is a protocol-buffer message of which a handful of fields matter: reading them is less than a dependency.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from fastdeploy.core.errors import ConfigError

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class PieceKind(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Algorithm(IntEnum):
    """How text is cut into pieces."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its place in the list is its id."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True)
class SentencePieceModel:
    """A model file's content; defaults are those of the format.

    Attributes:
        charsmap: compiled normalization rules; empty for none.
        add_dummy_prefix: text begins with a space that is not there.
        remove_extra_whitespaces: spaces at both ends go, and of several in a row all but one.
        escape_whitespaces: spaces become U+2581 in pieces.
        spaces_end_words: the space belongs to the word before it.
    """

    pieces: list[Piece] = field(default_factory=list)
    algorithm: Algorithm = Algorithm.UNIGRAM
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    spaces_end_words: bool = False

    def text_of(self, token_id: int) -> str | None:
        """Return the piece of an id, None for ids that stand for nothing (-1 is the format's `none`)."""
        return self.pieces[token_id].text if 0 <= token_id < len(self.pieces) else None


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Read a model file.

    Raises:
        ConfigError: it cannot be read, or is no SentencePiece model.
    """
    try:
        return _parse_model(file.read_bytes())
    except OSError as error:
        raise ConfigError("tokenizer", f"cannot read {str(file)!r}: {error.strerror}") from None
    except (ValueError, IndexError, struct.error) as error:
        raise ConfigError("tokenizer", f"{str(file)!r} is no SentencePiece model: {error}") from None


def _parse_model(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            pieces.append(_parse_piece(_as_bytes(value)))
        elif number == _TRAINER:
            trainer.update(_fields(_as_bytes(value)))
        elif number == _NORMALIZER:
            normalizer.update(_fields(_as_bytes(value)))
    if not pieces or not trainer:
        raise ValueError("no pieces in it")
    return SentencePieceModel(
        pieces,
        algorithm=Algorithm(_as_int(trainer.get(3, 1))),
        unk_id=_as_int(trainer.get(40, 0)),
        bos_id=_as_int(trainer.get(41, 1)),
        eos_id=_as_int(trainer.get(42, 2)),
        charsmap=_as_bytes(normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, True)),
        remove_extra_whitespaces=bool(normalizer.get(4, True)),
        escape_whitespaces=bool(normalizer.get(5, True)),
        spaces_end_words=bool(trainer.get(24, False)),
    )


def _parse_piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", _as_bytes(fields.get(2, b"\0\0\0\0")))
    return Piece(_as_bytes(fields.get(1, b"")).decode("utf-8"), score, PieceKind(_as_int(fields.get(3, 1))))


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where text was expected")
    return value


def _as_int(value: int | bytes) -> int:
    """Return an int32; negative ones are stored as 64 bits."""
    if isinstance(value, bytes):
        raise ValueError("text where a number was expected")
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a message: integers as such, everything else as its bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"unknown wire type {wire}")
        if at + size > len(data):
            raise ValueError("it ends too early")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer that begins at `at`, and where the next thing begins."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
