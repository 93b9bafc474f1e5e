# SPDX-License-Identifier: Apache-2.0
"""Attention on an emulated GPU: close to float64, and a row has the same bits in every call."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import paddle
import pytest

from fastdeploy.ops.attention import KVCache, make_attention_metadata
from fastdeploy.ops.backends.gpu.attention import row_bytes
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.reference.rotary import prepare
from fastdeploy.ops.rotary import HeadLayout, RotaryParams
from tests.ops.bits import assert_same_bits, bits
from tests.ops.gpu.attention_cases import Sequences, assert_close, quantize
from tests.ops.gpu.emulated import count, counts_on_device, emulate

SPLIT, GROUP = 256, 2048  # positions; kSplit and kGroupSplits of custom_ops/gpu_ops/attention_plan.h
DTYPES = ["bfloat16", "int8"]  # of the cache
SMALL, LARGE = HeadLayout(4, 2, 64), HeadLayout(7, 1, 128)


@pytest.mark.parametrize("edge", [16, 64, SPLIT, GROUP, 2 * GROUP])
@pytest.mark.parametrize(("block_size", "dtype"), [(16, "bfloat16"), (48, "int8")])
def test_gpu_attention_at_the_edges_of_blocks_splits_and_groups(edge: int, block_size: int, dtype: str) -> None:
    for length in (edge - 1, edge, edge + 1):
        sequences = Sequences(SMALL, [length], block_size, cache_dtype=dtype)
        rows = 3 if edge <= SPLIT else 2
        sequences.check([(0, length - rows, length)], f"{length} positions", has_checks=edge == SPLIT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [SMALL, HeadLayout(3, 1, 128), HeadLayout(2, 1, 256)])
def test_gpu_attention_gives_a_row_the_same_bits_for_every_number_of_rows(heads: HeadLayout, dtype: str) -> None:
    length = SPLIT + 21
    sequences = Sequences(heads, [length], cache_dtype=dtype)
    most = [(0, length - 20, length)]
    alone = sequences.alone(most)
    assert_close(sequences.run(most), sequences.exact(most))
    for rows in range(2, 21):
        got = sequences.run([(0, length - rows, length)], has_checks=rows == 17)
        assert_same_bits(bits(got), alone[-rows:], f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_attention_in_chunks_of_any_size(dtype: str) -> None:
    length = 2 * SPLIT + 30
    sequences = Sequences(SMALL, [length], 48, cache_dtype=dtype)
    whole = bits(sequences.run([(0, 0, length)]))
    assert_close(sequences.run([(0, 0, length)]), sequences.exact([(0, 0, length)]))
    for position in (0, 1, 63, 64, SPLIT - 1, SPLIT, length - 1):
        assert_same_bits(
            sequences.alone([(0, position, position + 1)]), whole[position : position + 1], f"row {position}"
        )
    for size in (65, 250):
        cuts = [*range(0, length, size), length]
        chunks = [bits(sequences.run([(0, *cut)])) for cut in pairwise(cuts)]
        assert_same_bits(np.concatenate(chunks), whole, f"chunks of {size}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_attention_has_the_same_bits_in_every_order_of_blocks_and_threads(dtype: str) -> None:
    sequences = Sequences(LARGE, [SPLIT + 40, 19, 2 * SPLIT + 3], cache_dtype=dtype)
    rows = [(0, SPLIT + 30, SPLIT + 40), (1, 0, 19), (2, 2 * SPLIT + 2, 2 * SPLIT + 3)]
    want = bits(sequences.run(rows))
    assert_same_bits(want, sequences.alone(rows), "rows alone")
    for seed in range(1, 4):
        assert_same_bits(bits(sequences.run(rows, has_checks=True, seed=seed)), want, f"seed {seed}")


@pytest.mark.parametrize(
    ("shared", "rows", "dtype"),
    [
        ((0, 40, 40, 33, 16, 15), 1, "bfloat16"),
        ((0, 40, 40, 33, 16, 15), 3, "int8"),
        ((0, 64, 48, 0, 64), 3, "bfloat16"),
        ((0, *[33] * 24), 2, "bfloat16"),
    ],
)
def test_gpu_attention_with_shared_prefixes_has_the_bits_of_each_alone(
    shared: tuple[int, ...], rows: int, dtype: str
) -> None:
    lengths = [max(shared) * 16 + 3 * b + rows for b in range(len(shared))]
    sequences = Sequences(SMALL, lengths, 16, shared, dtype)
    each = [(b, length - rows, length) for b, length in enumerate(lengths)]
    alone = [sequences.alone([one]) for one in each]
    orders: list[list[int]] = [list(range(len(shared))), list(range(len(shared)))[::-1], [1, 2], [3, 0]]
    for order in orders:
        got = sequences.run([each[b] for b in order], has_checks=len(order) == 6)
        assert_same_bits(bits(got), np.concatenate([alone[b] for b in order]), f"sequences {order}")
    assert_close(sequences.run(each), sequences.exact(each))


def test_gpu_attention_of_many_sequences_shares_nothing_if_the_scratch_memory_is_too_small() -> None:
    heads, length = HeadLayout(16, 1, 64), GROUP + SPLIT + 40
    sequences = Sequences(heads, [length] * 34, 64, [0, *[36] * 33])
    each = [(b, length - 2, length) for b in range(34)]
    got = bits(sequences.run(each)).reshape(34, 2, -1)
    for b in (0, 1, 33):
        assert_same_bits(got[b], sequences.alone([each[b]]), f"sequence {b}")


@pytest.mark.parametrize("heads", [HeadLayout(3, 1, 64), HeadLayout(1, 1, 128)])
def test_gpu_attention_of_504_rows(heads: HeadLayout) -> None:
    length = GROUP + 2 * SPLIT + 20
    sequences = Sequences(heads, [length], 32)
    rows = [(0, length - 504, length)]
    got = sequences.run(rows)
    assert_close(got, sequences.exact(rows))
    for row in (0, 63, 64, 503):
        position = length - 504 + row
        assert_same_bits(bits(got)[row : row + 1], sequences.alone([(0, position, position + 1)]), f"row {row}")


@pytest.mark.parametrize(("num_seqs", "rows", "shared"), [(4, 1, 0), (4, 1, 160), (1, 350, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_attention_merges_splits_and_groups_in_one_order(num_seqs: int, rows: int, shared: int, dtype: str) -> None:
    """Of single splits, groups, and all splits at once: results are what rounding leaves of sums that would be 0."""
    heads, before = HeadLayout(3, 1, 64), GROUP + 2 * SPLIT + 20
    sequences = Sequences(heads, [before + rows] * num_seqs, 16, [0, *[shared] * (num_seqs - 1)], dtype)
    sizes = np.exp2(np.random.default_rng(8).integers(-24, 1, (before // 2, 1))).astype(np.float32)
    values = random_rows(before // 2, 64, "bfloat16", 7) * paddle.to_tensor(sizes).astype("bfloat16")
    for qkv in sequences.qkv:
        qkv[:, -128:] = 0.0
        qkv[:before, -64:] = paddle.concat([values, -values])
    each = [(b, before, before + rows) for b in range(num_seqs)]
    got = bits(sequences.run(each)).reshape(num_seqs, rows, -1)
    alone = sequences.alone([(0, before, before + 1), (0, before + rows - 1, before + rows)])
    assert (alone != 0).mean() > 0.5
    for b in range(num_seqs):
        assert_same_bits(got[b][[0, -1]], alone, f"sequence {b}")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("length", [40, 66, SPLIT + 1, 2 * SPLIT])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_attention_masks_later_rows_that_are_not_finite(poison: float, length: int, dtype: str) -> None:
    sequences = Sequences(SMALL, [length], cache_dtype=dtype)
    rows = [(0, length - 5, length)]
    clean = bits(sequences.run(rows))
    sequences.qkv[0][-4:] = poison
    got = sequences.run(rows, has_checks=length == 66)
    assert_same_bits(bits(got)[:1], clean[:1], f"the row before {poison}")
    assert np.isnan(got[1:].astype("float32").numpy()).all()


def test_gpu_attention_adds_values_that_are_not_finite_to_the_rows_that_attend_to_them() -> None:
    sequences = Sequences(SMALL, [40])
    values = sequences.qkv[0].reshape([40, -1, 64])
    values[37, -1, 5] = float("inf")
    values[38, -1, 5] = float("-inf")
    sequences.qkv[0][:] = values.reshape([40, -1])
    rows = [(0, 35, 40)]
    got = sequences.run(rows)
    assert_same_bits(bits(got), sequences.alone(rows), "rows alone")
    last_head = got.astype("float32").numpy().reshape(5, 4, 64)[:, 3]
    assert np.isfinite(np.delete(last_head, 5, axis=1)).all()
    assert np.isfinite(last_head[:2, 5]).all()
    assert np.isposinf(last_head[2, 5])
    assert np.isnan(last_head[3:, 5]).all()


@pytest.mark.parametrize("masked", [1, 7, 16])
def test_gpu_attention_masks_leading_positions(masked: int) -> None:
    sequences = Sequences(SMALL, [20, SPLIT + 9])
    sequences.check([(0, 0, 20), (1, SPLIT + 6, SPLIT + 9)], f"{masked} masked", num_masked_prefix=masked)


@pytest.mark.parametrize(("heads", "rotary_dim"), [(SMALL, 64), (SMALL, 20), (HeadLayout(3, 1, 128), 32), (LARGE, 128)])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_gpu_attention_caches_rotated_keys(
    heads: HeadLayout, rotary_dim: int, is_interleaved: bool, has_norm: bool
) -> None:
    length = 19
    sequences = Sequences(heads, [length])
    norms = [random_rows(1, heads.head_dim, "bfloat16", seed)[0] for seed in (2, 3)] if has_norm else (None, None)
    rotary = RotaryParams(random_rows(length, rotary_dim, "float32", 4), is_interleaved, *norms)
    batch, cache, qkv = sequences.metadata([(0, 0, length)]), sequences.cache([]), sequences.qkv[0].clone()
    out = paddle.zeros([length, heads.num_heads * heads.head_dim], "bfloat16")
    emulate()("append_attention")(qkv, cache, batch, out, heads, heads.head_dim**-0.5, 0, rotary)
    prepare(sequences.qkv[0], batch.positions, length, heads, rotary)
    _, key, value = sequences.parts(0)
    got_key, got_value = rows_of(cache, sequences, length)
    assert_same_bits(bits(got_value), bits(value.contiguous()), "values")
    if has_norm:
        assert_close(got_key, key.astype("float64").numpy(), 8e-3)
    else:
        assert_same_bits(bits(got_key), bits(key.contiguous()), "keys")
        assert_close(out, sequences.exact([(0, 0, length)]))
    unused = cache.key[int(sequences.tables[0, length // 16]), :, length % 16 :].astype("float32").numpy()
    assert np.isnan(unused).all()


@pytest.mark.parametrize("heads", [SMALL, LARGE, HeadLayout(2, 1, 256)])
def test_gpu_attention_caches_codes_and_scales(heads: HeadLayout) -> None:
    length = 19
    sequences = Sequences(heads, [length], cache_dtype="int8")
    sequences.qkv[0][3] = 0.0
    sequences.qkv[0][4] = 2.0**-120
    batch, cache, size = sequences.metadata([(0, 0, length)]), sequences.cache([]), 16 * heads.head_dim
    out = paddle.zeros([length, heads.num_heads * heads.head_dim], "bfloat16")
    emulate()("append_attention")(sequences.qkv[0].clone(), cache, batch, out, heads, 0.125, 0)
    used, small = np.arange(length), (3, 4)
    for tensor, part in ((cache.key, 1), (cache.value, 2)):
        memory = tensor.numpy()[sequences.tables[0]]
        codes = memory[..., :size].reshape(-1, heads.num_kv_heads, 16, heads.head_dim)[used // 16, :, used % 16]
        scales = memory[..., size:].view(np.float32)[used // 16, :, used % 16]
        want_codes, want_scales = quantize(sequences.parts(0)[part])
        want_codes[small, :], want_scales[small, :] = 0, 0
        assert_same_bits(codes, want_codes, "codes")
        assert_same_bits(scales.view(np.int32), want_scales.view(np.int32), "scales")
        assert np.isnan(memory[..., size:].view(np.float32)[-1, :, length % 16 :]).all()


def rows_of(cache: KVCache, sequences: Sequences, length: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the keys and values [length, kv_heads, head_dim] of the first sequence."""
    table = paddle.to_tensor(sequences.tables[0])
    parts = [paddle.gather(t, table).transpose([0, 2, 1, 3]) for t in (cache.key, cache.value)]
    key, value = (part.reshape([-1, *part.shape[2:]])[:length] for part in parts)
    return key, value


def test_gpu_attention_reads_the_numbers_of_rows_and_sequences_on_the_device() -> None:
    sequences = Sequences(SMALL, [30, SPLIT + 2, 9, 9])
    rows = [(0, 28, 30), (1, SPLIT - 1, SPLIT + 2)]
    want = bits(sequences.run(rows))
    batch = sequences.metadata([*rows, (2, 6, 9), (3, 6, 9)])
    qkv = paddle.concat([sequences.qkv[b][begin:end] for b, begin, end in [*rows, (2, 6, 9), (3, 6, 9)]])
    cache, out = sequences.cache(rows), paddle.full([batch.num_rows, 256], float("nan"), "bfloat16")
    append = emulate()("append_attention")
    with counts_on_device(5, 2):
        append(qkv, cache, batch, out, SMALL, 0.125, 0)
    assert_same_bits(bits(out)[:5], want, "rows")
    assert np.isnan(out[5:].astype("float32").numpy()).all()
    written = np.zeros(cache.key.shape[0], bool)
    written[sequences.tables[:2]] = True
    assert np.isnan(cache.key.astype("float32").numpy()[~written]).all(), "rows beyond the count are not cached"


def test_gpu_attention_launches_two_kernels_a_layer_and_plans_once() -> None:
    sequences = Sequences(SMALL, [30])
    rows = [(0, 28, 30)]
    batch, cache, out = sequences.metadata(rows), sequences.cache(rows), paddle.zeros([2, 256], "bfloat16")
    append, qkv = emulate()("append_attention"), sequences.qkv[0][28:].contiguous()
    launches = [count(lambda: append(qkv, cache, batch, out, SMALL, 0.125, 0))["launches"] for _ in range(3)]
    assert launches == [3, 2, 2]


@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [SMALL, HeadLayout(2, 1, 128), HeadLayout(2, 1, 256)])
def test_gpu_attention_reads_keys_and_values_once(heads: HeadLayout, dtype: str, num_rows: int) -> None:
    length = GROUP + 100
    sequences = Sequences(heads, [length], cache_dtype=dtype)
    counted = counts_of(sequences, [(0, length - num_rows, length)])
    assert_reads(counted, sequences, length, num_rows)


def test_gpu_attention_reads_shared_prefixes_once() -> None:
    num_seqs, length = 8, GROUP + 20
    sequences = Sequences(SMALL, [length] * num_seqs, 16, [0, *[GROUP // 16] * (num_seqs - 1)])
    counted = counts_of(sequences, [(b, length - 1, length) for b in range(num_seqs)])
    assert_reads(counted, sequences, GROUP + 20 * num_seqs, num_seqs)


def assert_reads(counted: dict[str, int], sequences: Sequences, num_positions: int, num_rows: int) -> None:
    """Check how often keys and values are read, how much of the sectors is used, and that no bank is asked twice."""
    heads = sequences.heads
    position_bytes = heads.num_kv_heads * sum(row_bytes(heads.head_dim, sequences.cache_dtype))
    least = num_positions * position_bytes + num_rows * heads.row_size * 2
    # Partial results of more query rows are an eighth of the keys and values of a split, if each split is an item.
    query_rows, item_bytes = (
        num_rows * heads.num_heads // heads.num_kv_heads,
        1 if sequences.cache_dtype == "int8" else 2,
    )
    assert counted["read_sectors"] * 32 <= (1.15 if query_rows <= 8 * item_bytes else 1.25) * least
    touched = (counted["read_sectors"] + counted["written_sectors"]) * 32
    assert (counted["global_read_bytes"] + counted["global_written_bytes"]) / touched >= 0.90
    assert counted["matrix_wavefronts"] <= 1.10 * counted["least_matrix_wavefronts"]


def counts_of(sequences: Sequences, rows: list[tuple[int, int, int]]) -> dict[str, int]:
    """Return what a call with these rows counts, without the planning kernel."""
    batch, cache, heads = sequences.metadata(rows), sequences.cache(rows), sequences.heads
    qkv = paddle.concat([sequences.qkv[b][begin:end] for b, begin, end in rows])
    out = paddle.zeros([batch.num_rows, heads.num_heads * heads.head_dim], "bfloat16")
    append = emulate()("append_attention")
    for _ in range(2):
        counted = count(lambda: append(qkv, cache, batch, out, heads, heads.head_dim**-0.5, 0))
    return counted


def test_gpu_attention_refuses_what_it_has_no_kernel_for() -> None:
    allocate, append = emulate()("allocate_kv_cache"), emulate()("append_attention")
    with pytest.raises(ValueError, match="allocate_kv_cache: head_dim: expected 64, 128 or 256, got 96"):
        allocate(4, 16, 1, 96, "bfloat16")
    with pytest.raises(ValueError, match="allocate_kv_cache: dtype: expected bfloat16 or int8, got float32"):
        allocate(4, 16, 1, 64, "float32")
    with pytest.raises(ValueError, match="allocate_kv_cache: block_size: expected a multiple of 16, got 24"):
        allocate(4, 24, 1, 64, "bfloat16")
    cache, heads = allocate(4, 16, 1, 64, "bfloat16"), HeadLayout(2, 1, 64)
    batch = make_attention_metadata([2], [2], np.array([[0, 1, 2, 3]]), 16)
    qkv, out = paddle.zeros([2, 256], "bfloat16"), paddle.zeros([2, 128], "bfloat16")
    with pytest.raises(ValueError, match="append_attention: qkv: expected bfloat16, got float32"):
        append(qkv.astype("float32"), cache, batch, out, heads, 0.125, 0)
    with pytest.raises(ValueError, match=r"append_attention: out: expected \[2 or more, 128\], got \[1, 128\]"):
        append(qkv, cache, batch, out[:1], heads, 0.125, 0)
    with pytest.raises(ValueError, match="append_attention: num_masked_prefix: expected 0 to 16, got 17"):
        append(qkv, cache, batch, out, heads, 0.125, 17)
    rotary = RotaryParams(paddle.zeros([2, 80]), is_interleaved=False)
    with pytest.raises(ValueError, match="append_attention: rotary_dim: expected an even number up to head_dim"):
        append(qkv, cache, batch, out, heads, 0.125, 0, rotary)
