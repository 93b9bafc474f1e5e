# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of `LLM.get_tokenizer`: results that transformers 5.24 returns for the same calls on the same files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.offline_tokenizer import OfflineTokenizer
from fastdeploy.hub.model_path import resolve_model_path

TEXT = "def f(x):</s> a , b ."
IDS = [1, 298, 302, 15, 95, 288, 2, 327, 228, 19, 320, 1376]
MESSAGES = [{"role": "user", "content": "def g():"}]


@pytest.fixture(scope="module")
def tokenizer() -> OfflineTokenizer:
    return OfflineTokenizer(Tokenizer.from_pretrained(resolve_model_path("demo")))


def test_encode_adds_the_special_tokens_unless_told_otherwise(tokenizer: OfflineTokenizer) -> None:
    assert tokenizer.encode(TEXT) == IDS
    assert tokenizer.encode(TEXT, add_special_tokens=False) == IDS[1:]
    assert tokenizer.encode(["a", "b"]) == [[1, 72], [1, 73]]


def test_a_call_returns_ids_and_attention_masks_by_key_and_by_attribute(tokenizer: OfflineTokenizer) -> None:
    encoding = tokenizer(TEXT)
    assert dict(encoding) == {"input_ids": IDS, "attention_mask": [1] * 12}
    assert (encoding.input_ids, encoding["input_ids"]) == (IDS, IDS)
    assert dict(tokenizer([TEXT, "x"], return_attention_mask=False)) == {"input_ids": [IDS, [1, 95]]}
    assert tokenizer([TEXT, "x"]).attention_mask == [[1] * 12, [1, 1]]
    with pytest.raises(AttributeError, match="token_type_ids"):
        _ = encoding.token_type_ids


def test_decode_keeps_special_tokens_unless_told_otherwise(tokenizer: OfflineTokenizer) -> None:
    assert tokenizer.decode(IDS) == "<s>" + TEXT
    assert tokenizer.decode(IDS, skip_special_tokens=True) == "def f(x): a , b ."
    assert tokenizer.decode(np.array(IDS)) == "<s>" + TEXT
    assert tokenizer.decode(5) == "<|assistant|>"
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([10**6]) == ""
    assert tokenizer.decode([IDS, IDS[:2]]) == ["<s>" + TEXT, "<s>def"]
    assert tokenizer.batch_decode([IDS], skip_special_tokens=True) == ["def f(x): a , b ."]


def test_ids_may_be_numbers_and_arrays_of_numpy(tokenizer: OfflineTokenizer) -> None:
    for ids in (np.array([72, 73]), [np.int64(72), np.int32(73)], (72, 73), [72.0, 73], range(72, 74)):
        assert (tokenizer.decode(ids), tokenizer.convert_ids_to_tokens(ids)) == ("ab", ["a", "b"])
        assert tokenizer.batch_decode([ids]) == ["ab"]
    for one in (np.int64(72), np.array(72), 72.0):
        assert (tokenizer.decode(one), tokenizer.convert_ids_to_tokens(one)) == ("a", "a")
    assert tokenizer.decode(np.array([[72], [73]])) == ["a", "b"]
    for wrong in (None, "72", [None], [5.5], b"x"):
        with pytest.raises(InvalidRequestError, match=r"^token_ids: expected a token id or a list of token ids, got "):
            tokenizer.decode(wrong)
    for wrong in ([[72]], [None], [5.5]):
        with pytest.raises(InvalidRequestError, match=r"^ids: expected token ids, got "):
            tokenizer.convert_ids_to_tokens(wrong)


def test_chat_template_returns_ids_unless_told_otherwise(tokenizer: OfflineTokenizer) -> None:
    ids = [1, 298, 553, 644]
    assert tokenizer.apply_chat_template(MESSAGES) == {"input_ids": ids, "attention_mask": [1, 1, 1, 1]}
    assert tokenizer.apply_chat_template(MESSAGES, return_dict=False) == ids
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "<s>def g():"
    assert tokenizer.apply_chat_template([MESSAGES, MESSAGES], tokenize=False) == ["<s>def g():"] * 2
    assert tokenizer.apply_chat_template([MESSAGES] * 2, return_dict=False) == [ids, ids]


def test_chat_template_has_no_generation_prompt_unless_asked_for(tokenizer: OfflineTokenizer) -> None:
    def render(**options: Any) -> Any:
        template = "{{ add_generation_prompt }} {{ kind }} {{ documents }} {{ tools | length if tools else '-' }}"
        return tokenizer.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, **options)

    assert render(kind="a") == "False a None -"
    assert render(add_generation_prompt=True, kind="b", documents=[1], tools=[{}]) == "True b [1] 1"


def test_tokens_and_sizes_of_the_vocabulary(tokenizer: OfflineTokenizer) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert (tokenizer.unk_token, tokenizer.unk_token_id) == (None, None)
    vocab = tokenizer.get_vocab()
    assert (len(vocab), len(tokenizer), tokenizer.vocab_size) == (4096, 4096, 4096)
    assert (vocab["<|assistant|>"], vocab["Ġf"]) == (5, 302)
    assert tokenizer.convert_ids_to_tokens([298, 302, 9999]) == ["def", "Ġf", None]
    assert tokenizer.convert_ids_to_tokens(5) == "<|assistant|>"
    assert tokenizer.convert_tokens_to_ids(["</s>", "no such token"]) == [2, None]
    assert tokenizer.chat_template is not None and tokenizer.chat_template.startswith("{{ bos_token }}")


def test_options_of_transformers_are_accepted_at_their_default_and_otherwise_refused_by_name(
    tokenizer: OfflineTokenizer,
) -> None:
    assert tokenizer.encode("a", truncation=False, max_length=None, return_tensors=None) == [1, 72]
    assert tokenizer.decode([72], clean_up_tokenization_spaces=False) == "a"
    for name, value in {"truncation": True, "return_tensors": "pt", "padding": "longest", "text_pair": "b"}.items():
        with pytest.raises(InvalidRequestError, match=f"^{name}: is not supported; load .* with transformers"):
            tokenizer("a", **{name: value})
    with pytest.raises(InvalidRequestError, match=r"^padding: is not supported"):
        tokenizer.apply_chat_template(MESSAGES, padding=True)
    with pytest.raises(InvalidRequestError, match=r"^add_special_token: is not an option"):
        tokenizer.encode("a", add_special_token=False)


def test_wrong_arguments_are_refused_by_name(tokenizer: OfflineTokenizer) -> None:
    for text in (None, 5, ["a", 5]):
        with pytest.raises(InvalidRequestError, match=r"^text: expected a text or a list of texts"):
            tokenizer(text)
    for conversation in ([], [[]]):
        with pytest.raises(InvalidRequestError, match=r"^conversation: expected at least one message"):
            tokenizer.apply_chat_template(conversation)
    with pytest.raises(InvalidRequestError, match=r"^tools: expected function definitions"):
        tokenizer.apply_chat_template(MESSAGES, tools=[len])  # type: ignore[list-item]
