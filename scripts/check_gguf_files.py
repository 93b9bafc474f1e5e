# SPDX-License-Identifier: Apache-2.0
"""Check that llama.cpp loads the files of make_gguf_files.py and computes what `transformers` does.

Run in an environment with llama-cpp-python, after `make_gguf_files.py --float32 FOLDER`:

    python scripts/check_gguf_files.py FOLDER

Of each file with a reference it prints the largest difference of a log-probability, and fails if one exceeds TOLERANCE.
Files of other types than float32 differ more, since llama.cpp's kernels round the activations.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import llama_cpp
import numpy as np

TOLERANCE = 1e-4
FLOAT32 = 0  # ggml's number of the type


def logprobs(file: Path, tokens: np.ndarray) -> np.ndarray:
    """Return the log-probabilities that llama.cpp computes, [T, V] float64."""
    model = llama_cpp.Llama(
        str(file), n_ctx=64, logits_all=True, verbose=False, type_k=FLOAT32, type_v=FLOAT32, flash_attn=False
    )
    model.eval([int(token) for token in tokens])
    logits = np.array(model.scores[: len(tokens)], np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def main() -> None:
    """Compare all files of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    largest = 0.0
    for file in sorted(parser.parse_args().folder.glob("*.npz")):
        with np.load(file) as expected:
            found = logprobs(file.with_suffix(".gguf"), expected["tokens"])[expected["rows"]]
            difference = float(np.abs(found - expected["logprobs"]).max())
        print(f"{file.stem}: {difference:.1e}", flush=True)
        largest = max(largest, difference)
    if largest > TOLERANCE:
        sys.exit(f"the largest difference is {largest:.1e}, expected at most {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
