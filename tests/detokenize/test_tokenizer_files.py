# SPDX-License-Identifier: Apache-2.0
"""Folders without tokenizer.json: byte-level BPE, files that only PaddleNLP reads, and unsupported formats."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.detokenize.tokenizer_files import has_tokenizer
from tests.detokenize.tokenizers_for_tests import byte_level_backend, make_tokenizer, save_tokenizer

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "paddlenlp_tokenizers"
REAL_PADDLENLP = os.environ.get("FD_PADDLENLP_PYTHON")


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt"])
def test_folders_saved_by_paddlenlp_give_the_ids_of_paddlenlp(name: str) -> None:
    tokenizer = Tokenizer.from_pretrained(GOLDEN / name)
    expected = json.loads((GOLDEN / name / "encoded.json").read_text())
    assert len(expected) == 70
    assert {text: tokenizer.encode(text) for text in expected} == expected


def save_pair(folder: Path, **config: Any) -> Path:
    """Write vocab.json and merges.txt of a byte-level BPE of 400 ids."""
    byte_level_backend().model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_vocab_and_merges_give_the_same_tokenizer_as_tokenizer_json(tmp_path: Path) -> None:
    decoder = {"0": {"content": "<s>", "special": True}, "1": {"content": "</s>", "special": True}}
    folder = save_pair(tmp_path, tokenizer_class="GPT2TokenizerFast", eos_token="</s>", added_tokens_decoder=decoder)
    found, expected = Tokenizer.from_pretrained(folder), make_tokenizer("byte_level")
    text = "<s>def add(a, b):\n    return  a + b # héllo 你好 🙂</s>"
    assert found.encode(text) == expected.encode(text)
    assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert (found.eos_token_id, found.is_byte_level, found.special_ids) == (1, True, frozenset({0, 1}))


def test_qwen_folders_split_digits_normalize_and_add_tokens(tmp_path: Path) -> None:
    size = byte_level_backend().get_vocab_size() - 1  # the one added there is not in vocab.json
    decoder = {str(size): {"content": "<|im_start|>", "special": True}, str(size + 1): {"content": "<tool_call>"}}
    folder = save_pair(tmp_path, tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=decoder)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.encode("<|im_start|><tool_call>") == [size, size + 1]
    assert tokenizer.special_ids == frozenset({size})
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9"), "texts are normalized to NFC"
    assert tokenizer.decode(tokenizer.encode("12345 it's")) == "12345 it's"


def test_class_follows_from_the_model_type(tmp_path: Path) -> None:
    save_pair(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert (
        Tokenizer.from_pretrained(tmp_path).decode(Tokenizer.from_pretrained(tmp_path).encode("the end")) == "the end"
    )


def test_special_tokens_are_read_from_special_tokens_map(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}, "bos_token": "<s>"}')
    assert Tokenizer.from_pretrained(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_chat_template_json_is_read(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}?"}')
    assert Tokenizer.from_pretrained(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}]) == "hi?"


def test_folder_without_a_tokenizer_is_refused_with_the_supported_formats(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer in .*tokenizer\.json.*merges\.txt.*SentencePiece.*PaddleNLP"):
        Tokenizer.from_pretrained(tmp_path)
    byte_level_backend().model.save(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no tokenizer in .*of a known class"):
        Tokenizer.from_pretrained(tmp_path)


FAKE_PADDLENLP = """
import os
import pathlib

calls = pathlib.Path({calls!r})

class AutoTokenizer:
    added_tokens_decoder = {{}}
    all_special_tokens = ["</s>"]

    @classmethod
    def from_pretrained(cls, folder):
        with calls.open("a") as log:
            log.write(f"{{os.getpid()}}\\n")
        if {fails!r}:
            raise ValueError({fails!r})
        return cls()

    def __call__(self, text):
        from paddlenlp.transformers.convert_slow_tokenizer import convert_slow_tokenizer

        return {{"input_ids": convert_slow_tokenizer(self).encode(text).ids + [3] * {is_wrong}}}
"""
FAKE_CONVERSION = """
import tokenizers

def convert_slow_tokenizer(_slow):
    return tokenizers.Tokenizer.from_file({file!r})
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the process a cache of its own and no PaddleNLP; return a folder that only PaddleNLP reads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FD_PADDLENLP_PYTHON", raising=False)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("[UNK]\n")
    config = {"tokenizer_class": "ErnieTokenizer", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def install_fake_paddlenlp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str = "", is_wrong: bool = False
) -> Path:
    """Make an interpreter whose PaddleNLP reads every folder as the same tokenizer; return its log of calls."""
    package = tmp_path / "site" / "paddlenlp" / "transformers"
    package.mkdir(parents=True)
    file, calls = str(save_tokenizer(tmp_path) / "tokenizer.json"), tmp_path / "calls"
    source = FAKE_PADDLENLP.format(calls=str(calls), fails=fails, is_wrong=int(is_wrong))
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(source)
    (package / "convert_slow_tokenizer.py").write_text(FAKE_CONVERSION.format(file=file))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("FD_PADDLENLP_PYTHON", str(python))
    return calls


def test_error_without_paddlenlp_says_in_one_line_what_to_install(environment: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Tokenizer.from_pretrained(environment)
    message = str(caught.value)
    assert "ErnieTokenizer" in message and "FD_PADDLENLP_PYTHON" in message and "\n" not in message


def test_child_process_converts_once_and_does_not_change_the_model(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install_fake_paddlenlp(tmp_path, monkeypatch)
    before = sorted(path.name for path in environment.iterdir())
    first, second = Tokenizer.from_pretrained(environment), Tokenizer.from_pretrained(environment)
    assert first.encode("the end") == second.encode("the end") == make_tokenizer("byte_level").encode("the end")
    assert first.eos_token_id == 1 and "paddlenlp" not in sys.modules
    pids = calls.read_text().split()
    assert len(pids) == 1 and pids[0] != str(os.getpid())
    assert sorted(path.name for path in environment.iterdir()) == before
    (environment / "vocab.txt").write_text("[UNK]\nnew\n")
    Tokenizer.from_pretrained(environment)
    assert len(calls.read_text().split()) == 2, "changed files are converted again"


def test_concurrent_loads_share_one_conversion(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install_fake_paddlenlp(tmp_path, monkeypatch)
    results: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: results.append(Tokenizer.from_pretrained(environment).encode("the end")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 3 and results[0] == results[1] == results[2]
    assert len(calls.read_text().split()) == 1


def test_failed_conversion_is_one_line_and_leaves_no_file(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_paddlenlp(tmp_path, monkeypatch, fails="no such vocabulary")
    with pytest.raises(ConfigError, match="cannot convert this ErnieTokenizer: ValueError: no such vocabulary"):
        Tokenizer.from_pretrained(environment)
    assert not list((tmp_path / "cache").rglob("tokenizer.json"))


def test_conversion_that_gives_other_ids_is_refused(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_paddlenlp(tmp_path, monkeypatch, is_wrong=True)
    with pytest.raises(ConfigError, match="the converted tokenizer gives other ids than AutoTokenizer"):
        Tokenizer.from_pretrained(environment)


def test_error_names_a_missing_interpreter(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_PADDLENLP_PYTHON", "/no/such/python")
    with pytest.raises(ConfigError, match="FD_PADDLENLP_PYTHON: cannot run '/no/such/python'"):
        Tokenizer.from_pretrained(environment)


def test_error_names_a_cache_that_cannot_be_written(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_paddlenlp(tmp_path, monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot write the cache .*Not a directory"):
        Tokenizer.from_pretrained(environment)


def test_file_in_tiktoken_format_is_not_a_sentencepiece_model(environment: Path) -> None:
    (environment / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ConfigError, match="requires PaddleNLP"):
        Tokenizer.from_pretrained(environment)
    (environment / "tokenizer_config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"tokenizer\.model' is in tiktoken format, which is not supported; use tokenizer\.json"
    ):
        Tokenizer.from_pretrained(environment)


@pytest.mark.skipif(not REAL_PADDLENLP, reason="FD_PADDLENLP_PYTHON names no environment with PaddleNLP")
def test_real_paddlenlp_converts_a_tokenizer_that_only_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = Tokenizer.from_pretrained(GOLDEN / "ernie")
    expected = json.loads((GOLDEN / "ernie" / "encoded.json").read_text())
    assert {text: tokenizer.encode(text) for text in expected} == expected
