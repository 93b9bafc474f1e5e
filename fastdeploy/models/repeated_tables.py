# SPDX-License-Identifier: Apache-2.0
"""Recognizes tables of weights that a drafting model's files only repeat from the target's."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

_ROWS = 4096  # at a time, so that comparing needs little memory


def are_equal(first: Tensor, second: Tensor, dtype: str) -> bool:
    """Return whether two tensors of one shape are equal after a conversion."""
    pairs = zip(_parts(first, dtype), _parts(second, dtype), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def digest_of(table: Tensor, dtype: str) -> str:
    """Return a digest of a tensor's values after a conversion."""
    digest = blake2b(digest_size=16)
    for part in _parts(table, dtype):
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _parts(table: Tensor, dtype: str) -> Iterator[NDArray]:
    for begin in range(0, table.shape[0], _ROWS):
        yield table[begin : begin + _ROWS].astype(dtype).numpy()
