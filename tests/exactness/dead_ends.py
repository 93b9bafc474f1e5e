# SPDX-License-Identifier: Apache-2.0
"""Requests whose grammar and bad words, or allowed ids, allow no token somewhere, and some that end before it."""

from __future__ import annotations

from typing import Any

from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.exactness.requests import HEADS

FORCED = "return value5 and more"
# Grammars that allow no token at some position once all digits are bad words; "stops" and "length" end before it.
DEAD_ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "free": ({"temperature": 0.0}, r"[a-z ]{12}[0-9]"),
    "sampled": ({"seed": 3, "n": 2, "top_p": 0.9}, r"[a-z ]{4,9}[0-9]"),
    "forced": ({"seed": 4, "repetition_penalty": 1.2}, FORCED),
    "logprobs": ({"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}, FORCED),
    "stops": ({"temperature": 0.0, "stop": ["val"], "logprobs": 0}, FORCED),
    "repeats": ({"temperature": 0.0}, r"def mean\(data\):\n    total = 0"),
    "at_once": ({"temperature": 0.0}, r"[0-9]"),
    "not_allowed": ({"temperature": 0.0, "bad_words_token_ids": []}, FORCED),
    "length": ({"temperature": 0.0, "max_tokens": 2}, FORCED),
}


def make_dead_ends(tokenizer: Tokenizer) -> list[GenerationRequest]:
    """Return the requests of DEAD_ENDS."""
    texts = [tokenizer.decode([token_id]) for token_id in range(tokenizer.vocab_size)]
    digits = [[token_id] for token_id, text in enumerate(texts) if any(char.isdigit() for char in text)]
    others = [token_id for token_id in range(len(texts)) if [token_id] not in digits]
    return [
        GenerationRequest(
            name,
            tokenizer.encode(HEADS[i % 4] if name != "repeats" else HEADS[0] * 2),
            SamplingParams(
                **{
                    "max_tokens": 40,
                    "bad_words_token_ids": digits,
                    "allowed_token_ids": others if name == "not_allowed" else None,
                    "guided_decoding": GuidedDecodingParams(regex=regex),
                    **params,
                }
            ),
        )
        for i, (name, (params, regex)) in enumerate(DEAD_ENDS.items())
    ]
