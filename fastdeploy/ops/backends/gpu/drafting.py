# SPDX-License-Identifier: Apache-2.0
"""Kernels of `fastdeploy.ops.drafting`: all passes of a draft are launched without a wait.

The host knows the numbers of rows and sequences of every pass in advance; what is sampled stays on the device. A pass
is captured as a graph, if launches have a stream of their own and the backend captures.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops.backend import Graph, StepFunction
from fastdeploy.ops.backends.gpu.checks import require_dtype, require_rows
from fastdeploy.ops.backends.gpu.library import Address, DeviceCounts, active, launch
from fastdeploy.ops.batch_index import virtual_padding
from fastdeploy.ops.drafting import DraftLoop
from fastdeploy.ops.input_checks import check_counts
from fastdeploy.ops.registry import selected_backend
from fastdeploy.ops.sampling import SamplingBatch, sample

_OPERATOR = "draft"
_NEXT_PASS = -1


def fill_stage(loop: DraftLoop, stage: int, num_seqs: int) -> None:
    """Compute one stage for the rows of the first sequences."""
    if not 0 <= stage < len(loop.stages):
        raise _refusal("stage", "the index of a stage", stage)
    num_rows = int(_checked_rows(loop, num_seqs, 0).sum())
    if num_rows:
        _passes_of(loop).fill(stage, num_rows, num_seqs)


def draft(loop: DraftLoop, num_seqs: int) -> None:
    """Launch every draft pass."""
    if not 0 <= loop.vocab_index < len(loop.vocab_sizes):
        raise _refusal("vocab_index", "an index into vocab_sizes", loop.vocab_index)
    if not 0 <= num_seqs <= len(loop.num_drafts.array):
        raise _refusal("num_seqs", "at most the sequences of the buffers", num_seqs)
    passes, last = _passes_of(loop), len(loop.stages) - 1
    for index, (num_rows, num_active) in enumerate(_plan(loop, num_seqs)):
        passes.draft(min(index, last), index > last, loop.vocab_index, num_rows, num_active)


class _Buffers(ctypes.Structure):
    """DraftBuffers of custom_ops/gpu_ops/drafting.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("states", "input_states", "output", "token_ids")),
        *((name, ctypes.c_void_p) for name in ("num_scheduled", "num_computed", "block_tables", "cu_seqlens_q")),
        *((name, ctypes.c_void_p) for name in ("kv_lens", "batch_id_per_row", "positions", "float_params")),
        *((name, ctypes.c_void_p) for name in ("int_params", "drafted", "drafts", "next_pass", "batch_rows")),
        *((name, ctypes.c_void_p) for name in ("batch_float_params", "batch_int_params", "batch_count", "sampled")),
        ("target_ids", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_states", "row_bytes", "max_rows", "max_seqs")),
        *((name, ctypes.c_int64) for name in ("table_stride", "block_positions", "max_drafts", "max_batch")),
        ("num_target_ids", ctypes.c_int64),
    ]


class DraftPasses:
    """The launches of a loop's passes, and what they need besides the loop's own buffers."""

    def __init__(self, loop: DraftLoop) -> None:
        """Allocate memory; the loop must use the selected backend's memory from now on.

        Raises:
            ValueError: a dtype or a shape of the loop's tensors is not supported.
        """
        _check_tensors(loop)
        max_batch, max_seqs, max_rows = loop.logits.shape[0], loop.batch.kv_lens.shape[0], loop.output.shape[0]
        self._loop, self._max_batch, self._max_seqs, self._max_rows = loop, max_batch, max_seqs, max_rows
        self._batch = SamplingBatch(max_batch)
        self._batch_count: Tensor = paddle.zeros([1], "int32")
        self._next_pass: Tensor = paddle.zeros([1], "int32")
        count = Address(self._batch_count.data_ptr())
        self._batch_counts = DeviceCounts(count, count)
        self._buffers = self._make_buffers()
        self._address = Address(ctypes.addressof(self._buffers))
        self._graphs: dict[tuple[int, ...], Graph] = {}
        active().call("fd_device_sync")  # what Paddle has written is there, although its stream is another one

    def fill(self, stage: int, num_rows: int, num_seqs: int) -> None:
        """Compute a stage for the rows that the host has written."""
        self._run((stage,), partial(self._fill, stage), self._max_rows, num_rows, num_seqs)

    def draft(self, stage: int, continues: bool, vocab_index: int, num_rows: int, num_seqs: int) -> None:
        """Launch a pass.

        Args:
            continues: the pass has one row per sequence, that of the previous draft; otherwise it is the pass of
                number `stage`.
            num_rows, num_seqs: of this pass.
        """
        function, key = partial(self._draft, stage, continues, vocab_index), (stage, continues, vocab_index)
        self._run(key, function, self._max_seqs if continues else self._max_rows, num_rows, num_seqs)

    def _run(self, key: tuple[int, ...], function: StepFunction, max_rows: int, num_rows: int, num_seqs: int) -> None:
        """Replay the graph of a function, which is captured at the first call; without a stream, call it."""
        if active().stream is None:
            function(num_rows, num_seqs)
            return
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = selected_backend().capture(function, max_rows, self._max_seqs)
        graph.replay(num_rows, num_seqs)

    def _fill(self, stage: int, num_rows: int, num_seqs: int) -> None:
        batch = self._loop.batch
        virtual_padding(batch.buffers, num_seqs, batch.block_size)
        if self._loop.input_states is not None and (stage or self._loop.states is not None):
            launch("fd_draft_read_inputs", self._address, stage == 0, *active().row_count(num_rows))
        self._loop.stages[stage].compute(batch.attention_metadata(num_rows, num_seqs))

    def _draft(self, stage: int, continues: bool, vocab_index: int, num_rows: int, num_seqs: int) -> None:
        batch = self._loop.batch
        if continues:
            launch("fd_draft_keep_one_row", self._address, *active().seq_count(num_seqs))
            virtual_padding(batch.buffers, num_seqs, batch.block_size)
            self._loop.stages[stage].compute(batch.attention_metadata(num_rows, num_seqs))
        else:
            if stage:
                launch("fd_draft_shift_rows", self._address, *active().seq_count(num_seqs))
            self._fill(stage, num_rows, num_seqs)
        for first in range(0, num_seqs, self._max_batch):
            self._sample(stage, vocab_index, first, num_seqs)
            is_last = first + self._max_batch >= num_seqs
            number = _NEXT_PASS if continues else stage
            is_mapped = vocab_index == 0 and self._loop.target_ids is not None
            launch(
                "fd_draft_end_batch", self._address, first, number, is_last, is_mapped, *active().seq_count(num_seqs)
            )

    def _sample(self, stage: int, vocab_index: int, first: int, num_seqs: int) -> None:
        """Sample a token after the last row of the sequences from `first` on, as many as the logits have rows for."""
        loop, library = self._loop, active()
        launch("fd_draft_begin_batch", self._address, first, *library.seq_count(num_seqs))
        num_rows, logits = min(self._max_batch, num_seqs - first), loop.narrow_logits[vocab_index]
        with nullcontext() if library.counts is None else library.counted_by(self._batch_counts):
            loop.stages[stage].compute_logits(loop.logits_hidden, num_rows, logits)
            sample(logits, self._batch, num_rows)

    def _make_buffers(self) -> _Buffers:
        loop, batch, rows = self._loop, self._loop.batch, self._batch
        tensors = {
            "states": loop.states,
            "input_states": loop.input_states,
            "output": loop.output,
            "token_ids": loop.token_ids.tensor,
            "num_scheduled": batch.buffers.num_scheduled.tensor,
            "num_computed": batch.buffers.num_computed.tensor,
            "block_tables": batch.block_tables,
            "cu_seqlens_q": batch.cu_seqlens_q,
            "kv_lens": batch.kv_lens,
            "batch_id_per_row": batch.batch_id_per_row,
            "positions": batch.positions,
            "float_params": loop.sampling.float_params.tensor,
            "int_params": loop.sampling.int_params.tensor,
            "drafted": loop.sampling.token_ids.tensor,
            "drafts": loop.drafts.tensor,
            "next_pass": self._next_pass,
            "batch_rows": loop.logits_hidden,
            "batch_float_params": rows.float_params.tensor,
            "batch_int_params": rows.int_params.tensor,
            "batch_count": self._batch_count,
            "sampled": rows.token_ids.tensor,
            "target_ids": loop.target_ids,
        }
        max_seqs, table_stride = batch.block_tables.shape
        sizes = {
            "num_states": 0 if loop.states is None else loop.states.shape[0],
            "row_bytes": loop.output.shape[1] * loop.output.element_size(),
            "max_rows": loop.output.shape[0],
            "max_seqs": max_seqs,
            "table_stride": table_stride,
            "block_positions": batch.block_size,
            "max_drafts": loop.drafts.tensor.shape[1],
            "max_batch": self._max_batch,
            "num_target_ids": 0 if loop.target_ids is None else loop.target_ids.shape[0],
        }
        addresses = {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
        return _Buffers(**addresses, **sizes)


def _passes_of(loop: DraftLoop) -> DraftPasses:
    if loop.backend_state is None:
        loop.backend_state = DraftPasses(loop)
    passes: DraftPasses = loop.backend_state
    return passes


def _plan(loop: DraftLoop, num_seqs: int) -> list[tuple[int, int]]:
    """Return the numbers of rows and sequences of each pass.

    Raises:
        ValueError: what the host has written does not fit the buffers.
    """
    wanted = loop.num_drafts.array[:num_seqs]
    is_ascending = wanted[1:] > wanted[:-1]
    if is_ascending.any():
        raise _refusal("num_drafts", "descending numbers", wanted[int(is_ascending.argmax()) + 1])
    most = int(wanted[0]) if num_seqs else 0
    if most > loop.drafts.array.shape[1]:
        raise _refusal("num_drafts", "at most the drafts of the buffers", most)
    if most <= 0:
        return []
    num_active = np.searchsorted(-wanted, -np.arange(most)).tolist()
    wanted = wanted[: num_active[0]]
    scheduled = _checked_rows(loop, len(wanted), wanted - 1)
    if scheduled.min() <= 0:
        raise _refusal("num_scheduled", "a row of every sequence", scheduled.min())
    num_rows, last = scheduled.cumsum(), len(loop.stages) - 1
    return [(int(num_rows[n - 1]) if index <= last else n, n) for index, n in enumerate(num_active)]


def _checked_rows(loop: DraftLoop, num_seqs: int, num_later: NDArray[np.int32] | int) -> NDArray[np.int32]:
    """Return the numbers of rows of the first sequences after a check of what the host has written.

    Args:
        num_later: for each sequence, how many tokens later passes add.
    """
    check_counts(loop.batch, num_seqs, _OPERATOR, num_later)
    buffers = loop.batch.buffers
    scheduled, computed = buffers.num_scheduled.array[:num_seqs], buffers.num_computed.array[:num_seqs]
    if loop.states is not None and num_seqs:
        _check_states(loop, computed - 1, computed + scheduled - 2)
    return scheduled


def _check_states(loop: DraftLoop, first: NDArray[np.int32], last: NDArray[np.int32]) -> None:
    """Check that the slots of some positions of each sequence, from `first` to `last`, have states."""
    assert loop.states is not None
    size, tables = loop.batch.block_size, loop.batch.buffers.block_tables.array
    num_blocks, seqs = (loop.states.shape[0] - 1) // size, (last >= 0).nonzero()[0]
    first_block, last_block = np.maximum(first[seqs], 0) // size, last[seqs] // size
    for offset in range(int((last_block - first_block).max(initial=-1)) + 1):
        blocks = tables[seqs, np.minimum(first_block + offset, last_block)]
        has_none = (blocks < 0) | (blocks >= num_blocks)
        if has_none.any():
            raise _refusal("block_tables", "blocks that have states", blocks[has_none][0])


def _check_tensors(loop: DraftLoop) -> None:
    """Check that kernels can copy the rows of the loop's tensors."""
    max_rows, hidden = loop.output.shape
    tensors = {"output": loop.output, "logits_hidden": loop.logits_hidden}
    if loop.input_states is not None:
        tensors["input_states"] = loop.input_states
        require_rows(_OPERATOR, max_rows, hidden, input_states=loop.input_states)
    if loop.states is not None:
        tensors["states"] = loop.states
        require_rows(_OPERATOR, 1, hidden, states=loop.states)
    require_dtype(_OPERATOR, "bfloat16", **tensors)
    if hidden % 8:
        raise _refusal("output", "rows of a multiple of 8 elements", hidden)


def _refusal(argument: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{_OPERATOR}: {argument}: expected {expected}, got {got}")


KERNELS: dict[str, Callable[..., Any]] = {"fill_stage": fill_stage, "draft": draft}
