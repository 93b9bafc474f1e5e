# SPDX-License-Identifier: Apache-2.0
"""Drafting with a model: its passes one after the other, with indexing, gathering and sampling between them.

pass 0   the rows of each sequence that the model has not computed yet; the last row leads to the first draft
pass k   while there is a stage k: the same number of rows, one position further on
         then one row per sequence, that of the previous draft, through the last stage

A backend may run all of it in one native call: between two passes of a small model, Python and Paddle would take longer
than the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.input_checks import InputLimits
from fastdeploy.ops.reference import drafting as reference
from fastdeploy.ops.registry import Example, Lookup, OpEntry, cpu_only, register, selected_backend
from fastdeploy.ops.sampling import SamplingBatch


@dataclass(frozen=True)
class DraftStage:
    """A drafting model, or one of several layers that draft in turn.

    Attributes:
        compute: compute(metadata) reads the loop's `token_ids` and, if any, `input_states`, and writes `output`.
        compute_logits: compute_logits(rows, num_rows, out) writes float32 logits of rows of `output`. If `out` has
            fewer columns than the vocabulary, it gets the logits of the first ids.
    """

    compute: Callable[[AttentionMetadata], None]
    compute_logits: Callable[[Tensor, int, Tensor], None]


class DraftLoop:
    """The stages and buffers of drafting.

    Attributes:
        batch: its `buffers.num_scheduled`, `num_computed`, `num_blocks` and `block_tables` describe the rows of the
            first pass; drafting overwrites the first two.
        token_ids: [max_rows] int32, the tokens of these rows; drafting overwrites them.
        num_drafts: [max_seqs] int32, number of drafts to sample for each sequence, in descending order.
        drafts: [max_seqs, max_drafts] int32; -1 where no token could be sampled, and what follows it is undefined.
        vocab_sizes: the numbers of first ids that drafts may be sampled from, ascending; the last is the vocabulary.
        vocab_index: index into vocab_sizes for the next drafts; at first the last one.
        sampling: sampling parameters, a row per sequence; the positions are written here, lists and masks are ignored.
        stages, output, states, input_states: as given to `__init__`.
        target_ids: the same as a tensor of int32.
        logits_rows, logits_hidden, logits: scratch for the rows whose logits are computed.
        narrow_logits: the memory of `logits` as rows of each width in vocab_sizes.
        backend_state: what the backend's kernels keep with this loop.
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
        max_logits_rows: int,
        limits: InputLimits,
        states: Tensor | None = None,
        input_states: Tensor | None = None,
        target_ids: NDArray[np.int32] | None = None,
    ) -> None:
        """Allocate the buffers that are not given.

        Args:
            output: [max_rows, hidden], written by every stage.
            max_logits_rows: capacity of the logits; more sequences are sampled in several batches.
            limits: of the rows, of all stages.
            states: [num_slots + 1, hidden], the state after the token of each slot; the last entry is the state before
                the first token of a sequence. None for models that read tokens only.
            input_states: [max_rows, hidden], the state of the position before each row: in the first pass it comes from
                `states`, in later ones from `output`. Without `states`, the first stage makes its own.
            target_ids: [vocab_sizes[0]], what the ids stand for that are sampled with vocab_index 0; None: themselves.
        """
        max_seqs, hidden = batch.kv_lens.shape[0], output.shape[1]
        self.stages, self.batch, self.token_ids, self.output = tuple(stages), batch, token_ids, output
        self.states, self.input_states, self._limits = states, input_states, limits
        self.num_drafts = HostBuffer(max_seqs, "int32")
        self.drafts = HostBuffer((max_seqs, max_drafts), "int32")
        self.sampling = SamplingBatch(max_seqs)
        self.logits_rows = HostBuffer(max_logits_rows, "int32")
        self.logits_hidden: Tensor = paddle.zeros([max_logits_rows, hidden], output.dtype)
        self.vocab_sizes, self.vocab_index = tuple(vocab_sizes), len(vocab_sizes) - 1
        self.target_ids: Tensor | None = None if target_ids is None else paddle.to_tensor(target_ids, "int32")
        self.logits: Tensor = paddle.zeros([max_logits_rows, vocab_sizes[-1]], "float32")
        flat = self.logits.reshape([-1])
        self.narrow_logits = [  # indexing would copy on some devices
            flat._slice(0, max_logits_rows * size).reshape([max_logits_rows, size]) for size in vocab_sizes
        ]
        self.backend_state: Any = None

    def fill_stage(self, stage: int, num_seqs: int) -> None:
        """Write the keys and values of one stage for the rows of the first sequences.

        Every stage but the first reads what the previous call wrote for the same rows. The output of the last stage is
        not needed, so a kernel may stop once its last keys and values are written.

        Raises:
            ValueError: the rows do not fit the buffers, or an id, position or slot is out of range.
        """
        self._upload(num_seqs, 0)
        _FILL_STAGE.run(self, stage, num_seqs)
        selected_backend().synchronize()

    def draft(self, num_seqs: int) -> None:
        """Fill `drafts` for the first sequences.

        Raises:
            ValueError: as fill_stage; more drafts than `drafts` has columns; a sequence without a row.
        """
        self._upload(num_seqs, np.maximum(self.num_drafts.array[:num_seqs] - 1, 0))
        self.num_drafts.upload(num_seqs)
        self.sampling.upload(num_seqs)
        _DRAFT.run(self, num_seqs)
        self.drafts.download(num_seqs)
        selected_backend().synchronize()

    def _upload(self, num_seqs: int, num_later: NDArray[np.int32] | int) -> None:
        """Check the rows of the first sequences and send them to the device.

        Args:
            num_later: how many tokens later passes add to each sequence.
        """
        if not selected_backend().shares_memory:
            num_rows = self._limits.check_rows(self.batch, self.token_ids, num_seqs, "draft", num_later)
            self.batch.upload(num_seqs)
            self.token_ids.upload(num_rows)


_SIZE, _FEW, _VOCAB, _BLOCK = 64, 128, 200, 16


def _integer_rows(count: int, dtype: str, seed: int) -> Tensor:
    """Return small integers, whose products and sums are exact: every backend computes the same logits."""
    return paddle.to_tensor(np.random.default_rng(seed).integers(-2, 3, (count, _SIZE)).astype("float32")).astype(dtype)


def _example_loop(num_stages: int, has_states: bool, dtype: str, lookup: Lookup, is_mapped: bool = False) -> DraftLoop:
    """Return a loop of models that multiply the embedding and, if there are states, add the input states."""
    batch, token_ids, output = BatchIndex(12, 3, 2, _BLOCK), HostBuffer(12, "int32"), paddle.zeros([12, _SIZE], dtype)
    states = 8 * _integer_rows(4 * _BLOCK + 1, dtype, 1) if has_states else None
    input_states = paddle.zeros([12, _SIZE], dtype) if has_states else None
    table, embedded = _integer_rows(_VOCAB, dtype, 2), paddle.zeros([12, _SIZE], dtype)

    def stage(number: int) -> DraftStage:
        pack, linear = lookup("pack_linear"), lookup("linear")
        weight = pack(_integer_rows(_SIZE, dtype, 3 + number))
        heads = {n: pack(_integer_rows(_VOCAB, dtype, 13 + number)[:n]) for n in (_FEW, _VOCAB)}

        def compute(metadata: AttentionMetadata) -> None:
            num_rows = metadata.num_rows
            lookup("embedding")(token_ids.tensor, table, embedded, num_rows)
            linear(embedded, weight, output, num_rows, input_states)

        return DraftStage(compute, lambda rows, num_rows, out: linear(rows, heads[out.shape[1]], out, num_rows))

    sizes, limits = {"max_drafts": 4, "max_logits_rows": 2}, InputLimits(_VOCAB, 4, 2 * _BLOCK)
    stages = [stage(number) for number in range(num_stages)]
    loop = DraftLoop(
        stages,
        batch,
        token_ids,
        output,
        vocab_sizes=[_FEW, _VOCAB],
        **sizes,
        limits=limits,
        states=states,
        input_states=input_states,
        target_ids=np.arange(_FEW, dtype=np.int32)[::-1] + 7 if is_mapped else None,
    )
    loop.sampling.float_params.array[:, 0] = [0.0, 1.0, 0.0]
    batch.buffers.block_tables.array[:] = [[2, 0], [1, 3], [3, 2]]
    batch.buffers.num_blocks.array[:] = 2
    batch.buffers.num_scheduled.array[:] = [3, 1, 2]
    batch.buffers.num_computed.array[:] = [0, 16, 14]
    token_ids.array[:6] = [5, 39, 0, 7, 8, 9]
    return loop


def _draft_example(
    num_stages: int, has_states: bool, vocab_index: int, is_mapped: bool, dtype: str, lookup: Lookup
) -> Sequence[Tensor]:
    loop = _example_loop(num_stages, has_states, dtype, lookup, is_mapped)
    loop.vocab_index = vocab_index
    loop.num_drafts.array[:] = [4, 2, 1]
    lookup("draft")(loop, 3)
    drafts = np.where(np.arange(4) < loop.num_drafts.array[:, None], loop.drafts.array, -2)
    return [paddle.to_tensor(drafts)]


def _stage_example(has_states: bool, dtype: str, lookup: Lookup) -> Sequence[Tensor]:
    loop = _example_loop(3, has_states, dtype, lookup)
    for stage in range(2):  # the third has no keys and values to write
        lookup("fill_stage")(loop, stage, 3)
    return [loop.output[:6]]


def _in_both_dtypes(example: Callable[..., Sequence[Tensor]], *args: Any) -> list[Example]:
    """Return an example in bfloat16, and in float32 for the CPU."""
    return [partial(example, *args, "bfloat16"), cpu_only(partial(example, *args, "float32"))]


_FILL_STAGE = register(
    OpEntry(
        "fill_stage",
        reference.fill_stage,
        examples=[example for has_states in (False, True) for example in _in_both_dtypes(_stage_example, has_states)],
    )
)
_DRAFT = register(
    OpEntry(
        "draft",
        reference.draft,
        examples=[
            example
            for args in (
                (1, False, 1, False),
                (1, True, 1, False),
                (2, True, 1, False),
                (4, True, 1, False),
                (2, True, 0, False),
                (2, True, 0, True),
                (1, True, 1, True),
            )
            for example in _in_both_dtypes(_draft_example, *args)
        ],
    )
)
