# SPDX-License-Identifier: Apache-2.0
"""How the tokens of one request are chosen and when they end."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams

GREEDY_TEMPERATURE = 1e-5  # below it the choice is the argmax
MAX_STOP_STRINGS = 16
MAX_LISTED = 4096  # every step looks at them, in which all requests share
MAX_LOGPROBS_LIMIT = 20
SEED_MODULUS = 1 << 64


@dataclass
class SpeculativeParams:
    """What one request asks of speculation.

    Attributes:
        method: "off" decodes this request without drafts; None follows the server.
        num_speculative_tokens: most drafts per step, never above the server's; None follows the server.
    """

    method: str | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.method not in (None, "off"):
            raise InvalidRequestError("speculative.method", f'expected "off" or nothing, got {self.method!r}')
        if self.num_speculative_tokens is not None:
            _check_int("speculative.num_speculative_tokens", self.num_speculative_tokens, 0, 16)


@dataclass
class SamplingParams:
    """Parameters of one request; names and ranges are the field's usual ones.

    Attributes:
        n: number of choices, 1..128.
        temperature: 0 (and below 1e-5) is greedy.
        top_p: smallest set of ids whose probability reaches this, (0, 1]; 0 keeps one id.
        top_k: number of largest logits kept; 0 and -1 keep all.
        min_p: least probability relative to the largest, [0, 1].
        presence_penalty, frequency_penalty: [-2, 2], over the output's tokens.
        repetition_penalty: > 0, over prompt and output.
        seed: integer modulo 2**64; None draws one.
        max_tokens: most tokens emitted; None = until the context is full.
        min_tokens: no end token and no stop before so many tokens.
        stop: strings at which the text ends; the string itself is cut unless include_stop_str_in_output.
        stop_token_ids: up to 4096 token ids that end the output, beside the model's end tokens.
        bad_words: up to 4096 strings that are never emitted (tokenised by the front end into bad_words_token_ids).
        bad_words_token_ids: up to 4096 token sequences that are never completed.
        ignore_eos: do not end at the model's end tokens.
        logit_bias: token id -> value added to its logit, [-100, 100].
        logprobs: number of alternatives reported per emitted token, 0..20; None reports nothing.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        visible_token_ids: special tokens that stay in the text all the same: markers that somebody reads there.
        include_stop_str_in_output: keep the stop string in the text.
        truncate_prompt_tokens: keep only the last so many tokens of the prompt; -1: as many as fit the context.
        reasoning_max_tokens: after so many tokens of reasoning its end marker is forced (needs a reasoning parser).
        response_max_tokens: most tokens after the reasoning's end.
        guided_decoding: the form that the output (after the reasoning) must have.
        speculative: what this request asks of speculation.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    visible_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    reasoning_max_tokens: int | None = None
    response_max_tokens: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    speculative: SpeculativeParams | None = None

    def __post_init__(self) -> None:
        """Normalise the convenient spellings (one stop string, None for a default) and check every range."""
        self._normalise()
        _check_int("n", self.n, 1, 128)
        _check_float("temperature", self.temperature, 0.0, 2.0e9)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        if self.seed is not None:
            _check_int("seed", self.seed, -SEED_MODULUS // 2, SEED_MODULUS - 1)
            self.seed %= SEED_MODULUS
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        for name, low in (("reasoning_max_tokens", 0), ("response_max_tokens", 1), ("truncate_prompt_tokens", -1)):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low, 2**31 - 1)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens", "expected -1 or at least 1, got 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")
        self._check_lists()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS_LIMIT)

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for spec in fields(self):
            if getattr(self, spec.name) is None and spec.default is not None:
                fresh = spec.default_factory() if callable(spec.default_factory) else spec.default
                setattr(self, spec.name, fresh)
        if isinstance(self.speculative, dict):
            self.speculative = SpeculativeParams(**self.speculative)
        if isinstance(self.guided_decoding, dict):
            self.guided_decoding = GuidedDecodingParams(**self.guided_decoding)

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for name in ("bad_words", "bad_words_token_ids", "stop_token_ids"):
            if len(getattr(self, name)) > MAX_LISTED:
                raise InvalidRequestError(name, f"at most {MAX_LISTED} entries, got {len(getattr(self, name))}")
        for name in ("stop", "bad_words"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name)):
                raise InvalidRequestError(name, "expected non-empty strings")
        for name in ("stop_token_ids", "visible_token_ids"):
            for token_id in getattr(self, name):
                _check_int(name, token_id, 0, 2**31 - 1)
        if any(len(sequence) == 0 for sequence in self.bad_words_token_ids):
            raise InvalidRequestError("bad_words_token_ids", "expected non-empty lists of token ids")
        for sequence in self.bad_words_token_ids:
            for token_id in sequence:
                _check_int("bad_words_token_ids", token_id, 0, 2**31 - 1)
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0, 2**31 - 1)
            _check_float("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """True when every token is the argmax of its processed logits."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def needs_history(self) -> bool:
        """True when a penalty looks at earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(name, f"expected an integer in [{low}, {high}], got {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(name, f"expected an integer in [{low}, {high}], got {value}")


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(name, f"expected a number in [{low:g}, {high:g}], got {value!r}")
    if not low <= value <= high:  # also refuses NaN
        raise InvalidRequestError(name, f"expected a number in [{low:g}, {high:g}], got {value}")
