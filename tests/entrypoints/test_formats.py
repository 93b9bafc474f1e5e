# SPDX-License-Identifier: Apache-2.0
"""A folder as PaddleNLP and SentencePiece leave it, served: every process finds the same weights and tokenizer."""

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
    """Put a tokenizer.model of 112 pieces beside a sharded checkpoint of 112 ids in Paddle layout."""
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


def test_a_paddle_checkpoint_with_a_sentencepiece_model_is_served_as_it_runs_offline(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/tokenizer.model")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    offline = LLM(folder, max_num_seqs=2, max_model_len=64).generate(PROMPT, params, use_tqdm=False)[0]  # type: ignore[index]
    assert offline.prompt_token_ids == [1, *library.encode(PROMPT)]
    assert len(offline.outputs[0].token_ids) == 16

    with real_server(folder, "--max-num-seqs", "2", "--max-model-len", "64") as server:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
        answer = server.post("/v1/completions", {"model": "default", **body}).json()
    assert answer["choices"][0]["text"] == offline.outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(offline.prompt_token_ids)
