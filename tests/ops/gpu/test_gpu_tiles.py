# SPDX-License-Identifier: Apache-2.0
"""The classes through which kernels fetch and multiply tiles compute products, in any order of threads."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from custom_ops.tools.emulated_library import build_emulated
from tests.ops.gpu.emulated import SEEDS

HERE = Path(__file__).parent


class Tiles:
    """The kernels of tiles.cc."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(build_emulated("test_tiles", [HERE / "tiles.cc"], has_checks=True)))
        self.library.fd_emulation_fault.restype = ctypes.c_char_p

    def run(self, name: str, a: np.ndarray, b: np.ndarray, out: np.ndarray, *sizes: int) -> np.ndarray:
        results = []
        for seed in SEEDS:
            self.library.fd_emulation_configure(ctypes.c_uint64(seed), 1)
            pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, out)]
            failed = getattr(self.library, name)(*pointers, *sizes)
            assert not failed, self.library.fd_emulation_fault().decode()
            results.append(out.copy())
        assert all(result.tobytes() == results[0].tobytes() for result in results)
        return results[0]

    def wavefronts(self) -> tuple[int, int]:
        values = (ctypes.c_int64 * 10)()
        self.library.fd_emulation_counters(values, len(values))
        return values[8], values[9]


@pytest.fixture(scope="module")
def tiles() -> Tiles:
    return Tiles()


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def draw(rows: int, columns: int, limit: int = 4) -> np.ndarray:
    return np.random.default_rng(rows * columns).integers(-limit, limit, (rows, columns))


@pytest.mark.parametrize("k", [8, 64, 72, 640])
@pytest.mark.parametrize("num_columns", [1, 16])
def test_gpu_tiles_multiply_rows_and_fill_with_zeros(tiles: Tiles, k: int, num_columns: int) -> None:
    a, b = draw(32, k), draw(num_columns, k)
    expected = np.zeros((32, 16), np.float32)
    expected[:, :num_columns] = a @ b.T
    out = tiles.run("fd_test_bf16", bf16(a), bf16(b), np.full((32, 16), np.nan, np.float32), k, num_columns)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("k", [16, 128, 656])
def test_gpu_tiles_multiply_signed_bytes(tiles: Tiles, k: int) -> None:
    a, b = draw(32, k, 128), draw(16, k, 127)
    out = tiles.run("fd_test_s8", a.astype(np.int8), b.astype(np.int8), np.zeros((32, 16), np.int32), k, 16)
    np.testing.assert_array_equal(out, a @ b.T)


def test_gpu_tiles_multiply_unsigned_bytes_by_signed_ones(tiles: Tiles) -> None:
    a, b = draw(32, 128, 128) + 128, draw(8, 128, 128)
    out = tiles.run("fd_test_u8", a.astype(np.uint8), b.astype(np.int8), np.zeros((32, 16), np.int32))
    np.testing.assert_array_equal(out[:, :8], a @ b.T)


def test_gpu_tiles_of_a_warp_multiply_eight_rows(tiles: Tiles) -> None:
    a, b = draw(32, 256), draw(8, 256)
    out = tiles.run("fd_test_narrow", bf16(a), bf16(b), np.zeros((32, 16), np.float32), 256)
    np.testing.assert_array_equal(out[:, :8], a @ b.T)


def test_gpu_tiles_are_loaded_transposed(tiles: Tiles) -> None:
    a, b = draw(80, 64), draw(64, 80).T.copy()
    out = tiles.run("fd_test_transposed", bf16(a), bf16(b), np.zeros((16, 16), np.float32), 80)
    np.testing.assert_array_equal(out, a[:, :16].T @ b[:, :16])


@pytest.mark.parametrize("num_rows", [0, 5, 32, 40])
@pytest.mark.parametrize(("row_bytes", "group"), [(512, 16), (128, 16), (64, 8)])
def test_gpu_tiles_are_copied_in_groups_of_rows(tiles: Tiles, row_bytes: int, group: int, num_rows: int) -> None:
    rows = draw(32, row_bytes, 128).astype(np.int8)
    expected = rows.reshape(-1, group, row_bytes)[::-1].reshape(32, row_bytes).copy()
    expected[num_rows:] = 0
    out = tiles.run("fd_test_grouped", rows, rows, np.full_like(rows, 1), row_bytes, num_rows)
    np.testing.assert_array_equal(out, expected)


def test_gpu_tiles_of_few_rows_are_copied_by_some_threads(tiles: Tiles) -> None:
    rows = draw(8, 64, 128).astype(np.int8)
    expected = rows[::-1].copy()
    expected[6:] = 0
    np.testing.assert_array_equal(tiles.run("fd_test_grouped_few", rows, rows, np.full_like(rows, 1), 6), expected)


def test_gpu_tiles_keep_the_rows_of_a_matrix_in_different_banks(tiles: Tiles) -> None:
    tiles.library.fd_emulation_reset_counters()
    tiles.run("fd_test_bf16", bf16(draw(32, 64)), bf16(draw(16, 64)), np.zeros((32, 16), np.float32), 64, 16)
    wavefronts, least = tiles.wavefronts()
    assert wavefronts == least > 0
