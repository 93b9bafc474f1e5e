# SPDX-License-Identifier: Apache-2.0
"""GGUF files with mistakes: in the header, the metadata, the table of tensors, the data, or the parts."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdeploy.core.ggml_types import GGML_TYPES, TYPES_BY_ID
from fastdeploy.gguf.file import part_name
from fastdeploy.gguf.header import GGUFTensor, read_header
from fastdeploy.gguf.metadata import _NEUTRAL, SAMPLING_KEYS
from tests.gguf.files import aligned, info, text, value
from tests.gguf.gguf_files import NAMES, gguf_path

ALIGNMENT = 32
U8, I8, U16, I16, I32, F64, I64 = 0, 1, 2, 3, 5, 12, 11
ENCODED = (
    *(
        value(item)
        for item in (True, False, 0, 1, 2, 3, 5, 7, 64, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
    ),
    *(value(item) for item in (0.0, -0.0, 0.5, 1.0, -1.0, 1e-38, 3e38, float("nan"), float("inf"), -float("inf"))),
    *(
        value(item)
        for item in ("", "x", "1", "none", "linear", "yarn", "longrope", "gpt2", "llama", "a\nb\0", "x" * 5000)
    ),
    *(value(item) for item in ([], [0], [1, 2], [True], [0.5] * 3, ["x"], ["x", "x"], [""] * 9, [1] * 5000)),
    *(struct.pack(f"<I{code}", kind, -1) for kind, code in ((I8, "b"), (I16, "h"), (I32, "i"), (I64, "q"), (F64, "d"))),
    *(struct.pack("<IIQ", 9, kind, 2**length) for kind in (0, 8, 9, 12, 99) for length in (20, 60)),
    *(
        struct.pack("<IQ", 8, 2**40),
        struct.pack("<IB", 7, 2),
        struct.pack("<I", 99),
        struct.pack("<IQ", 8, 1) + b"\xff",
    ),
)
TOKENIZER_KEYS = (
    *("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "eot_token_id"),
    *("unknown_token_id", "padding_token_id", "eom_token_id", "fim_pre_token_id", "add_bos_token", "add_eos_token"),
    *("add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap", "add_sep_token", "seperator_token_id"),
)
OTHER_KEYS = (
    *("general.architecture", "general.alignment", "general.type", "general.name", "general.file_type", "x", ""),
    *("tokenizer.chat_template", "tokenizer.chat_template.x", "tokenizer.chat_templates", "tokenizer.huggingface.json"),
    *("split.no", "split.count", "split.tensors.count"),
)
ARCHITECTURE_KEYS = (
    *_NEUTRAL,
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "vocab_size"),
    *(
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.freq_base",
        "rope.scale_linear",
    ),
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.dimension_count", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "attention.sliding_window_pattern", "unknown"),
)
NAMES_OF_TENSORS = (
    *(
        "",
        "x",
        "x" * 64,
        "../x",
        "a\nb",
        "rope_freqs.weight",
        "output.weight",
        "token_embd.weight",
        "blk.0.attn_q.bias",
    ),
    *("blk.0.attn_q_norm.weight", "blk.1.ffn_gate_inp.weight", "blk.99.attn_q.weight", "blk.0.ffn_gate_exps.weight"),
)


class Parts:
    """The parts of a file, which are damaged one by one and then written."""

    def __init__(self, path: Path) -> None:
        found = read_header(path)
        content = path.read_bytes()
        self.magic, self.version, self.more_counts = b"GGUF", 3, (0, 0)
        self.metadata: list[tuple[str, Any]] = list(found.metadata.items())  # bytes for what is no value
        self.architecture = found.metadata["general.architecture"]
        self.tensors = [_Tensor(tensor, content) for tensor in found.tensors.values()]

    def write(self, path: Path) -> None:
        """Write the file."""
        infos, data = [], b""
        for tensor in self.tensors:
            offset = len(data) if tensor.offset is None else tensor.offset
            infos.append(info(tensor.name, tensor.shape, tensor.type_id, offset))
            data += aligned(tensor.data, ALIGNMENT)
        counts = len(infos) + self.more_counts[0], len(self.metadata) + self.more_counts[1]
        start = self.magic + struct.pack("<IQQ", self.version, *(count % 2**64 for count in counts))
        keys = b"".join(text(key) + (item if isinstance(item, bytes) else value(item)) for key, item in self.metadata)
        path.write_bytes(aligned(start + keys + b"".join(infos), ALIGNMENT) + data)


class _Tensor:
    """A tensor with its data; its offset follows from those before it, unless one is given."""

    def __init__(self, tensor: GGUFTensor, content: bytes) -> None:
        self.name, self.shape, self.type_id = tensor.name, tensor.shape, tensor.kind.type_id
        self.data = content[tensor.offset : tensor.offset + tensor.num_bytes]
        self.offset: int | None = None

    def fill(self) -> None:
        """Let the data be as long as type and shape say, if that is not much."""
        kind = TYPES_BY_ID.get(self.type_id)
        if kind is None or not self.shape or self.shape[-1] % kind.block_values:
            return
        num_bytes = kind.row_bytes(self.shape[-1])
        for size in self.shape[:-1]:
            num_bytes *= size
        if num_bytes < 2**20:
            self.data = (self.data * (num_bytes // max(1, len(self.data)) + 1))[:num_bytes]


def damage_counts(chance: random.Random, parts: Parts) -> str:
    def change_counts() -> None:
        more = [0, 0]
        more[chance.randrange(2)] = chance.choice((-1, 1, 2**20, 2**63, -2))
        parts.more_counts = more[0], more[1]

    chance.choice(
        (
            lambda: setattr(parts, "magic", chance.choice((b"GGML", b"FUGG", b"\0\0\0\0"))),
            lambda: setattr(parts, "version", chance.choice((0, 1, 2, 4, 3 << 24, 2**32 - 1))),
            change_counts,
        )
    )()
    return "counts"


def near(chance: random.Random, item: Any) -> Any:
    """Return a value that is a little different: another number, or a list with a wrong, missing or repeated item."""
    match item:
        case bool():
            return not item
        case int() | float():
            return chance.choice((abs(item - 1), item + 1, item * 2, type(item)(item // 2)))
        case str():
            return chance.choice((f"{item}x", item[1:], item[:50] * 2))
        case list() if item:
            found, at, other = list(item), chance.randrange(len(item)), chance.choice(item)
            found[at : at + 1] = chance.choice(([], [other], [other, found[at]]))
            return found
    return item


def damage_metadata(chance: random.Random, parts: Parts) -> str:
    """Replace, remove, repeat or add a value."""
    index = chance.randrange(len(parts.metadata))
    key, old = parts.metadata[index]
    kind = chance.random()
    if kind < 0.2:
        parts.metadata[index] = key, near(chance, old)
    elif kind < 0.4:
        parts.metadata[index] = key, chance.choice(ENCODED)
    elif kind < 0.5:
        del parts.metadata[index]
    elif kind < 0.55:
        parts.metadata.append((key, chance.choice((old, chance.choice(ENCODED)))))
    else:
        prefix, names = chance.choice(
            (
                (f"{parts.architecture}.", ARCHITECTURE_KEYS),
                ("tokenizer.ggml.", TOKENIZER_KEYS),
                ("general.sampling.", (*SAMPLING_KEYS, "mirostat")),
                ("", OTHER_KEYS),
            )
        )
        key = prefix + chance.choice(names)
        parts.metadata = [entry for entry in parts.metadata if entry[0] != key]
        parts.metadata.insert(chance.randrange(len(parts.metadata) + 1), (key, chance.choice(ENCODED)))
    return f"metadata {key}"


def damage_table(chance: random.Random, parts: Parts) -> str:
    """Change the name, shape, type or place of a tensor, leave it out or repeat it."""
    index = chance.randrange(len(parts.tensors))
    tensor = parts.tensors[index]
    name, sizes = tensor.name, (0, 1, 2, 31, 32, 64, 256, 2**20, 2**31, 2**32, 2**63, 2**64 - 1)
    match chance.randrange(9):
        case 0:
            tensor.name = chance.choice((*NAMES_OF_TENSORS, chance.choice(parts.tensors).name))
        case 1:
            tensor.shape = tuple(chance.choice(sizes) for _ in range(chance.randrange(6)))
        case 2:
            shape = list(tensor.shape)
            shape[chance.randrange(len(shape))] = chance.choice(sizes)
            tensor.shape = tuple(shape)
        case 3:
            tensor.shape = chance.choice(((1, *tensor.shape), (*tensor.shape, 1), tensor.shape[::-1], tensor.shape[:1]))
        case 4:
            tensor.type_id = chance.choice((*(kind.type_id for kind in GGML_TYPES.values()), 4, 99, 2**31, 2**32 - 1))
        case 5:
            tensor.offset = chance.choice((0, 1, 31, 32, len(tensor.data), 2**20, 2**40, 2**63, 2**64 - 32))
        case 6:
            del parts.tensors[index]
        case 7:
            parts.tensors.insert(chance.randrange(len(parts.tensors)), tensor)
        case _:
            other = chance.randrange(len(parts.tensors))
            parts.tensors[index], parts.tensors[other] = parts.tensors[other], tensor
    if chance.random() < 0.5:
        tensor.fill()
    return f"tensor {name}"


def damage_data(chance: random.Random, parts: Parts) -> str:
    """Put numbers that are not finite, or any bytes, in the data of a tensor."""
    tensor, patterns = chance.choice(parts.tensors), (b"\xff", b"\x00\x7c", b"\x00\xfe", b"\x00\x00\x80\x7f", b"\x7f")
    data, pattern = bytearray(tensor.data), chance.choice(patterns)
    begin = chance.randrange(len(data)) & ~3
    length = chance.choice((4, 32, len(data)))
    data[begin : begin + length] = (pattern * length)[: len(data[begin : begin + length])]
    tensor.data = bytes(data)
    return f"data of {tensor.name}"


def damage_bytes(chance: random.Random, path: Path) -> str:
    """Cut the file off, or overwrite bytes of its header."""
    content, limit = bytearray(path.read_bytes()), read_header(path).num_bytes
    match chance.randrange(3):
        case 0:
            del content[chance.choice((chance.randrange(limit), chance.randrange(len(content)), len(content) - 1)) :]
        case 1:
            for _ in range(chance.randint(1, 4)):
                content[chance.randrange(limit)] = chance.randrange(256)
        case _:
            at = chance.randrange(limit)
            content[at : at + 8] = struct.pack("<Q", chance.choice((0, 1, 2**31, 2**63, 2**64 - 1)))
    path.write_bytes(content)
    return "bytes"


DAMAGES: tuple[Callable[[random.Random, Parts], str], ...] = (
    *(damage_metadata,) * 4,
    *(damage_table,) * 3,
    damage_data,
    damage_counts,
)


def damage_parts(chance: random.Random, path: Path) -> Path:
    """Divide a file into two or three, with a mistake more often than not; return the first one."""
    count, whole = chance.choice((2, 3)), Parts(path)
    files = [path.with_name(part_name("m", number + 1, count)) for number in range(count)]
    keys = {"split.count": count, "split.tensors.count": len(whole.tensors)}
    for number, file in enumerate(files):
        part = Parts(path)
        part.tensors = whole.tensors[number::count]
        metadata = [*(whole.metadata if number == 0 else ()), *{"split.no": number, **keys}.items()]
        if chance.random() < 0.15:
            key = chance.choice(("split.no", *keys))
            metadata = [(name, chance.choice(ENCODED) if name == key else item) for name, item in metadata]
        part.metadata = metadata
        part.write(file)
    other = files[chance.randrange(count)]
    match chance.randrange(7):
        case 0:
            other.unlink()
        case 1:
            other.write_bytes(chance.choice(files).read_bytes())
        case 2:
            shutil.copy(gguf_path(chance.choice(NAMES)), other)
        case 3:
            os.truncate(other, chance.randrange(other.stat().st_size))
        case 4:
            first, last = files[0].read_bytes(), files[-1].read_bytes()
            files[0].write_bytes(last)
            files[-1].write_bytes(first)
        case 5:
            files[0] = other
    return files[0]


def write_damaged(chance: random.Random, path: Path) -> tuple[Path, str]:
    """Write a file with a few mistakes; return the file, and what they are in."""
    source = gguf_path(chance.choice(NAMES))
    if chance.random() < 0.15:
        shutil.copy(source, path)
        return path, f"{source.stem}: {damage_bytes(chance, path)}"
    if chance.random() < 0.1:
        shutil.copy(source, path)
        return damage_parts(chance, path), f"{source.stem}: parts"
    parts = Parts(source)
    damaged = [chance.choice(DAMAGES)(chance, parts) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    parts.write(path)
    return path, f"{source.stem}: {', '.join(damaged)}"
