# SPDX-License-Identifier: Apache-2.0
"""What is refused before it is sent to a GPU is what the CPU's operators refuse, with the same words."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import paddle
import pytest

from fastdeploy.ops.attention import HeadLayout, allocate_kv_cache, append_attention
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.embedding import embedding
from fastdeploy.ops.input_checks import InputLimits, check_counts, check_logprob_rows, check_row_ranges
from fastdeploy.ops.rotary import RotaryParams
from fastdeploy.ops.sampling import LogprobBuffers, SamplingBatch, logprobs
from fastdeploy.ops.verify import VerifyBatch, verify_draft_tokens

ROWS, SEQS, TABLE, BLOCK = 12, 4, 3, 16
VOCAB, NUM_BLOCKS, POSITIONS = 50, 9, 40
LIMITS = InputLimits(VOCAB, NUM_BLOCKS, POSITIONS)
HEADS = HeadLayout(1, 1, 64)


class Step:
    """The inputs of a step of three requests."""

    def __init__(self) -> None:
        self.num_seqs = 3
        self.batch, self.tokens = BatchIndex(ROWS, SEQS, TABLE, BLOCK), HostBuffer(ROWS, "int32")
        self.batch.write_inputs([5, 1, 3], [0, 16, 37], [1, 1, 0], [[8], [0, 3], [1, 2, 4]])
        self.tokens.array[:9] = np.arange(41, 50)

    def check(self) -> int:
        """Check the step as a runner does before its upload, and send it."""
        num_rows = LIMITS.check_rows(self.batch, self.tokens, self.num_seqs)
        self.batch.upload(self.num_seqs)
        return num_rows

    def run_on_cpu(self) -> None:
        """Run the operators that read the inputs."""
        metadata = self.batch.compute(self.num_seqs)
        table, out = paddle.zeros([VOCAB, 8]), paddle.zeros([ROWS, 8])
        embedding(self.tokens.tensor, table, out, metadata.num_rows)
        cache = allocate_kv_cache(NUM_BLOCKS, BLOCK, 1, 64, "float32")
        qkv, attended = paddle.zeros([ROWS, HEADS.row_size]), paddle.zeros([ROWS, 64])
        rotary = RotaryParams(paddle.zeros([POSITIONS, 64]), False)
        append_attention(qkv, cache, metadata, attended, HEADS, 1.0, 0, rotary)


def write(name: str, index: int | tuple[int, int], value: int) -> Callable[[Step], None]:
    def spoil(step: Step) -> None:
        getattr(step.batch.buffers, name).array[index] = value

    return spoil


def write_token(row: int, token: int) -> Callable[[Step], None]:
    def spoil(step: Step) -> None:
        step.tokens.array[row] = token

    return spoil


def message_of(call: Callable[[], object]) -> str:
    """Return the message of the ValueError that a call raises, without what Paddle adds."""
    with pytest.raises(ValueError) as caught:
        call()
    found = re.search(r"\w+: \w+: expected [^\n]*?, got [^\n]*", str(caught.value))
    assert found is not None
    return found[0].split(" (at ")[0].strip().removesuffix(".")


def test_gpu_inputs_of_a_valid_step_are_accepted() -> None:
    step = Step()
    assert step.check() == 9
    step.run_on_cpu()
    step.num_seqs = 0
    assert step.check() == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (write("num_scheduled", 1, -1), "virtual_padding: num_scheduled: expected at least 0, got -1 for request 1"),
        (write("num_computed", 1, -16), "virtual_padding: num_computed: expected at least 0, got -16 for request 1"),
        (write("num_logits", 2, 4), "virtual_padding: num_logits: expected 0..3, got 4 for request 2"),
        (write("num_logits", 0, -1), "virtual_padding: num_logits: expected 0..5, got -1 for request 0"),
        (
            write("num_blocks", 1, 1),
            "virtual_padding: block_tables: expected blocks for 17 tokens, got 1 for request 1",
        ),
        (
            write("num_scheduled", 1, 16),
            "virtual_padding: num_scheduled: expected at most 12 rows, got 21 for request 1",
        ),
        (write("num_computed", 2, 38), "append_attention: positions: expected 0..39, got 40"),
        (write("num_computed", 2, 45), "append_attention: positions: expected 0..39, got 45"),
        (write("block_tables", (2, 0), 9), "append_attention: block_tables: expected a block of the cache, got 9"),
        (write("block_tables", (2, 1), -1), "append_attention: block_tables: expected a block of the cache, got -1"),
        (write_token(8, 50), "embedding: token_ids: expected 0..49, got 50 at row 8"),
        (write_token(0, -1), "embedding: token_ids: expected 0..49, got -1 at row 0"),
    ],
)
def test_gpu_inputs_are_refused_in_the_words_of_the_cpu(spoil: Callable[[Step], None], message: str) -> None:
    step = Step()
    spoil(step)
    assert message_of(step.check) == message
    assert message_of(step.run_on_cpu) == message


@pytest.mark.parametrize(
    "spoil",
    [
        write("block_tables", (0, 1), 99),  # no token is there
        write("block_tables", (3, 0), 99),  # no request has this table
        write_token(9, 50),
        write("num_scheduled", 3, -1),
    ],
)
def test_gpu_inputs_that_no_row_uses_are_not_checked(spoil: Callable[[Step], None]) -> None:
    step = Step()
    spoil(step)
    assert step.check() == 9
    step.run_on_cpu()


def test_gpu_block_tables_are_checked_when_they_are_sent() -> None:
    step = Step()
    step.check()
    tables = step.batch.buffers.block_tables
    tables.array[2, 0] = 9
    step.batch.note_changed_table(2)
    step.num_seqs = 2
    assert step.check() == 6, "the third table is not sent"
    step.num_seqs = 3
    for _ in range(2):  # what has been refused is checked again
        assert message_of(step.check) == "append_attention: block_tables: expected a block of the cache, got 9"
    tables.array[2, 0] = 1
    assert step.check() == 9
    assert step.batch.changed_tables(3)[0] >= 3, "all have been sent"


def test_gpu_inputs_of_later_passes_are_checked_before_the_first() -> None:
    batch, tokens = BatchIndex(ROWS, SEQS, TABLE, BLOCK), HostBuffer(ROWS, "int32")
    batch.write_inputs([1, 1], [14, 36], [0, 0], [[8], [0, 3, 5]])
    assert LIMITS.check_rows(batch, tokens, 2, "draft", np.array([1, 3], np.int32)) == 2
    with pytest.raises(ValueError, match="draft: block_tables: expected blocks for 17 tokens, got 1 for request 0"):
        LIMITS.check_rows(batch, tokens, 2, "draft", np.array([2, 3], np.int32))
    with pytest.raises(ValueError, match=r"append_attention: positions: expected 0\.\.39, got 40"):
        LIMITS.check_rows(batch, tokens, 2, "draft", np.array([1, 4], np.int32))


def test_gpu_inputs_may_not_exceed_the_buffers() -> None:
    step = Step()
    step.num_seqs = SEQS + 1
    with pytest.raises(ValueError, match="num_seqs: expected at most the sequences of the buffers, got 5"):
        step.check()
    step = Step()
    step.batch.buffers.num_blocks.array[2], step.batch.buffers.num_computed.array[2] = 9, 60
    with pytest.raises(ValueError, match="block_tables: expected blocks for 63 tokens, got 9 for request 2"):
        check_counts(step.batch, 3, "virtual_padding")


@pytest.mark.parametrize(
    ("first", "count", "message"),
    [
        (-1, 2, "verify_draft_tokens: first_row: expected at least 0, got -1"),
        (4, -2, "verify_draft_tokens: row_count: expected at least 0, got -2"),
        (
            5,
            4,
            "verify_draft_tokens: row_count: "
            "expected ranges within the rows of target, draft_is_allowed and emitted, got 9",
        ),
    ],
)
def test_gpu_ranges_of_verification_are_refused_in_the_words_of_the_cpu(first: int, count: int, message: str) -> None:
    sampling, batch = SamplingBatch(8), VerifyBatch(8)
    inputs = sampling.token_ids.tensor, sampling.int_params.tensor, sampling.draft_is_allowed.tensor
    batch.fill([0, first], [3, count])
    assert message_of(lambda: check_row_ranges(batch)) == message
    assert message_of(lambda: verify_draft_tokens(*inputs, batch, False, 0)) == message
    batch.fill([0, 3], [3, 5])
    check_row_ranges(batch)
    batch.fill([], [])
    check_row_ranges(batch)


@pytest.mark.parametrize(
    ("row", "token", "message"),
    [
        (5, 0, "logprobs: rows: expected 0..4, got 5"),
        (-1, 0, "logprobs: rows: expected 0..4, got -1"),
        (4, 50, "logprobs: chosen: expected 0..49, got 50"),
        (0, -1, "logprobs: chosen: expected 0..49, got -1"),
    ],
)
def test_gpu_rows_of_logprobs_are_refused_in_the_words_of_the_cpu(row: int, token: int, message: str) -> None:
    logits, buffers = paddle.zeros([5, VOCAB]), LogprobBuffers(3)
    buffers.rows.array[1], buffers.chosen.array[1] = row, token
    arguments = logits, buffers.rows.tensor, buffers.chosen.tensor
    assert message_of(lambda: check_logprob_rows(buffers, 2, 5, VOCAB)) == message
    assert message_of(lambda: logprobs(*arguments, 2, 1, buffers)) == message
    check_logprob_rows(buffers, 1, 5, VOCAB)
