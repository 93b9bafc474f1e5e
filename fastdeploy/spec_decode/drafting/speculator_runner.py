# SPDX-License-Identifier: Apache-2.0
"""Runs MLP speculators: each draft is a pass, which reads the state and the draft of the pass before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.heads.mlp_speculator import MLPSpeculator
from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.drafting import DraftLoop, DraftStage
from fastdeploy.ops.input_checks import InputLimits
from fastdeploy.spec_decode.drafting.base import sampled_tokens
from fastdeploy.spec_decode.drafting.draft_vocabulary import DraftVocabulary, draft_vocab_sizes
from fastdeploy.spec_decode.drafting.row_runner import DraftInput, RowRunner
from fastdeploy.worker.model_runner import RunnerConfig, max_logits_rows
from fastdeploy.worker.sampling_metadata import SamplingMetadata

BLOCK_MULTIPLE = 16  # tokens; the index arrays of a step need blocks of such sizes


class SpeculatorRunner(RowRunner):
    """Drafts with an MLP speculator.

    Attributes:
        loop: the native loop over the draft passes.
    """

    def __init__(self, speculator: MLPSpeculator, target: CausalLM, config: RunnerConfig) -> None:
        """Bind the speculator to the target's output."""
        super().__init__(speculator, config)
        num_positions = config.max_model_len + config.max_drafts
        block_size = -(-num_positions // BLOCK_MULTIPLE) * BLOCK_MULTIPLE  # one block per sequence, which nobody reads
        batch = BatchIndex(config.max_seqs, config.max_seqs, 1, block_size)
        token_ids, self._rows = HostBuffer(config.max_seqs, "int32"), HostBuffer(config.max_seqs, "int32")
        sizes = draft_vocab_sizes(config.vocab_size)

        def compute(index: int, metadata: AttentionMetadata) -> None:
            speculator.compute(index, target.output, self._rows.tensor, token_ids.tensor, metadata.num_rows)

        stages = [
            DraftStage(partial(compute, index), partial(speculator.compute_logits, index))
            for index in range(speculator.num_drafts)
        ]
        self.loop = DraftLoop(
            stages,
            batch,
            token_ids,
            speculator.output,
            vocab_sizes=sizes,
            max_drafts=config.max_drafts,
            max_logits_rows=max_logits_rows(config),
            limits=InputLimits(config.vocab_size, 1, num_positions),
            input_states=speculator.input_states,
        )
        self._vocabulary = DraftVocabulary(sizes)
        self._sampling_metadata = SamplingMetadata(self.loop.sampling, config.eos_token_ids, config.vocab_limit)

    def _draft(self, inputs: Sequence[DraftInput]) -> list[list[int]]:
        """Return the drafts of each request."""
        loop = self.loop
        for index, each in enumerate(inputs):
            self._write(index, each)
        self._vocabulary.observe(loop.token_ids.memory[: len(inputs)])
        loop.vocab_index = self._vocabulary.best_index([each.request for each in inputs])
        self._rows.upload(len(inputs))
        loop.draft(len(inputs))
        drafts = loop.drafts.memory
        return [sampled_tokens(drafts[i, k] for k in range(each.count)) for i, each in enumerate(inputs)]

    def _write(self, index: int, each: DraftInput) -> None:
        """Write what the loop needs of one request."""
        loop, last = self.loop, each.request.num_tokens - 1
        buffers = loop.batch.buffers
        loop.token_ids.memory[index] = each.request.tokens_of_rows(last, 1)[0]
        buffers.num_scheduled.memory[index], buffers.num_computed.memory[index] = 1, last
        buffers.num_blocks.memory[index] = 1
        self._rows.memory[index] = each.row
        loop.num_drafts.memory[index] = each.count
        self._sampling_metadata.write_draft(each.request, index)
