# SPDX-License-Identifier: Apache-2.0
"""Balances the channels of keys for a KV cache of eight bits, without changing a score.

The codes of a key share one scale, so that one large channel costs all others their bits. A rotation keeps the length
of a pair of channels. The keys of a KV head may therefore be divided by a power of two per pair, and the queries of
this head multiplied by it: every product of a query and a key is the same number, and no step does more work.

The exponents follow from the weights. They apply to the rows of the projections and to their biases, or, where heads
are normalised after the projection, to the weights of these norms, which all heads share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.models.finite import bits_of
from fastdeploy.ops.linear import WeightPiece

MAX_EXPONENT = 16  # so that weights between 2^-110 and 2^110 keep every bit
_STRENGTH = 0.75  # 1 would give all pairs one length; less leaves the queries more even
_ROWS = 32  # computed at a time, so that they stay within a core's cache

_T = TypeVar("_T")
Exponents = NDArray[np.int8]
Factors = NDArray[np.float32]


def pairs_of_channels(head_dim: int, rotary_dim: int, is_interleaved: bool) -> NDArray[np.intp]:
    """Return the pair to which each channel of a head belongs; a channel that is not rotated is alone.

    Args:
        rotary_dim, is_interleaved: as `RotaryParams` has them.
    """
    rotated, half = np.arange(rotary_dim), rotary_dim // 2
    pairs = rotated // 2 if is_interleaved else rotated % half
    return np.concatenate([pairs, half + np.arange(head_dim - rotary_dim)])


def squared_lengths(pieces: Sequence[WeightPiece], norm: Tensor, bias: Tensor | None) -> NDArray[np.float64]:
    """Return bias^2 + sum over the inputs of (weight * norm)^2 for each output of a linear layer.

    Args:
        pieces: of a bfloat16 weight.
        norm: [in_features], the weight of the norm before the layer.
        bias: [out_features], or None.
    """
    gamma = norm.astype("float64").numpy()

    def lengths(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
        return np.asarray(np.square(_floats(bits) * gamma).sum(axis=1))

    sums = np.concatenate([sums for piece in pieces for sums in _map_blocks(lengths, _rows(piece))])
    return sums if bias is None else sums + np.square(bias.astype("float64").numpy())


def _rows(piece: WeightPiece) -> NDArray[np.uint16]:
    """Return the bits of a piece, [outputs, inputs], in its memory."""
    bits = bits_of(piece.matrix).reshape(piece.matrix.shape)
    return bits[:, piece.begin : piece.end].T if piece.is_transposed else bits[piece.begin : piece.end]


def _floats(bits: NDArray[np.uint16]) -> Factors:
    """Return the values that bits of bfloat16 stand for."""
    return (bits.astype(np.uint32, order="C") << 16).view(np.float32)


def _map_blocks(function: Callable[..., _T], *arrays: NDArray[Any]) -> list[_T]:
    """Return the results of a function for all blocks of rows of these arrays, several of which run at a time."""
    starts = range(0, len(arrays[0]), _ROWS)
    blocks = ([array[begin : begin + _ROWS] for begin in starts] for array in arrays)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # NumPy releases the global lock
        return list(threads.map(function, *blocks))


def choose_exponents(squares: NDArray[np.float64], pairs: NDArray[np.intp]) -> Exponents:
    """Return the exponent of each channel: keys are divided by 2^exponent, queries multiplied.

    A pair of length s has round(log2(s^0.75 / m)), where m is the geometric mean of s^0.75 over the pairs of the head.
    Pairs of length 0 have the exponent 0 and do not count.

    Args:
        squares: [num_heads, head_dim], the mean square of each channel up to a common factor.
        pairs: [head_dim], from `pairs_of_channels`.
    """
    sums = np.stack([np.bincount(pairs, weights=head) for head in squares])
    counts = sums > 0
    logs = _STRENGTH / 2 * np.log2(np.where(counts, sums, 1.0))
    means = logs.sum(axis=1, keepdims=True) / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    exponents = np.where(counts, np.rint(logs - means), 0.0)
    return np.clip(exponents, -MAX_EXPONENT, MAX_EXPONENT).astype(np.int8)[:, pairs]


def powers_of_two(exponents: NDArray[np.integer]) -> Factors:
    """Return 2^exponent for each channel, flat."""
    return np.ldexp(np.float32(1.0), exponents.reshape(-1).astype(np.int32))


def scale_vector(vector: Tensor, factors: Factors) -> Tensor:
    """Return a bias or the weight of a norm times a power of two per element."""
    return vector * paddle.to_tensor(factors).astype(vector.dtype)


def scale_outputs(pieces: Sequence[WeightPiece], factors: Factors) -> list[WeightPiece]:
    """Return copies of the pieces of a bfloat16 weight, with each output times a power of two."""
    scaled, begin = [], 0
    for piece in pieces:
        rows, of_rows = _rows(piece), factors[begin : begin + piece.end - piece.begin, None]
        shape = rows.shape[::-1] if piece.is_transposed else rows.shape
        scaled.append(WeightPiece(paddle.empty(list(shape), "bfloat16"), 0, len(rows), piece.is_transposed))
        _map_blocks(_write_scaled, _rows(scaled[-1]), rows, of_rows)
        begin += len(rows)
    return scaled


def _write_scaled(out: NDArray[np.uint16], bits: NDArray[np.uint16], factors: Factors) -> None:
    """Write the bits of values times factors."""
    out[:] = (_floats(bits) * factors).view(np.uint32) >> 16


def digest_exponents(layers: Iterable[Tensor | None]) -> str:
    """Return a digest of the exponents of all layers; empty if keys are not balanced."""
    exponents = [layer.numpy() for layer in layers if layer is not None]
    return blake2b(b"".join(map(bytes, exponents)), digest_size=8).hexdigest() if exponents else ""
