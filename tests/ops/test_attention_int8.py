# SPDX-License-Identifier: Apache-2.0
"""An int8 cache compared with float64 attention in NumPy, over the rounded and over the exact keys and values."""

import numpy as np
import paddle
import pytest

from fastdeploy.ops.attention import allocate_kv_cache, append_attention, make_attention_metadata
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.rotary import HeadLayout

LENGTHS = [9, 600]
ROUNDING = 2.0**-7  # of weights and of results to bfloat16 together, relative
LAYOUTS = [HeadLayout(4, 2, 64), HeadLayout(3, 1, 72), HeadLayout(2, 2, 18)]


def attend(qkv: paddle.Tensor, heads: HeadLayout, num_new: int, seed: int = 0) -> np.ndarray:
    """Return the last num_new rows [num_new, num_heads, head_dim] of a sequence whose other rows come first."""
    blocks = -(-qkv.shape[0] // 32)
    cache = allocate_kv_cache(blocks, 32, heads.num_kv_heads, heads.head_dim, "int8")
    table = np.random.default_rng(seed).permutation(blocks)[None]
    begin = 0
    for end in (qkv.shape[0] - num_new, qkv.shape[0]):
        out = paddle.zeros([end - begin, heads.num_heads * heads.head_dim], "bfloat16")
        batch = make_attention_metadata([end - begin], [end], table, 32)
        append_attention(qkv[begin:end].clone(), cache, batch, out, heads, heads.head_dim**-0.5)
        begin = end
    return np.asarray(out.astype("float64").numpy()).reshape(num_new, heads.num_heads, heads.head_dim)


def split(qkv: paddle.Tensor, heads: HeadLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return queries, keys and values [rows, num_heads, head_dim], the latter two repeated for every query head."""
    rows = np.asarray(qkv.astype("float64").numpy()).reshape(qkv.shape[0], -1, heads.head_dim)
    query, rest = rows[:, : heads.num_heads], rows[:, heads.num_heads :]
    repeated = np.repeat(rest, heads.num_heads // heads.num_kv_heads, axis=1)
    return query, repeated[:, : heads.num_heads], repeated[:, heads.num_heads :]


def scales_of(rows: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(rows).max(axis=-1, keepdims=True) / 127)


def round_to_codes(rows: np.ndarray) -> np.ndarray:
    inverse = np.float32(127) / np.abs(rows).max(axis=-1, keepdims=True).astype(np.float32)
    return np.asarray(np.rint(rows.astype(np.float32) * inverse) * scales_of(rows))


def weights_of(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the softmax of the last len(query) of len(keys) positions: [rows, num_heads, positions]."""
    rows, positions, dim = len(query), len(keys), query.shape[-1]
    scores = np.einsum("rhd,phd->rhp", query, keys) * dim**-0.5
    hidden = np.arange(positions) > np.arange(positions - rows, positions)[:, None]
    scores = np.where(hidden[:, None, :], -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("heads", LAYOUTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_result_is_attention_over_the_codes(heads: HeadLayout, length: int) -> None:
    qkv = random_rows(length, heads.row_size, "bfloat16", 1)
    query, keys, values = split(qkv, heads)
    keys, values = round_to_codes(keys), round_to_codes(values)
    weights = weights_of(query[-9:], keys)
    want, size = (np.einsum("rhp,phd->rhd", weights, v) for v in (values, np.abs(values)))
    assert np.all(np.abs(attend(qkv, heads, 9) - want) <= ROUNDING * size)


@pytest.mark.parametrize("heads", LAYOUTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_error_of_rounding_is_at_most_half_a_scale_per_code(heads: HeadLayout, length: int) -> None:
    qkv = random_rows(length, heads.row_size, "bfloat16", 2)
    query, keys, values = split(qkv, heads)
    weights = weights_of(query[-9:], keys)
    want, size = (np.einsum("rhp,phd->rhd", weights, v) for v in (values, np.abs(values)))
    score_error = heads.head_dim**-0.5 * np.abs(query[-9:]).sum(-1) * scales_of(keys).max() / 2
    bound = scales_of(values).max() / 2 + (np.expm1(2 * score_error)[..., None] + ROUNDING) * size
    assert np.all(np.abs(attend(qkv, heads, 9) - want) <= bound)


def test_keys_and_values_may_be_zero_tiny_or_huge() -> None:
    heads = HeadLayout(1, 1, 16)
    qkv = paddle.zeros([3, 48], "bfloat16")
    qkv[1, 32:] = 1e-30
    qkv[2, 32:] = 3e30
    assert np.array_equal(attend(qkv[:1], heads, 1), np.zeros((1, 1, 16)))
    assert attend(qkv[:2], heads, 1) == pytest.approx(5e-31, rel=0.01)
    assert attend(qkv, heads, 1) == pytest.approx(1e30, rel=0.01)


@pytest.mark.parametrize("column", [20, 40])
def test_rows_that_attend_to_a_value_that_is_not_finite_are_nan(column: int) -> None:
    heads = HeadLayout(1, 1, 16)
    qkv = random_rows(4, 48, "bfloat16", 3)
    qkv[2, column] = float("inf")
    assert np.isnan(attend(qkv, heads, 3)).all(axis=(1, 2)).tolist() == [False, True, True]


def test_a_position_takes_its_codes_and_a_scale() -> None:
    cache = allocate_kv_cache(3, 32, 2, 24, "int8")
    assert cache.is_int8 and str(cache.key.dtype) == str(cache.value.dtype) == "paddle.int8"
    assert cache.key.shape == [3, 2, 32, 24 + 4]
    assert cache.value.shape == [3, 2, 32, 32 + 4]
