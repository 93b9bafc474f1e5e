# SPDX-License-Identifier: Apache-2.0
"""Drafting in one native call; tests/ops/test_examples.py compares it with the reference."""

from __future__ import annotations

import re
from collections.abc import Callable

import paddle
import pytest

from fastdeploy.config.cache_spec import CacheSpec
from fastdeploy.ops.attention import AttentionMetadata, KVCache, append_attention
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.caches import allocate_cache
from fastdeploy.ops.drafting import DraftLoop, DraftStage
from fastdeploy.ops.embedding import embedding
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.input_checks import InputLimits
from fastdeploy.ops.linear import linear, pack_linear
from fastdeploy.ops.rotary import HeadLayout
from fastdeploy.ops.sampling import FloatColumn, IntColumn

VOCAB, SIZE, ROWS, SEQS, DRAFTS, BLOCK = 50, 16, 24, 5, 4, 16
PROMPTS = ([3, 1, 4], [15], [9, 2], [6, 5, 3, 5], [8])
STARTS = (0, 16, 30, 7, 3)


class Model:
    """A loop of a model whose output depends on the embedding of a token and the state of the position before it."""

    def __init__(self, max_logits_rows: int = SEQS) -> None:
        self.batch, self.tokens = BatchIndex(ROWS, SEQS, 3, BLOCK), HostBuffer(ROWS, "int32")
        self.output, self.input_states = paddle.zeros([ROWS, SIZE]), paddle.zeros([ROWS, SIZE])
        embedded, table = paddle.zeros([ROWS, SIZE]), random_rows(VOCAB, SIZE, "float32", 1)
        weight, head = (pack_linear(random_rows(n, SIZE, "float32", n)) for n in (SIZE, VOCAB))

        def compute(metadata: AttentionMetadata) -> None:
            num_rows = metadata.num_rows
            embedding(self.tokens.tensor, table, embedded, num_rows)
            linear(embedded, weight, self.output, num_rows, self.input_states)

        stage = DraftStage(compute, lambda rows, num_rows, out: linear(rows, head, out, num_rows))
        self.states = random_rows(3 * SEQS * BLOCK + 1, SIZE, "float32", 2)
        self.loop = DraftLoop(
            [stage],
            self.batch,
            self.tokens,
            self.output,
            vocab_sizes=[VOCAB],
            max_drafts=DRAFTS,
            max_logits_rows=max_logits_rows,
            limits=InputLimits(VOCAB, 3 * SEQS, 3 * BLOCK),
            states=self.states,
            input_states=self.input_states,
        )
        self.loop.sampling.float_params.array[:, FloatColumn.TEMPERATURE] = 20.0

    def write_first_pass(self, order: list[int], num_drafts: list[int]) -> None:
        """Write the rows of the first pass for some of PROMPTS, in this order."""
        buffers, at = self.batch.buffers, 0
        for row, prompt in enumerate(order):
            count = len(PROMPTS[prompt])
            self.tokens.array[at : at + count] = PROMPTS[prompt]
            at += count
            buffers.num_scheduled.array[row], buffers.num_computed.array[row] = count, STARTS[prompt]
            buffers.block_tables.array[row] = [3 * prompt, 3 * prompt + 1, 3 * prompt + 2]
            buffers.num_blocks.array[row] = 3
            self.loop.sampling.int_params.array[row, IntColumn.SEED] = prompt
        self.loop.num_drafts.array[: len(order)] = num_drafts

    def draft(self, order: list[int], num_drafts: list[int]) -> dict[int, list[int]]:
        """Return the drafts of some of PROMPTS."""
        self.write_first_pass(order, num_drafts)
        self.loop.draft(len(order))
        return {p: self.loop.drafts.array[row, : num_drafts[row]].tolist() for row, p in enumerate(order)}


def test_drafts_do_not_depend_on_other_sequences_their_order_or_the_number_of_logits_batches() -> None:
    alone = {prompt: Model().draft([prompt], [DRAFTS])[prompt] for prompt in range(SEQS)}
    assert len({tuple(draft) for draft in alone.values()}) == SEQS
    for max_logits_rows in (1, 2, SEQS):
        model = Model(max_logits_rows)
        assert model.draft([0, 1, 2, 3, 4], [DRAFTS] * SEQS) == alone
        found = model.draft([3, 0, 4, 1], [4, 3, 3, 1])
        assert found == {p: alone[p][:count] for p, count in ((3, 4), (0, 3), (4, 3), (1, 1))}


def test_heads_write_block_maxima() -> None:
    model = Model()
    model.draft([0], [1])
    (head,) = model.loop.backend_state.heads
    assert head.describe() == ["Gather", f"Linear with block maxima [{VOCAB}, {SIZE}]"]


def test_a_sequence_without_allowed_tokens_does_not_affect_the_others() -> None:
    model = Model()
    expected = model.draft([0, 1, 2], [3, 3, 3])
    model.loop.sampling.int_params.array[1, IntColumn.VOCAB_LIMIT] = 0
    assert model.draft([0, 1, 2], [3, 3, 3]) == {0: expected[0], 1: [-1, -1, -1], 2: expected[2]}


def test_greedy_and_random_rows_draft_in_one_call() -> None:
    model = Model()
    sampled = model.draft([0, 1], [4, 4])
    model.loop.sampling.float_params.array[0, FloatColumn.TEMPERATURE] = 0.0
    found = model.draft([0, 1], [4, 4])
    assert found[0] != sampled[0] and found[1] == sampled[1]


def wrong_token(model: Model) -> None:
    model.tokens.array[1] = VOCAB


def no_row(model: Model) -> None:
    model.batch.buffers.num_scheduled.array[1] = 0


def no_block(model: Model) -> None:
    model.batch.buffers.num_blocks.array[0] = 0


def no_state(model: Model) -> None:
    model.batch.buffers.block_tables.array[1, 0] = 99


def no_room(model: Model) -> None:
    model.loop.num_drafts.array[:2] = DRAFTS + 1


def no_order(model: Model) -> None:
    model.loop.num_drafts.array[:2] = [1, 2]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_token, "embedding: token_ids: expected 0..49, got 50 at row 1"),
        (no_row, "draft: num_scheduled: expected a row of every sequence, got 0"),
        (no_block, "draft: block_tables: expected blocks for 3 tokens, got 0 for request 0"),
        (no_state, "draft: block_tables: expected slots that have states, got 1599"),
        (no_order, "draft: num_drafts: expected descending numbers, got 2"),
        (no_room, "draft: num_drafts: expected at most the drafts of the buffers, got 5"),
    ],
)
def test_invalid_inputs_are_refused_and_the_next_call_is_not_affected(
    spoil: Callable[[Model], None], message: str
) -> None:
    model = Model()
    expected = model.draft([0, 1], [2, 2])
    model.write_first_pass([0, 1], [2, 2])
    spoil(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        model.loop.draft(2)
    assert model.draft([0, 1], [2, 2]) == expected


def test_more_sequences_than_the_buffers_hold_are_refused() -> None:
    model = Model()
    for call in (lambda: model.loop.draft(SEQS + 1), lambda: model.loop.fill_stage(0, SEQS + 1)):
        with pytest.raises(ValueError, match="draft: num_seqs: expected at most the sequences of the buffers, got 6"):
            call()
    with pytest.raises(ValueError, match="draft: stage: expected the index of a stage, got 1"):
        model.loop.fill_stage(1, 1)


def test_nothing_is_computed_without_drafts() -> None:
    model = Model()
    model.output[:] = 7.0
    model.draft([0, 1], [0, 0])
    assert (model.output.numpy() == 7.0).all()


def test_filling_the_last_stage_ends_with_the_last_write_to_a_cache() -> None:
    batch, tokens, heads = BatchIndex(ROWS, SEQS, 3, BLOCK), HostBuffer(ROWS, "int32"), HeadLayout(1, 1, SIZE)
    table, weight = random_rows(VOCAB, 3 * SIZE, "float32", 1), pack_linear(random_rows(SIZE, SIZE, "float32", 2))
    caches = [allocate_cache(4, BLOCK, CacheSpec("grouped", 1, SIZE, "float32")) for _ in range(2)]
    qkv, attended, output = (paddle.full([ROWS, width], 7.0) for width in (3 * SIZE, SIZE, SIZE))

    def compute(metadata: AttentionMetadata) -> None:
        for cache in caches:
            assert isinstance(cache, KVCache)
            embedding(tokens.tensor, table, qkv, metadata.num_rows)
            append_attention(qkv, cache, metadata, attended, heads, 1.0)
        linear(attended, weight, output, metadata.num_rows)

    stage, limits = DraftStage(compute, lambda rows, num_rows, out: None), InputLimits(VOCAB, 4, 3 * BLOCK)
    sizes = {"max_drafts": 1, "max_logits_rows": 1}
    loop = DraftLoop([stage], batch, tokens, output, vocab_sizes=[VOCAB], **sizes, limits=limits)
    tokens.array[:2] = 5
    batch.buffers.num_scheduled.array[0] = batch.buffers.num_blocks.array[0] = 2
    loop.fill_stage(0, 1)
    assert all((tensor[0].numpy() != 0).any() for cache in caches for tensor in cache.tensors)
    assert (output.numpy() == 7.0).all()
