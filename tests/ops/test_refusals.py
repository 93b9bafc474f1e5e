# SPDX-License-Identifier: Apache-2.0
"""Invalid arguments are refused with operator, argument, expected and actual value in one sentence."""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import paddle
import pytest

from fastdeploy.ops.attention import allocate_kv_cache, append_attention, make_attention_metadata
from fastdeploy.ops.embedding import embedding, packed_embedding
from fastdeploy.ops.gather import gather_rows, scatter_rows
from fastdeploy.ops.linear import WeightPiece, linear, pack_linear
from fastdeploy.ops.logits import scatter_logits
from fastdeploy.ops.norm import NormParams, norm_gelu, rms_norm
from fastdeploy.ops.rotary import HeadLayout, RotaryParams

HEADS = HeadLayout(2, 1, 16)


def floats(*shape: int, dtype: str = "float32") -> paddle.Tensor:
    return paddle.zeros(list(shape), dtype)


def ints(*values: int) -> paddle.Tensor:
    return paddle.to_tensor(np.array(values, np.int32))


def attend(
    qkv: paddle.Tensor | None = None,
    table: int = 0,
    kv_len: int = 2,
    slot: int | None = None,
    heads: HeadLayout = HEADS,
    rotary: RotaryParams | None = None,
    cache_dtype: str = "float32",
) -> None:
    cache = allocate_kv_cache(2, 16, 1, 16, cache_dtype)
    batch = make_attention_metadata([2], [kv_len], np.array([[table]]), 16)
    if slot is not None:
        batch = replace(batch, slot_mapping=ints(0, slot))
    append_attention(floats(2, 64) if qkv is None else qkv, cache, batch, floats(2, 32), heads, 0.25, rotary=rotary)


PACKED = pack_linear(floats(8, 4))
QUANTIZED = pack_linear(floats(8, 12, dtype="bfloat16"), None, "wint8")
REFUSED: list[tuple[str, Callable[[], object]]] = [
    (
        "linear: x: expected a CPU tensor that holds [3, 4], got [2, 4]",
        lambda: linear(floats(2, 4), PACKED, floats(3, 8), 3),
    ),
    (
        "linear: x: expected dtype float32, got bfloat16",
        lambda: linear(floats(2, 4, dtype="bfloat16"), PACKED, floats(2, 8), 2),
    ),
    (
        "linear: out: expected a CPU tensor that holds [2, 8], got [2, 9]",
        lambda: linear(floats(2, 4), PACKED, floats(2, 9), 2),
    ),
    (
        "linear: residual: expected a CPU tensor that holds [2, 8], got [1, 8]",
        lambda: linear(floats(2, 4), PACKED, floats(2, 8), 2, floats(1, 8)),
    ),
    (
        "linear: norm: expected a CPU tensor that holds [4], got [3]",
        lambda: linear(floats(2, 4), PACKED, floats(2, 8), 2, norm=NormParams(floats(3), 1e-6)),
    ),
    (
        "linear: x: expected at least in_features columns, got 3",
        lambda: linear(floats(2, 3), PACKED, floats(2, 8), 2, norm=NormParams(floats(4), 1e-6)),
    ),
    (
        "linear: x: expected a CPU tensor that holds [2, 4], got [2, 5]",
        lambda: linear(floats(2, 5), PACKED, floats(2, 8), 2),
    ),
    (
        "linear: weight: expected a CPU tensor of [128], got [64]",
        lambda: linear(floats(2, 4), replace(PACKED, is_gated=True), floats(2, 8), 2),
    ),
    (
        "pack_linear: weight: expected an even number of rows when gated, got 7",
        lambda: pack_linear(floats(7, 4), is_gated=True),
    ),
    (
        "pack_linear: weight: expected an even number of rows when gated, got 7",
        lambda: pack_linear(floats(7, 4, dtype="bfloat16"), None, "w4a8", is_gated=True),
    ),
    ("linear: num_rows: expected at least 0, got -1", lambda: linear(floats(2, 4), PACKED, floats(2, 8), -1)),
    ("pack_linear: weight: expected [out_features, in_features], got [4]", lambda: pack_linear(floats(4))),
    (
        "pack_linear: weight: expected all pieces transposed or none, got both",
        lambda: pack_linear([WeightPiece(floats(4, 4), 0, 4), WeightPiece(floats(4, 4), 0, 4, True)]),
    ),
    (
        "pack_linear: weight: expected a range of its outputs, got 5",
        lambda: pack_linear([WeightPiece(floats(4, 6), 0, 5)]),
    ),
    (
        "pack_linear: weight: expected a CPU tensor of [any, 6], got [4, 5]",
        lambda: pack_linear([WeightPiece(floats(4, 6), 0, 4), WeightPiece(floats(4, 5), 0, 4)]),
    ),
    (
        "pack_linear: weight: expected dtype float32, got bfloat16",
        lambda: pack_linear([WeightPiece(floats(4, 6), 0, 4), WeightPiece(floats(4, 6, dtype="bfloat16"), 0, 4)]),
    ),
    (
        "embedding: table: expected one row for each output, got a gated layer",
        lambda: packed_embedding(ints(0, 1), pack_linear(floats(8, 4), is_gated=True), floats(2, 4), 2),
    ),
    (
        "embedding: out: expected a CPU tensor that holds [2, 4], got [2, 3]",
        lambda: packed_embedding(ints(0, 1), PACKED, floats(2, 3), 2),
    ),
    (
        "embedding: token_ids: expected 0..7, got 8 at row 1",
        lambda: packed_embedding(ints(0, 8), PACKED, floats(2, 4), 2),
    ),
    (
        "pack_linear: bias: expected paddle.float32 of [8], got paddle.float32 of [7]",
        lambda: pack_linear(floats(8, 4), floats(7)),
    ),
    (
        "pack_linear: weight: expected dtype bfloat16 or float32, got float64",
        lambda: pack_linear(floats(8, 4, dtype="float64")),
    ),
    (
        "pack_linear: quantization: expected one of none, wint8, wint4, wint4_min, w8a8, w4a8, w4a8_min, got 'int8'",
        lambda: pack_linear(floats(8, 4), None, "int8"),
    ),
    (
        "pack_linear: weight: expected dtype bfloat16 for wint4, got float32",
        lambda: pack_linear(floats(8, 4), None, "wint4"),
    ),
    (
        "pack_linear: weight: expected finite values, got NaN or infinity",
        lambda: pack_linear(paddle.full([40, 4], float("inf"), "bfloat16"), None, "wint8"),
    ),
    (
        "linear: x: expected dtype bfloat16, got float32",
        lambda: linear(floats(2, 12), QUANTIZED, floats(2, 8), 2),
    ),
    (
        "linear: x: expected a CPU tensor that holds [3, 12], got [2, 12]",
        lambda: linear(floats(2, 12, dtype="bfloat16"), QUANTIZED, floats(3, 8), 3),
    ),
    (
        "linear: weight: expected a CPU tensor of [384], got [576]",
        lambda: linear(floats(2, 12, dtype="bfloat16"), replace(QUANTIZED, quantization="wint4"), floats(2, 8), 2),
    ),
    (
        "rms_norm: weight: expected a CPU tensor of [8], got [4]",
        lambda: rms_norm(floats(2, 8), floats(4), floats(2, 8), 2, 1e-6),
    ),
    (
        "rms_norm: out: expected dtype float32, got bfloat16",
        lambda: rms_norm(floats(2, 8), floats(8), floats(2, 8, dtype="bfloat16"), 2, 1e-6),
    ),
    (
        "embedding: token_ids: expected 0..4, got 5 at row 1",
        lambda: embedding(ints(0, 5), floats(5, 2), floats(2, 2), 2),
    ),
    (
        "embedding: token_ids: expected 0..4, got -1 at row 0",
        lambda: embedding(ints(-1, 5), floats(5, 2), floats(2, 2), 2),
    ),
    ("gather_rows: rows: expected 0..2, got 3 at row 0", lambda: gather_rows(floats(3, 2), ints(3), floats(1, 2), 1)),
    (
        "scatter_logits: ids: expected columns of out, got 4",
        lambda: scatter_logits(floats(1, 2), ints(0, 4), floats(1, 4), 1),
    ),
    (
        "scatter_logits: ids: expected a CPU tensor of [2], got [1]",
        lambda: scatter_logits(floats(1, 2), ints(0), floats(1, 4), 1),
    ),
    (
        "norm_gelu: bias: expected a CPU tensor of [8], got [4]",
        lambda: norm_gelu(floats(2, 8), floats(8), floats(4), floats(2, 8), 2, 1e-6),
    ),
    ("scatter_rows: rows: expected rows of out, got -1", lambda: scatter_rows(floats(1, 2), ints(-1), floats(3, 2), 1)),
    ("scatter_rows: rows: expected rows of out, got 3", lambda: scatter_rows(floats(1, 2), ints(3), floats(3, 2), 1)),
    (
        "scatter_rows: out: expected a CPU tensor of [any, 2], got [3, 4]",
        lambda: scatter_rows(floats(1, 2), ints(0), floats(3, 4), 1),
    ),
    (
        "append_attention: positions: expected 0..4, got 5",
        lambda: attend(kv_len=6, rotary=RotaryParams(floats(5, 16), False)),
    ),
    (
        "append_attention: cos_sin: expected an even last axis up to head_dim, got 18",
        lambda: attend(rotary=RotaryParams(floats(5, 18), False)),
    ),
    (
        "append_attention: q_norm: expected a CPU tensor that holds [16], got [15]",
        lambda: attend(rotary=RotaryParams(floats(5, 16), False, floats(15))),
    ),
    ("append_attention: qkv: expected a CPU tensor that holds [2, 64], got [2, 63]", lambda: attend(floats(2, 63))),
    ("append_attention: block_tables: expected a block of the cache, got 2", lambda: attend(table=2, slot=1)),
    ("append_attention: slot_mapping: expected a slot of the cache, got 32", lambda: attend(slot=32)),
    ("append_attention: slot_mapping: expected a slot of the cache, got -1", lambda: attend(slot=-1)),
    (
        "allocate_kv_cache: block_size: expected a multiple of 16, got 24",
        lambda: allocate_kv_cache(1, 24, 1, 16, "float32"),
    ),
    (
        "allocate_kv_cache: head_dim: expected an even number up to 256, got 15",
        lambda: allocate_kv_cache(1, 16, 1, 15, "float32"),
    ),
    (
        "append_attention: qkv: expected dtype bfloat16, got float32",
        lambda: attend(cache_dtype="int8"),
    ),
    (
        "allocate_kv_cache: dtype: expected bfloat16, float32 or int8, got float16",
        lambda: allocate_kv_cache(1, 16, 1, 16, "float16"),
    ),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message[:60] for message, _ in REFUSED])
def test_invalid_arguments_are_refused_with_one_sentence(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_block_table_that_is_too_short_is_refused() -> None:
    cache = allocate_kv_cache(2, 16, 1, 16, "float32")
    batch = make_attention_metadata([2], [2], np.array([[0]]), 16)
    batch = replace(batch, kv_lens=ints(17))
    with pytest.raises(ValueError, match=r"append_attention: kv_lens: .* got 17"):
        append_attention(floats(2, 64), cache, batch, floats(2, 32), HEADS, 0.25)


def test_query_heads_must_divide_by_the_kv_heads() -> None:
    cache = allocate_kv_cache(2, 16, 2, 16, "float32")
    batch = make_attention_metadata([2], [2], np.array([[0]]), 16)
    with pytest.raises(ValueError, match="append_attention: num_heads: expected a multiple of the kv heads, got 3"):
        append_attention(floats(2, 112), cache, batch, floats(2, 48), HeadLayout(3, 2, 16), 0.25)
