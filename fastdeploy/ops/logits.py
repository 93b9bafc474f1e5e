# SPDX-License-Identifier: Apache-2.0
"""Logits of some ids, written to their places among the logits of all ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.reference import logits as reference
from fastdeploy.ops.registry import Lookup, OpEntry, register


def scatter_logits(x: Tensor, ids: Tensor, out: Tensor, num_rows: int) -> None:
    """Write out[r, ids[i]] = x[r, i] for the first `num_rows` rows, and minus infinity to their other columns.

    Args:
        x: [capacity, num_ids] float32.
        ids: [num_ids] int32, distinct columns of out.
        out: [capacity, vocab_size] float32.
        num_rows: rows to read and write.

    Raises:
        ValueError: an id outside out, or an invalid shape or dtype.
    """
    _SCATTER_LOGITS.run(x, ids, out, num_rows)


def _example(rows: int, num_ids: int, vocab_size: int, lookup: Lookup) -> Sequence[Tensor]:
    ids = np.random.default_rng(3).permutation(vocab_size)[:num_ids].astype(np.int32)
    out = paddle.full([rows + 1, vocab_size], 7.0, "float32")
    lookup("scatter_logits")(random_rows(rows + 1, num_ids, "float32", 4), paddle.to_tensor(ids), out, rows)
    return [out[:rows].clip(min=-1e30)]  # results are compared by their difference


_SCATTER_LOGITS = register(
    OpEntry(
        "scatter_logits",
        reference.scatter_logits,
        {"float32": 0.0},
        [partial(_example, *sizes) for sizes in ((1, 64, 200), (5, 3, 1000), (16, 1024, 1024))],
    )
)
