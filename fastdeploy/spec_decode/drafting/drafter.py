# SPDX-License-Identifier: Apache-2.0
"""What the runners of drafting models share: caches under the target's block ids, and the choice of drafts.

token    x_0 ...    x_{ready} ...      x_{n-1} |  draft 1     draft 2
         |<-filled->|<- the first call's rows->|  one row in each further call
stage 2             |      the second call's rows         |

What decoding adds is computed when drafts are wanted, in the call that makes the first of them or, where it is much, in
one before it, which stops at the last keys and values: a request without drafts costs nothing. For each block it is
known how many of its slots are filled, so that whoever finds a block by its prefix fills what is missing. Of requests
that may draft no more than a backlog is left open, lest much be caught up at once; chunks of long prompts are so
computed beside the target's.

A model of several stages makes draft k in stage k, and all further ones in the last. A row of stage k reads its token
and the row that stage k - 1 has one position earlier: the stages' calls have equally many rows, each of them one
position behind the rows of the call before. What stands behind the text is computed again.

A drafting model's caches have the target's blocks and, behind them, one scratch block per sequence. Drafts are written
behind the committed slots: into the request's last block, or its scratch block where that one is full. What comes next
overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from paddle import Tensor

from fastdeploy.core.request import NO_DRAFT, Request
from fastdeploy.core.step import StepPlan
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.drafting import DraftLoop, DraftStage
from fastdeploy.spec_decode.drafting.draft_vocabulary import DraftVocabulary
from fastdeploy.worker.model_runner import LOGITS_BYTES, RunnerConfig
from fastdeploy.worker.row_rules import RowRules

MAX_BACKLOG = 1024  # rows of a request that may draft; a model of 1/16 computes them while its target does 64


class DraftBuffers:
    """What the calls of a drafting model read: the index of their rows, and the tokens."""

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        self.batch = BatchIndex(config.max_rows, config.max_seqs, config.max_blocks_per_seq, config.block_size)
        self.token_ids = HostBuffer(config.max_rows, "int32")

    def loop(
        self,
        stages: Sequence[DraftStage],
        output: Tensor,
        states: Tensor | None = None,
        source: Tensor | None = None,
        vocab_sizes: Sequence[int] = (),
    ) -> DraftLoop:
        """Return the loop over these buffers of stages that write `output`, by default to draft any id; see there."""
        config = self._config
        return DraftLoop(
            stages,
            self.batch,
            self.token_ids,
            output,
            vocab_sizes=vocab_sizes or [config.vocab_size],
            max_drafts=config.max_drafts,
            max_logits_rows=min(config.max_seqs, max(LOGITS_BYTES // (4 * config.vocab_size), 1)),
            states=states,
            source=source,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one request: its tokens in the positions [start, end)."""

    request: Request
    start: int
    end: int


@dataclass(slots=True)
class _Known:
    """How far the blocks of a request are known to be filled, while it holds them.

    Attributes:
        block_ids: the request's own list, another one after a preemption.
        num_whole: by stage, blocks filled to the last slot, from the first one on.
    """

    block_ids: list[int]
    num_whole: list[int]


class Drafter:
    """Fills the caches of a drafting model and drafts token by token for many requests together.

    Attributes:
        loop: computes and draws.
    """

    def __init__(self, loop: DraftLoop, num_blocks: int, config: RunnerConfig, least_fill: int | None = None) -> None:
        """Start with nothing filled.

        Args:
            loop: over the buffers of `DraftBuffers`; at most max_rows / max_seqs stages.
            num_blocks: of the target's cache.
            config: sizes of the drafting model.
            least_fill: where more rows per request are missing, they are filled in a call of their own, before that of
                the first drafts; None: where they would not fit into that.
        """
        self.config, self.loop = config, loop
        self._num_blocks, self._num_stages = num_blocks, len(loop.stages)
        self._least_fill = least_fill
        self._num_filled = [[0] * num_blocks for _ in loop.stages]  # slots of each block, from its first on
        self._known: WeakKeyDictionary[Request, _Known] = WeakKeyDictionary()
        self._vocabulary = DraftVocabulary(loop.vocab_sizes)
        self._rules = RowRules(loop.sampling, config.eos_token_ids, config.vocab_limit)
        self._tables: list[list[int] | None] = [None] * config.max_seqs  # the blocks that each sequence's row shows
        self._num_shown = [0] * config.max_seqs
        self._grown: list[tuple[Request, int]] = []  # requests to be filled after the step, and to where

    def begin_step(self, plan: StepPlan) -> bool:
        """Take in a step of the target: empty the blocks that it begins, note whose backlog will have grown too far.

        It is done before the step, while what the plan is made of lies in near caches.
        """
        size = self.config.block_size
        self._grown.clear()
        for request, start, count in zip(plan.requests, plan.num_computed, plan.num_scheduled):
            end = start + count
            if (start - 1) // size == end // size:
                continue  # begins no block and completes none
            for block in request.block_ids[-(-start // size) : -(-end // size)]:
                for filled in self._num_filled:
                    filled[block] = 0
            if request.max_drafts and start // size < end // size:
                known = min(end, request.num_tokens)
                if known - self._first_missing(request, self._num_stages) >= MAX_BACKLOG:
                    self._grown.append((request, known))
        return bool(self._grown)

    def end_step(self) -> None:
        """Fill what has grown."""
        self._fill(self._grown)

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return up to counts[i] tokens to follow the last one of requests[i].

        All tokens of a request but its last are computed.
        """
        order = sorted((i for i, count in enumerate(counts) if count > 0), key=lambda i: -counts[i])
        drafts = [NO_DRAFT.token_ids] * len(requests)
        if not order:
            return drafts
        wanted = [counts[i] for i in order]
        spans = self._first_spans([requests[i] for i in order], wanted)
        self._pack(spans)
        self.loop.vocab_index = self._vocabulary.choose()
        for row, count in enumerate(wanted):
            self.loop.num_drafts.memory[row] = count
        self.loop.draft(len(order))
        for row, (i, span) in enumerate(zip(order, spans)):
            drafts[i] = self._read_draft(row, counts[i])
            for stage in range(min(counts[i], self._num_stages)):
                self._mark(stage, span.request, span.start + stage, span.end)
        return drafts

    def _read_draft(self, row: int, count: int) -> list[int]:
        """Return a draft, which ends where no token could be drawn."""
        tokens = [self.loop.drafts.memory[row, i] for i in range(count)]
        return tokens[: tokens.index(-1)] if -1 in tokens else tokens

    def _first_spans(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Span]:
        """Return the rows of the call of the first drafts; fill first what would not fit into it."""
        spans = self._missing(requests, counts)
        num_rows = sum(span.end - span.start for span in spans)
        is_long = self._least_fill is not None and num_rows > len(spans) * self._least_fill
        if num_rows > self.config.max_rows or is_long:
            self._fill([(request, request.num_tokens - 1) for request in requests])
            spans = self._missing(requests, counts)
        return spans

    def _missing(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Span]:
        spans = []
        for request, count in zip(requests, counts):
            missing, end = self._first_missing(request, min(count, self._num_stages)), request.num_tokens
            spans.append(Span(request, min(missing, end - 1), end))
        return spans

    def _pack(self, spans: Sequence[Span]) -> None:
        """Describe the rows of a call: at most max_rows, of at most max_seqs requests."""
        tokens, buffers, at = self.loop.token_ids.memory, self.loop.batch.buffers, 0
        for row, span in enumerate(spans):
            count = span.end - span.start
            tokens[at : at + count] = span.request.tokens_of_rows(span.start, count)
            buffers.num_scheduled.memory[row], buffers.num_computed.memory[row] = count, span.start
            at += count
            self._show(row, span.request)
        self._vocabulary.observe(tokens[:at])

    def _show(self, row: int, request: Request) -> None:
        """Let a row of the loop's buffers stand for a request; what has not changed since the last call stays."""
        blocks = request.block_ids
        if self._tables[row] is not blocks:
            self._tables[row], self._num_shown[row] = blocks, 0
            self._rules.write_draft(request, row)
        shown, count = self._num_shown[row], len(blocks)
        if shown == count:
            return
        table = self.loop.batch.buffers.block_tables.array[row]
        table[shown:count] = blocks[shown:]
        self._num_shown[row] = count
        if count < len(table):
            table[count] = self._num_blocks + row
            count += 1
        self.loop.batch.buffers.num_blocks.array[row] = count

    def _fill(self, wanted: Sequence[tuple[Request, int]]) -> None:
        """Compute what each request lacks before a position, in as many rounds of all stages as that takes.

        The rows of the first stage end earlier by as many positions as there are further stages.
        """
        ends = [(request, end + 1 - self._num_stages) for request, end in wanted]
        while ends := [(request, end) for request, end in ends if self._first_missing(request, self._num_stages) < end]:
            spans, room = list[Span](), self.config.max_rows
            for request, end in ends:
                start = self._first_missing(request, self._num_stages)
                spans.append(Span(request, start, min(end, start + room)))
                room -= spans[-1].end - start
                if not room:
                    break
            for stage in range(self._num_stages):
                self._fill_stage(stage, [Span(span.request, span.start + stage, span.end + stage) for span in spans])

    def _fill_stage(self, stage: int, spans: Sequence[Span]) -> None:
        """Compute rows of a stage, each one position behind that of the stage before."""
        self._pack(spans)
        self.loop.fill_stage(stage, len(spans))
        for span in spans:
            self._mark(stage, span.request, span.start, span.end)

    def _first_missing(self, request: Request, num_stages: int) -> int:
        """Return the first position from which on the first stage must compute to fill so many stages."""
        known = self._known.get(request)
        if known is None or known.block_ids is not request.block_ids:
            known = self._known[request] = _Known(request.block_ids, [0] * self._num_stages)
        return max(0, min(self._num_ready(stage, known) - stage for stage in range(num_stages)))

    def _num_ready(self, stage: int, known: _Known) -> int:
        """Return how many positions, from 0 on, a stage has filled without a hole."""
        size, filled, blocks = self.config.block_size, self._num_filled[stage], known.block_ids
        whole = known.num_whole[stage]
        while whole < len(blocks) and filled[blocks[whole]] == size:
            whole += 1
        known.num_whole[stage] = whole
        return whole * size + (filled[blocks[whole]] if whole < len(blocks) else 0)

    def _mark(self, stage: int, request: Request, start: int, end: int) -> None:
        """Note that the positions [start, end) are filled, as far as the request's own blocks hold them."""
        size, filled = self.config.block_size, self._num_filled[stage]
        first = start // size * size
        for block in request.block_ids[start // size : -(-end // size)]:
            first += size
            filled[block] = max(filled[block], min(size, size + end - first))
