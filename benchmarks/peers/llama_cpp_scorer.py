# SPDX-License-Identifier: Apache-2.0
"""Which logits does llama.cpp compute? A worker of bench_quality: llama_cpp_scorer.py CHECKPOINT TYPE, such as q4_0.

The checkpoint's bf16 tensors become a GGUF file, which llama.cpp quantizes in its default mix of the type. With type
`as_stored`, CHECKPOINT is a GGUF file. A job is
{"token_ids": [...], "file": FILE}; FILE receives the logits after each token but the last, float32 [tokens - 1,
vocab_size], in NumPy's format. Requires llama-cpp-python and gguf.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf_files import quantize, read_safetensors, write_gguf
from llama_cpp_worker import Context, load_model
from protocol import NUM_THREADS, Message, answer_jobs

AS_STORED = "as_stored"


def make_file(checkpoint: Path, kind: str, folder: Path) -> Path:
    """Return the GGUF file of a type, which is written into the folder unless the checkpoint is that file."""
    if kind == AS_STORED:
        return checkpoint
    source, target = folder / "source.gguf", folder / "target.gguf"
    config = json.loads((checkpoint / "config.json").read_text())
    write_gguf(source, config, read_safetensors(checkpoint))
    quantize(source, target, kind, NUM_THREADS)
    return target


def score(model: Any, token_ids: list[int], file: str) -> None:
    """Write the logits of one text."""
    context = Context(model, 1, len(token_ids))
    context.compute([token_ids], 0, all_logits=True)
    np.save(file, np.stack([context.logits(row) for row in range(len(token_ids) - 1)]))
    context.close()


def main(checkpoint: str, kind: str) -> None:
    """Make and load the model, and score texts."""
    with tempfile.TemporaryDirectory() as folder:
        file = make_file(Path(checkpoint), kind, Path(folder))
        mib, model = file.stat().st_size / 2**20, load_model(str(file))

    def answer(job: Message) -> Message:
        score(model, job["token_ids"], job["file"])
        return {}

    ready = f"llama.cpp {kind}, {llama_cpp.__version__}"
    answer_jobs({"ready": ready, "weights_mib": mib}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
