# SPDX-License-Identifier: Apache-2.0
"""Sampling gives the same bits on every instruction-set path (no other operator promises this)."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from fastdeploy.ops.sampling import LogprobBuffers, logprobs, sample
from tests.ops.noise import gumbel_noise, philox4x32
from tests.ops.sampling_rows import batch_of, logits_of, random_options, results_of, tensor

VOCAB_SIZES = (37, 64, 1000, 20_001)
GOLDEN_DIGEST = "108e08c0d9db2c3f"


def digest() -> str:
    """Return a hash over noise, tokens, allowed sets, processed logits and log-probabilities of fixed inputs."""
    state = hashlib.sha256(gumbel_noise(2**63 + 1, 2**33 + 5, 5001).tobytes())
    for vocab_size in VOCAB_SIZES:
        row_options = [random_options(np.random.default_rng(row), vocab_size) for row in range(30)]
        words = philox4x32(np.arange(30 * vocab_size * 4, dtype=np.uint32).reshape(-1, 4), vocab_size)[:, 0]
        values = (words.reshape(30, vocab_size) >> 12).astype(np.float32) / 2**16 - 8  # exact in float32
        batch, buffer = batch_of(row_options), logits_of(values)
        sample(buffer.tensor, batch, 30)
        chosen = results_of(batch, 30)
        sample(buffer.tensor, batch, 30, keep_processed=True)
        assert results_of(batch, 30) == chosen, "the same tokens whether or not the whole allowed set is computed"
        out = LogprobBuffers(30)
        logprobs(
            logits_of(values).tensor, tensor(list(range(30))), tensor([row % 37 for row in range(30)]), 30, 20, out
        )
        state.update(repr(results_of(batch, 30)).encode())
        for array in (buffer.array, out.chosen_logprob.array, out.chosen_rank.array, out.top_logprobs.array):
            state.update(array.tobytes())
    return state.hexdigest()[:16]


@pytest.mark.parametrize("path", ["avx512_bf16", "avx512", "avx2", "portable"])
def test_every_path_gives_the_golden_bits(path: str) -> None:
    environment = {**os.environ, "FD_CPU_ISA": path}
    code = "from tests.ops.test_sampling_paths import digest; print(digest())"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    if "this processor has no" in result.stderr:
        pytest.skip(f"this processor has no {path}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == GOLDEN_DIGEST
