# SPDX-License-Identifier: Apache-2.0
"""Memory of caches on the CPU: it is taken when it is touched or written, and can be given back."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.ops.backends.cpu import memory
from fastdeploy.ops.backends.cpu.cache_pages import HostCachePages
from fastdeploy.ops.backends.cpu.memory import HUGE_PAGE, allocate_untouched
from fastdeploy.ops.block_moves import BlockRegion

BLOCK_BYTES = 96 << 10  # no divisor of a page
NUM_BLOCKS = 1000


def resident_bytes(tensor: paddle.Tensor) -> int:
    """Return the bytes of the pages of a tensor that are in memory."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + int(tensor.size) * int(tensor.element_size()) - first
    is_resident = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), is_resident)
    return mmap.PAGESIZE * sum(page & 1 for page in is_resident)


def make_cache(num_blocks: int = NUM_BLOCKS, dtype: str = "bfloat16") -> tuple[paddle.Tensor, HostCachePages]:
    width = BLOCK_BYTES // {"int8": 1, "bfloat16": 2, "float32": 4}[dtype]
    tensor = allocate_untouched([num_blocks, width], dtype)
    return tensor, HostCachePages([BlockRegion(tensor.data_ptr(), num_blocks, 1, BLOCK_BYTES, 0)])


def touched_blocks(tensor: paddle.Tensor) -> set[int]:
    """Return the blocks that have been written to, without reading the others."""
    return {block for block in range(tensor.shape[0]) if bool(tensor[block].astype("float32").abs().sum())}


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_untouched_memory_takes_none_and_reads_as_zeros(dtype: str) -> None:
    tensor, _ = make_cache(dtype=dtype)
    assert resident_bytes(tensor) == 0
    assert tensor.data_ptr() % HUGE_PAGE == 0
    assert str(tensor.dtype).endswith(dtype)
    assert tensor.shape[0] == NUM_BLOCKS
    assert not touched_blocks(tensor)
    tensor[7] = 1
    assert touched_blocks(tensor) == {7}


def test_touching_takes_the_memory_that_was_announced() -> None:
    tensor, pages = make_cache()
    for first, last in ((0, 1), (1, 2), (2, 50), (50, 51), (51, NUM_BLOCKS)):
        announced, before = pages.num_bytes(first, last), resident_bytes(tensor)
        pages.touch(first, last)
        assert last * BLOCK_BYTES <= resident_bytes(tensor) <= before + announced + HUGE_PAGE
    assert pages.num_bytes(0, NUM_BLOCKS) == NUM_BLOCKS * BLOCK_BYTES


def test_touching_blocks_leaves_those_before_as_they_are() -> None:
    tensor, pages = make_cache(num_blocks=9)
    expected = np.zeros([9, BLOCK_BYTES // 2], np.float32)
    for block in range(9):
        pages.touch(block, block + 1)
        tensor[block] = block + 1
        expected[block] = block + 1
    assert np.array_equal(tensor.astype("float32").numpy(), expected)


def test_released_pages_hold_zeros_again() -> None:
    tensor, pages = make_cache()
    tensor[3:40] = 1
    assert resident_bytes(tensor) >= 37 * BLOCK_BYTES
    pages.release()
    assert resident_bytes(tensor) <= HUGE_PAGE
    assert not touched_blocks(tensor)


def test_a_small_cache_is_announced_as_no_more_than_it_is() -> None:
    _, pages = make_cache(num_blocks=4)
    assert pages.num_bytes(0, 1) + pages.num_bytes(1, 4) == 4 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("always [madvise] never", True),
        ("[always] madvise never", True),
        ("always madvise [never]", False),
        (None, False),
    ],
)
def test_huge_pages_count_where_the_system_gives_them(
    text: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_HUGE_PAGES_FILE", tmp_path / "enabled")
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    assert memory.has_huge_pages() is expected
    _, pages = make_cache()
    assert pages.num_bytes(0, 1) == (HUGE_PAGE if expected else BLOCK_BYTES)


ALLOCATE_AND_FREE = """
import threading, time
from fastdeploy.ops.backends.cpu.memory import allocate_untouched

def use(end_s):
    while time.monotonic() < end_s:
        allocate_untouched([1 << 22], "int8").fill_(1)

threads = [threading.Thread(target=use, args=(time.monotonic() + 1,)) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_allocate_caches_while_others_free_theirs() -> None:
    """In a process of its own: a deadlock that holds the lock of the interpreter cannot be interrupted."""
    subprocess.run([sys.executable, "-c", ALLOCATE_AND_FREE], check=True, timeout=60)
