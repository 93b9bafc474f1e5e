# SPDX-License-Identifier: Apache-2.0
"""Drafting with a model: its calls one after the other, with indexing, gathering and sampling between them.

call 0   the rows of each sequence that the model has not computed, the last of which leads to the first draft
call k   while there is a k-th stage: the same number of rows, one position further on
         then one row per sequence, that of the draft before, through the last stage

All of it is one native call: what Python and Paddle take between two calls of a small model exceeds the model itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy.ops.attention import RowIndex
from fastdeploy.ops.batch_index import BatchIndex, full_step
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.gather import gather_rows
from fastdeploy.ops.graph import OpGraph
from fastdeploy.ops.reference import drafting as reference
from fastdeploy.ops.registry import Lookup, OpEntry, load_library, register, run_native
from fastdeploy.ops.sampling import SamplingBatch


@dataclass(frozen=True)
class DraftStage:
    """A model that drafts, or one of several that do so in turn.

    Attributes:
        compute: compute(batch, num_rows) reads `token_ids`, and `source` where there is one, and writes `output`.
        compute_logits: compute_logits(rows, num_rows, out) writes float32 logits of rows of `output`, of as many of the
            first ids as `out` is wide.
    """

    compute: Callable[[RowIndex, int], None]
    compute_logits: Callable[[Tensor, int, Tensor], None]


class DraftLoop:
    """The buffers of drafting, and what it runs.

    Attributes:
        batch: its `buffers.num_scheduled`, `num_computed`, `num_blocks` and `block_tables` describe the rows of the
            first call; drafting overwrites the first two.
        token_ids: [max_rows] int32, the tokens of these rows; overwritten too.
        num_drafts: [max_seqs] int32, drafts wanted of each sequence, none above one before it.
        drafts: [max_seqs, max_drafts] int32; -1 where no token could be drawn, what follows it means nothing.
        vocab_sizes: first ids that a draft may be drawn from, rising, all ids last.
        size: which of them holds for the next drafts; all at first.
        sampling: how to draw, a row per sequence; positions are filled in, lists and masks are not read.
        stages, output, states, source: as `__init__` has them.
        chosen_rows, chosen_hidden, logits: scratch of it.
        narrow_logits: the memory of `logits` as rows of each of vocab_sizes.
    """

    def __init__(
        self,
        stages: Sequence[DraftStage],
        batch: BatchIndex,
        token_ids: HostBuffer,
        output: Tensor,
        *,
        vocab_sizes: Sequence[int],
        max_drafts: int,
        max_chosen: int,
        states: Tensor | None = None,
        source: Tensor | None = None,
    ) -> None:
        """Allocate what is not given.

        Args:
            output: [max_rows, hidden], what every stage writes.
            max_chosen: rows of logits that there is room for; more sequences take several goes.
            states: [num_slots + 1, hidden], by slot the state after a token, the last one for what precedes a text.
            source: [max_rows, hidden], where a row reads the state of the position before its own, from `states` in
                the first call, from `output` in others; None, as `states`, for models that read tokens alone.
        """
        max_seqs, hidden = batch.kv_lens.shape[0], output.shape[1]
        self.stages, self.batch, self.token_ids, self.output = tuple(stages), batch, token_ids, output
        self.states, self.source = states, source
        self.num_drafts = HostBuffer(max_seqs, "int32")
        self.drafts = HostBuffer((max_seqs, max_drafts), "int32")
        self.sampling = SamplingBatch(max_seqs)
        self.chosen_rows = HostBuffer(max_chosen, "int32")
        self.chosen_hidden: Tensor = paddle.zeros([max_chosen, hidden], output.dtype)
        self.vocab_sizes, self.size = tuple(vocab_sizes), len(vocab_sizes) - 1
        self.logits: Tensor = paddle.zeros([max_chosen, vocab_sizes[-1]], "float32")
        flat = self.logits.reshape([-1])
        self.narrow_logits = [flat[: max_chosen * size].reshape([max_chosen, size]) for size in vocab_sizes]
        self.native: _Native | None = None

    def fill_stage(self, stage: int, num_seqs: int) -> None:
        """Write the keys and values of one stage for the rows of the first sequences.

        A stage but the first reads what the call before it wrote for the same rows. The last one, whose outputs nobody
        reads, stops when its last keys and values are written.

        Raises:
            ValueError: the rows do not fit the buffers, or an id, position or slot is out of range.
        """
        _FILL_STAGE.run(self, stage, num_seqs)

    def draft(self, num_seqs: int) -> None:
        """Fill `drafts` for the first sequences.

        Raises:
            ValueError: as fill_stage; more drafts than there is room for; a sequence without a row.
        """
        _DRAFT.run(self, num_seqs)


class _Native:
    """The addresses of a loop's buffers and the recordings of its stages and heads; the loop owns what they refer to.

    Attributes:
        heads: by stage, and of each by the loop's vocab_sizes.
    """

    def __init__(self, loop: DraftLoop) -> None:
        num_rows, max_chosen = loop.output.shape[0], loop.logits.shape[0]
        full = full_step(loop.batch, num_rows)

        def head(stage: DraftStage, logits: Tensor) -> None:
            gather_rows(loop.output, loop.chosen_rows.tensor, loop.chosen_hidden, max_chosen)
            stage.compute_logits(loop.chosen_hidden, max_chosen, logits)

        self._stages = [OpGraph(partial(stage.compute, full, num_rows)) for stage in loop.stages]
        self.heads = [OpGraph(partial(head, stage, out)) for stage in loop.stages for out in loop.narrow_logits]
        self._free = load_library().fd_drafting_free  # kept here: modules may be gone when the last loop goes
        self._free.argtypes = [ctypes.c_void_p]
        self.handle = _bind(loop, [stage.handle for stage in self._stages], [head.handle for head in self.heads])

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._free(self.handle)


def _bind(loop: DraftLoop, stages: list[int], heads: list[int]) -> int:
    sampling, handle = loop.sampling, HostBuffer(1, "int64")
    run_native(
        "fd_bind_drafting",
        *loop.batch.buffers.tensors(),
        loop.token_ids.tensor,
        loop.num_drafts.tensor,
        loop.drafts.tensor,
        loop.states,
        loop.source,
        loop.output,
        loop.chosen_rows.tensor,
        loop.logits,
        sampling.float_params.tensor,
        sampling.int_params.tensor,
        sampling.token_ids.tensor,
        sampling.status.tensor,
        sampling.draft_survives.tensor,
        handle.tensor,
        stages,
        heads,
        list(loop.vocab_sizes),
        loop.batch.block_size,
    )
    return int(handle.array[0])


def _native(loop: DraftLoop) -> int:
    if loop.native is None:
        loop.native = _Native(loop)
    return loop.native.handle


def _fill_stage_cpu(loop: DraftLoop, stage: int, num_seqs: int) -> None:
    run_native("fd_fill_stage", loop.output, _native(loop), stage, num_seqs)


def _draft_cpu(loop: DraftLoop, num_seqs: int) -> None:
    run_native("fd_draft", loop.drafts.tensor, _native(loop), num_seqs, loop.size)


_SIZE, _FEW, _VOCAB, _BLOCK = 16, 128, 200, 16


def _example_loop(num_stages: int, has_states: bool, lookup: Lookup) -> DraftLoop:
    """Return the loop of models whose output is a product of the embedding and, where there are states, the source."""
    batch, token_ids, output = BatchIndex(12, 3, 2, _BLOCK), HostBuffer(12, "int32"), paddle.zeros([12, _SIZE])
    states = random_rows(4 * _BLOCK + 1, _SIZE, "float32", 1) if has_states else None
    source = paddle.zeros([12, _SIZE]) if has_states else None
    table, embedded = random_rows(_VOCAB, _SIZE, "float32", 2), paddle.zeros([12, _SIZE])

    def stage(number: int) -> DraftStage:
        pack, linear = lookup("pack_linear"), lookup("linear")
        weight = pack(random_rows(_SIZE, _SIZE, "float32", 3 + number))
        heads = {n: pack(random_rows(_VOCAB, _SIZE, "float32", 13 + number)[:n]) for n in (_FEW, _VOCAB)}

        def compute(batch: RowIndex, num_rows: int) -> None:
            lookup("embedding")(token_ids.tensor, table, embedded, num_rows)
            linear(embedded, weight, output, num_rows, source)

        return DraftStage(compute, lambda rows, num_rows, out: linear(rows, heads[out.shape[1]], out, num_rows))

    sizes = {"max_drafts": 4, "max_chosen": 2}
    stages = [stage(number) for number in range(num_stages)]
    loop = DraftLoop(
        stages, batch, token_ids, output, vocab_sizes=[_FEW, _VOCAB], **sizes, states=states, source=source
    )
    loop.sampling.float_params.array[:, 0] = [0.0, 1.0, 0.0]
    batch.buffers.block_tables.array[:] = [[2, 0], [1, 3], [3, 2]]
    batch.buffers.num_blocks.array[:] = 2
    batch.buffers.num_scheduled.array[:] = [3, 1, 2]
    batch.buffers.num_computed.array[:] = [0, 16, 14]
    token_ids.array[:6] = [5, 39, 0, 7, 8, 9]
    return loop


def _draft_example(num_stages: int, has_states: bool, size: int, lookup: Lookup) -> Sequence[Tensor]:
    loop = _example_loop(num_stages, has_states, lookup)
    loop.size = size
    loop.num_drafts.array[:] = [4, 2, 1]
    lookup("draft")(loop, 3)
    drafts = np.where(np.arange(4) < loop.num_drafts.array[:, None], loop.drafts.array, -2)
    return [paddle.to_tensor(drafts)]


def _stage_example(has_states: bool, lookup: Lookup) -> Sequence[Tensor]:
    loop = _example_loop(3, has_states, lookup)
    for stage in range(2):  # the third writes nothing: it has no keys and values
        lookup("fill_stage")(loop, stage, 3)
    return [loop.output[:6]]


_FILL_STAGE = register(
    OpEntry(
        "fill_stage",
        reference.fill_stage,
        {"cpu": _fill_stage_cpu},
        {"float32": 1e-5},
        [partial(_stage_example, has_states) for has_states in (False, True)],
    )
)
_DRAFT = register(
    OpEntry(
        "draft",
        reference.draft,
        {"cpu": _draft_cpu},
        examples=[
            partial(_draft_example, num_stages, has_states, size)
            for num_stages, has_states, size in ((1, False, 1), (1, True, 1), (2, True, 1), (4, True, 1), (2, True, 0))
        ],
    )
)
