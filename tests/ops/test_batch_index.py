# SPDX-License-Identifier: Apache-2.0
"""Virtual padding: literal index arrays, equality with the reference, refused inputs."""

import numpy as np
import pytest

from fastdeploy.ops import registry
from fastdeploy.ops.batch_index import BatchIndex, StepBuffers

OUTPUTS = ("cu_seqlens_q", "cu_logits_rows", "kv_lens", "batch_id_per_row", "positions", "slot_mapping", "logits_rows")


def filled(batch: BatchIndex, scheduled: list[int], computed: list[int], logits: list[int], tables: list) -> BatchIndex:
    batch.fill(np.array(scheduled), np.array(computed), np.array(logits), tables)
    return batch


def test_arrays_of_a_chunk_a_decode_row_and_a_verification() -> None:
    batch = filled(BatchIndex(20, 4, 3, 4), [3, 1, 2], [4, 0, 6], [0, 1, 2], [[9, 5], [0], [2, 7]])
    assert batch.buffers.totals.array.tolist() == [6, 3]
    assert batch.cu_seqlens_q.numpy()[:4].tolist() == [0, 3, 4, 6]
    assert batch.cu_logits_rows.numpy()[:4].tolist() == [0, 0, 1, 3]
    assert batch.kv_lens.numpy()[:3].tolist() == [7, 1, 8]
    assert batch.batch_id_per_row.numpy()[:6].tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.positions.numpy()[:6].tolist() == [4, 5, 6, 0, 6, 7]
    assert batch.slot_mapping.numpy()[:6].tolist() == [20, 21, 22, 0, 30, 31]
    assert batch.logits_rows.numpy()[:3].tolist() == [3, 4, 5]
    assert batch.block_tables.numpy()[[0, 0, 2], [0, 1, 1]].tolist() == [9, 5, 7]


def test_a_second_fill_replaces_the_first() -> None:
    batch = BatchIndex(20, 4, 3, 4)
    filled(batch, [9, 5], [0, 0], [1, 1], [[1, 2, 3], [4, 5]])
    filled(batch, [1], [2], [1], [[6]])
    assert batch.buffers.totals.array.tolist() == [1, 1]
    assert batch.slot_mapping.numpy()[0] == 26
    assert batch.cu_seqlens_q.numpy()[:2].tolist() == [0, 1]


def test_a_longer_table_is_extended_and_another_one_rewritten() -> None:
    batch, table = BatchIndex(20, 2, 4, 4), [9, 5]
    filled(batch, [1], [4], [1], [table])
    table += [7, 3]
    filled(batch, [1], [12], [1], [table])
    assert batch.block_tables.numpy()[0].tolist() == [9, 5, 7, 3]
    assert batch.slot_mapping.numpy()[0] == 12
    filled(batch, [1], [5], [1], [[1, 2, 6, 8]])
    assert batch.block_tables.numpy()[0].tolist() == [1, 2, 6, 8]


def test_a_table_that_is_too_long_is_refused_and_the_next_one_is_written() -> None:
    batch, table = BatchIndex(20, 2, 2, 4), [9, 5, 7]
    for _ in range(2):
        with pytest.raises(ValueError, match="could not broadcast"):
            filled(batch, [1], [4], [1], [table])
    filled(batch, [1], [4], [1], [[3, 1]])
    assert batch.block_tables.numpy()[0].tolist() == [3, 1]


def test_a_step_may_be_empty() -> None:
    batch = filled(BatchIndex(4, 2, 1, 16), [], [], [], [])
    assert batch.buffers.totals.array.tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_equal_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seqs, block_size = int(rng.integers(1, 12)), 16 * int(rng.integers(1, 5))
    results = []
    for backend in ("cpu", "reference"):
        buffers, rng = StepBuffers(400, 16, 40), np.random.default_rng(seed + 100)
        buffers.num_scheduled.array[:seqs] = rng.integers(0, 30, seqs)
        buffers.num_computed.array[:seqs] = rng.integers(0, 500, seqs)
        buffers.num_logits.array[:seqs] = rng.integers(0, buffers.num_scheduled.array[:seqs] + 1)
        buffers.num_blocks.array[:seqs] = 40
        buffers.block_tables.array[:] = rng.permutation(640).reshape(16, 40)
        registry.lookup(backend)("virtual_padding")(buffers, seqs, block_size)
        results.append({name: getattr(buffers, name).array.tolist() for name in ("totals", *OUTPUTS)})
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([5], [0], [1], [[1]]), "block_tables: expected blocks for 5 tokens, got 1 for request 0"),
        (([1, 1], [0, 8], [1, 1], [[1], [2, 3]]), "blocks for 9 tokens, got 2 for request 1"),
        (([9], [0], [1], [[1, 2, 3]]), "num_scheduled: expected at most 8 rows, got 9 for request 0"),
        (([2], [0], [3], [[1]]), r"num_logits: expected 0\.\.2, got 3 for request 0"),
        (([-1], [0], [0], [[1]]), "num_scheduled: expected at least 0, got -1"),
        (([1], [-1], [0], [[1]]), "num_computed: expected at least 0, got -1"),
    ],
)
def test_inconsistent_inputs_are_refused_by_field(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(BatchIndex(8, 4, 3, 4), *arguments)


def test_too_many_requests_or_blocks_are_refused() -> None:
    batch = BatchIndex(8, 1, 2, 4)
    with pytest.raises(ValueError):
        filled(batch, [1, 1], [0, 0], [1, 1], [[1], [2]])
    with pytest.raises(ValueError):
        filled(batch, [1], [0], [1], [[1, 2, 3]])
