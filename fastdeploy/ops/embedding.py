# SPDX-License-Identifier: Apache-2.0
"""Token embedding: rows of a table by token id."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import paddle

from fastdeploy.ops.examples import CODED_FORMS, random_codes, random_rows
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.quantized_form import FORMS, NO_QUANTIZATION, QuantizedForm
from fastdeploy.ops.reference import gather as reference
from fastdeploy.ops.registry import Lookup, OpEntry, cpu_only, register


def embedding(token_ids: paddle.Tensor, table: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """Copy table[token_ids[r]] to out[r] for the first `num_rows` rows.

    Args:
        token_ids: [capacity] int32.
        table: [vocab, hidden] of any dtype.
        out: [capacity, hidden], dtype of table.
        num_rows: rows to read and write.

    Raises:
        ValueError: an id outside 0..vocab-1, or an invalid shape or dtype.
    """
    _EMBEDDING.run(token_ids, table, out, num_rows)


def packed_embedding(token_ids: paddle.Tensor, table: PackedLinear, out: paddle.Tensor, num_rows: int) -> None:
    """Do the same as `embedding` with a packed weight, so that a tied head and embedding share their memory.

    The weights of a quantized table, (code * scale + minimum) * factor in fp32, are rounded to bfloat16 once;
    custom_ops/common/quant.h defines the order, which is the same on every backend and path.

    Args:
        token_ids: [capacity] int32.
        table: a packed weight [vocab, hidden] in any form, not gated.
        out: [capacity, hidden], dtype of table, which is bfloat16 if the table is quantized.
        num_rows: rows to read and write.

    Raises:
        ValueError: a gated table, an id outside 0..vocab-1, or an invalid shape or dtype.
    """
    if table.is_gated:
        raise ValueError("embedding: table: expected one row for each output, got a gated layer")
    _PACKED_EMBEDDING.run(token_ids, table, out, num_rows)


def _example(dtype: str, lookup: Lookup) -> Sequence[paddle.Tensor]:
    table = random_rows(9, 24, dtype, 4)
    ids = paddle.to_tensor(np.array([8, 0, 3, 3, 99], np.int32))
    out = paddle.full([5, 24], 7.0, dtype)
    lookup("embedding")(ids, table, out, 4)
    return [out]


def _packed_example(
    dtype: str, hidden: int, lookup: Lookup, quantization: str = NO_QUANTIZATION
) -> Sequence[paddle.Tensor]:
    return _rows_of(lookup("pack_linear")(random_rows(37, hidden, dtype, 4), None, quantization), dtype, hidden, lookup)


def _coded_example(form: QuantizedForm, hidden: int, lookup: Lookup) -> Sequence[paddle.Tensor]:
    piece = random_codes(37, hidden, form, 4)
    return _rows_of(lookup("pack_linear")([piece], None, form.quantization), "bfloat16", hidden, lookup)


def _rows_of(table: PackedLinear, dtype: str, hidden: int, lookup: Lookup) -> Sequence[paddle.Tensor]:
    ids = paddle.to_tensor(np.array([36, 0, 15, 16, 16, 99], np.int32))
    out = paddle.full([6, hidden], 7.0, dtype)
    lookup("packed_embedding")(ids, table, out, 5)
    return [out]


_EMBEDDING = register(
    OpEntry(
        "embedding",
        reference.embedding,
        {"float32": 0.0, "bfloat16": 0.0},
        [partial(_example, dtype) for dtype in ("float32", "bfloat16")],
    )
)

_PACKED_EMBEDDING = register(
    OpEntry(
        "packed_embedding",
        reference.packed_embedding,
        {"float32": 0.0, "bfloat16": 0.0},
        [
            *(partial(_packed_example, "bfloat16", hidden) for hidden in (24, 72)),
            cpu_only(partial(_packed_example, "bfloat16", 33)),
            *(cpu_only(partial(_packed_example, "float32", hidden)) for hidden in (24, 33)),
            *(partial(_packed_example, "bfloat16", 136, quantization=quantization) for quantization in FORMS),
            *(cpu_only(partial(_packed_example, "bfloat16", 33, quantization=quantization)) for quantization in FORMS),
            *(partial(_coded_example, form, 136) for form in CODED_FORMS),
        ],
    )
)
