# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of SentencePiece models give the same ids and text as the sentencepiece library."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.pieces import PieceKind
from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from fastdeploy.detokenize.sentencepiece_model import Algorithm, read_sentencepiece
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.detokenize.tokenizers_for_tests import CORPUS

LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", **LLAMA},
    "bpe_without_prefix": {
        "model_type": "bpe",
        **LLAMA,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<sep>", "\n\n"],
    },
    "bpe_user_defined": {
        "model_type": "bpe",
        **LLAMA,
        "user_defined_symbols": ["<sep>", "<sep>\n", "\u2581\u2581", "é*"],
    },
    "unigram_user_defined": {"model_type": "unigram", "user_defined_symbols": ["<sep>", "<sep>>"]},
    "bpe_without_bytes": {"model_type": "bpe", **LLAMA, "byte_fallback": False},
    "unigram": {"model_type": "unigram", **LLAMA},
    "unigram_nfkc": {"model_type": "unigram"},
    "char": {"model_type": "char"},
}
SUPPORTED = (
    "bpe",
    "bpe_without_prefix",
    "bpe_user_defined",
    "unigram_user_defined",
    "bpe_without_bytes",
    "unigram",
    "unigram_nfkc",
)


@cache
def model_of(kind: str) -> bytes:
    """Train a model and return its file."""
    file = io.BytesIO()
    sizes = {"vocab_size": 500, "hard_vocab_limit": False} if kind != "char" else {"vocab_size": 60}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=file, minloglevel=2, **{**sizes, **SETTINGS[kind]}
    )
    return file.getvalue()


def save(folder: Path, kind: str, name: str = "tokenizer.model", **config: Any) -> Tokenizer:
    (folder / name).write_bytes(model_of(kind))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_pretrained(folder)


def random_texts(seed: int, number: int) -> list[str]:
    """Return substrings of the corpus, strings of few characters with many spaces, and strings of any characters."""
    generator = random.Random(seed)
    corpus = "".join(CORPUS)
    few = ["<sep>", ">", "*", "the ", *"abc  \n\n\téüñ你好世界🙂\u00a0\u3000ßﬁ①한글ابج\x00\x7f"]
    ranges = ((32, 127), (0xA0, 0x2FF), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF))

    def any_character() -> str:
        return chr(generator.randrange(*generator.choice(ranges)))

    texts = []
    for _ in range(number):
        begin = generator.randrange(len(corpus))
        texts.append(corpus[begin : begin + generator.randrange(60)])
        texts.append("".join(generator.choice(few) for _ in range(generator.randrange(30))))
        texts.append("".join(any_character() for _ in range(generator.randrange(20))))
    return texts


@pytest.mark.parametrize("kind", SUPPORTED)
def test_ids_and_text_are_those_of_the_library(tmp_path: Path, kind: str) -> None:
    tokenizer = save(tmp_path, kind)
    library = sentencepiece.SentencePieceProcessor(model_proto=model_of(kind))
    for text in random_texts(seed=3, number=300):
        expected = library.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, repr(text)
        if library.unk_id() not in expected:
            assert tokenizer.decode(expected) == library.decode(expected), repr(text)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_text_of_any_pieces_is_that_of_the_library(tmp_path: Path, kind: str) -> None:
    tokenizer = save(tmp_path, kind)
    library = sentencepiece.SentencePieceProcessor(model_proto=model_of(kind))
    normal = [i for i, piece in enumerate(read(tmp_path, kind).pieces) if piece.kind is PieceKind.NORMAL]
    space = library.piece_to_id("\u2581")
    generator = random.Random(6)
    for _ in range(300):
        ids = [space] * generator.randrange(4) + generator.choices(normal, k=generator.randrange(6))
        assert tokenizer.decode(ids) == library.decode(ids), [library.id_to_piece(i) for i in ids]


def test_pieces_merge_by_their_scores_and_not_by_their_order(tmp_path: Path) -> None:
    model = sentencepiece_model_pb2.ModelProto.FromString(model_of("bpe"))
    normal = [piece for piece in model.pieces if piece.type == PieceKind.NORMAL]
    others = [piece for piece in model.pieces if piece.type != PieceKind.NORMAL]
    del model.pieces[:]
    model.pieces.extend([*others, *reversed(normal)])
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    for text in random_texts(seed=5, number=50):
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text), repr(text)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_streamed_text_is_the_whole_text(tmp_path: Path, kind: str) -> None:
    tokenizer = save(tmp_path, kind)
    for text in random_texts(seed=4, number=40):
        stream = IncrementalDetokenizer(tokenizer, tokenizer.encode("x"))
        pieces = [stream.push([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)]
        prefixed = " " if text else ""  # after a prompt the prefix is an ordinary space
        assert "".join(pieces) + stream.flush() == prefixed + text


def test_folder_with_only_the_model_adds_the_bos_token_as_llama_does(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, "bpe")
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.eos_token_id, tokenizer.special_ids) == (2, frozenset({0, 1, 2}))
    assert tokenizer.encode("the end")[0] == 1
    assert tokenizer.encode("the end")[1:] == tokenizer.encode("the end", add_special_tokens=False)
    assert tokenizer.encode("the</s>")[-1] == 2, "the text of a control piece in a prompt is its token"
    assert tokenizer.decode(tokenizer.encode("the end</s>")) == "the end"
    assert tokenizer.token_bytes(tokenizer.encode("龍", add_special_tokens=False)[-1]) == "龍".encode()[-1:]


@pytest.mark.parametrize(
    ("config", "has_bos", "has_eos"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, True, False),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False, False),
        ({"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}, True, True),
        ({"tokenizer_class": "Ernie4_5_Tokenizer"}, False, False),
    ],
)
def test_bos_and_eos_tokens_follow_the_configuration(
    tmp_path: Path, config: dict[str, Any], has_bos: bool, has_eos: bool
) -> None:
    ids = save(tmp_path, "bpe", **config).encode("the end")
    assert (ids[0] == 1, ids[-1] == 2) == (has_bos, has_eos)


@pytest.mark.parametrize("name", ["tokenizer.model", "sentencepiece.bpe.model", "spiece.model"])
def test_every_common_file_name_is_found(tmp_path: Path, name: str) -> None:
    tokenizer = save(tmp_path, "bpe", name)
    assert tokenizer.decode(tokenizer.encode("the end")) == "the end"


def test_added_tokens_have_the_ids_of_the_folder(tmp_path: Path) -> None:
    size = len(read(tmp_path, "bpe").pieces)
    decoder = {str(size): {"content": "<|user|>", "special": True}, "1": {"content": "<s>", "special": True}}
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": size + 1}))
    tokenizer = save(tmp_path, "bpe", added_tokens_decoder=decoder, additional_special_tokens=["<tool>"])
    assert tokenizer.encode("<|user|>the<tool>", add_special_tokens=False)[::2][-1] == size + 1
    assert tokenizer.encode("<|user|>the<tool>", add_special_tokens=False)[0] == size
    assert {size, size + 1} <= tokenizer.special_ids and tokenizer.vocab_size == size + 2


def test_pieces_named_by_the_configuration_are_special_tokens(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Ernie4_5_Tokenizer", "cls_token": "<sep>"}
    tokenizer = save(tmp_path, "bpe_without_prefix", **config)
    ids = tokenizer.encode("a<sep>b")
    assert ids[1] in tokenizer.special_ids and tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<sep>b"


def test_added_token_with_an_impossible_id_is_refused(tmp_path: Path) -> None:
    size = len(read(tmp_path, "bpe").pieces)
    with pytest.raises(
        ConfigError, match=rf"added_tokens_decoder\.{size + 5}: .*'<gap>' has id {size + 5}, but .* {size}$"
    ):
        save(tmp_path, "bpe", added_tokens_decoder={str(size + 5): {"content": "<gap>"}})
    with pytest.raises(ConfigError, match=r"added_tokens_decoder\.7: .*'</s>' has id 7, but .* 2$"):
        save(tmp_path, "bpe", added_tokens_decoder={"7": {"content": "</s>"}})


def read(folder: Path, kind: str) -> Any:
    (folder / "tokenizer.model").write_bytes(model_of(kind))
    return read_sentencepiece(folder / "tokenizer.model")


def test_model_file_is_parsed_as_by_the_library(tmp_path: Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=model_of("bpe_without_prefix"))
    model = read(tmp_path, "bpe_without_prefix")
    assert [piece.text for piece in model.pieces] == [library.id_to_piece(i) for i in range(library.vocab_size())]
    assert [piece.score for piece in model.pieces] == [library.get_score(i) for i in range(library.vocab_size())]
    kinds = {piece.text: piece.kind for piece in model.pieces}
    assert (kinds["<unk>"], kinds["<s>"], kinds["<sep>"]) == (
        PieceKind.UNKNOWN,
        PieceKind.CONTROL,
        PieceKind.USER_DEFINED,
    )
    assert (kinds["<0x0A>"], model.algorithm, model.add_dummy_prefix) == (PieceKind.BYTE, Algorithm.BPE, False)


@pytest.mark.parametrize("num_bytes", [10, 1000])
def test_error_names_a_truncated_file(tmp_path: Path, num_bytes: int) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_of("bpe")[:num_bytes])
    with pytest.raises(ConfigError, match=r"tokenizer.model' is not a SentencePiece model"):
        Tokenizer.from_pretrained(tmp_path)


def test_models_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="type 'char' are not supported"):
        save(tmp_path, "char")
