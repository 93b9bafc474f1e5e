# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in the results of the offline `LLM`: one mapping per position, and their sum."""

from __future__ import annotations

import math

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.outputs import RequestOutput
from tests.entrypoints.test_llm import PROMPT, complete


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="demo", max_model_len=256, seed=1)


def test_logprobs_map_token_ids_to_values_the_chosen_one_first(llm: LLM) -> None:
    output = complete(llm, logprobs=3)
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == 24
    for token_id, entries in zip(output.token_ids, output.logprobs):
        assert next(iter(entries)) == token_id
        assert [entry.rank for entry in entries.values()] == [1, 2, 3]  # a greedy choice is the most probable one
        values = [entry.logprob for entry in entries.values()]
        assert values == sorted(values, reverse=True) and math.exp(values[0]) <= 1.0
        assert [entry.decoded_token for entry in entries.values()] == [llm.tokenizer.token_text(i) for i in entries]
    assert (
        "".join(str(entries[i].decoded_token) for i, entries in zip(output.token_ids, output.logprobs)) == output.text
    )


def test_chosen_token_outside_the_most_probable_ones_is_added_to_them(llm: LLM) -> None:
    output = complete(llm, logprobs=2, logit_bias={300: 100.0}, max_tokens=2)
    assert output.logprobs is not None
    (chosen, first, second), (rank, *others) = list(output.logprobs[0]), output.logprobs[0].values()
    assert chosen == 300 and 300 not in (first, second)
    assert rank.rank is not None and rank.rank > 2
    assert [entry.rank for entry in others] == [1, 2]
    assert list(complete(llm, logprobs=0, max_tokens=1).logprobs[0]) == complete(llm, max_tokens=1).token_ids  # type: ignore[index]


def test_cumulative_logprob_is_the_sum_and_exists_only_with_logprobs(llm: LLM) -> None:
    output = complete(llm, logprobs=0)
    assert output.logprobs is not None
    total = sum(entries[token_id].logprob for token_id, entries in zip(output.token_ids, output.logprobs))
    assert output.cumulative_logprob == pytest.approx(total) and total < 0.0
    plain = complete(llm)
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_raw_logprobs_ignore_processing_and_processed_ones_do_not(llm: LLM) -> None:
    processed = LLM(model="demo", max_model_len=256, logprobs_mode="processed_logprobs")
    values = {"temperature": 2.0, "seed": 3, "top_k": 1, "logprobs": 0, "max_tokens": 4}
    raw, sure = complete(llm, **values), complete(processed, **values)
    assert raw.logprobs and sure.logprobs
    assert all(entries[i].logprob < 0.0 for i, entries in zip(raw.token_ids, raw.logprobs))
    assert sure.cumulative_logprob == 0.0  # top_k 1 leaves one token with probability one


def test_prompt_logprobs_cover_all_but_the_first_token(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    assert isinstance(output, RequestOutput) and output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    assert [next(iter(entries)) for entries in others if entries] == output.prompt_token_ids[1:]
    assert {len(entries) for entries in others if entries} == {2, 3}
    assert complete(llm, max_tokens=1).logprobs is None


def test_without_detokenization_there_are_ids_and_no_texts(llm: LLM) -> None:
    output = complete(llm, detokenize=False, logprobs=1)
    assert (output.text, output.token_ids) == ("", complete(llm).token_ids)
    assert output.logprobs is not None
    assert {entry.decoded_token for entries in output.logprobs for entry in entries.values()} == {None}
    with pytest.raises(InvalidRequestError, match="detokenize: must be true with stop strings"):
        SamplingParams(stop="x", detokenize=False)
