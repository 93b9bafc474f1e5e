# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the table of cosines and sines.

Sources: Su et al. 2021 (RoFormer), and what model families publish for each `rope_type` of config.json: linear
interpolation, dynamic NTK-aware scaling, the frequency bands of Llama 3.1, YaRN (Peng et al. 2023); and GGUF's factors
per frequency.
"""

from __future__ import annotations

from math import ceil, floor, log, pi

import numpy as np
from numpy.typing import NDArray

from fastdeploy.config.rope_config import RopeConfig

_TABLE_CHUNK = 4096  # positions computed at a time, to limit the float64 scratch memory


def rotary_table(rope: RopeConfig, max_model_len: int) -> NDArray[np.float32]:
    """Compute cosines and sines for every position, in float64, rounded once.

    Returns:
        [max_model_len, rotary_dim] float32: the first half of a row holds cosines, the second half sines, one per pair
        of rotated dimensions, both multiplied by `rope.attention_factor`.
    """
    frequencies = inverse_frequencies(rope, max_model_len)
    half = frequencies.size
    table = np.empty((max_model_len, 2 * half), np.float32)
    for begin in range(0, max_model_len, _TABLE_CHUNK):
        rows = table[begin : begin + _TABLE_CHUNK]
        angles = np.arange(begin, begin + len(rows), dtype=np.float64)[:, None] * frequencies
        rows[:, :half] = np.cos(angles) * rope.attention_factor
        rows[:, half:] = np.sin(angles) * rope.attention_factor
    return table


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> NDArray[np.float64]:
    """Compute the angle per position of each pair of dimensions: [rotary_dim / 2] float64."""
    if rope.kind == "dynamic":
        return _geometric(_dynamic_base(rope, max_model_len), rope.rotary_dim)
    plain = _geometric(rope.theta, rope.rotary_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    if rope.kind == "freq_factors":
        return plain / np.asarray(rope.freq_factors, np.float64)
    return plain


def _geometric(base: float, rotary_dim: int) -> NDArray[np.float64]:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    return np.asarray(base**-exponents, np.float64)


def _dynamic_base(rope: RopeConfig, max_model_len: int) -> float:
    """Return the NTK-aware base for max_model_len.

    The base is fixed, because adapting it to a growing sequence would change keys that are already cached.
    """
    length = max(max_model_len, rope.max_position_embeddings)
    scale = rope.factor * length / rope.max_position_embeddings - (rope.factor - 1.0)
    return rope.theta * float(scale) ** (rope.rotary_dim / (rope.rotary_dim - 2))


def _llama3(plain: NDArray[np.float64], rope: RopeConfig) -> NDArray[np.float64]:
    """Keep high frequencies, scale low ones by 1 / factor, and interpolate between the two band edges."""
    rotations = rope.original_max_positions * plain / (2.0 * pi)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray((1.0 - blend) * plain / rope.factor + blend * plain, np.float64)


def _yarn(plain: NDArray[np.float64], rope: RopeConfig) -> NDArray[np.float64]:
    """Keep high frequencies, scale low ones, and interpolate linearly over the pairs between the two band edges."""
    low, high = _yarn_edge(rope, rope.beta_fast), _yarn_edge(rope, rope.beta_slow)
    if rope.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # avoids division by zero
    blend = np.clip((np.arange(plain.size) - low) / (high - low), 0.0, 1.0)
    return np.asarray(plain / rope.factor * blend + plain * (1.0 - blend), np.float64)


def _yarn_edge(rope: RopeConfig, num_rotations: float) -> float:
    """Return the index of the pair, as a real number, that rotates this often within the original context."""
    return rope.rotary_dim * log(rope.original_max_positions / (num_rotations * 2.0 * pi)) / (2.0 * log(rope.theta))
