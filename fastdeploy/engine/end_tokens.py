# SPDX-License-Identifier: Apache-2.0
"""End tokens of a model: what its tokenizer, generation_config.json and config.json name together."""

from __future__ import annotations

import logging

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.detokenize.tokenizer import Tokenizer

logger = logging.getLogger("fastdeploy.engine")


def find_eos_token_ids(config: ModelConfig, tokenizer: Tokenizer | None, vocab_limit: int) -> list[int]:
    """Return the ids that end an output, sorted.

    A fine-tuned model often names its end token in one of the files only, so the union counts. Of config.json, whose
    ids may be the defaults of another vocabulary, an id that the tokenizer holds as ordinary text does not count unless
    another file names it. Ids beyond the vocabulary are never sampled and do not count either; one line of the log
    lists what does not count.

    Args:
        vocab_limit: number of ids that both the model and the tokenizer have.
    """
    named = set(config.generation_eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        named.add(tokenizer.eos_token_id)
    ordinary = {token_id for token_id in config.eos_token_ids if _is_ordinary_text(tokenizer, token_id)} - named
    beyond = {token_id for token_id in named.union(config.eos_token_ids) if token_id >= vocab_limit}
    _log_left_out("are not in the vocabulary", beyond)
    _log_left_out("are ordinary text in the tokenizer and named by config.json alone", ordinary - beyond)
    return sorted(named.union(config.eos_token_ids) - ordinary - beyond)


def _is_ordinary_text(tokenizer: Tokenizer | None, token_id: int) -> bool:
    return tokenizer is not None and tokenizer.has_token(token_id) and token_id not in tokenizer.special_ids


def _log_left_out(reason: str, token_ids: set[int]) -> None:
    if token_ids:
        logger.warning("eos_token_id: %s %s and end no output", ", ".join(map(str, sorted(token_ids))), reason)
