# SPDX-License-Identifier: Apache-2.0
"""Serving a folder written by PaddleNLP and SentencePiece: every process loads the same weights and tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import sentencepiece

from fastdeploy import LLM, SamplingParams
from tests.entrypoints.server_process import real_server

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
CORPUS = ("for name in names:", "return the sum of all names", "the quick brown fox jumps over the lazy dog")
PROMPT = "the names for all"


def make_folder(folder: Path) -> str:
    """Save a tokenizer.model of 112 pieces and a sharded checkpoint in Paddle layout with 112 ids."""
    shutil.copytree(GOLDEN / "paddlenlp_llama", folder, dirs_exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=112,
        model_type="bpe",
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return str(folder)


def test_a_paddle_checkpoint_with_a_sentencepiece_model_is_served_with_the_offline_results(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/tokenizer.model")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    offline = LLM(folder, max_num_seqs=2, max_model_len=64).generate(PROMPT, params, use_tqdm=False)[0]  # type: ignore[index]
    assert offline.prompt_token_ids == [1, *library.encode(PROMPT)]
    assert len(offline.outputs[0].token_ids) == 16

    with real_server(folder, "--max-num-seqs", "2", "--max-model-len", "64") as server:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
        response = server.post("/v1/completions", {"model": "default", **body}).json()
    assert response["choices"][0]["text"] == offline.outputs[0].text
    assert response["usage"]["prompt_tokens"] == len(offline.prompt_token_ids)
