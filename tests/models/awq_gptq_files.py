# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints of tests/golden/awq_gptq, and what their tensors are by the formats' definitions."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.compressed_tensors_files import Tensors, read_tensors, write_tensors

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "awq_gptq"
NAMES = sorted(path.name for path in FOLDER.iterdir())
IN_ORDER, AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Defined:
    """What the tensors of a module stand for.

    Attributes:
        bits: of a code.
        codes: [out, in], from 0 on.
        scales, zeros: [out, groups].
        groups: [in], the group of each input.
    """

    bits: int
    codes: NDArray[np.int64]
    scales: NDArray[np.float32]
    zeros: NDArray[np.int64]
    groups: NDArray[np.int64]

    @property
    def is_symmetric(self) -> bool:
        return bool((self.zeros == 2 ** (self.bits - 1)).all())

    def values(self) -> NDArray[np.float32]:
        """Return the weights: differences are exact, products are rounded to float32."""
        differences = (self.codes - self.zeros[:, self.groups]).astype(np.float32)
        return differences * self.scales[:, self.groups]


def quantization_of(folder: Path) -> dict[str, Any]:
    """Return the quantization_config of a folder."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def copy_of(name: str, folder: Path, change: Callable[[Tensors, dict[str, Any]], None]) -> Path:
    """Return a copy of a checkpoint after a change of its tensors and of its config.json."""
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    tensors, config = read_tensors(folder), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    write_tensors(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def unpacked(words: NDArray[Any], bits: int, order: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the codes of words along the last axis, of which the i-th bits hold the code at order[i]."""
    per_word, wide = 32 // bits, words.astype(np.int64)
    codes = np.empty((*words.shape, per_word), np.int64)
    for place, code in enumerate(order[:per_word]):
        codes[..., code] = wide >> (bits * place) & (1 << bits) - 1
    return codes.reshape(*words.shape[:-1], -1)


def packed(codes: NDArray[Any], bits: int, order: tuple[int, ...] = IN_ORDER) -> NDArray[np.int32]:
    """Return the words of codes along the last axis."""
    per_word = 32 // bits
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, per_word)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for place, code in enumerate(order[:per_word]):
        words |= parts[..., code] << np.uint32(bits * place)
    return words.view(np.int32)


def coded_modules(tensors: Tensors) -> list[str]:
    """Return the names of the modules with codes, in order."""
    return sorted(name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))


def define(tensors: Tensors, module: str, quantization: dict[str, Any]) -> Defined:
    """Return what the tensors of a module stand for."""
    words, zero_words, scales = (tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
    keys = dict(quantization)
    for pattern, overrides in (keys.get("dynamic") or {}).items():
        keys |= overrides if re.match(pattern, module) else {}
    bits, is_awq = keys["bits"], keys["quant_method"] == "awq"
    if is_awq:
        codes, zeros = unpacked(words.values, 4, AWQ_ORDER).T, unpacked(zero_words.values, 4, AWQ_ORDER).T
    else:
        codes, zeros = unpacked(words.values.T, bits, IN_ORDER), unpacked(zero_words.values, bits, IN_ORDER).T
        zeros = zeros + (keys["checkpoint_format"] == "gptq")
    size = keys["group_size"] if keys["group_size"] > 0 else codes.shape[1]
    groups = np.arange(codes.shape[1]) // size if is_awq else tensors[f"{module}.g_idx"].values.astype(np.int64)
    return Defined(bits, codes, np.ascontiguousarray(scales.floats().T), zeros, groups)
