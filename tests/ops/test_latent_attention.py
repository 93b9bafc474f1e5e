# SPDX-License-Identifier: Apache-2.0
"""Latent attention equals its definition, and a row depends on what it attends to and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
import pytest

from fastdeploy.ops.attention import AttentionMetadata, make_attention_metadata
from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.latent_attention import (
    LatentCache,
    LatentLayout,
    allocate_latent_cache,
    append_latent_attention,
)
from fastdeploy.ops.norm import NormParams
from tests.ops.bits import assert_row_counts_agree, assert_same_bits, bits, is_finite, values_of

SPLIT, TASK_ROWS = 256, 64  # kSplit of attention_plan.h and kLatentTaskRows of latent_attention.cc
DTYPES = ["float32", "bfloat16"]
TINY, ODD, LITE, V3 = (
    LatentLayout(*sizes) for sizes in ((3, 24, 16, 8), (20, 136, 0, 40), (16, 512, 128, 64), (128, 512, 128, 64))
)
EPS, MAX_POSITIONS = 1e-6, 1400


def wide(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.astype("float32").numpy().astype(np.float64)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return wide(paddle.to_tensor(values.astype(np.float32)).astype(dtype))


def poisoned_cache(num_blocks: int, block_size: int, layout: LatentLayout, dtype: str) -> LatentCache:
    cache = allocate_latent_cache(num_blocks, block_size, layout.latent_dim, layout.rope_dim, dtype)
    cache.rows[:] = float("nan")
    cache.rows[:, ::2, 0] = 0.0  # the kernel itself writes rows that are finite or NaN throughout
    return cache


class Rows:
    """Random rows of one or several sequences, and the parameters of the layer."""

    def __init__(self, count: int, layout: LatentLayout, dtype: str, seed: int = 1) -> None:
        self.layout, self.dtype = layout, dtype
        self.query_width = layout.num_heads * (layout.nope_dim + layout.rope_dim)
        self.absorbed = random_rows(count, layout.num_heads * layout.latent_dim, dtype, seed)
        latent_width = layout.latent_dim + layout.rope_dim
        self.both = random_rows(count, self.query_width + latent_width, dtype, seed + 100)  # query and latent
        self.norm = NormParams(1 + 0.1 * random_rows(1, layout.latent_dim, dtype, 2)[0], EPS)
        angles = np.random.default_rng(3).uniform(0, 6.28, (MAX_POSITIONS, layout.rope_dim // 2))
        self.cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        self.is_interleaved, self.num_masked_prefix = True, 0
        self.scale = latent_width**-0.5

    def attend(self, rows: slice | list[int], cache: LatentCache, batch: AttentionMetadata) -> np.ndarray:
        """Return the bits of the outputs of a call with these rows."""
        both, absorbed = self.both[rows].clone(), self.absorbed[rows]
        out = paddle.full([absorbed.shape[0] + 1, absorbed.shape[1]], 7.0, self.dtype)
        append_latent_attention(
            absorbed, both, both, cache, batch, out, self.layout, self.scale, self.norm,
            paddle.to_tensor(self.cos_sin), self.is_interleaved, self.num_masked_prefix,
        )  # fmt: skip
        assert (wide(out[-1:]) == 7.0).all(), "a row beyond num_rows"
        return bits(out[:-1])

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        half = self.layout.rope_dim // 2
        angles = self.cos_sin.astype(np.float64)[positions]
        cosine, sine = angles[:, None, :half], angles[:, None, half:]
        first, second = (x[..., 0::2], x[..., 1::2]) if self.is_interleaved else (x[..., :half], x[..., half:])
        parts = first * cosine - second * sine, second * cosine + first * sine
        result = np.stack(parts, axis=-1).reshape(x.shape) if self.is_interleaved else np.concatenate(parts, axis=-1)
        return rounded(result, self.dtype)

    def define(self, first: int, end: int) -> np.ndarray:
        """Return the outputs of rows [first, end) of a sequence that starts with row 0, in float64."""
        layout, both = self.layout, wide(self.both[:end])
        rows, latent, rope = end - first, layout.latent_dim, layout.rope_dim
        new = both[:, self.query_width :]
        factor = 1 / np.sqrt((new[:, :latent] ** 2).mean(axis=1, keepdims=True) + EPS)
        values = rounded(new[:, :latent] * factor * wide(self.norm.weight), self.dtype)
        keys = self.rotate(new[:, None, latent:], np.arange(end))[:, 0]
        query = both[first:, : self.query_width].reshape(rows, layout.num_heads, -1)[..., layout.nope_dim :]
        query = self.rotate(query, np.arange(first, end))
        absorbed = wide(self.absorbed[first:end]).reshape(rows, layout.num_heads, latent)
        assert keys.shape == (end, rope)
        scores = (absorbed @ values.T + query @ keys.T) * self.scale
        for row, position in enumerate(range(first, end)):
            scores[row, :, position + 1 :] = -np.inf
            scores[row, :, : min(self.num_masked_prefix, position)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights / weights.sum(axis=-1, keepdims=True) @ values).reshape(rows, -1)


class OneSequence(Rows):
    """The rows of one sequence, and its block table."""

    def __init__(self, length: int, layout: LatentLayout, dtype: str, block_size: int = 16, seed: int = 1) -> None:
        super().__init__(length, layout, dtype, seed)
        self.length, self.block_size = length, block_size
        self.num_blocks = -(-length // block_size)
        self.table = np.random.default_rng(seed).permutation(self.num_blocks)[None, :]

    def cache(self) -> LatentCache:
        return poisoned_cache(self.num_blocks, self.block_size, self.layout, self.dtype)

    def run(self, cuts: Sequence[int], cache: LatentCache | None = None) -> np.ndarray:
        """Return the bits of all rows computed in calls that end at the positions `cuts`."""
        cache, outs, start = cache or self.cache(), [], 0
        for end in cuts:
            batch = make_attention_metadata([end - start], [end], self.table, self.block_size)
            outs.append(self.attend(slice(start, end), cache, batch))
            start = end
        return np.concatenate(outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "is_interleaved"),
    [
        *((layout, is_interleaved) for layout in (LITE, TINY) for is_interleaved in (True, False)),
        *((V3, True), (ODD, False), (LatentLayout(2, 1024, 256, 256), True), (LatentLayout(1, 8, 8, 8), False)),
    ],
)
def test_it_equals_its_definition(layout: LatentLayout, is_interleaved: bool, dtype: str) -> None:
    length = SPLIT + 30
    sequence = OneSequence(length, layout, dtype)
    sequence.is_interleaved = is_interleaved
    got = values_of(sequence.run([SPLIT - 9, SPLIT + 20, length]), dtype)
    first = SPLIT - 15
    want = sequence.define(first, length)
    error = np.abs(got[first:] - want) / (1 + np.abs(want))
    assert error.max() <= {"float32": 4e-6, "bfloat16": 8e-3}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_masked", [1, 5, 16])
def test_the_masked_prefix_is_that_of_the_definition(dtype: str, num_masked: int) -> None:
    sequence = OneSequence(SPLIT + 8, TINY, dtype)
    sequence.num_masked_prefix = num_masked
    alone = sequence.run(range(1, sequence.length + 1))
    want = sequence.define(0, sequence.length)
    error = np.abs(values_of(alone, dtype) - want) / (1 + np.abs(want))
    assert error.max() <= {"float32": 4e-6, "bfloat16": 8e-3}[dtype]
    for size in (3, 17, SPLIT, sequence.length):
        assert_same_bits(sequence.run([*range(size, sequence.length, size), sequence.length]), alone, f"chunks {size}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [TINY, ODD])
@pytest.mark.parametrize("block_size", [16, 48])
def test_chunked_prefill_equals_one_token_at_a_time(dtype: str, layout: LatentLayout, block_size: int) -> None:
    length = 504 + 15
    sequence = OneSequence(length, layout, dtype, block_size)
    alone = sequence.run(range(1, length + 1))
    assert is_finite(alone, dtype)
    for size in (2, 7, 64, 250, 504, length):
        assert_same_bits(sequence.run([*range(size, length, size), length]), alone, f"chunks of {size}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [LITE, V3, TINY])
def test_any_number_of_rows_gives_the_same_bits(dtype: str, layout: LatentLayout) -> None:
    length, most = SPLIT + 9, 20
    sequence = OneSequence(length, layout, dtype)
    cache = sequence.cache()
    sequence.run([length - most], cache)

    def rows(first: int, end: int) -> np.ndarray:
        batch = make_attention_metadata([end - first], [end], sequence.table, 16)
        return sequence.attend(slice(first, end), cache, batch)

    alone = np.concatenate([rows(row, row + 1) for row in range(length - most, length)])
    assert is_finite(alone, dtype)
    for count in range(2, most + 1):
        assert_same_bits(rows(length - count, length), alone[-count:], f"{count} rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edge", [16, 48, SPLIT, SPLIT + 48, 2 * SPLIT, 4 * SPLIT])
def test_row_counts_agree_at_the_edges_of_tiles_blocks_and_splits(dtype: str, edge: int) -> None:
    for kv_len in (edge - 1, edge, edge + 1):
        assert_row_counts_agree(OneSequence(kv_len, TINY, dtype, 48).run, kv_len, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "rows"), [(TINY, 1), (TINY, 6), (LITE, 1), (LITE, 4)])
def test_a_row_has_the_same_bits_with_and_without_sequences_that_share_its_prefix(
    dtype: str, layout: LatentLayout, rows: int
) -> None:
    shared, own = (0, 40, 40, 33, 16, 15), 5  # blocks shared with sequence 0, blocks of its own
    lens = [(count + own) * 16 - 3 for count in (40, *shared[1:])]
    most = max(lens)
    trunk = OneSequence(most, layout, dtype)
    tables = np.zeros((len(shared), 45), np.int64)
    tables[0] = np.arange(45)
    for b, count in enumerate(shared[1:], start=1):
        tables[b] = np.concatenate([np.arange(count), 45 * b + np.arange(45 - count)])
    cache = poisoned_cache(45 * len(shared), 16, layout, dtype)
    for b, length in enumerate(lens):
        start = shared[b] * 16
        batch = make_attention_metadata([length - rows - start], [length - rows], tables[b : b + 1], 16)
        trunk.attend(slice(start, length - rows), cache, batch)
    last = Rows(rows * len(shared), layout, dtype, seed=9)

    def run(sequences: list[int]) -> np.ndarray:
        batch = make_attention_metadata([rows] * len(sequences), [lens[b] for b in sequences], tables[sequences], 16)
        return last.attend([b * rows + r for b in sequences for r in range(rows)], cache, batch)

    alone = [run([b]) for b in range(len(shared))]
    assert all(is_finite(row, dtype) for row in alone)
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [1, 2], [3, 0]):
        assert_same_bits(run(order), np.concatenate([alone[b] for b in order]), f"sequences {order}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_sequences_than_fit_into_one_task_share_a_prefix(dtype: str) -> None:
    num_seqs, prefix = TASK_ROWS // TINY.num_heads + 5, 2 * SPLIT + 16
    trunk = OneSequence(prefix, TINY, dtype)
    cache = poisoned_cache(trunk.num_blocks + num_seqs, 16, TINY, dtype)
    trunk.run([prefix], cache)
    own = trunk.num_blocks + np.arange(num_seqs)[:, None]
    tables = np.concatenate([trunk.table.repeat(num_seqs, axis=0), own], axis=1)
    last = Rows(num_seqs, TINY, dtype, seed=9)

    def run(sequences: list[int]) -> np.ndarray:
        lens = [prefix + 1] * len(sequences)
        return last.attend(sequences, cache, make_attention_metadata([1] * len(lens), lens, tables[sequences], 16))

    alone = np.concatenate([run([b]) for b in range(num_seqs)])
    assert_same_bits(run(list(range(num_seqs))), alone, f"{num_seqs} sequences")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_attends_to_rows_that_another_one_writes_in_the_same_call(dtype: str) -> None:
    prefix = SPLIT + 32
    rows = OneSequence(prefix + 1, TINY, dtype)
    tables = np.arange(19)[None, :].repeat(2, axis=0)
    tables[1, -1] = 19
    batch = make_attention_metadata([prefix, 1], [prefix, prefix + 1], tables, 16)
    together = rows.attend(slice(0, prefix + 1), poisoned_cache(20, 16, TINY, dtype), batch)
    assert is_finite(together, dtype)
    assert_same_bits(together, rows.run([prefix, prefix + 1]), "one call and two")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["latent", "rope"])
@pytest.mark.parametrize("kv_len", [40, 66, SPLIT + 1, SPLIT + 4, 2 * SPLIT])
def test_a_row_that_is_not_finite_spoils_the_rows_that_attend_to_it_and_no_others(
    dtype: str, poison: float, part: str, kv_len: int
) -> None:
    sequence = OneSequence(kv_len, TINY, dtype)
    clean = sequence.run([kv_len - 5, kv_len])
    sequence.both[-3, -1 if part == "rope" else -TINY.rope_dim - 2] = poison
    got = sequence.run([kv_len - 5, kv_len])
    assert_same_bits(got[:-3], clean[:-3], f"rows before {poison}")
    assert np.isnan(values_of(got[-3:], dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_sequences_do_not_change_a_row_even_if_they_contain_nan(dtype: str) -> None:
    length, others = 5 * SPLIT + 70, 12
    sequence = OneSequence(length, TINY, dtype)
    alone = sequence.run([length - 3, length])[-3:]  # several tasks
    cache = poisoned_cache(sequence.num_blocks + others * 2, 16, TINY, dtype)
    sequence.run([length - 3], cache)
    tables = np.zeros((others + 1, sequence.num_blocks), np.int64)
    tables[0] = sequence.table
    tables[1:, :2] = sequence.num_blocks + np.arange(2 * others).reshape(others, 2)
    noise = Rows(3 + 2 * others, TINY, dtype, seed=9)
    noise.both[3::3] = float("nan")
    noise.absorbed[3::4] = float("inf")
    noise.both[:3], noise.absorbed[:3] = sequence.both[-3:], sequence.absorbed[-3:]
    batch = make_attention_metadata([3] + [2] * others, [length] + [20] * others, tables, 16)
    assert_same_bits(noise.attend(slice(None), cache, batch)[:3], alone, "rows beside NaN")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rejected_draft_does_not_change_later_rows(dtype: str) -> None:
    sequence = OneSequence(70, TINY, dtype)
    want, cache = sequence.run([60, 61, 70]), sequence.cache()
    sequence.run([60], cache)
    wrong = Rows(6, TINY, dtype, seed=5)
    wrong.attend(slice(None), cache, make_attention_metadata([6], [66], sequence.table, 16))
    for start, end in ((60, 61), (61, 70)):
        batch = make_attention_metadata([end - start], [end], sequence.table, 16)
        assert_same_bits(sequence.attend(slice(start, end), cache, batch), want[start:end], f"rows {start}..{end - 1}")


def test_the_query_is_the_first_columns_and_the_latent_row_the_last_ones() -> None:
    rows = Rows(5, TINY, "bfloat16")
    batch, cos_sin = make_attention_metadata([5], [5], np.array([[0]]), 16), paddle.to_tensor(rows.cos_sin)
    outs = []
    for is_wide in (False, True):
        query, latent = rows.both[:, : rows.query_width], rows.both[:, rows.query_width :]
        if is_wide:
            query, latent = (paddle.concat(pair, axis=1) for pair in ((query, latent), (latent, latent)))
        cache, out = poisoned_cache(1, 16, TINY, "bfloat16"), paddle.zeros_like(rows.absorbed)
        append_latent_attention(
            rows.absorbed, query, latent, cache, batch, out, TINY, rows.scale, rows.norm, cos_sin, True
        )
        outs.append(bits(out))
    assert_same_bits(outs[1], outs[0], "wider rows")
    whole = rows.attend(slice(None), poisoned_cache(1, 16, TINY, "bfloat16"), batch)
    assert_same_bits(whole, outs[0], "query and latent rows in one tensor")


@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("layout", [LITE, TINY, ODD])
def test_a_token_takes_its_latent_and_rope_values_and_nothing_else(layout: LatentLayout, dtype: str, item: int) -> None:
    cache = allocate_latent_cache(3, 48, layout.latent_dim, layout.rope_dim, dtype)
    num_bytes = sum(int(tensor.size) * int(tensor.element_size()) for tensor in cache.tensors)
    assert num_bytes == cache.num_blocks * 48 * (layout.latent_dim + layout.rope_dim) * item
    assert cache.num_blocks == 3


def test_a_replay_of_fewer_rows_and_sequences_equals_a_call() -> None:
    rows = Rows(4, TINY, "bfloat16")
    batch = make_attention_metadata([1, 1, 2], [1, 1, 2], np.array([[0], [1], [2]]), 16)
    cache, out = poisoned_cache(3, 16, TINY, "bfloat16"), paddle.full_like(rows.absorbed, 7.0)
    cos_sin = paddle.to_tensor(rows.cos_sin)
    arguments = rows.absorbed, rows.both, rows.both, cache, batch, out, TINY, rows.scale, rows.norm, cos_sin, True
    graph = OpGraph(lambda: append_latent_attention(*arguments))
    assert graph.describe() == ["LatentAttention"]
    assert (wide(out) == 7.0).all()
    graph.replay(2, 2)
    whole = rows.attend(slice(None), poisoned_cache(3, 16, TINY, "bfloat16"), batch)
    assert_same_bits(bits(out)[:2], whole[:2], "replayed rows")
    assert (wide(out)[2:] == 7.0).all()
