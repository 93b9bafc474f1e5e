# SPDX-License-Identifier: Apache-2.0
"""Golden checkpoints, and a driver that runs a model without an engine and returns the logits of every row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.model_config import DType, ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.ops.batch_index import BatchIndex, virtual_padding
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.caches import allocate_cache
from fastdeploy.ops.graph import CapturedGraph

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
LATENT = "latent/"
GOLDEN_FILES = (*GOLDEN.glob("*/config.json"), *GOLDEN.glob(f"{LATENT}*/config.json"))
GOLDEN_NAMES = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN_FILES)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 64
MAX_ROWS = 256

Logits = NDArray[np.float32]


def load_golden(
    name: str, dtype: DType = "float32", quantization: str | Mapping[str, str] = "none", **changes: object
) -> CausalLM:
    """Load a golden checkpoint; `changes` replace fields of its configuration."""
    config = replace(ModelConfig.from_pretrained(GOLDEN / name, dtype=dtype), **changes)  # type: ignore[arg-type]
    formats = QuantizationConfig.from_value(quantization)
    return load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=formats)


@dataclass
class Request:
    """One request: its blocks and how many of its tokens are in the cache."""

    blocks: NDArray[np.int32]
    num_computed: int = 0
    logits: list[Logits] = field(default_factory=list)

    @property
    def all_logits(self) -> Logits:
        """Return the logits of every row computed so far: [num_rows, vocab_size]."""
        return np.concatenate(self.logits)


class Driver:
    """Runs captured steps of a model with a paged cache whose blocks are allocated in random order."""

    def __init__(self, model: CausalLM, num_blocks: int = 64, max_seqs: int = 16, captures: bool = True) -> None:
        self.model = model
        self.captures = captures
        self.forward = CapturedGraph(self._forward_rows, model.max_rows, max_seqs)
        self.hidden: Tensor | None = None
        spec = model.config.cache_spec
        self.caches = [allocate_cache(num_blocks, BLOCK_SIZE, spec) for _ in range(model.num_layers)]
        self.blocks_per_request = -(-model.max_model_len // BLOCK_SIZE)
        self.batch = BatchIndex(model.max_rows, max_seqs, self.blocks_per_request, BLOCK_SIZE)
        self.token_ids = HostBuffer(model.max_rows, "int32")
        self.logits = paddle.zeros([model.max_rows, model.vocab_size], "float32")
        self.free = [int(block) for block in np.random.default_rng(3).permutation(num_blocks)]

    def start(self) -> Request:
        """Allocate blocks for a new request of maximum length."""
        blocks = [self.free.pop() for _ in range(self.blocks_per_request)]
        return Request(np.array(blocks, np.int32))

    def finish(self, sequence: Request) -> None:
        """Release the blocks of a request."""
        self.free.extend(int(block) for block in sequence.blocks)

    def step(self, work: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """Compute tokens of each request in one step and append the logits of their rows to the requests."""
        counts = np.array([len(tokens) for _, tokens in work], np.int32)
        computed = np.array([sequence.num_computed for sequence, _ in work], np.int32)
        tables = [s.blocks[: -(-(s.num_computed + len(t)) // BLOCK_SIZE)] for s, t in work]
        self.batch.write_inputs(counts, computed, counts, tables)
        num_rows = int(counts.sum())
        self.token_ids.array[:num_rows] = np.concatenate([np.asarray(tokens, np.int32) for _, tokens in work])
        (self.forward.run if self.captures else self._forward_rows)(num_rows, len(work))
        assert self.hidden is not None
        self.model.compute_logits(self.hidden, num_rows, self.logits)
        rows = self.logits.numpy()[:num_rows]
        begin = 0
        for (sequence, tokens), count in zip(work, counts, strict=True):
            sequence.logits.append(rows[begin : begin + count].copy())
            sequence.num_computed += len(tokens)
            begin += int(count)

    def _forward_rows(self, num_rows: int, num_seqs: int) -> None:
        virtual_padding(self.batch.buffers, num_seqs, BLOCK_SIZE)
        self.hidden = self.model.forward(
            self.token_ids.tensor, self.batch.attention_metadata(num_rows, num_seqs), self.caches
        )

    def run_alone(self, tokens: Sequence[int], chunks: Iterable[int] | None = None) -> Logits:
        """Compute one request alone, in one step or in chunks; return the logits of every row."""
        sequence = self.start()
        begin = 0
        for size in chunks or [len(tokens)]:
            self.step([(sequence, tokens[begin : begin + size])])
            begin += size
        assert begin == len(tokens), "chunks must add up"
        self.finish(sequence)
        return sequence.all_logits


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Return log-probabilities in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
