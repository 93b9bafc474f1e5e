# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory is a mapped file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastdeploy.ops.backends.cpu.mapped_file import MappedFile
from fastdeploy.ops.checksums import digest_memory

VALUES = np.arange(32, dtype=np.float32)


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, int]:
    """Return a sparse file of more than 4 GiB with VALUES at two places, and its size."""
    path = tmp_path / "data"
    with path.open("wb") as stream:
        for offset in (64, 5 << 30):
            stream.seek(offset)
            stream.write(VALUES.tobytes())
    return path, path.stat().st_size


@pytest.mark.parametrize("offset", [64, 5 << 30])
def test_a_tensor_is_the_bytes_at_its_offset(file: tuple[Path, int], offset: int) -> None:
    mapped = MappedFile(*file)
    tensor, again = mapped.tensor("float32", [4, 8], offset), mapped.tensor("bfloat16", [64], offset)
    assert (tensor.numpy() == VALUES.reshape(4, 8)).all()
    assert again.data_ptr() == tensor.data_ptr() and again.shape == [64]
    del mapped, again  # a tensor keeps the mapping
    assert (tensor.numpy() == VALUES.reshape(4, 8)).all()


def test_digests_tell_bytes_and_sizes_apart() -> None:
    memory = np.random.default_rng(0).integers(0, 256, (9 << 20) + 5, np.uint8)
    digests = set()
    for changed in (0, 1 << 20, (4 << 20) - 1, 8 << 20, memory.size - 1):
        memory[changed] ^= 1
        digests.add(digest_memory(memory.ctypes.data, memory.size))
    digests |= {digest_memory(memory.ctypes.data, size) for size in (0, 1, 1 << 20, memory.size - 1)}
    assert len(digests) == 9
    assert digest_memory(memory.ctypes.data, memory.size) in digests
