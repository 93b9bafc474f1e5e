# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a GGUF file are special, and which end the output: llama.cpp's rules.

Converters have often missed to say it, so llama.cpp goes by the texts of tokens, too. Following it gives the same ids
and ends where its users expect. The price: `</s>`, which Qwen's vocabulary has as an ordinary token that its original
tokenizer never uses, is one token here that ends the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastdeploy.core.pieces import PieceKind
from fastdeploy.gguf.vocabulary import Vocabulary

HIDDEN_KINDS = (PieceKind.CONTROL, PieceKind.UNKNOWN)
SPECIAL_KINDS = (*HIDDEN_KINDS, PieceKind.USER_DEFINED)
END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    )
)
"""Tokens that end the output whatever the file says about them."""
_FILL_IN_TEXTS: Mapping[str, str] = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
"""By the key that names such a token: the texts by which it is found in a file without the key."""
_OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_FILE_ENDS = ("fim_pad", "fim_rep", "fim_sep")
_SHOWN_TEXTS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))


def token_kinds(vocabulary: Vocabulary) -> list[PieceKind]:
    """Return the types of the tokens, corrected by their texts.

    Raises:
        ConfigError: the file names a token that it does not have.
    """
    ids, kinds = vocabulary.ids, list(vocabulary.kinds)
    fill_in = {token_id for name in _FILL_IN_TEXTS for token_id in _ids_by_text(vocabulary, name)}
    for token_id in {ids[text] for text in END_TEXTS & ids.keys()} | fill_in:
        kinds[token_id] = PieceKind.CONTROL
    for text in _SHOWN_TEXTS & ids.keys():  # they divide the answers of GPT-OSS, so they are shown
        kinds[ids[text]] = PieceKind.USER_DEFINED
    for text, kind in _not_ends(vocabulary).items():
        kinds[ids[text]] = kind
    return kinds


def end_ids(vocabulary: Vocabulary) -> list[int]:
    """Return the ids of the tokens that end the output.

    These are the tokens that the file names as the end of a text, turn or message, those of `END_TEXTS`, and those
    after which another file begins in a prompt of several files (`fim_pad`, `fim_rep`, `fim_sep`). Unlike in llama.cpp,
    a byte-level file that names no EOS token does not end at token 11, which is that of Falcon.

    Raises:
        ConfigError: the file names a token that it does not have.
    """
    ids = vocabulary.ids
    named = [vocabulary.token_id("eos", None if vocabulary.is_byte_level else 2)]
    named += [vocabulary.token_id(name) for name in ("eot", "eom")]
    found = {token_id for token_id in named if token_id is not None}
    found |= {ids[text] for text in END_TEXTS & ids.keys()}
    for name in _FILE_ENDS:
        by_key = vocabulary.token_id(name)
        found |= set(_ids_by_text(vocabulary, name)) if by_key is None else {by_key}
    return sorted(found - {ids[text] for text in _not_ends(vocabulary)})


def tokens_that_strip(vocabulary: Vocabulary, kinds: Sequence[PieceKind]) -> set[str]:
    """Return the texts of the special tokens that absorb the white space after them: those of models called Phi-3."""
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return set()
    special = {text for text, kind in zip(vocabulary.ids, kinds) if kind in SPECIAL_KINDS}
    return special - {"<unk>", "<s>", "<|endoftext|>"}


def _ids_by_text(vocabulary: Vocabulary, name: str) -> list[int]:
    """Return the ids of the tokens for filling in that only their texts tell; none if the file has the key."""
    keys = [name, _OLD_KEYS[name]] if name in _OLD_KEYS else [name]
    if any(vocabulary.token_id(key) is not None for key in keys):
        return []
    return [vocabulary.ids[text] for text in _FILL_IN_TEXTS[name].split() if text in vocabulary.ids]


def _not_ends(vocabulary: Vocabulary) -> dict[str, PieceKind]:
    """Return the tokens of `END_TEXTS` that do not end the output of some models, with the types that they have.

    These are the end of a message among several of GPT-OSS and Solar, and the tag in the vocabulary of Gemma 4.
    """
    ids = vocabulary.ids
    found = {}
    has_call = "<|call|>" in ids or "<|calls|>" in ids
    if "<|end|>" in ids and has_call and ("<|return|>" in ids or "<|flush|>" in ids):
        found["<|end|>"] = PieceKind.USER_DEFINED
    if "</s>" in ids and "<|tool_response>" in ids:
        found["</s>"] = PieceKind.NORMAL
    return found
