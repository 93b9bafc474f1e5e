# SPDX-License-Identifier: Apache-2.0
"""Reads SentencePiece model files: the pieces, and the settings that determine how text is split into pieces.

The file is a protocol-buffer message, of which only a few fields are needed, so this module parses it itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.pieces import PieceKind

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Algorithm(IntEnum):
    """How text is split into pieces."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary; its index is its id."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a model file, with the defaults of the format.

    Attributes:
        charsmap: compiled normalization rules; empty for none.
        add_dummy_prefix: add a space before the text.
        remove_extra_whitespaces: strip the text and collapse runs of spaces.
        escape_whitespaces: replace spaces by U+2581.
        treat_whitespace_as_suffix: a space belongs to the word before it.
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
    treat_whitespace_as_suffix: bool = False

    def text_of(self, token_id: int) -> str | None:
        """Return the text of a piece; None if there is no such id (-1 means none in this format)."""
        return self.pieces[token_id].text if 0 <= token_id < len(self.pieces) else None


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Read a model file.

    Raises:
        ConfigError: the file cannot be read, or is not a SentencePiece model.
    """
    try:
        return _parse_model(file.read_bytes())
    except OSError as error:
        raise ConfigError("tokenizer", f"cannot read {str(file)!r}: {error.strerror}") from None
    except (ValueError, IndexError, struct.error) as error:
        raise ConfigError("tokenizer", f"{str(file)!r} is not a SentencePiece model: {error}") from None


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
        raise ValueError("it has no pieces")
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
        treat_whitespace_as_suffix=bool(trainer.get(24, False)),
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
    """Return an int32, which is stored in 64 bits if it is negative."""
    if isinstance(value, bytes):
        raise ValueError("text where a number was expected")
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a message; the value is an integer, or the bytes of another type."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == _VARINT:
            number, position = _varint(data, position)
            yield key >> 3, number
            continue
        if wire == _BYTES:
            size, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"unknown wire type {wire}")
        if position + size > len(data):
            raise ValueError("it is truncated")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the integer at a position and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
