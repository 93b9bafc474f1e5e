# SPDX-License-Identifier: Apache-2.0
"""Balances the channels of keys for a KV cache of eight bits, without changing a score.

The codes of a key share one scale, so that one large channel costs all others their bits. A rotation keeps the length
of a pair of channels. The keys of a KV head may therefore be divided by a power of two per pair, and the queries of
this head multiplied by it: every product of a query and a key is the same number, and no step does more work.

The exponents follow from the weights. They apply to the rows of the projections and to their biases, or, where heads
are normalised after the projection, to the weights of these norms, which all heads share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops.linear import WeightPiece

MAX_EXPONENT = 16  # so that weights between 2^-110 and 2^110 keep every bit
_STRENGTH = 0.75  # 1 would give all pairs one length; less leaves the queries more even
_ROWS = 64  # converted at a time, so that they stay within a core's cache

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
        norm: [in_features], the weight of the norm before the layer.
        bias: [out_features], or None.
    """
    gamma = norm.astype("float64").numpy()
    sums = np.concatenate([np.square(block * gamma).sum(axis=1) for block in _blocks(pieces)])
    return sums if bias is None else sums + np.square(bias.astype("float64").numpy())


def _blocks(pieces: Sequence[WeightPiece]) -> Iterator[NDArray[np.float64]]:
    """Yield the rows of a weight in order, several at a time."""
    for piece in pieces:
        rows = piece.rows()
        for begin in range(0, rows.shape[0], _ROWS):
            yield rows[begin : begin + _ROWS].astype("float64").numpy()


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
    """Return copies of a weight's pieces, with each output times a power of two."""
    scaled, begin = [], 0
    for piece in pieces:
        count = piece.end - piece.begin
        part = paddle.to_tensor(factors[begin : begin + count]).astype(piece.matrix.dtype)
        columns = slice(piece.begin, piece.end)
        matrix = piece.matrix[:, columns] * part if piece.is_transposed else piece.matrix[columns] * part.unsqueeze(1)
        scaled.append(WeightPiece(matrix, 0, count, piece.is_transposed))
        begin += count
    return scaled


def digest_exponents(layers: Iterable[Tensor | None]) -> str:
    """Return a digest of the exponents of all layers; empty if keys are not balanced."""
    exponents = [layer.numpy() for layer in layers if layer is not None]
    return blake2b(b"".join(map(bytes, exponents)), digest_size=8).hexdigest() if exponents else ""
