# SPDX-License-Identifier: Apache-2.0
"""Drafting on an emulated GPU: the CPU's drafts, given equal logits; the kernels of other operators are the CPU's."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import paddle
import pytest

from fastdeploy.ops.registry import lookup
from fastdeploy.ops.sampling import IntColumn
from tests.ops.gpu.draft_loops import BLOCK, DRAFTS, NUM_DRAFTS, NUM_ROWS, SEQS, SIZE, VOCAB_SIZES, Loop
from tests.ops.gpu.emulated import SEEDS, count, emulate

ALL, FEW = list(range(SEQS)), [0, 1, 2, 3, 4]


def on_cpu(*args: int, vocab_index: int = 1, **kwargs: int) -> list[list[int]]:
    loop = Loop(*args, **kwargs)
    loop.loop.vocab_index = vocab_index
    return loop.draft(ALL, NUM_DRAFTS, lookup("cpu")("draft"))


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_gpu_drafts_are_those_of_the_cpu_in_any_order_and_number_of_logits_batches(
    num_stages: int, has_states: bool
) -> None:
    for vocab_index in (0, 1):
        expected = on_cpu(num_stages, has_states, vocab_index=vocab_index)
        tokens = [token for draft in expected for token in draft]
        assert len(set(tokens)) > len(tokens) // 2
        assert (max(tokens) < VOCAB_SIZES[0]) == (vocab_index == 0)
        for seed, max_logits_rows in zip(SEEDS, (SEQS, 4, 2, 1)):
            loop = Loop(num_stages, has_states, max_logits_rows)
            loop.loop.vocab_index = vocab_index
            for _ in range(2):
                assert loop.draft(ALL, NUM_DRAFTS, emulate(seed)("draft")) == expected


def test_gpu_drafts_of_a_sequence_do_not_depend_on_others() -> None:
    loop, run = Loop(2, True, 2), emulate(1)("draft")
    alone = {seq: loop.draft([seq], [DRAFTS], run)[0] for seq in FEW}
    found = loop.draft([3, 0, 4, 1], [4, 3, 3, 1], run)
    assert found == [alone[seq][:length] for seq, length in ((3, 4), (0, 3), (4, 3), (1, 1))]


def test_gpu_drafts_end_where_no_token_can_be_sampled() -> None:
    results = []
    for run in (lookup("cpu")("draft"), emulate(2)("draft")):
        loop = Loop(2, True)
        loop.loop.sampling.int_params.array[1, IntColumn.VOCAB_LIMIT] = 0
        results.append(loop.draft(ALL, NUM_DRAFTS, run))
    assert results[0] == results[1]
    assert results[1][1] == [-1] * NUM_DRAFTS[1] and min(results[1][0]) >= 0


@pytest.mark.parametrize("has_states", [False, True])
def test_gpu_stages_are_filled_as_on_the_cpu(has_states: bool) -> None:
    outputs = []
    for run in (lookup("cpu")("fill_stage"), *(emulate(seed)("fill_stage") for seed in SEEDS)):
        loop = Loop(3, has_states)
        for stage in range(2):  # the CPU computes no output of the last one
            loop.write(ALL, NUM_DRAFTS)
            run(loop.loop, stage, SEQS)
        outputs.append(loop.output.view("int16").numpy()[: sum(NUM_ROWS)])
    assert len(np.unique(outputs[0], axis=0)) > SEQS
    for other in outputs[1:]:
        assert (other == outputs[0]).all()


def test_gpu_drafting_launches_three_kernels_a_pass_and_moves_each_row_once() -> None:
    size = 1024
    loop, run = Loop(1, True, size=size), emulate()("draft")
    loop.draft(FEW, [1] * len(FEW), run)
    counted = count(lambda: loop.draft(FEW, [DRAFTS] * len(FEW), run))
    assert counted["launches"] == 3 * DRAFTS  # inputs of the rows, begin and end of the batch of logits
    num_rows = sum(NUM_ROWS[seq] for seq in FEW)
    moved = (num_rows + len(FEW) * (2 * DRAFTS - 1)) * size * 2  # inputs, and last rows, of each pass
    for name in ("read_sectors", "written_sectors"):
        assert moved <= 32 * counted[name] <= 1.2 * moved


def test_gpu_drafting_launches_nothing_without_drafts() -> None:
    loop = Loop(1, True)
    assert count(lambda: loop.draft(FEW, [0] * len(FEW), emulate()("draft")))["launches"] == 0


def no_row(loop: Loop) -> None:
    loop.batch.buffers.num_scheduled.array[1] = 0


def no_room(loop: Loop) -> None:
    loop.batch.buffers.num_scheduled.array[:2] = [200, 201]


def no_block(loop: Loop) -> None:
    loop.batch.buffers.num_blocks.array[0] = 0


def no_block_for_drafts(loop: Loop) -> None:
    loop.batch.buffers.num_blocks.array[1], loop.batch.buffers.num_scheduled.array[1] = 2, BLOCK


def no_state(loop: Loop) -> None:
    loop.batch.buffers.block_tables.array[1, 0] = 999


def too_many_drafts(loop: Loop) -> None:
    loop.loop.num_drafts.array[:2] = DRAFTS + 1


def no_order(loop: Loop) -> None:
    loop.loop.num_drafts.array[:2] = [1, 2]


def no_vocabulary(loop: Loop) -> None:
    loop.loop.vocab_index = 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_row, "draft: num_scheduled: expected a row of every sequence, got 0"),
        (no_room, "draft: num_scheduled: expected at most 400 rows, got 401"),
        (no_block, "draft: block_tables: expected blocks for 4 tokens, got 0 for request 0"),
        (no_block_for_drafts, "draft: block_tables: expected blocks for 33 tokens, got 2 for request 1"),
        (no_state, "draft: block_tables: expected blocks that have states, got 999"),
        (too_many_drafts, "draft: num_drafts: expected at most the drafts of the buffers, got 6"),
        (no_order, "draft: num_drafts: expected descending numbers, got 2"),
        (no_vocabulary, "draft: vocab_index: expected an index into vocab_sizes, got 2"),
    ],
)
def test_gpu_drafting_refuses_invalid_inputs(spoil: Callable[[Loop], None], message: str) -> None:
    loop, run = Loop(1, True), emulate()("draft")
    loop.write([0, 1], [2, 2])
    spoil(loop)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(loop.loop, 2)


def test_gpu_drafting_refuses_stages_sequences_and_dtypes_that_it_does_not_have() -> None:
    emulated, loop = emulate(), Loop(1, True)
    for name, args in (("draft", (SEQS + 1,)), ("fill_stage", (0, SEQS + 1))):
        with pytest.raises(ValueError, match="draft: num_seqs: expected at most the sequences of the buffers, got 7"):
            loop.loop.num_drafts.array[:] = 1
            emulated(name)(loop.loop, *args)
    with pytest.raises(ValueError, match="draft: stage: expected the index of a stage, got 1"):
        emulated("fill_stage")(loop.loop, 1, 1)
    with pytest.raises(ValueError, match="draft: output: expected bfloat16, got float32"):
        Loop(1, True, dtype="float32").draft(FEW, [1] * 5, emulated("draft"))
    with pytest.raises(ValueError, match="draft: output: expected rows of a multiple of 8 elements, got 36"):
        Loop(1, True, size=36).draft(FEW, [1] * 5, emulated("draft"))
    loop.loop.states = paddle.zeros([100, SIZE + 8], "bfloat16")
    with pytest.raises(ValueError, match=re.escape("draft: states: expected [1 or more, 64], got [100, 72]")):
        loop.draft(FEW, [1] * 5, emulated("draft"))
