# SPDX-License-Identifier: Apache-2.0
"""Kernels of `fastdeploy.ops.drafting`: all draft passes in one native call, which replays captured graphs.

The first call of a loop captures its stages and heads and binds them to the addresses of the loop's buffers.
"""

from __future__ import annotations

import ctypes
from functools import partial

from paddle import Tensor

from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.backends.cpu.library import load_library, run_native
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.drafting import DraftLoop, DraftStage
from fastdeploy.ops.gather import gather_rows


def fill_stage(loop: DraftLoop, stage: int, num_seqs: int) -> None:
    """Replay one stage; the last one stops once its last keys and values are written."""
    run_native("fd_fill_stage", loop.output, _bound(loop).handle, stage, num_seqs)


def draft(loop: DraftLoop, num_seqs: int) -> None:
    """Run every draft pass with its indexing, gathering and sampling."""
    run_native("fd_draft", loop.drafts.tensor, _bound(loop).handle, num_seqs, loop.vocab_index)


class BoundLoop:
    """Captured stages and heads of a loop, and the addresses of its buffers; the loop owns what they refer to.

    Attributes:
        stages: one graph per stage.
        heads: graphs that compute logits, by stage and, for each, by the loop's vocab_sizes.
        handle: address of the native object.
    """

    def __init__(self, loop: DraftLoop) -> None:
        """Capture for as many rows and sequences as the buffers have room for."""
        num_rows, max_logits_rows = loop.output.shape[0], loop.logits.shape[0]
        metadata = loop.batch.attention_metadata(num_rows, loop.batch.kv_lens.shape[0])

        def compute_head(stage: DraftStage, logits: Tensor) -> None:
            gather_rows(loop.output, loop.logits_rows.tensor, loop.logits_hidden, max_logits_rows)
            stage.compute_logits(loop.logits_hidden, max_logits_rows, logits)

        self.stages = [OpGraph(partial(stage.compute, metadata)) for stage in loop.stages]
        self.heads = [OpGraph(partial(compute_head, stage, out)) for stage in loop.stages for out in loop.narrow_logits]
        self._free = (
            load_library().fd_draft_loop_free
        )  # kept here: at interpreter exit, modules may be gone before this
        self._free.argtypes = [ctypes.c_void_p]
        self.handle = _bind(loop, [stage.handle for stage in self.stages], [head.handle for head in self.heads])

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._free(self.handle)


def _bound(loop: DraftLoop) -> BoundLoop:
    if loop.backend_state is None:
        loop.backend_state = BoundLoop(loop)
    bound: BoundLoop = loop.backend_state
    return bound


def _bind(loop: DraftLoop, stages: list[int], heads: list[int]) -> int:
    """Return the address of a native object that drafts with these graphs, given by their addresses."""
    sampling, handle = loop.sampling, HostBuffer(1, "int64")
    run_native(
        "fd_bind_draft_loop",
        *loop.batch.buffers.tensors(),
        loop.token_ids.tensor,
        loop.num_drafts.tensor,
        loop.drafts.tensor,
        loop.target_ids,
        loop.states,
        loop.input_states,
        loop.output,
        loop.logits_rows.tensor,
        loop.logits,
        sampling.float_params.tensor,
        sampling.int_params.tensor,
        sampling.token_ids.tensor,
        sampling.status.tensor,
        sampling.draft_is_allowed.tensor,
        handle.tensor,
        stages,
        heads,
        list(loop.vocab_sizes),
        loop.batch.block_size,
    )
    return int(handle.array[0])
