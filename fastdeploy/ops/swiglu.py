# SPDX-License-Identifier: Apache-2.0
"""The gated activation of the feed-forward layer."""

from collections.abc import Sequence
from functools import partial

import paddle

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.reference import swiglu as reference
from fastdeploy.ops.registry import Lookup, OpEntry, register, run_native


def swiglu(gate_up: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """Write silu(gate) * up of the first `num_rows` rows, computed in fp32 and rounded once.

    Args:
        gate_up: [cap, 2 * size] bfloat16 or float32, the gate in the first half.
        out: [cap, size], dtype of gate_up.
        num_rows: rows to read and write.

    Raises:
        ValueError: a shape or dtype that does not fit, named with operator and argument.
    """
    _SWIGLU.run(gate_up, out, num_rows)


def _cpu(gate_up: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    run_native("fd_swiglu", gate_up, out, num_rows)


def _example(dtype: str, rows: int, size: int, lookup: Lookup) -> Sequence[paddle.Tensor]:
    gate_up = random_rows(rows + 1, 2 * size, dtype, 3, scale=4.0)
    out = paddle.full([rows + 1, size], 7.0, dtype)
    lookup("swiglu")(gate_up, out, rows)
    return [out]


_SWIGLU = register(
    OpEntry(
        "swiglu",
        reference.swiglu,
        {"cpu": _cpu},
        {"float32": 2e-6, "bfloat16": 8e-3},
        [
            partial(_example, dtype, rows, size)
            for dtype in ("float32", "bfloat16")
            for rows, size in ((1, 64), (5, 100), (3, 7), (16, 1024))
        ],
    )
)
