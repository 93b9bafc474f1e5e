# SPDX-License-Identifier: Apache-2.0
"""Texts get the ids that llama.cpp gives them by the same file (scripts/make_golden_gguf_tokenizers.py)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.pieces import PieceKind
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.gguf.pre_tokenizers import PRE_TOKENIZERS
from fastdeploy.gguf.special_tokens import token_kinds
from fastdeploy.gguf.tokenizer import make_tokenizer_json
from fastdeploy.gguf.tokenizer_config import end_token_ids, make_tokenizer_config
from fastdeploy.gguf.vocabulary import read_vocabulary

FILE = Path(__file__).resolve().parent.parent / "golden" / "gguf_tokenizers.json"
PREFIX = "tokenizer.ggml."


@cache
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def byte_characters() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def with_prefix(keys: dict[str, Any]) -> dict[str, Any]:
    return {PREFIX + key: value for key, value in keys.items()}


@cache
def byte_level_keys() -> dict[str, Any]:
    content = golden()["byte_level"]
    tokens = byte_characters()
    tokens += dict.fromkeys(text.replace(" ", "") for text in content["merges"])
    tokens += [word for word in content["words"] if word not in tokens]
    types = [1] * len(tokens) + list(content["special"].values())
    first = len(tokens)
    keys = {"tokens": tokens + list(content["special"]), "token_type": types, "merges": content["merges"]}
    return with_prefix({"model": "gpt2", "pre": "qwen2", "bos_token_id": first, "eos_token_id": first + 1} | keys)


@cache
def sentencepiece_keys() -> dict[str, Any]:
    texts, scores, types = (list(column) for column in zip(*golden()["sentencepiece"]))
    return with_prefix({"model": "llama", "tokens": texts, "scores": scores, "token_type": types})


def load(metadata: dict[str, Any], folder: Path, **config: Any) -> Tokenizer:
    """Load a tokenizer from the files that are made of metadata."""
    (folder / "tokenizer.json").write_text(json.dumps(make_tokenizer_json(metadata, "m.gguf")))
    content = make_tokenizer_config(metadata, "m.gguf") | config
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return Tokenizer.from_pretrained(folder)


def expected_ids(result: dict[str, Any], plain: bool) -> list[list[int]]:
    """Return the ids of the texts, with special tokens in texts or without."""
    first = golden()["byte_level_ids"][0]["ids"]
    parsed = [same if ids is None else ids for ids, same in zip(result["ids"], first)]
    return [same if ids is None else ids for ids, same in zip(result["plain_ids"], parsed)] if plain else parsed


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_words_are_split_as_llama_cpp_does_by_each_name(name: str, tmp_path: Path) -> None:
    result = golden()["byte_level_ids"][golden()["splits"][name]]
    metadata = byte_level_keys() | {f"{PREFIX}pre": name}
    tokenizer, bos = load(metadata, tmp_path), metadata[f"{PREFIX}bos_token_id"]
    texts = golden()["texts"]
    assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == expected_ids(result, plain=False)
    assert tokenizer.encode("a") == [bos] * result["adds_bos"] + tokenizer.encode("a", add_special_tokens=False)


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "smollm"])
def test_texts_without_special_tokens_have_llama_cpp_ids(name: str, tmp_path: Path) -> None:
    result = golden()["byte_level_ids"][golden()["splits"][name]]
    tokenizer = load(byte_level_keys() | {f"{PREFIX}pre": name}, tmp_path, split_special_tokens=True)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in golden()["texts"]]
    assert ids == expected_ids(result, plain=True)


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("plain", [False, True])
def test_sentencepiece_vocabularies_give_llama_cpp_ids(index: int, plain: bool, tmp_path: Path) -> None:
    variant = golden()["variants"][index]
    tokenizer = load(sentencepiece_keys() | with_prefix(variant["keys"]), tmp_path, split_special_tokens=plain)
    assert [tokenizer.encode(text) for text in golden()["texts"]] == expected_ids(variant, plain)


def test_every_text_comes_back_from_byte_level_ids(tmp_path: Path) -> None:
    tokenizer = load(byte_level_keys(), tmp_path)
    assert len(golden()["texts"]) == 160
    for text in golden()["texts"]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_every_text_comes_back_from_sentencepiece_ids(tmp_path: Path) -> None:
    """U+2581 becomes a space, and special tokens are followed by one."""
    tokenizer = load(sentencepiece_keys(), tmp_path)
    texts = [text for text in golden()["texts"] if not any(mark in text for mark in ("<", "\u2581"))]
    assert len(texts) > 100
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


def test_control_tokens_are_hidden_and_the_users_own_are_shown(tmp_path: Path) -> None:
    tokenizer = load(byte_level_keys(), tmp_path)
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>")
    assert (len(ids), tokenizer.decode(ids)) == (5, "a<think>b")
    assert {"<s>", "</s>", "<|im_end|>"} <= {tokenizer.token_text(token_id) for token_id in tokenizer.special_ids}


def test_unused_tokens_are_never_sampled(tmp_path: Path) -> None:
    metadata = byte_level_keys()
    tokens, types = metadata[f"{PREFIX}tokens"], metadata[f"{PREFIX}token_type"]
    metadata = metadata | with_prefix({"tokens": [*tokens, "[PAD9]"], "token_type": [*types, 5]})
    tokenizer = load(metadata, tmp_path)
    assert not tokenizer.has_token(tokens.index("[PAD7]"))
    assert tokenizer.vocab_size == len(tokens)


@pytest.mark.parametrize("index", range(7))
def test_the_tokens_that_end_outputs_are_those_of_llama_cpp(index: int) -> None:
    case = golden()["special_tokens"][index]
    tokens, types = [*byte_characters(), *case["tokens"], "ab"], [1] * 256 + [*case["tokens"].values(), 1]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": ["a b"], **case["keys"]}
    metadata = with_prefix(keys)
    assert end_token_ids(metadata, "m.gguf") == case["ends"]
    kinds = token_kinds(read_vocabulary(metadata, "m.gguf"))
    assert [index for index, kind in enumerate(kinds) if kind is PieceKind.CONTROL] == case["control"]


def test_a_run_of_spaces_with_equal_scores_grows_from_the_left(tmp_path: Path) -> None:
    tokenizer = load(sentencepiece_keys(), tmp_path)
    ids = tokenizer.encode(" " * 36, add_special_tokens=False)
    texts = {token_id: len(text) for text, token_id in tokenizer.vocabulary().items()}
    assert [texts[token_id] for token_id in ids] == [16, 16, 5]


@pytest.mark.parametrize("name", [None, "default", "kimi-k2", "deepseek-llm", 3])
def test_an_unknown_way_to_split_words_is_refused_with_the_known_names(name: Any) -> None:
    metadata = byte_level_keys() | {f"{PREFIX}pre": name}
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer\.ggml\.pre: .*known: .*llama-bpe.*qwen2"):
        make_tokenizer_json(metadata, "m.gguf")


BAD_LISTS: list[tuple[str, Any, str]] = [
    ("model", "bert", "expected a tokenizer of kind gpt2 or llama, got 'bert'"),
    ("model", None, "expected a tokenizer of kind gpt2 or llama, got none"),
    ("tokens", None, "expected a list"),
    ("tokens", [], r"expected a list, got \[\]"),
    ("tokens", ["a", 1], "item 1: expected text in UTF-8, got 1"),
    ("tokens", ["a", "\udc80"], "item 1: expected text in UTF-8, got '.udc80'"),
    ("tokens", ["a", "b", "a"], "items 0 and 2 are both 'a'"),
    ("token_type", None, "expected a list"),
    ("token_type", [1], "expected [0-9]+ items, one for each token, got 1"),
    ("token_type", 0, "item 0: expected 1 to 6, got 0"),
    ("token_type", 7, "item 0: expected 1 to 6, got 7"),
    ("token_type", True, "item 0: expected 1 to 6, got True"),
    ("bos_token_id", 10**6, "expected the id of one of the [0-9]+ tokens, got 1000000"),
    ("eos_token_id", -1, "expected the id of one of the [0-9]+ tokens, got -1"),
    ("eot_token_id", "2", "expected the id of one of the [0-9]+ tokens, got '2'"),
    ("add_bos_token", 1, "expected true or false, got 1"),
    ("suppress_tokens", [1], "tokens that are never generated are not supported"),
]
BAD_MERGES: list[tuple[str, Any, str]] = [
    ("merges", None, "expected a list"),
    *(
        ("merges", ["a b", text], f"item 1: expected two tokens .*, got '{text}'")
        for text in ("", "ab", "a zzzz", "zzzz a", "q z", " ", "a b c")
    ),
]
BAD_PIECES: list[tuple[str, Any, str]] = [
    ("scores", None, "expected a list"),
    ("scores", [0.0], "expected [0-9]+ items, one for each token, got 1"),
    ("scores", float("nan"), "item 0: expected a finite number, got nan"),
    ("scores", float("-inf"), "item 0: expected a finite number, got -inf"),
    ("scores", "1", "item 0: expected a finite number, got '1'"),
    ("add_space_prefix", "yes", "expected true or false, got 'yes'"),
]
CASES = [(byte_level_keys, *case) for case in (*BAD_LISTS, *BAD_MERGES)]
CASES += [(sentencepiece_keys, *case) for case in (*BAD_LISTS, *BAD_PIECES)]


@pytest.mark.parametrize(("keys", "key", "value", "message"), CASES)
def test_metadata_that_is_wrong_is_refused_with_file_and_key(keys: Any, key: str, value: Any, message: str) -> None:
    metadata = dict(keys())
    if key in ("token_type", "scores") and value is not None and not isinstance(value, list):
        value = [value, *metadata[PREFIX + key][1:]]
    metadata[PREFIX + key] = value
    with pytest.raises(ConfigError, match=rf"^tokenizer: m\.gguf: {PREFIX}{key}: {message}$"):
        make_tokenizer_json(metadata, "m.gguf")
        end_token_ids(metadata, "m.gguf")


def test_a_text_that_gets_a_bos_token_needs_one() -> None:
    metadata = byte_level_keys() | {f"{PREFIX}pre": "llama-bpe"}
    del metadata[f"{PREFIX}bos_token_id"]
    with pytest.raises(ConfigError, match=r"bos_token_id: expected an id, since texts get BOS tokens"):
        make_tokenizer_json(metadata, "m.gguf")


def test_a_byte_token_must_name_its_byte() -> None:
    metadata = sentencepiece_keys()
    tokens = list(metadata[f"{PREFIX}tokens"])
    tokens[metadata[f"{PREFIX}token_type"].index(PieceKind.BYTE)] = "<0xZZ>"
    with pytest.raises(ConfigError, match="expected bytes to be <0x00> to <0xFF>, got '<0xZZ>'"):
        make_tokenizer_json(metadata | {f"{PREFIX}tokens": tokens}, "m.gguf")


def test_merges_that_are_repeated_count_once_and_empty_tokens_get_a_name(tmp_path: Path) -> None:
    tokens = [*byte_characters(), "", "ab", "bc"]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * len(tokens)}
    tokenizer = load(with_prefix(keys | {"merges": ["a b", "b c", "a b"]}), tmp_path)
    assert tokenizer.encode("abc") == [257, tokens.index("c")]
    assert tokenizer.token_text(256) == "[EMPTY_256]"


def test_special_tokens_of_phi_3_absorb_the_white_space_after_them(tmp_path: Path) -> None:
    tokenizer = load(byte_level_keys() | {"general.name": "Phi-3 mini"}, tmp_path)
    assert tokenizer.decode(tokenizer.encode("<|im_start|> \n a <s> b"), skip_special_tokens=False) == (
        "<|im_start|>a <s> b"
    )
