# SPDX-License-Identifier: Apache-2.0
"""Builds and validates a `GenerationRequest` from a prompt and sampling parameters, for `LLM` and the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fastdeploy.core.errors import ContextLengthError, InvalidRequestError
from fastdeploy.core.faults import fault_point
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams, check_bad_word_ids
from fastdeploy.detokenize.tokenizer import Tokenizer

LENGTH_SLACK = 4


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the model: `max_model_len` tokens of prompt and output, token ids below `vocab_size`."""

    max_model_len: int
    vocab_size: int


def build_request(
    tokenizer: Tokenizer,
    limits: RequestLimits,
    request_id: str,
    prompt: str | Sequence[int],
    params: SamplingParams,
    add_special_tokens: bool = True,
    field: str = "prompt",
) -> GenerationRequest:
    """Encode a prompt, truncate it if `params` require it, and check the request.

    The result has a copy of `params`, with `bad_words` tokenized into `bad_words_token_ids`.

    Args:
        prompt: text, or token ids.
        field: name of the prompt in errors.

    Raises:
        InvalidRequestError: the prompt is empty or too long, the bad words have too many ids, or a token id is not in
            the vocabulary.
    """
    fault_point("tokenise", request_id)
    if isinstance(prompt, str):
        if params.truncate_prompt_tokens is None:
            check_text_length(field, prompt, tokenizer, limits.max_model_len)
        token_ids = tokenizer.encode(prompt, add_special_tokens)
    else:
        token_ids = list(prompt)
        check_token_ids(field, token_ids, limits.vocab_size)
    token_ids = truncate_prompt(token_ids, params, limits.max_model_len)
    check_prompt_length(field, token_ids, limits.max_model_len)
    check_min_tokens(len(token_ids), params.min_tokens, limits.max_model_len)
    bad_words = [*params.bad_words_token_ids, *tokenize_bad_words(tokenizer, params.bad_words)]
    check_bad_word_ids("bad_words" if params.bad_words else "bad_words_token_ids", bad_words)
    check_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    check_token_ids("logit_bias", params.logit_bias, limits.vocab_size)
    for sequence in bad_words:
        check_token_ids("bad_words_token_ids", sequence, limits.vocab_size)
    fault_point("build", request_id)
    return GenerationRequest(request_id, token_ids, replace(params, bad_words_token_ids=bad_words))


def truncate_prompt(token_ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Return the last `truncate_prompt_tokens` tokens; for -1, as many as leave room for `max_tokens` (1 if unset)."""
    if params.truncate_prompt_tokens is None:
        return token_ids
    room = max(1, max_model_len - (params.max_tokens or 1))
    return token_ids[-(room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens) :]


def check_text_length(field: str, text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Raise ContextLengthError for a text that cannot fit into the context, without encoding it.

    Encoding megabytes would take seconds. The slack is for normalizers, and for tokens that absorb white space around
    them. In vocabularies that are not byte-level, a token may stand for a text of any length.
    """
    if tokenizer.is_byte_level and len(text) > LENGTH_SLACK * tokenizer.max_token_length * max_model_len:
        raise ContextLengthError(
            field, f"expected 1 to {max_model_len - 1} tokens, got a text of {len(text)} characters"
        )


def check_prompt_length(field: str, token_ids: Sequence[int], max_model_len: int) -> None:
    """Raise InvalidRequestError unless 1 <= number of prompt tokens < max_model_len."""
    if not 1 <= len(token_ids) < max_model_len:
        error = ContextLengthError if token_ids else InvalidRequestError
        raise error(
            field,
            f"expected 1 to {max_model_len - 1} tokens (max_model_len {max_model_len} minus one output token), "
            f"got {len(token_ids)}",
        )


def check_min_tokens(num_prompt: int, min_tokens: int, max_model_len: int) -> None:
    """Raise InvalidRequestError if the context ends before `min_tokens` tokens are emitted."""
    if num_prompt + min_tokens > max_model_len:
        raise InvalidRequestError(
            "min_tokens",
            f"expected at most {max_model_len - num_prompt}, which the prompt leaves of the context, got {min_tokens}",
        )


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequestError unless every id is an integer in [0, vocab_size)."""
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(field, f"expected token ids in [0, {vocab_size - 1}], got {token_id!r}")


def tokenize_bad_words(tokenizer: Tokenizer, bad_words: Iterable[str]) -> list[list[int]]:
    """Return the token sequences of each word, at the start of a text and after a space.

    A sequence that ends with another one of the same word is omitted, because the shorter one already forbids it.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        spellings: list[list[int]] = []
        for text in (word, " " + word.lstrip(" ")):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if token_ids and not any(token_ids[-len(shorter) :] == shorter for shorter in spellings):
                spellings.append(token_ids)
        sequences.update(dict.fromkeys(map(tuple, spellings)))
    return [list(token_ids) for token_ids in sequences]
