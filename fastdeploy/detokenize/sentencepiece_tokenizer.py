# SPDX-License-Identifier: Apache-2.0
"""Builds a `tokenizers.Tokenizer` that gives the same ids and text as a SentencePiece model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.pieces import PieceKind, rank_merges
from fastdeploy.detokenize.sentencepiece_model import Algorithm, SentencePieceModel, read_sentencepiece

SPACE = "\u2581"
_MANY = 1 << 31  # no limit


def build_sentencepiece(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, SentencePieceModel]:
    """Build the tokenizer of a SentencePiece model, without the BOS and EOS tokens that some classes add.

    Control pieces become special tokens, so that `<s>` in a prompt is the BOS token.

    Args:
        config: tokenizer_config.json; `add_prefix_space` and `legacy` determine where a space is added.

    Raises:
        ConfigError: the file cannot be read, or `tokenizers` has no equivalent of a setting.
    """
    model = read_sentencepiece(file)
    if model.treat_whitespace_as_suffix or not model.escape_whitespaces:
        raise ConfigError("tokenizer", f"{str(file)!r}: SentencePiece models with spaces after words are not supported")
    if model.algorithm not in (Algorithm.BPE, Algorithm.UNIGRAM):
        name = model.algorithm.name.lower()
        raise ConfigError("tokenizer", f"{str(file)!r}: SentencePiece models of type '{name}' are not supported")
    backend = tokenizers.Tokenizer(_bpe(model) if model.algorithm is Algorithm.BPE else _unigram(model))
    backend.add_special_tokens([piece.text for piece in model.pieces if piece.kind in _SPECIAL_KINDS])
    _set_spaces(backend, model, config)
    return backend, model


_SPECIAL_KINDS = (PieceKind.CONTROL, PieceKind.UNKNOWN)


def _user_defined(model: SentencePieceModel) -> list[str]:
    """Return the pieces that are split off before all others, longest first."""
    texts = [piece.text for piece in model.pieces if piece.kind is PieceKind.USER_DEFINED]
    return sorted(texts, key=len, reverse=True)


def _has_bytes(model: SentencePieceModel) -> bool:
    return any(piece.kind is PieceKind.BYTE for piece in model.pieces)


def _bpe(model: SentencePieceModel) -> models.BPE:
    vocab = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
    return models.BPE(
        vocab,
        _merges(model),
        unk_token=model.text_of(model.unk_id),
        fuse_unk=True,
        byte_fallback=_has_bytes(model),
        ignore_merges=bool(_user_defined(model)),  # a pre-token that is a piece is not split further
    )


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    kinds = (PieceKind.NORMAL, PieceKind.USER_DEFINED)
    return rank_merges({piece.text: piece.score for piece in model.pieces if piece.kind in kinds})


def _unigram(model: SentencePieceModel) -> models.Unigram:
    vocab = [(piece.text, piece.score) for piece in model.pieces]
    return models.Unigram(vocab, model.unk_id, byte_fallback=_has_bytes(model))


def _set_spaces(backend: tokenizers.Tokenizer, model: SentencePieceModel, config: Mapping[str, Any]) -> None:
    """Configure the handling of spaces in both directions, and the splitting at user-defined pieces.

    A prefix space is added before each text between special tokens, as in other tokenizers for SentencePiece models.
    With `legacy: false` it is added only at the start, and not before a space.
    """
    has_prefix = model.add_dummy_prefix and config.get("add_prefix_space") is not False
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("^ | $"), "")]
    splits: list[Any] = []
    if has_prefix and config.get("legacy") is False:
        splits.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False))
    else:
        steps += [normalizers.Prepend(SPACE)] if has_prefix else []
        steps.append(normalizers.Replace(" ", SPACE))
    if user_defined := _user_defined(model):
        splits.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, user_defined))), "isolated"))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    num_stripped = _MANY if model.remove_extra_whitespaces else int(has_prefix)
    strip = [decoders.Strip(" ", num_stripped, 0)] if num_stripped else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
