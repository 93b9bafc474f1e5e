# SPDX-License-Identifier: Apache-2.0
"""Trained heads compute on a GPU, in bfloat16, what their definitions say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.drafting_models import HEADS
from tests.engine.gpu.small_model import write_heads, write_model
from tests.spec_decode.heads_definition import HEADS as DEFINITIONS
from tests.spec_decode.heads_definition import TargetView, log_softmax, read_tensors

TOLERANCE = 0.15  # of log-probabilities after three passes of bfloat16; those of another context differ by 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    write_model(folder / "target")
    write_heads(folder)
    env = {"FD_GPU_EMULATED": "1", **os.environ}
    subprocess.run(
        [sys.executable, "-m", "tests.engine.gpu.head_values", str(folder)], env=env, check=True, timeout=300
    )
    return folder


@pytest.mark.parametrize("method", HEADS)
def test_heads_on_a_gpu_compute_what_their_definitions_say(method: str, folder: Path) -> None:
    found, tensors = np.load(folder / f"{method}.npz"), read_tensors(folder / "target" / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    view = TargetView(found["states"], found["inputs"], embedding, head)
    definition, num_compared = DEFINITIONS[method](folder / method, "float64"), 0
    for length, count, ids, logits in zip(found["lengths"], found["counts"], found["ids"], found["logits"]):
        want = definition.drafts(found["text"][:length].tolist(), view, count)
        if ids[: count - 1].tolist() != want.ids[: count - 1]:  # two ids were about as probable
            continue
        wanted = want.log_probs[-1]
        if len(logits) < len(wanted):  # of the head's own ids
            wanted = wanted[np.isfinite(wanted)]
        np.testing.assert_allclose(log_softmax(logits.astype(np.float64)), wanted, atol=TOLERANCE)
        num_compared += 1
    assert num_compared >= 0.8 * len(found["lengths"]) and num_compared > 10
    assert {1, 2, 3} <= set(found["counts"].tolist())
