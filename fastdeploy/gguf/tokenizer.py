# SPDX-License-Identifier: Apache-2.0
"""Makes tokenizer.json from the metadata of a GGUF file.

The law is that texts get the ids that llama.cpp gives them. Where it differs from the original tokenizer, its way is
followed, since the file is what its users have compared: byte-level tokenizers do not normalize text (Qwen's original
does, to NFC), and SentencePiece's rules for normalization are not applied.

What is different: of special tokens that overlap in a text, llama.cpp finds the longest first, `tokenizers` the
leftmost. Of merges with equal scores llama.cpp makes the leftmost first. Characters that Unicode 16 added are symbols
for llama.cpp. And pieces are never merged to a control token, so that a text without special tokens cannot have one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastdeploy.core.pieces import PieceKind, rank_merges
from fastdeploy.gguf.pre_tokenizers import PreTokenizer, find_pre_tokenizer
from fastdeploy.gguf.special_tokens import HIDDEN_KINDS, SPECIAL_KINDS, token_kinds, tokens_that_strip
from fastdeploy.gguf.vocabulary import PREFIX, Vocabulary, read_vocabulary

SPACE = "\u2581"  # SentencePiece's character for a space
_MODEL = {
    **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None},
    **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False},
}
_BYTE = re.compile("<0x[0-9A-F]{2}>")


def make_tokenizer_json(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the content of tokenizer.json, in the format of `tokenizers`.

    Control tokens are special: they are found in texts, and not shown. Tokens that a user has defined are found, and
    shown. Unused ones that no text can become are left out, so that they are never sampled.

    Args:
        where: the file's name, with which messages begin.

    Raises:
        ConfigError: the tokenizer is not supported, or its lists are missing or contradict each other.
    """
    vocabulary = read_vocabulary(metadata, where)
    kinds = token_kinds(vocabulary)
    if vocabulary.is_byte_level:
        return _byte_level(vocabulary, kinds)
    return _sentencepiece(vocabulary, kinds)


def added_tokens(vocabulary: Vocabulary) -> tuple[int | None, int | None]:
    """Return the ids of the tokens that are put before and after a text; None for none.

    Raises:
        ConfigError: the file does not say which token is to be added.
    """
    adds_bos = not vocabulary.is_byte_level or _pre_tokenizer(vocabulary).add_bos
    bos, eos = (None, None) if vocabulary.is_byte_level else (1, 2)
    before = _added(vocabulary, "bos", adds_bos, bos)
    return before, _added(vocabulary, "eos", False, eos)


def _added(vocabulary: Vocabulary, name: str, default: bool, default_id: int | None) -> int | None:
    token_id = vocabulary.token_id(name, default_id)
    if not vocabulary.flag(f"add_{name}_token", default):
        return None
    if token_id is None:
        vocabulary.refuse(f"{PREFIX}{name}_token_id", f"expected an id, since texts get {name.upper()} tokens")
    return token_id


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    return find_pre_tokenizer(vocabulary.metadata.get(f"{PREFIX}pre"), vocabulary.where)


def _byte_level(vocabulary: Vocabulary, kinds: list[PieceKind]) -> dict[str, Any]:
    pre_tokenizer = _pre_tokenizer(vocabulary)
    merges = _read_merges(vocabulary)
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre_tokenizer.patterns
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"ignore_merges": pre_tokenizer.ignore_merges, "vocab": _used_ids(vocabulary, kinds, merges)}
    return _tokenizer(
        vocabulary,
        kinds,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
        decoder=to_bytes,
        model=model | {"merges": merges},
    )


def _read_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges without those that are repeated; the first of them counts."""
    merges: dict[tuple[str, str], None] = {}
    for index, text in enumerate(vocabulary.read_texts("merges")):
        space = text.find(" ", 1)
        left, right = text[:space], text[space + 1 :]
        if space < 0 or any(part not in vocabulary.ids for part in (left, right, left + right)):
            problem = "expected two tokens with a space between them, which are a token together"
            vocabulary.refuse(f"{PREFIX}merges", f"item {index}: {problem}, got {text!r:.60}")
        merges[left, right] = None
    return list(merges)


def _sentencepiece(vocabulary: Vocabulary, kinds: list[PieceKind]) -> dict[str, Any]:
    scores = dict(zip(vocabulary.ids, vocabulary.scores()))
    for text, kind in zip(vocabulary.ids, kinds):
        if kind is PieceKind.BYTE and not _BYTE.fullmatch(text):
            vocabulary.refuse(f"{PREFIX}tokens", f"expected bytes to be <0x00> to <0xFF>, got {text!r:.60}")
    merges = rank_merges(
        {text: score for (text, score), kind in zip(scores.items(), kinds) if kind not in HIDDEN_KINDS}
    )
    has_prefix = vocabulary.flag("add_space_prefix", True)
    rules: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    rules.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.token_id("unknown", 0)
    texts = list(vocabulary.ids)
    model: dict[str, Any] = {"unk_token": None if unknown is None else texts[unknown], "fuse_unk": True}
    model |= {"byte_fallback": PieceKind.BYTE in kinds, "vocab": _used_ids(vocabulary, kinds, merges)}
    return _tokenizer(
        vocabulary,
        kinds,
        normalizer={"type": "Sequence", "normalizers": rules},
        decoder={"type": "Sequence", "decoders": steps},
        model=model | {"merges": merges},
    )


def _used_ids(vocabulary: Vocabulary, kinds: list[PieceKind], merges: list[tuple[str, str]]) -> dict[str, int]:
    """Return text -> id without the unused tokens that no text becomes."""
    made = {left + right for left, right in merges}
    return {
        text: token_id
        for (text, token_id), kind in zip(vocabulary.ids.items(), kinds)
        if kind is not PieceKind.UNUSED or len(text) == 1 or text in made
    }


def _tokenizer(vocabulary: Vocabulary, kinds: list[PieceKind], **parts: Any) -> dict[str, Any]:
    """Return the content of the file, with the special tokens and the parts that differ."""
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    strip = tokens_that_strip(vocabulary, kinds)
    tokens = [
        {"id": token_id, "content": text, **flags, "rstrip": text in strip, "special": kind in HIDDEN_KINDS}
        for (text, token_id), kind in zip(vocabulary.ids.items(), kinds)
        if kind in SPECIAL_KINDS
    ]
    content: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens}
    content |= {"normalizer": None, "pre_tokenizer": None, "post_processor": _post_processor(vocabulary), **parts}
    content["model"] = {**_MODEL, **content["model"]}
    return content


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Return what adds the BOS and EOS tokens to a text, or to each of two."""
    before, after = added_tokens(vocabulary)
    if before is None and after is None:
        return None
    texts = list(vocabulary.ids)
    special: dict[str, dict[str, Any]] = {}
    templates: list[list[dict[str, Any]]] = []
    for type_id, name in enumerate("AB"):
        templates.append([{"Sequence": {"id": name, "type_id": type_id}}])
        for token_id, position in ((before, 0), (after, 2)):
            if token_id is not None:
                text = texts[token_id]
                special[text] = {"id": text, "ids": [token_id], "tokens": [text]}
                templates[-1].insert(position, {"SpecialToken": {"id": text, "type_id": type_id}})
    single, second = templates
    return {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": special}
