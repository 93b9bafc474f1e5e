# SPDX-License-Identifier: Apache-2.0
"""Prompts, conversations, priorities and parameters of `LLM` in every type that holds the values, and no other."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy import LLM, InvalidRequestError, SamplingParams
from tests.entrypoints.small_llm import assert_empty, load_small_model

PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
MESSAGE = {"role": "user", "content": "a"}
PROMPT = "expected a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_small_model(tmp_path_factory.mktemp("small"), max_model_len=np.int64(48), seed=np.uint8(3))


def ids_of(llm: LLM, prompts: Any, **arguments: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, **{"sampling_params": PARAMS, "use_tqdm": False, **arguments})
    assert isinstance(outputs, list)
    assert all(type(token_id) is int for output in outputs for token_id in output.prompt_token_ids)
    return [output.prompt_token_ids for output in outputs]


def prompts_of(llm: LLM, messages: Any) -> list[str | None]:
    outputs = llm.chat(messages, PARAMS, use_tqdm=False)
    assert isinstance(outputs, list)
    return [output.prompt for output in outputs]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (np.array([5, 6]), [[5, 6]]),
        ([np.int64(5), np.uint8(6)], [[5, 6]]),
        (np.array([5.0, 6.0]), [[5, 6]]),
        ([5.0, np.float32(6)], [[5, 6]]),
        (array.array("i", [5, 6]), [[5, 6]]),
        (range(5, 7), [[5, 6]]),
        (paddle.to_tensor([5, 6]), [[5, 6]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([np.array([5, 6]), "a"], [[5, 6], [68]]),
        (np.array(["ab", "a"]), [[68, 69], [68]]),
        ((text for text in ("ab", "a")), [[68, 69], [68]]),
        ({"prompt_token_ids": np.array([5, 6])}, [[5, 6]]),
        ([], []),
    ],
)
def test_prompts_may_have_any_type_that_holds_texts_or_whole_numbers(llm: LLM, prompts: Any, expected: Any) -> None:
    assert ids_of(llm, prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"x", f"prompts: {PROMPT}, or a list of these, got b'x'"),
        (bytearray(b"x"), f"prompts: {PROMPT}, or a list of these, got bytearray(b'x')"),
        (None, f"prompts: {PROMPT}, or a list of these, got None"),
        (np.array(5), f"prompts: {PROMPT}, or a list of these, got array(5)"),
        ([b"x"], f"prompts[0]: {PROMPT}, got b'x'"),
        ([None], f"prompts[0]: {PROMPT}, got None"),
        (["a", 5], f"prompts[1]: {PROMPT}, got 5"),
        ([5, "a"], f"prompts[0]: {PROMPT}, got 5"),
        ({"prompt": b"x"}, "prompts: expected a text as prompt, got b'x'"),
        ({"prompt_token_ids": "ab"}, "prompts: expected a list of token ids as prompt_token_ids, got 'ab'"),
        ([5.5], "prompt: expected token ids in [0, 97], got 5.5"),
        ([True, False], "prompt: expected token ids in [0, 97], got True"),
        (np.array([True]), "prompt: expected token ids in [0, 97], got True"),
        ([float("nan")], "prompt: expected token ids in [0, 97], got nan"),
        ([["a"]], "prompt: expected token ids in [0, 97], got 'a'"),
        (np.zeros((1, 1, 2), int), "prompt: expected token ids in [0, 97], got an array"),
    ],
)
def test_other_prompts_are_refused_with_one_line(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ids_of(llm, prompts)
    assert str(caught.value) == message
    assert_empty(llm)


def test_conversations_may_be_any_lists_of_messages(llm: LLM) -> None:
    for messages in ([MESSAGE], (MESSAGE,), iter([MESSAGE]), [(MESSAGE,)]):
        assert prompts_of(llm, messages) == ["u:a;"]
    assert prompts_of(llm, [[MESSAGE], [MESSAGE] * 2]) == ["u:a;", "u:a;u:a;"]
    for wrong in (None, 5, "a", b"a", [None], ["a"], [5], MESSAGE):
        with pytest.raises(InvalidRequestError, match=r"^messages: expected a list of messages, or a list of such"):
            prompts_of(llm, wrong)


@pytest.mark.parametrize(
    ("priority", "expected"),
    [(1, [1, 1]), (np.int64(-2), [-2, -2]), (2.0, [2, 2]), (np.array([1, 2]), [1, 2]), ((1, np.int8(2)), [1, 2])],
)
def test_a_priority_may_be_one_integer_for_all_prompts(llm: LLM, priority: Any, expected: list[int]) -> None:
    found = []
    add = llm.engine.add_request

    def look(request: Any) -> Any:
        found.append(request.priority)
        return add(request)

    llm.engine.add_request = look  # type: ignore[method-assign]
    try:
        ids_of(llm, ["a", "b"], priority=priority)
    finally:
        llm.engine.add_request = add  # type: ignore[method-assign]
    assert found == expected and {type(value) for value in found} == {int}


def test_parameters_are_objects_one_or_one_per_prompt(llm: LLM) -> None:
    assert ids_of(llm, ["a", "b"], sampling_params=(PARAMS, PARAMS)) == [[68], [69]]
    for wrong in (5, {"max_tokens": 1}, [PARAMS], [PARAMS] * 3):
        with pytest.raises(InvalidRequestError, match=r"^sampling_params: expected SamplingParams, or a list of 2"):
            ids_of(llm, ["a", "b"], sampling_params=wrong)
    with pytest.raises(InvalidRequestError, match=r"^sampling_params\[1\]: expected SamplingParams, got None"):
        ids_of(llm, ["a", "b"], sampling_params=[PARAMS, None])


def test_parameters_of_numpy_give_the_tokens_of_python_s_numbers(llm: LLM) -> None:
    given = {"n": 2, "temperature": 0.5, "top_k": 40, "seed": 2**64 - 1, "max_tokens": 6, "logprobs": 1}
    types = {"temperature": np.float64, "seed": np.uint64}
    plain, numpy = (
        llm.generate("abc", SamplingParams(**values), use_tqdm=False)
        for values in (given, {name: types.get(name, np.int32)(value) for name, value in given.items()})
    )
    assert isinstance(plain, list) and isinstance(numpy, list)
    assert [choice.token_ids for choice in numpy[0].outputs] == [choice.token_ids for choice in plain[0].outputs]
