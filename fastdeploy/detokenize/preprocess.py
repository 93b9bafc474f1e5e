# SPDX-License-Identifier: Apache-2.0
"""Builds and validates a `GenerationRequest` from a prompt and sampling parameters, for `LLM` and the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from fastdeploy.core.errors import ContextLengthError, InvalidRequestError
from fastdeploy.core.faults import fault_point
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.json_types import check_unicode, shorten, to_integers
from fastdeploy.core.sampling_params import MAX_LOGPROB_ENTRIES, SamplingParams, check_bad_word_ids
from fastdeploy.detokenize.tokenizer import Tokenizer

TRUNCATED_FACTOR = 8  # a prompt that is truncated may have so many times the limit of others
MAX_LONG_TEXT_LENGTH = 2**21  # characters of texts that need not fit the context, unless others may have more


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the model, and of log-probabilities.

    Attributes:
        max_model_len: tokens of prompt and output.
        vocab_size: token ids are below it.
        max_logprob_entries: log-probabilities in one answer.
        model_context: the model's own limit of `max_model_len`; 0 if it is not known.
    """

    max_model_len: int
    vocab_size: int
    max_logprob_entries: int = MAX_LOGPROB_ENTRIES
    model_context: int = 0

    @property
    def context(self) -> str:
        """The flag that limits the context, and the model's own limit, for messages."""
        own = f" of the model's {self.model_context}" if self.model_context else ""
        return f"--max-model-len {self.max_model_len}{own}"


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

    The result has a copy of `params`, as `prepare_params` returns it.

    Args:
        prompt: text, or token ids.
        field: name of the prompt in errors.

    Raises:
        InvalidRequestError: the prompt is empty, too long or not valid Unicode, the bad words have too many ids, or a
            token id is not in the vocabulary.
    """
    prepared = prepare_params(tokenizer, limits, params)
    return build_prepared_request(tokenizer, limits, request_id, prompt, prepared, add_special_tokens, field)


def build_prepared_request(
    tokenizer: Tokenizer,
    limits: RequestLimits,
    request_id: str,
    prompt: str | Sequence[int],
    params: SamplingParams,
    add_special_tokens: bool,
    field: str,
) -> GenerationRequest:
    """Build a request as `build_request` does, from the result of `prepare_params`, which several prompts may share."""
    fault_point("tokenise", request_id)
    if isinstance(prompt, str):
        is_truncated = params.truncate_prompt_tokens is not None
        limit = max_text_length(tokenizer, limits.max_model_len, is_truncated)
        check_text(field, prompt, tokenizer, limit, None if is_truncated else limits)
        token_ids = tokenizer.encode(prompt, add_special_tokens, field)
    else:
        token_ids = to_integers(prompt)
        check_token_ids(field, token_ids, limits.vocab_size)
    token_ids = truncate_prompt(token_ids, params, limits.max_model_len)
    check_prompt_length(field, token_ids, limits)
    check_min_tokens(len(token_ids), params.min_tokens, limits.max_model_len)
    fault_point("build", request_id)
    return GenerationRequest(request_id, token_ids, params)


def prepare_params(tokenizer: Tokenizer, limits: RequestLimits, params: SamplingParams) -> SamplingParams:
    """Return a copy of `params` with `bad_words` tokenized into `bad_words_token_ids`.

    Raises:
        InvalidRequestError: the bad words have too many ids, or a token id is not in the vocabulary.
    """
    bad_words = [*params.bad_words_token_ids, *tokenize_bad_words(tokenizer, params.bad_words)]
    check_bad_word_ids("bad_words" if params.bad_words else "bad_words_token_ids", bad_words)
    check_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    check_token_ids("logit_bias", params.logit_bias, limits.vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), limits.vocab_size)
    check_token_ids("logprob_token_ids", params.logprob_token_ids, limits.vocab_size)
    for sequence in bad_words:
        check_token_ids("bad_words_token_ids", sequence, limits.vocab_size)
    prepared = copy(params)  # `replace` would check everything again
    prepared.bad_words_token_ids = bad_words
    return prepared


def truncate_prompt(token_ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Return the last `truncate_prompt_tokens` tokens; for -1, as many as leave room for `max_tokens`, at least 1.

    With `truncation_side` right, it is the first tokens.
    """
    if params.truncate_prompt_tokens is None:
        return token_ids
    num_output = 1 if params.max_tokens is None else max(1, params.max_tokens)
    room = max(1, max_model_len - num_output)
    length = room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
    return token_ids[:length] if params.truncation_side == "right" else token_ids[-length:]


def max_text_length(tokenizer: Tokenizer, max_model_len: int, is_truncated: bool = False) -> int:
    """Return the maximum length of the text of a prompt in characters; one that is truncated may be longer."""
    limit = tokenizer.max_text_length(max_model_len)
    return max(limit, min(TRUNCATED_FACTOR * limit, MAX_LONG_TEXT_LENGTH)) if is_truncated else limit


def check_text(field: str, text: str, tokenizer: Tokenizer, limit: int, limits: RequestLimits | None = None) -> None:
    """Check a text before it is tokenized, which would take seconds and gigabytes for many megabytes.

    Args:
        limit: maximum length in characters (`Tokenizer.text_length`).
        limits: with the context that the text must fit, if it must.

    Raises:
        ContextLengthError: it is longer than `limit`.
        InvalidRequestError: it is not valid Unicode.
    """
    length = len(text)
    if length <= limit:
        length = tokenizer.text_length(text)
    if length > limit:
        tokens, flag = "", ""
        if limits is not None:
            tokens, flag = f"1 to {limits.max_model_len - 1} tokens, which have ", f" ({limits.context})"
        raise ContextLengthError(field, f"expected {tokens}at most {limit} characters{flag}, got {length}")
    check_unicode(field, text)


def check_prompt_length(field: str, token_ids: Sequence[int], limits: RequestLimits) -> None:
    """Raise InvalidRequestError unless 1 <= number of prompt tokens < max_model_len."""
    if not 1 <= len(token_ids) < limits.max_model_len:
        error = ContextLengthError if token_ids else InvalidRequestError
        raise error(
            field,
            f"expected 1 to {limits.max_model_len - 1} tokens ({limits.context}, minus one output token), "
            f"got {len(token_ids)}",
        )


def check_min_tokens(num_prompt: int, min_tokens: int, max_model_len: int) -> None:
    """Raise InvalidRequestError if the context ends before `min_tokens` tokens are emitted."""
    if num_prompt + min_tokens > max_model_len:
        raise InvalidRequestError(
            "min_tokens",
            f"expected at most {max_model_len - num_prompt}, which the prompt leaves of the context, got {min_tokens}",
        )


def check_num_alternatives(field: str, value: int | None, max_logprobs: int) -> None:
    """Raise InvalidRequestError unless a request may ask for so many alternatives per token; -1 is the vocabulary."""
    if value is not None and max_logprobs != -1 and not 0 <= value <= max_logprobs:
        raise InvalidRequestError(field, f"expected an integer in [0, {max_logprobs}] (--max-logprobs), got {value}")


def check_num_logprobs(
    limits: RequestLimits, requests: Iterable[GenerationRequest], prompt_field: str, output_field: str, num_copies: int
) -> None:
    """Check how many log-probabilities the answer to some requests may have: one more per token than alternatives.

    Args:
        prompt_field, output_field: the fields that ask for those of the prompt and of the output.
        num_copies: number of choices of each prompt that carry those of the prompt.

    Raises:
        InvalidRequestError: there are more than `max_logprob_entries`; names the field that asks for more of them.
    """
    num_in_prompts = num_in_outputs = 0
    for request in requests:
        params, num_prompt = request.params, len(request.prompt_token_ids)
        room = limits.max_model_len - num_prompt
        num_output = room if params.max_tokens is None else min(room, params.max_tokens)
        num_in_prompts += num_prompt * num_copies * _entries_per_token(params.prompt_logprobs, limits.vocab_size)
        num_per_token = _entries_per_token(params.logprobs, limits.vocab_size) + len(params.logprob_token_ids)
        num_in_outputs += num_output * params.n * num_per_token
    count = num_in_prompts + num_in_outputs
    if count > limits.max_logprob_entries:
        field = prompt_field if num_in_prompts > num_in_outputs else output_field
        expected = f"expected at most {limits.max_logprob_entries} log-probabilities in the answer"
        raise InvalidRequestError(
            field,
            f"{expected} (--max-logprob-entries), got up to {count}; "
            "fewer alternatives, choices or max_tokens have less",
        )


def _entries_per_token(num_alternatives: int | None, vocab_size: int) -> int:
    if num_alternatives is None:
        return 0
    return 1 + (vocab_size if num_alternatives < 0 else min(num_alternatives, vocab_size))


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequestError unless every id is an integer in [0, vocab_size)."""
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(field, f"expected token ids in [0, {vocab_size - 1}], got {shorten(token_id)}")


def tokenize_bad_words(tokenizer: Tokenizer, bad_words: Iterable[str]) -> list[list[int]]:
    """Return the token sequences of each word, at the start of a text and after a space.

    A sequence that ends with another one of the same word is omitted, because the shorter one already forbids it.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(bad_words):
        spellings: list[list[int]] = []
        for text in (word, " " + word.lstrip(" ")):
            token_ids = tokenizer.encode(text, False, "bad_words")
            if token_ids and not any(token_ids[-len(shorter) :] == shorter for shorter in spellings):
                spellings.append(token_ids)
        sequences.update(dict.fromkeys(map(tuple, spellings)))
    return [list(token_ids) for token_ids in sequences]
