# SPDX-License-Identifier: Apache-2.0
"""The files beside tokenizer.json mean what they mean to transformers; ids that contradict each other are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.detokenize.tokenizers_for_tests import make_tokenizer, save_tokenizer

FILE = Path(__file__).resolve().parent.parent / "golden" / "tokenizer_folders.json"
GOLDEN = json.loads(FILE.read_text())
FOLDERS = range(len(GOLDEN["folders"]))
SIZE = make_tokenizer("byte_level").vocab_size  # of the tokenizer that `save_tokenizer` writes


def read_folder(path: Path, index: int) -> Tokenizer:
    """Write the files of a folder, and read them."""
    folder = GOLDEN["folders"][index]
    content = {**GOLDEN["bases"][folder["base"]], "added_tokens": folder["added_tokens"]}
    for name, value in {**folder["files"], "tokenizer.json": content}.items():
        (path / name).write_text(json.dumps(value))
    return Tokenizer.from_pretrained(path)


def test_there_are_folders_of_every_base_and_every_file() -> None:
    folders = GOLDEN["folders"]
    assert {folder["base"] for folder in folders} == set(GOLDEN["bases"]) and len(folders) == 108
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        assert sum(name in folder["files"] for folder in folders) >= 12
    assert len({json.dumps(folder["ids"]) for folder in folders}) > 50


@pytest.mark.parametrize("index", FOLDERS)
def test_ids_texts_and_special_tokens_are_those_of_transformers(tmp_path: Path, index: int) -> None:
    folder, tokenizer = GOLDEN["folders"][index], read_folder(tmp_path, index)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in GOLDEN["texts"]]
    assert ids == folder["ids"]
    every = [token_id for token_ids in ids for token_id in token_ids]
    assert [tokenizer.decode(every, skip) for skip in (False, True)] == folder["decoded"]
    assert sorted(tokenizer.special_ids) == folder["skipped_ids"]
    assert tokenizer.special_tokens == folder["names"]
    assert tokenizer.vocab_size == folder["vocab_size"]
    eos = folder["names"].get("eos_token")
    assert tokenizer.eos_token_id == (None if eos is None else tokenizer.vocabulary()[eos])


def write(folder: Path, **files: Any) -> Path:
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({str(SIZE + 1): "<new>"}, f"added_tokens_decoder.{SIZE + 1}: .*'<new>' has id {SIZE + 1}, but .* {SIZE}$"),
        ({"0": "<new>"}, f"added_tokens_decoder.0: .*'<new>' has id 0, but .* {SIZE}$"),
        ({"7": "</s>"}, "added_tokens_decoder.7: .*'</s>' has id 7, but .* 1$"),
        ({"2": "<s>", "0": "<|user|>"}, "added_tokens_decoder.2: .*'<s>' has id 2, but .* 0$|added_tokens_decoder.0: "),
        ({str(SIZE): "<new>", str(SIZE + 1): "<new>"}, f"added_tokens_decoder.{SIZE + 1}: .*'<new>'"),
    ],
)
def test_ids_of_the_configuration_that_contradict_the_tokenizer_are_refused(
    tmp_path: Path, decoder: dict[str, str], message: str
) -> None:
    tokens = {token_id: {"content": text} for token_id, text in decoder.items()}
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_pretrained(write(tmp_path, tokenizer_config={"added_tokens_decoder": tokens}))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"<new>": SIZE + 1}, f"added_tokens.json: .*'<new>' has id {SIZE + 1}, but .* {SIZE}$"),
        ({"<new>": 0}, f"added_tokens.json: .*'<new>' has id 0, but .* {SIZE}$"),
        ({"</s>": SIZE}, f"added_tokens.json: .*'</s>' has id {SIZE}, but .* 1$"),
        ({"<new>": SIZE, "<other>": SIZE}, "added_tokens.json: .*'<other>'"),
    ],
)
def test_ids_of_added_tokens_json_that_contradict_the_tokenizer_are_refused(
    tmp_path: Path, ids: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_pretrained(write(tmp_path, added_tokens=ids))


def test_added_tokens_json_is_not_read_beside_the_configuration_that_replaces_it(tmp_path: Path) -> None:
    decoder = {"added_tokens_decoder": {str(SIZE): {"content": "<new>"}}}
    tokenizer = Tokenizer.from_pretrained(write(tmp_path, tokenizer_config=decoder, added_tokens={"<new>": 7}))
    assert tokenizer.encode("<new>") == [SIZE]


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"eos_token": 2}, "eos_token: .*expected a text or an object with its content, got 2"),
        ({"eos_token": {"content": 2}}, "eos_token: .*expected a text or an object with its content"),
        ({"additional_special_tokens": "<e>"}, "additional_special_tokens: .*expected a list of tokens"),
        ({"additional_special_tokens": ["<e>", 5]}, "additional_special_tokens: .*expected a list of tokens"),
        ({"extra_special_tokens": {"x": None}}, "extra_special_tokens: .*expected a list or an object of tokens"),
        ({"model_specific_special_tokens": ["<e>"]}, "model_specific_special_tokens: .*expected an object of tokens"),
        ({"split_special_tokens": "yes"}, "split_special_tokens: .*got 'yes'"),
    ],
)
def test_values_of_another_type_are_refused_by_key_and_file(
    tmp_path: Path, file: str, content: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer.from_pretrained(write(tmp_path, **{file: content}))
    assert f"{file}.json" in str(caught.value)


def test_marks_of_a_tokenizer_that_splits_special_tokens_are_found_as_one_token(tmp_path: Path) -> None:
    split = Tokenizer.from_pretrained(write(tmp_path, tokenizer_config={"split_special_tokens": True}))
    assert len(split.encode("<|user|>")) > 1
    assert split.find_token("<|user|>") == 2 and split.find_token("the") is not None
    assert split.find_token("<|no token|>") is None
    whole = Tokenizer.from_pretrained(write(tmp_path))
    assert whole.encode("<|user|>") == [2] and whole.digest() != split.digest()
