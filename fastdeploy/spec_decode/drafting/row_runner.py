# SPDX-License-Identifier: Apache-2.0
"""Runs heads that draft from one state of the target per request: MLP speculators and Medusa.

They read the state of the token before the last one, in the output of the target's last step. Nothing is stored, and a
request that was not part of that step gets no draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from paddle import Tensor

from fastdeploy.core.request import Request
from fastdeploy.core.step import StepPlan
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.heads.row_heads import RowHead
from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.drafting import DraftLoop, DraftStage
from fastdeploy.ops.input_checks import InputLimits
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.drafting.base import Drafter, no_drafts
from fastdeploy.spec_decode.drafting.draft_vocabulary import (
    DraftVocabulary,
    MappedVocabulary,
    Vocabulary,
    draft_vocab_sizes,
    spread_logits,
)
from fastdeploy.worker.model_runner import RunnerConfig, max_logits_rows
from fastdeploy.worker.sampling_metadata import SamplingMetadata

BLOCK_MULTIPLE = 16  # tokens; the index arrays of a step need blocks of such sizes


class RowRunner(Drafter):
    """Drafts with a head from the output of the target's last step."""

    num_stages = 0  # with caches

    def __init__(self, head: RowHead, target: CausalLM, config: RunnerConfig) -> None:
        """Bind the head to the target's output."""
        self.head, self.config = head, config
        num_positions = config.max_model_len + config.max_drafts
        block_size = -(-num_positions // BLOCK_MULTIPLE) * BLOCK_MULTIPLE  # one block per sequence, which nobody reads
        batch = BatchIndex(config.max_seqs, config.max_seqs, 1, block_size)
        token_ids, self._rows = HostBuffer(config.max_seqs, "int32"), HostBuffer(config.max_seqs, "int32")
        ids, sizes = head.target_ids, draft_vocab_sizes(config.vocab_size)
        if ids is not None:
            sizes = [len(ids), config.vocab_size]
        max_rows = max_logits_rows(config)

        def compute(index: int, metadata: AttentionMetadata) -> None:
            head.compute(index, target.output, self._rows.tensor, token_ids.tensor, metadata.num_rows)

        def stage(index: int) -> DraftStage:
            logits: Callable[[Tensor, int, Tensor], None] = partial(head.compute_logits, index)
            return DraftStage(partial(compute, index), logits if ids is None else spread_logits(logits, ids, max_rows))

        self.loop = DraftLoop(
            [stage(index) for index in range(head.num_drafts)],
            batch,
            token_ids,
            head.output,
            vocab_sizes=sizes,
            max_drafts=config.max_drafts,
            max_logits_rows=max_rows,
            limits=InputLimits(config.vocab_size, 1, num_positions),
            input_states=head.input_states,
            target_ids=ids,
        )
        self._vocabulary: Vocabulary = DraftVocabulary(sizes) if ids is None else MappedVocabulary()
        self._sampling_metadata = SamplingMetadata(self.loop.sampling, config.eos_token_ids, config.vocab_limit)
        self._first_rows: WeakKeyDictionary[Request, tuple[int, range]] = WeakKeyDictionary()  # of the last step

    def describe(self) -> dict[str, Any]:
        """Return how many drafts the head makes, and the bytes that it adds to the target's."""
        return {
            "num_drafts": self.head.num_drafts,
            "head": self.head.head_format,
            "weights_bytes": self.head.num_weight_bytes,
            "heads_bytes": self.head.num_head_bytes,
        }

    def begin_step(self, plan: StepPlan) -> bool:
        """Take note of the rows and positions of each request."""
        self._first_rows.clear()
        row = 0
        for scheduled in plan.requests:
            start, count = scheduled.num_computed_tokens, scheduled.num_scheduled_tokens
            self._first_rows[scheduled.request] = row, range(start, start + count)
            row += count
        return False

    def reset(self) -> None:
        """Make no drafts before the next step."""
        self._first_rows.clear()

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return drafts as `Drafter` says; none for a request without a row in the last step."""
        drafts, most = no_drafts(requests), self.head.num_drafts
        rows = [self._row_of(request) for request in requests]
        order = sorted((i for i, row in enumerate(rows) if row is not None and counts[i]), key=lambda i: -counts[i])
        if not order:
            return drafts
        for index, i in enumerate(order):
            self._write(index, requests[i], rows[i] or 0, min(counts[i], most))
        self._vocabulary.observe(self.loop.token_ids.memory[: len(order)])
        self.loop.vocab_index = self._vocabulary.best_index([requests[i] for i in order])
        if not selected_backend().shares_memory:
            self._rows.upload(len(order))
        self.loop.draft(len(order))
        for index, i in enumerate(order):
            drafts[i] = self._read_draft(index, min(counts[i], most))
        return drafts

    def draft_timed(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Draft from the first row of whatever step was the last one."""
        for request in requests:
            position = request.num_tokens - 2
            self._first_rows[request] = 0, range(position, position + 1)
        return self.draft(requests, counts)

    def _row_of(self, request: Request) -> int | None:
        """Return the row of the last step that has the state of the token before the last one."""
        first, positions = self._first_rows.get(request, (0, range(0)))
        position = request.num_tokens - 2
        return first + position - positions.start if position in positions else None

    def _write(self, index: int, request: Request, row: int, count: int) -> None:
        """Write what the loop needs of one request."""
        loop, last = self.loop, request.num_tokens - 1
        buffers = loop.batch.buffers
        loop.token_ids.memory[index] = request.tokens_of_rows(last, 1)[0]
        buffers.num_scheduled.memory[index], buffers.num_computed.memory[index] = 1, last
        buffers.num_blocks.memory[index] = 1
        self._rows.memory[index] = row
        loop.num_drafts.memory[index] = count
        self._sampling_metadata.write_draft(request, index)
