# SPDX-License-Identifier: Apache-2.0
"""How fast is llama.cpp? A worker of compare.py: llama_cpp_worker.py MODEL.gguf. Requires llama-cpp-python; greedy."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from protocol import NUM_THREADS, Decoding, serve


class Context:
    """A context for one job, and the batch of its steps."""

    def __init__(self, model: Any, num_requests: int, tokens_each: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_requests * (-(-tokens_each // 256) * 256)  # per sequence a multiple of 256
        params.n_seq_max = num_requests
        params.n_batch = params.n_ctx
        params.n_threads = params.n_threads_batch = NUM_THREADS
        self.handle = llama_cpp.llama_init_from_model(model, params)
        assert self.handle, "llama.cpp could not create a context"
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        """Compute the prompts of all sequences; return the most likely next token of each."""
        self.compute(prompts, 0, all_logits=False)
        ends = itertools.accumulate(len(prompt) for prompt in prompts)
        return [self._argmax(end - 1) for end in ends]

    def step(self, tokens: list[int], position: int, rows: int) -> list[int]:
        """Compute tokens[i] of sequence i at `position` and rows - 1 drafts, and reject these; return the next tokens.

        As verification needs them, the most likely tokens after all rows are determined.
        """
        self.compute([[token, *range(1000, 1000 + rows - 1)] for token in tokens], position, all_logits=True)
        likeliest = [self._argmax(row) for row in range(rows * len(tokens))]
        if rows > 1:
            memory = llama_cpp.llama_get_memory(self.handle)
            for sequence in range(len(tokens)):
                assert llama_cpp.llama_memory_seq_rm(memory, sequence, position + 1, -1), "drafts were not removed"
        return likeliest[::rows]

    def compute(self, tokens: list[list[int]], position: int, all_logits: bool) -> None:
        """Compute tokens[i] of sequence i from `position` on, and logits of all rows or of each sequence's last one."""
        batch, row = self.batch, 0
        for sequence, new in enumerate(tokens):
            for offset, token in enumerate(new):
                batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position + offset, 1
                batch.seq_id[row][0], batch.logits[row] = sequence, all_logits or offset == len(new) - 1
                row += 1
        batch.n_tokens = row
        assert llama_cpp.llama_decode(self.handle, batch) == 0, "llama.cpp could not compute the batch"

    def close(self) -> None:
        """Free batch and context."""
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.handle)

    def logits(self, row: int) -> NDArray[np.float32]:
        """Return a view of the logits of a row of the batch, [vocab_size]; valid until the next computation."""
        logits = llama_cpp.llama_get_logits_ith(self.handle, row)
        return np.ctypeslib.as_array(logits, shape=(self.vocab_size,))

    def _argmax(self, row: int) -> int:
        return int(self.logits(row).argmax())


def load_model(file: str) -> Any:
    """Load a GGUF file."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    assert model, f"llama.cpp cannot load {file}"
    return model


def main(file: str) -> None:
    """Load the model and serve."""
    model = load_model(file)

    def run(prompts: list[list[int]], new_tokens: int, rows: int, decoding: Decoding) -> None:
        length = len(prompts[0])
        context = Context(model, len(prompts), length + new_tokens + rows)
        tokens = context.prefill(prompts)
        decoding.begin()
        for position in range(length, length + new_tokens - 1):
            if decoding.is_over:
                break
            tokens = context.step(tokens, position, rows)
            decoding.step()
        context.close()

    serve(f"llama.cpp {file.rpartition('-')[2].removesuffix('.gguf')}, {llama_cpp.__version__}", run)


if __name__ == "__main__":
    main(*sys.argv[1:])
