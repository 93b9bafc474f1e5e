# SPDX-License-Identifier: Apache-2.0
"""Runs Medusa's heads: no draft depends on another, so that all drafts of all requests are sampled together.

Heads that share a matrix of logits read it once for all their drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.heads.medusa import MedusaHeads
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.gather import gather_rows
from fastdeploy.ops.graph import CapturedGraph
from fastdeploy.ops.registry import selected_backend
from fastdeploy.ops.sampling import IntColumn, SamplingBatch, sample
from fastdeploy.spec_decode.drafting.base import sampled_tokens
from fastdeploy.spec_decode.drafting.draft_vocabulary import (
    DraftVocabulary,
    LogitsFunction,
    MappedVocabulary,
    Vocabulary,
    draft_vocab_sizes,
    spread_logits,
)
from fastdeploy.spec_decode.drafting.row_runner import DraftInput, RowRunner
from fastdeploy.worker.model_runner import LOGITS_BYTES, RunnerConfig
from fastdeploy.worker.sampling_metadata import SamplingMetadata

Place = tuple[int, int]  # of a draft: the index of its request in the batch, and of its head


class MedusaRunner(RowRunner):
    """Drafts with Medusa's heads.

    Attributes:
        head: the heads.
        narrow_logits: memory for the logits of drafts that are sampled together, by request and head; as rows of each
            number of first ids that drafts may be sampled from.
        vocab_index: index into narrow_logits of the last drafts.
        num_matrices: of logits, each of which is read once.
    """

    head: MedusaHeads

    def __init__(self, heads: MedusaHeads, target: CausalLM, config: RunnerConfig) -> None:
        """Bind the heads to the target's output."""
        super().__init__(heads, config)
        self._target = target
        self._capacity = min(config.max_seqs * heads.num_drafts, max(LOGITS_BYTES // (4 * config.vocab_size), 1))
        self._state_rows, self._rows = HostBuffer(config.max_seqs, "int32"), HostBuffer(self._capacity, "int32")
        self._hidden: Tensor = paddle.zeros([self._capacity, heads.hidden_size], heads.output.dtype)
        self.num_matrices = len(heads.heads_by_matrix)
        ids, sizes = heads.target_ids, draft_vocab_sizes(config.vocab_size)
        compute: list[LogitsFunction] = [partial(heads.compute_logits, matrix) for matrix in range(self.num_matrices)]
        if ids is not None:
            sizes, own = [len(ids), config.vocab_size], paddle.zeros([self._capacity, len(ids)], "float32")
            compute = [spread_logits(function, ids, own) for function in compute]
        flat: Tensor = paddle.zeros([self._capacity * config.vocab_size], "float32")
        self.narrow_logits = [flat._slice(0, self._capacity * n).reshape([self._capacity, n]) for n in sizes]
        self.vocab_index = len(sizes) - 1
        self._vocabulary: Vocabulary = DraftVocabulary(sizes) if ids is None else MappedVocabulary()
        self._sampling = SamplingBatch(self._capacity)
        self._sampling_metadata = SamplingMetadata(self._sampling, config.eos_token_ids, config.vocab_limit)
        self._compute = [
            CapturedGraph(partial(self._compute_head, index), config.max_seqs, config.max_seqs)
            for index in range(heads.num_drafts)
        ]
        self._sample = [[self._sampler(function, out) for out in self.narrow_logits] for function in compute]

    def _compute_head(self, index: int, num_rows: int, _num_seqs: int) -> None:
        self.head.compute(index, self._target.output, self._state_rows.tensor, num_rows)

    def _sampler(self, compute: LogitsFunction, out: Tensor) -> CapturedGraph:
        """Return what samples drafts of the heads with one matrix from the ids for which `out` has room."""

        def run(num_rows: int, _num_seqs: int) -> None:
            gather_rows(self.head.output, self._rows.tensor, self._hidden, num_rows)
            compute(self._hidden, num_rows, out)
            sample(out, self._sampling, num_rows)

        return CapturedGraph(run, self._capacity, self._capacity)

    def _draft(self, inputs: Sequence[DraftInput]) -> list[list[int]]:
        """Return the drafts of each request."""
        requests = [each.request for each in inputs]
        for index, each in enumerate(inputs):
            self._state_rows.memory[index] = each.row
        self._vocabulary.observe(np.array([r.tokens_of_rows(r.num_tokens - 1, 1)[0] for r in requests], np.int32))
        self.vocab_index = self._vocabulary.best_index(requests)
        self._state_rows.upload(len(inputs))
        for index in range(inputs[0].count):
            num_rows = sum(each.count > index for each in inputs)
            self._compute[index].run(num_rows, num_rows)
        drafts = [[-1] * each.count for each in inputs]
        for matrix, heads in enumerate(self.head.heads_by_matrix):
            places = [(i, head) for i, each in enumerate(inputs) for head in heads if head < each.count]
            for first in range(0, len(places), self._capacity):
                batch = places[first : first + self._capacity]
                for (i, head), token in zip(batch, self._sample_batch(matrix, inputs, batch), strict=True):
                    drafts[i][head] = token
        return [sampled_tokens(tokens) for tokens in drafts]

    def _sample_batch(self, matrix: int, inputs: Sequence[DraftInput], places: Sequence[Place]) -> list[int]:
        """Return a sampled id of the target for each place; -1 where there is none."""
        sampling, count, position = self._sampling, len(places), int(IntColumn.POSITION)
        for row, (i, head) in enumerate(places):
            request = inputs[i].request
            self._rows.memory[row] = self.head.row_of(head, i)
            self._sampling_metadata.write_draft(request, row)
            sampling.int_params.memory[row, position] = request.num_tokens + head
        self._rows.upload(count)
        sampling.upload(count)
        self._sample[matrix][self.vocab_index].run(count, count)
        sampling.download(count)
        selected_backend().synchronize()
        tokens: list[int] = sampling.token_ids.memory[:count].tolist()
        ids = self.head.target_ids
        return tokens if ids is None or self.vocab_index else [t if t < 0 else int(ids[t]) for t in tokens]
