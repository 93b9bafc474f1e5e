# SPDX-License-Identifier: Apache-2.0
"""The native noise of sampling, built for the instruction-set path of this process from noise.cc."""

import ctypes
import runpy
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastdeploy.ops.backends.cpu import library

HERE = Path(__file__).resolve().parent


@lru_cache(maxsize=1)
def load_noise() -> ctypes.CDLL:
    """Build the library, unless it is up to date, and load it."""
    build = runpy.run_path(str(HERE.parents[1] / "setup.py"))
    return ctypes.CDLL(str(build["build_for_path"]("noise", [HERE / "noise.cc"], library.isa())))


def philox4x32(counters: NDArray[np.uint32], key: int) -> NDArray[np.uint32]:
    """Return the random words [n, 4] of counters [n, 4] with a 64-bit key (low word first)."""
    words = counters.astype(np.uint32)  # a copy
    load_noise().fd_philox4x32(_pointer(words), ctypes.c_int64(len(words)), ctypes.c_uint64(key))
    return words


def gumbel_of_words(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return the Gumbel transform [n] float32 of random words [n], by the scalar code."""
    noise = np.empty(len(words), np.float32)
    load_noise().fd_gumbel_of_words(_pointer(words), ctypes.c_int64(len(words)), _pointer(noise))
    return noise


def gumbel_noise(seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    """Return the noise [vocab_size] float32 that sampling adds to the logits at a position, by the vector code."""
    noise = np.empty(vocab_size, np.float32)
    arguments = ctypes.c_uint64(seed), ctypes.c_uint64(position), ctypes.c_int64(vocab_size)
    load_noise().fd_gumbel_noise(*arguments, _pointer(noise))
    return noise


def _pointer(array: NDArray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
