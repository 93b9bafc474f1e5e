# SPDX-License-Identifier: Apache-2.0
"""The adaptive length in virtual time: it keeps what drafts bring and costs next to nothing elsewhere."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.bench_adaptive import METHODS, MIXED, measure, recorded
from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.detokenize.tokenizer import Tokenizer

MODELS = {"mtp", "draft_model"}  # alone; a match beside them wins on half of a mixed load


@pytest.mark.parametrize(
    ("workload", "batch", "fixed_loses"),
    [("random", 4, MODELS | {"mtp+ngram", "mtp+suffix"}), ("editing", 1, set()), (MIXED, 4, MODELS)],
)
def test_nothing_is_slower_than_naive_by_more_than_two_percent(
    workload: str, batch: int, fixed_loses: set[str]
) -> None:
    texts = recorded(workload, Tokenizer.from_pretrained(resolve_model_path("demo")), 4, 1, 900, 96)
    args = argparse.Namespace(method=METHODS, num_speculative_tokens=8, noise=0.0, tilt=0.0)
    rows = {row["method"]: row for row in measure(args, "demo", workload, batch, texts)}
    for method in METHODS:
        adaptive, fixed = rows[method]["adaptive"], rows[method]["fixed"]
        assert min(adaptive, rows[method]["cold"]) > 0.98, method
        assert adaptive > 0.95 * fixed, method
        assert (fixed < 0.9) == (method in fixed_loses), method
