# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors get the names and the order of rows that they have in a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.peers import gguf_files

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 16,
    "tie_word_embeddings": True,
}


def test_a_gguf_file_has_the_two_rows_of_a_rotary_pair_side_by_side() -> None:
    rows = np.arange(12)[:, None]  # two heads of six rows, whose pairs are three apart
    stored = gguf_files.pairs_together(rows, 2)
    assert stored[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize(
    ("architecture", "moved"), [("LlamaForCausalLM", {"attn_q", "attn_k"}), ("Ernie4_5ForCausalLM", set())]
)
def test_only_queries_and_keys_of_a_llama_have_another_order(architecture: str, moved: set[str]) -> None:
    config: dict[str, Any] = {**CONFIG, "architectures": [architecture]}
    random = np.random.default_rng(0)
    names = {gguf_name: torch_name for torch_name, gguf_name, _ in gguf_files.tensors(config)}
    weights = {
        name: random.integers(2**16, size=shape, dtype=np.uint16) for name, _, shape in gguf_files.tensors(config)
    }
    stored = gguf_files.in_gguf_order(config, weights)
    assert stored.keys() == names.keys()
    changed = {name for name, bits in stored.items() if not np.array_equal(bits, weights[names[name]])}
    assert {name.split(".")[-2] for name in changed} == moved


def test_the_rotary_base_is_found_where_each_version_of_transformers_writes_it() -> None:
    assert gguf_files.rope_theta({"rope_theta": 100000}) == 100000.0
    assert gguf_files.rope_theta({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}) == 500000.0
