# SPDX-License-Identifier: Apache-2.0
"""Rules of a tokenizer.json that would make a text very long are refused, and texts that it cannot encode are, too."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from fastdeploy.core.errors import ConfigError, ContextLengthError, InvalidRequestError
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.preprocess import RequestLimits, build_request, check_text
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.detokenize.test_sentencepiece import save as save_sentencepiece
from tests.detokenize.tokenizers_for_tests import NAMED, byte_level_backend, save_tokenizer

BACKTRACKING = "(a+)+$"  # takes twice as many steps for each further letter if the text goes on
LONG_TEXT = "a" * 40 + "b"


def replace(content: str, pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def sequence(*rules: dict[str, Any], key: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", key: list(rules)}


def charsmap(*texts: str) -> dict[str, Any]:
    """Compiled rules with an empty trie of one unit."""
    data = (4).to_bytes(4, "little") + bytes(4) + b"".join(text.encode() + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def read_with(folder: Path, **parts: Any) -> Tokenizer:
    """Read a tokenizer.json with other rules."""
    save_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, **parts}))
    return Tokenizer.from_pretrained(folder)


LONG = "x" * 1025
ALLOWED = "x" * 1024
DOUBLING = [replace("aa") for _ in range(11)]


@pytest.mark.parametrize(
    ("parts", "part"),
    [
        ({"normalizer": {"type": "Prepend", "prepend": LONG}}, "normalizer"),
        ({"normalizer": replace(LONG)}, "normalizer"),
        ({"normalizer": replace("\u00e9" * 1025)}, "normalizer"),
        ({"normalizer": sequence({"type": "NFC"}, sequence(replace("b"), replace(LONG)))}, "normalizer"),
        ({"normalizer": sequence(*DOUBLING)}, "normalizer"),
        ({"normalizer": sequence(replace("A" * 40), {"type": "Lowercase"}, replace("b" * 40))}, "normalizer"),
        ({"normalizer": sequence({"type": "Prepend", "prepend": "a" * 1024}, replace("bb"))}, "normalizer"),
        ({"normalizer": charsmap("x", LONG)}, "normalizer"),
        ({"decoder": replace(LONG)}, "decoder"),
        ({"decoder": sequence({"type": "Fuse"}, *DOUBLING, key="decoders")}, "decoder"),
    ],
)
def test_rules_that_write_more_than_1024_characters_for_one_are_refused(
    tmp_path: Path, parts: dict[str, Any], part: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"tokenizer\.json: {part}: expected rules that write up to 1024 .*, got \d+"
    ):
        read_with(tmp_path, **parts)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Prepend", "prepend": ALLOWED}},
        {"normalizer": replace(ALLOWED)},
        {"normalizer": sequence(*DOUBLING[:10])},
        {"normalizer": sequence(*(replace("<text>", letter) for letter in "qwzjkv"))},
        {"normalizer": sequence(replace(""), replace("b"))},
        {"decoder": replace(ALLOWED)},
    ],
)
def test_rules_that_write_up_to_1024_characters_are_followed(tmp_path: Path, parts: dict[str, Any]) -> None:
    tokenizer = read_with(tmp_path, **parts)
    assert tokenizer.encode("the end")


def test_a_tokenizer_with_very_many_rules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: normalizer: expected at most 256 rules, got 257"):
        read_with(tmp_path, normalizer=sequence(*[{"type": "NFC"}] * 257))


def test_the_length_of_a_text_counts_what_the_rules_insert(tmp_path: Path) -> None:
    tokenizer = read_with(tmp_path, normalizer=sequence({"type": "NFC"}, replace("x" * 1000)))
    assert tokenizer.text_length("the a and a") == len("the  nd ") + 3 * 1000
    with pytest.raises(ContextLengthError, match="prompt: expected at most 5000 characters, got 100000"):
        check_text("prompt", "a" * 100, tokenizer, 5000)


def test_the_compiled_rules_of_sentencepiece_are_followed(tmp_path: Path) -> None:
    save_sentencepiece(tmp_path, "unigram_nfkc")._backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("\uff41") == tokenizer.encode("a")
    assert tokenizer.text_length("a" * 20_000) == 20_000


def backtracking(kind: str) -> Tokenizer:
    backend = byte_level_backend()
    if kind == "normalizer":
        backend.normalizer = normalizers.Replace(Regex(BACKTRACKING), "b")
    else:
        split = pre_tokenizers.Split(Regex(BACKTRACKING), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return Tokenizer(backend, NAMED)


def without_unknown_token() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"the": 0, "</s>": 1}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend, NAMED)


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (backtracking("normalizer"), "Onig: Regex search error: retry-limit-in-match over"),
        (backtracking("pre_tokenizer"), "Onig: Regex search error: retry-limit-in-match over"),
        (without_unknown_token(), "WordLevel error: Missing [UNK] token from the vocabulary"),
    ],
    ids=["normalizer", "pre_tokenizer", "unknown"],
)
def test_a_text_that_the_library_cannot_encode_fails_its_request_alone(tokenizer: Tokenizer, reason: str) -> None:
    message = f"the tokenizer of this model cannot encode it: {reason}"
    limits = RequestLimits(max_model_len=64, vocab_size=tokenizer.vocab_size)
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as caught:
            build_request(tokenizer, limits, "r", LONG_TEXT, SamplingParams(), field="prompt[1]")
        assert (caught.value.field, caught.value.message) == ("prompt[1]", message)
    with pytest.raises(InvalidRequestError) as caught:
        build_request(tokenizer, limits, "r", "the", SamplingParams(bad_words=[LONG_TEXT]))
    assert (caught.value.field, caught.value.message) == ("bad_words", message)
    assert build_request(tokenizer, limits, "r", "the", SamplingParams()).prompt_token_ids


def test_a_tokenizer_that_panics_when_its_tokens_are_added_is_refused(tmp_path: Path) -> None:
    rule = {"type": "Replace", "pattern": {"Regex": BACKTRACKING}, "content": "b"}
    save_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "normalizer": rule}))
    decoder = {str(len(content["model"]["vocab"]) + 1): {"content": LONG_TEXT, "normalized": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer of .*retry-limit"):
        Tokenizer.from_pretrained(tmp_path)
