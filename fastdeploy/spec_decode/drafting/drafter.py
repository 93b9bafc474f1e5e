# SPDX-License-Identifier: Apache-2.0
"""Fills the KV caches of a drafting model and runs its draft passes, for draft models and MTP layers alike.

token    x_0 ...    x_{filled} ...     x_{n-1} |  draft 1     draft 2
         |<-filled->|<- rows of pass 0 ------->|  one row in each further pass
stage 1             |       rows of pass 1         |

A drafting model uses the block ids of the target, in caches of its own. They are filled lazily: the tokens that were
emitted since the last draft are computed by the first draft pass. If there are many of them, they are computed by
separate calls before, which stop after the last keys and values. A request that never drafts costs nothing. The number
of filled slots is tracked per block, so that a request which finds a block in the prefix cache fills only what is
missing. A request that may draft is filled as soon as `MAX_BACKLOG` tokens are missing, so that the first draft after a
pause does not delay the other requests; long prompts are thereby filled along with the target's chunks.

A model of several stages makes draft k in stage k, and all further drafts in the last stage. A row of stage k reads its
token and the output of stage k - 1 one position earlier. The rows of pass k are therefore those of pass k - 1, one
position further on. The rows after the last token depend on drafts, so they are computed again next time.

Each cache has one more block per sequence than the target's, the scratch block. Drafts are written to the slots after
the filled ones: in the last block of the request, or in the scratch block if that one is full. Later tokens overwrite
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.core.request import Request
from fastdeploy.core.step import StepPlan
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.block_moves import BlockRegion
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.drafting import DraftLoop, DraftStage
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.drafting.base import Drafter, no_drafts, sampled_tokens
from fastdeploy.spec_decode.drafting.draft_vocabulary import DraftVocabulary, Vocabulary
from fastdeploy.worker.model_runner import RunnerConfig, max_logits_rows
from fastdeploy.worker.sampling_metadata import SamplingMetadata

MAX_ROWS_OF_FIRST_PASS = 32  # per request; filling alone takes a third of the arithmetic, but reads its weights again
MAX_BACKLOG = 1024  # rows; a drafting model of 1/16 of the target computes them in the time of 64 rows of the target


class DraftBuffers:
    """The input buffers of a drafting model: the index of its rows, and their tokens."""

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        self.batch = BatchIndex(config.max_rows, config.max_seqs, config.max_blocks_per_seq, config.block_size)
        self.token_ids = HostBuffer(config.max_rows, "int32")

    def loop(
        self,
        stages: Sequence[DraftStage],
        output: Tensor,
        kv_cache: LayerCache,
        states: Tensor | None = None,
        input_states: Tensor | None = None,
        vocab_sizes: Sequence[int] = (),
        target_ids: NDArray[np.int32] | None = None,
    ) -> DraftLoop:
        """Return a DraftLoop over these buffers.

        Args:
            kv_cache: one of the stages' caches, which have equal numbers of blocks.
            vocab_sizes: of DraftLoop; without them, drafts are sampled from all ids.
            target_ids: of DraftLoop.
        """
        config = self._config
        return DraftLoop(
            stages,
            self.batch,
            self.token_ids,
            output,
            vocab_sizes=vocab_sizes or [config.vocab_size],
            max_drafts=config.max_drafts,
            max_logits_rows=max_logits_rows(config),
            limits=config.limits_of(kv_cache),
            states=states,
            input_states=input_states,
            target_ids=target_ids,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one request at the positions [start, end), one row each."""

    request: Request
    start: int
    end: int


@dataclass(slots=True)
class CacheFillState:
    """The number of blocks of a request that are full.

    Attributes:
        block_ids: the request's own list; a preempted request gets a new one.
        num_full_blocks: per stage, the number of leading blocks whose slots are all filled.
    """

    block_ids: list[int]
    num_full_blocks: list[int]


class CachedDrafter(Drafter):
    """Runs a drafting model with caches for many requests together.

    Attributes:
        loop: the native loop over the draft passes.
        kv_caches: of the stages.
    """

    def __init__(
        self,
        loop: DraftLoop,
        kv_caches: Sequence[LayerCache],
        num_blocks: int,
        config: RunnerConfig,
        max_rows_of_first_pass: int | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """Start with empty caches.

        Args:
            loop: over the buffers of `DraftBuffers`; at most max_rows / max_seqs stages.
            kv_caches: of the stages.
            num_blocks: of the target's cache.
            config: sizes of the drafting model.
            max_rows_of_first_pass: if more rows per request are missing on average, they are filled by separate calls
                before the first draft pass; None: only if they exceed the capacity of the pass.
            vocabulary: chooses among `loop.vocab_sizes`; None: by the ids of recent tokens.
        """
        self.config, self.loop, self.kv_caches = config, loop, kv_caches
        self._num_blocks, self.num_stages = num_blocks, len(loop.stages)
        self._max_rows_of_first_pass = max_rows_of_first_pass
        self._num_filled = [[0] * num_blocks for _ in loop.stages]  # by stage and block: number of leading filled slots
        self._fill_states: WeakKeyDictionary[Request, CacheFillState] = WeakKeyDictionary()
        self._vocabulary = vocabulary or DraftVocabulary(loop.vocab_sizes)
        self._sampling_metadata = SamplingMetadata(loop.sampling, config.eos_token_ids, config.vocab_limit)
        self._synced_tables: list[list[int] | None] = [None] * config.max_seqs  # by index in the batch
        self._num_synced_blocks = [0] * config.max_seqs
        self._backlogged: list[tuple[Request, int]] = []  # to be filled after this step, up to which position
        self._knows_step = True  # False if it was reset in this step

    def begin_step(self, plan: StepPlan) -> bool:
        """Mark the blocks that the target's step starts to write as empty; return whether `end_step` has work to do.

        This runs before the step, while the plan's data is still in the processor's caches.
        """
        size = self.config.block_size
        self._backlogged.clear()
        for scheduled in plan.requests:
            request, start = scheduled.request, scheduled.num_computed_tokens
            end = start + scheduled.num_scheduled_tokens
            if (start - 1) // size == end // size:
                continue  # starts no block and completes none
            for block in request.block_ids[-(-start // size) : -(-end // size)]:
                for filled in self._num_filled:
                    filled[block] = 0
            if request.max_drafts and start // size < end // size:
                fill_end = min(end, request.num_tokens)
                if fill_end - self._first_unfilled(request, self.num_stages) >= MAX_BACKLOG:
                    self._backlogged.append((request, fill_end))
        self._knows_step = True
        return bool(self._backlogged)

    def end_step(self) -> None:
        """Fill the caches of requests whose backlog has become too large."""
        self._fill(self._backlogged)

    def block_regions(self) -> dict[str, list[BlockRegion]]:
        """Describe the blocks of the caches, `drafting`, and of the target's states that the model reads, `states`."""
        backend, num_blocks = selected_backend(), self._num_blocks
        found = {"drafting": [r for cache in self.kv_caches for r in backend.block_regions(cache, num_blocks)]}
        if self.loop.states is not None:
            found["states"] = [backend.row_region(self.loop.states, self.config.block_size, num_blocks)]
        return found

    def fill(self, request: Request, end: int) -> None:
        """Compute the positions before `end` of a request that has been computed by the target up to there."""
        self._fill([(request, end)])

    def num_filled(self, block_id: int) -> list[int]:
        """Return the number of leading slots of a block that each stage has filled."""
        return [filled[block_id] for filled in self._num_filled]

    def set_filled(self, block_id: int, num_filled: Sequence[int]) -> None:
        """Record what the caches of the stages hold of a block that was imported."""
        for filled, count in zip(self._num_filled, num_filled, strict=True):
            filled[block_id] = count

    def reset(self) -> None:
        """Mark all blocks as empty and draft again from the next step on, because a call raised.

        Blocks that a running request has found to be full stay so: nobody else has written to them.
        """
        for filled in self._num_filled:
            filled[:] = [0] * len(filled)
        self._knows_step = False

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return up to counts[i] tokens to follow the last one of requests[i].

        The target must have computed all tokens of a request except the last.
        """
        order = sorted((i for i, count in enumerate(counts) if count > 0), key=lambda i: -counts[i])
        drafts = no_drafts(requests)
        if not order or not self._knows_step:
            return drafts
        spans = self._spans_of_first_pass([requests[i] for i in order], [counts[i] for i in order])
        self._pack(spans)
        self.loop.vocab_index = self._vocabulary.best_index([requests[i] for i in order])
        for index, i in enumerate(order):
            self.loop.num_drafts.memory[index] = counts[i]
        self.loop.draft(len(order))
        for index, (i, span) in enumerate(zip(order, spans)):
            drafts[i] = sampled_tokens(self.loop.drafts.memory[index, k] for k in range(counts[i]))
            for stage in range(min(counts[i], self.num_stages)):
                self._mark_filled(stage, span.request, span.start + stage, span.end)
        return drafts

    def _spans_of_first_pass(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Span]:
        """Return the rows of the first draft pass; if they are too many, fill all but the last ones first."""
        spans = self._unfilled_spans(requests, counts)
        num_rows, limit = sum(span.end - span.start for span in spans), self._max_rows_of_first_pass
        if num_rows > self.config.max_rows or (limit is not None and num_rows > len(spans) * limit):
            self._fill([(request, request.num_tokens - 1) for request in requests])
            spans = self._unfilled_spans(requests, counts)
        return spans

    def _unfilled_spans(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Span]:
        spans = []
        for request, count in zip(requests, counts):
            first, end = self._first_unfilled(request, min(count, self.num_stages)), request.num_tokens
            spans.append(Span(request, min(first, end - 1), end))
        return spans

    def _pack(self, spans: Sequence[Span]) -> None:
        """Write the rows of a call to the buffers: at most max_rows rows of at most max_seqs requests."""
        tokens, buffers, row = self.loop.token_ids.memory, self.loop.batch.buffers, 0
        for index, span in enumerate(spans):
            count = span.end - span.start
            tokens[row : row + count] = span.request.tokens_of_rows(span.start, count)
            buffers.num_scheduled.memory[index], buffers.num_computed.memory[index] = count, span.start
            row += count
            self._sync_block_table(index, span.request)
        self._vocabulary.observe(tokens[:row])

    def _sync_block_table(self, index: int, request: Request) -> None:
        """Write the block table of a request at an index of the batch; only blocks added since the last call."""
        blocks = request.block_ids
        if self._synced_tables[index] is not blocks:
            self._sampling_metadata.write_draft(request, index)
            self._synced_tables[index], self._num_synced_blocks[index] = blocks, 0
        num_synced, count = self._num_synced_blocks[index], len(blocks)
        if num_synced == count:
            return
        table = self.loop.batch.buffers.block_tables.array[index]
        table[num_synced:count] = blocks[num_synced:]
        self._num_synced_blocks[index] = count
        if count < len(table):
            table[count] = self._num_blocks + index  # the scratch block
            count += 1
        self.loop.batch.buffers.num_blocks.array[index] = count
        self.loop.batch.note_changed_table(index)

    def _fill(self, targets: Sequence[tuple[Request, int]]) -> None:
        """Fill the caches of each request up to a position, in as many rounds through all stages as necessary.

        Stage k computes positions that are k further on, so the first stage ends earlier by the number of other stages.
        """
        ends = [(request, end + 1 - self.num_stages) for request, end in targets]
        while ends := [(r, end) for r, end in ends if self._first_unfilled(r, self.num_stages) < end]:
            spans, room = list[Span](), self.config.max_rows
            for request, end in ends:
                start = self._first_unfilled(request, self.num_stages)
                spans.append(Span(request, start, min(end, start + room)))
                room -= spans[-1].end - start
                if not room:
                    break
            for stage in range(self.num_stages):
                self._fill_stage(stage, [Span(span.request, span.start + stage, span.end + stage) for span in spans])

    def _fill_stage(self, stage: int, spans: Sequence[Span]) -> None:
        """Compute rows of one stage."""
        self._pack(spans)
        self.loop.fill_stage(stage, len(spans))
        for span in spans:
            self._mark_filled(stage, span.request, span.start, span.end)

    def _first_unfilled(self, request: Request, num_stages: int) -> int:
        """Return the position from which the first stage must compute, so that the first `num_stages` get filled."""
        state = self._fill_states.get(request)
        if state is None or state.block_ids is not request.block_ids:
            state = self._fill_states[request] = CacheFillState(request.block_ids, [0] * self.num_stages)
        return max(0, min(self._num_filled_tokens(stage, state) - stage for stage in range(num_stages)))

    def _num_filled_tokens(self, stage: int, state: CacheFillState) -> int:
        """Return the number of leading tokens that a stage has filled without a gap."""
        size, filled, blocks = self.config.block_size, self._num_filled[stage], state.block_ids
        full = state.num_full_blocks[stage]
        while full < len(blocks) and filled[blocks[full]] == size:
            full += 1
        state.num_full_blocks[stage] = full
        return full * size + (filled[blocks[full]] if full < len(blocks) else 0)

    def _mark_filled(self, stage: int, request: Request, start: int, end: int) -> None:
        """Mark the positions [start, end) as filled, except those in the scratch block."""
        size, filled = self.config.block_size, self._num_filled[stage]
        first = start // size * size
        for block in request.block_ids[start // size : -(-end // size)]:
            first += size
            filled[block] = max(filled[block], min(size, size + end - first))
