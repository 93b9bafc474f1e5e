# SPDX-License-Identifier: Apache-2.0
"""The end tokens of a model are those that its tokenizer, generation_config.json and config.json name together."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy.config.model_config import parse_model_config
from fastdeploy.core.outputs import CompletionOutput
from fastdeploy.engine.end_tokens import find_eos_token_ids
from fastdeploy.hub.model_path import resolve_model_path
from tests.config.test_model_config import MINIMAL
from tests.detokenize.tokenizers_for_tests import make_tokenizer

BOS, TOKENIZER_EOS, USER = 0, 1, 2  # special tokens of the byte-level tokenizer
LETTER, OTHER_LETTER = 70, 71  # ordinary tokens of it
UNUSED = 405  # between the tokenizer's last id and the model's


def end_tokens(*, config: Any = None, generation: Any = None, has_tokenizer: bool = True) -> list[int]:
    raw = {**MINIMAL, "vocab_size": 410, "eos_token_id": config}
    tokenizer = make_tokenizer("byte_level") if has_tokenizer else None
    limit = 410 if tokenizer is None else tokenizer.vocab_size
    return find_eos_token_ids(parse_model_config(raw, {"eos_token_id": generation}), tokenizer, limit)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, [TOKENIZER_EOS]),
        (BOS, None, [BOS, TOKENIZER_EOS]),
        (None, USER, [TOKENIZER_EOS, USER]),
        (BOS, [USER, TOKENIZER_EOS], [BOS, TOKENIZER_EOS, USER]),
        ([BOS, USER], [], [BOS, TOKENIZER_EOS, USER]),
        (None, LETTER, [TOKENIZER_EOS, LETTER]),
        (LETTER, None, [TOKENIZER_EOS]),
        ([LETTER, USER], None, [TOKENIZER_EOS, USER]),
        ([LETTER, OTHER_LETTER], [LETTER], [TOKENIZER_EOS, LETTER]),
        ([UNUSED, USER], [UNUSED, 409, 410, 151643], [TOKENIZER_EOS, USER]),
    ],
)
def test_end_tokens_are_the_union_without_ordinary_text_that_only_config_names(
    config: Any, generation: Any, expected: list[int]
) -> None:
    assert end_tokens(config=config, generation=generation) == expected


def test_without_a_tokenizer_the_ids_of_both_configs_count() -> None:
    assert end_tokens(config=[LETTER, 409], generation=[3, 410], has_tokenizer=False) == [3, LETTER, 409]
    assert end_tokens(has_tokenizer=False) == []


def test_one_line_lists_the_ids_beyond_the_vocabulary_and_one_those_of_ordinary_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "fastdeploy.engine"):
        end_tokens(config=[OTHER_LETTER, 151645, LETTER], generation=[151643, USER])
        assert [record.getMessage() for record in caplog.records] == [
            "eos_token_id: 151643, 151645 are not in the vocabulary and end no output",
            f"eos_token_id: {LETTER}, {OTHER_LETTER} are ordinary text in the tokenizer and named by config.json alone "
            "and end no output",
        ]
        caplog.clear()
        end_tokens(config=USER, generation=BOS)
    assert not caplog.records


# The outputs of the demo model, whose tokens at these places are made end tokens.
PROMPT = "def add("
PLAIN = [271, 19, 511, 482, 288, 267]  # what it continues with
CONFIG_ONLY, FROM_GENERATION, FROM_TOKENIZER = PLAIN[2], PLAIN[3], PLAIN[4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the demo model, with another end token in each file; that of config.json is ordinary text."""
    folder, demo = tmp_path_factory.mktemp("model"), Path(resolve_model_path("demo"))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).symlink_to(demo / name)
    tokens = json.loads((demo / "tokenizer.json").read_text())["model"]["vocab"]
    [text] = [token for token, token_id in tokens.items() if token_id == FROM_TOKENIZER]
    for name, changes in {
        "config.json": {"eos_token_id": [2, CONFIG_ONLY]},
        "generation_config.json": {"eos_token_id": FROM_GENERATION},
        "tokenizer_config.json": {"eos_token": text},
    }.items():
        (folder / name).write_text(json.dumps({**json.loads((demo / name).read_text()), **changes}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_model_len=64)


def complete(llm: LLM, **params: Any) -> CompletionOutput:
    params = {"temperature": 0.0, "max_tokens": len(PLAIN), **params}
    [output] = llm.generate([PROMPT], SamplingParams(**params), use_tqdm=False)
    return output.outputs[0]


def test_an_output_ends_at_the_end_token_of_any_file(folder: Path, llm: LLM) -> None:
    end = PLAIN.index(FROM_GENERATION) + 1
    output = complete(llm, logprobs=1)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (PLAIN[:end], "stop", None)
    assert output.logprobs is not None and len(output.logprobs) == end
    assert output.text == llm.tokenizer.decode(PLAIN[: end - 1])
    assert complete(llm, include_stop_str_in_output=True).text == llm.tokenizer.decode(PLAIN[:end])
    without = LLM(str(folder), max_model_len=64, generation_config="none")
    end = PLAIN.index(FROM_TOKENIZER) + 1
    assert complete(without).token_ids == PLAIN[:end]


def test_ignore_eos_means_all_end_tokens(llm: LLM) -> None:
    output = complete(llm, ignore_eos=True)
    assert (output.token_ids, output.finish_reason) == (PLAIN, "length")


@pytest.mark.parametrize("end", [2, FROM_GENERATION, FROM_TOKENIZER])
def test_min_tokens_and_grammars_mean_all_end_tokens(llm: LLM, end: int) -> None:
    assert complete(llm, logit_bias={end: 100.0}).token_ids == [end]
    later = complete(llm, logit_bias={end: 100.0}, min_tokens=3)
    assert later.token_ids[3:] == [end] and not {2, FROM_GENERATION, FROM_TOKENIZER} & set(later.token_ids[:3])
    constrained = complete(llm, logit_bias={end: 100.0}, structured_outputs={"regex": "[0-9]{2,40}"})
    assert constrained.token_ids[-1] == end and constrained.finish_reason == "stop"
    assert constrained.text.isdigit() and len(constrained.text) >= 2
