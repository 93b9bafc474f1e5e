# SPDX-License-Identifier: Apache-2.0
"""A row of attention depends on what it attends to, and not on chunks, other rows, block order or free slots."""

from collections.abc import Sequence

import numpy as np
import paddle
import pytest

from fastdeploy.ops.attention import (
    AttentionMetadata,
    KVCache,
    allocate_kv_cache,
    append_attention,
    make_attention_metadata,
)
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.rotary import HeadLayout, RotaryParams
from tests.ops.bits import assert_row_counts_agree, assert_same_bits, bits, is_finite

SPLIT, TASK_ROWS = 256, 96  # kSplit of custom_ops/cpu_ops/attention_plan.h and kTaskRows of attention.cc
DTYPES = ["float32", "bfloat16", "int8"]  # of the cache; rows of an int8 cache are bfloat16
LAYOUTS = [HeadLayout(4, 2, 32), HeadLayout(3, 1, 72)]


def poisoned_cache(num_blocks: int, block_size: int, heads: HeadLayout, dtype: str) -> KVCache:
    cache = allocate_kv_cache(num_blocks, block_size, heads.num_kv_heads, heads.head_dim, dtype)
    for tensor in (cache.key, cache.value):
        tensor[:] = poison(cache)
    return cache


def poison(cache: KVCache) -> float:
    """Return an element that makes a value NaN, or in an int8 cache a scale."""
    return -1 if cache.is_int8 else float("nan")


def rows_for(cache_dtype: str, count: int, size: int, seed: int) -> paddle.Tensor:
    return random_rows(count, size, "bfloat16" if cache_dtype == "int8" else cache_dtype, seed)


class RandomSequence:
    """One sequence of random rows and its block table."""

    rotary: RotaryParams | None = None

    def __init__(self, length: int, heads: HeadLayout, dtype: str, block_size: int, seed: int = 1) -> None:
        self.qkv = rows_for(dtype, length, heads.row_size, seed)
        self.length, self.heads, self.dtype, self.block_size = length, heads, dtype, block_size
        self.num_blocks = -(-length // block_size)
        self.table = np.random.default_rng(seed).permutation(self.num_blocks)[None, :]

    def run(self, cuts: Sequence[int], cache: KVCache | None = None) -> np.ndarray:
        """Return the bits of all rows computed in calls that end at the positions `cuts`."""
        cache = cache or poisoned_cache(self.num_blocks, self.block_size, self.heads, self.dtype)
        outs, start = [], 0
        for end in cuts:
            batch = make_attention_metadata([end - start], [end], self.table, self.block_size)
            outs.append(attend(self.qkv[start:end].clone(), cache, batch, self.heads, self.rotary))
            start = end
        return np.concatenate(outs)


class SharedPrefix:
    """Sequences of which number b has the first shared[b] blocks of number 0, then blocks of its own."""

    def __init__(
        self, heads: HeadLayout, dtype: str, block_size: int, shared: tuple[int, ...], rows: int, own: int = 5
    ) -> None:
        self.heads, self.block_size, self.rows = heads, block_size, rows
        most = max(shared) + own
        self.tables = np.arange(len(shared) * most).reshape(len(shared), most)[:, ::-1].copy()
        self.lens = [max(shared) * block_size + 3 * b + rows for b in range(len(shared))]
        self.cache = poisoned_cache(len(shared) * most, block_size, heads, dtype)
        self.qkv = []
        for b, count in enumerate(shared):
            self.tables[b, :count] = self.tables[0, :count]
            start, end = count * block_size, self.lens[b] - rows
            before = rows_for(dtype, end - start, heads.row_size, 2 * b)
            if end > start:
                attend(before, self.cache, self.index([b], [end - start], [end]), heads)
            self.qkv.append(rows_for(dtype, rows, heads.row_size, 2 * b + 1))

    def index(self, sequences: list[int], num_new: list[int], lens: list[int]) -> AttentionMetadata:
        return make_attention_metadata(num_new, lens, self.tables[sequences], self.block_size)

    def run(self, sequences: list[int]) -> np.ndarray:
        """Return the bits of the last rows of the given sequences, computed in one call."""
        batch = self.index(sequences, [self.rows] * len(sequences), [self.lens[b] for b in sequences])
        return attend(paddle.concat([self.qkv[b] for b in sequences]), self.cache, batch, self.heads)


def attend(
    qkv: paddle.Tensor, cache: KVCache, batch: object, heads: HeadLayout, rotary: RotaryParams | None = None
) -> np.ndarray:
    out = paddle.zeros([qkv.shape[0], heads.num_heads * heads.head_dim], qkv.dtype)
    append_attention(qkv, cache, batch, out, heads, heads.head_dim**-0.5, rotary=rotary)  # type: ignore[arg-type]
    return bits(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", LAYOUTS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_chunked_prefill_equals_one_token_at_a_time(dtype: str, heads: HeadLayout, block_size: int) -> None:
    length = 2 * SPLIT + 70
    sequence = RandomSequence(length, heads, dtype, block_size)
    alone = sequence.run(range(1, length + 1))
    assert is_finite(alone, dtype)
    for size in (2, 3, 7, 64, 250, length):
        assert_same_bits(sequence.run([*range(size, length, size), length]), alone, f"chunks of {size}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rows_are_rotated_by_their_positions_in_chunks_of_any_size(dtype: str, is_interleaved: bool) -> None:
    length, heads = SPLIT + 6, HeadLayout(6, 2, 40)
    sequence = RandomSequence(length, heads, dtype, 16)
    unrotated = sequence.run(range(1, length + 1))
    norms = [rows_for(dtype, 1, 40, seed).reshape([40]) for seed in (2, 3)]
    sequence.rotary = RotaryParams(random_rows(length, 20, "float32", 4), is_interleaved, *norms)
    alone = sequence.run(range(1, length + 1))
    assert (alone != unrotated).any(axis=1)[1:].all()  # the output of the first row is its value for any key
    for size in (2, 3, 7, 64, 65, SPLIT, length):
        assert_same_bits(sequence.run([*range(size, length, size), length]), alone, f"chunks of {size}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edge", [16, 48, 64, SPLIT, SPLIT + 48, 2 * SPLIT, 4 * SPLIT])
def test_row_counts_agree_at_the_edges_of_tiles_blocks_and_splits(dtype: str, edge: int) -> None:
    heads = HeadLayout(4, 2, 32)
    for kv_len in (edge - 1, edge, edge + 1):
        assert_row_counts_agree(RandomSequence(kv_len, heads, dtype, 48).run, kv_len, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_drafted_rows_gives_the_same_bits(dtype: str) -> None:
    heads, kv_len, most = HeadLayout(4, 2, 32), SPLIT + 20, 26  # 52 query rows of two heads, around the end of a split
    sequence = RandomSequence(kv_len, heads, dtype, 16)
    alone = sequence.run([kv_len - most, *range(kv_len - most + 1, kv_len + 1)])
    for rows in range(2, most + 1):
        got = sequence.run([kv_len - rows, kv_len])
        assert_same_bits(got[-rows:], alone[-rows:], f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_sequences_do_not_change_a_row_even_if_they_contain_nan(dtype: str) -> None:
    heads, length, others = HeadLayout(4, 2, 32), 5 * SPLIT + 70, 12
    sequence = RandomSequence(length, heads, dtype, 16)
    sequence.rotary = RotaryParams(random_rows(length, 32, "float32", 4), is_interleaved=False)
    alone = sequence.run([length - 3, length])[-3:]  # several tasks per KV head
    cache = poisoned_cache(sequence.num_blocks + others * 2, 16, heads, dtype)
    sequence.run([length - 3], cache)
    tables = np.zeros((others + 1, sequence.num_blocks), np.int64)
    tables[0] = sequence.table
    tables[1:, :2] = sequence.num_blocks + np.arange(2 * others).reshape(others, 2)
    batch = make_attention_metadata([3] + [2] * others, [length] + [20] * others, tables, 16)
    noise = rows_for(dtype, 2 * others, heads.row_size, 9)
    noise[::3] = float("nan")
    together = attend(paddle.concat([sequence.qkv[-3:], noise]), cache, batch, heads, sequence.rotary)
    assert_same_bits(together[:3], alone, "rows beside NaN")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_len", [40, 66, SPLIT + 1, 2 * SPLIT])
def test_a_later_row_of_the_same_sequence_is_masked(dtype: str, poison: float, kv_len: int) -> None:
    sequence = RandomSequence(kv_len, HeadLayout(4, 2, 32), dtype, 16)
    clean = sequence.run([kv_len - 5, kv_len])
    sequence.qkv[-4:] = poison  # rows 1 to 4 of 5: row 0 shares a group with them
    assert_same_bits(sequence.run([kv_len - 5, kv_len])[:-4], clean[:-4], f"rows before {poison}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [HeadLayout(4, 2, 32), HeadLayout(6, 1, 72)])
@pytest.mark.parametrize(("shared", "rows"), [((0, 40, 40, 33, 16, 15), 1), ((0, 64, 48, 0, 64), 6)])
def test_a_row_has_the_same_bits_with_and_without_sequences_that_share_its_prefix(
    dtype: str, layout: HeadLayout, shared: tuple[int, ...], rows: int
) -> None:
    batch = SharedPrefix(layout, dtype, 16, shared, rows)
    alone = [batch.run([b]) for b in range(len(shared))]
    assert all(is_finite(row, dtype) for row in alone)
    for order in (range(len(shared)), range(len(shared))[::-1], [1, 2], [3, 0]):
        assert_same_bits(batch.run(list(order)), np.concatenate([alone[b] for b in order]), f"sequences {order}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_sequences_than_fit_into_one_task_share_a_prefix(dtype: str) -> None:
    num_seqs = TASK_ROWS // 2 + 5
    batch = SharedPrefix(HeadLayout(4, 2, 32), dtype, 64, (0,) + (8,) * num_seqs, 1)
    alone = np.concatenate([batch.run([b]) for b in range(num_seqs)])
    assert_same_bits(batch.run(list(range(num_seqs))), alone, f"{num_seqs} sequences")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [0, SPLIT])
def test_a_sequence_attends_to_rows_that_another_one_writes_in_the_same_call(dtype: str, before: int) -> None:
    heads, prefix = HeadLayout(4, 2, 32), before + 32
    sequence = RandomSequence(prefix, heads, dtype, 16)
    tail = rows_for(dtype, 1, heads.row_size, 7)
    outs = []
    for together in (False, True):
        cache = poisoned_cache(sequence.num_blocks + 1, 16, heads, dtype)
        if before:
            sequence.run([before], cache)
        tables = np.concatenate([sequence.table, [[sequence.num_blocks]]], axis=1).repeat(2, axis=0)
        new, lens = [prefix - before, 1], [prefix, prefix + 1]
        qkv = paddle.concat([sequence.qkv[before:], tail])
        if together:
            outs.append(attend(qkv, cache, make_attention_metadata(new, lens, tables, 16), heads))
            continue
        first = attend(qkv[:-1].clone(), cache, make_attention_metadata(new[:1], lens[:1], tables[:1], 16), heads)
        second = attend(qkv[-1:].clone(), cache, make_attention_metadata(new[1:], lens[1:], tables[1:], 16), heads)
        outs.append(np.concatenate([first, second]))
    assert is_finite(outs[0], dtype)
    assert_same_bits(outs[1], outs[0], "one call and two")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rejected_draft_does_not_change_later_rows(dtype: str) -> None:
    heads = HeadLayout(4, 2, 32)
    sequence = RandomSequence(70, heads, dtype, 16)
    want = sequence.run([60, 61, 70])
    cache = poisoned_cache(sequence.num_blocks, 16, heads, dtype)
    sequence.run([60], cache)
    wrong = rows_for(dtype, 6, heads.row_size, 5)
    attend(wrong, cache, make_attention_metadata([6], [66], sequence.table, 16), heads)  # drafts that are rejected
    for start, end in ((60, 61), (61, 70)):
        got = attend(
            sequence.qkv[start:end], cache, make_attention_metadata([end - start], [end], sequence.table, 16), heads
        )
        assert_same_bits(got, want[start:end], f"rows {start}..{end - 1}")
