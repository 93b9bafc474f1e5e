# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters: how the tokens of one request are sampled, when its output ends, and the range of each value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams, StructuredOutputsParams
from fastdeploy.core.json_types import check_unicode, shorten, to_integer, to_integers, to_list, to_number
from fastdeploy.core.keywords import Absent, suggest_keywords

GREEDY_TEMPERATURE = 1e-5  # lower temperatures are greedy
SEED_MODULUS = 1 << 64
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """The values that a number may have, both ends included: integers if `low` is one; `high` None has no end."""

    low: int | float
    high: int | float | None

    @property
    def is_integer(self) -> bool:
        """True if only integers are allowed."""
        return isinstance(self.low, int)

    def read(self, name: str, value: Any) -> Any:
        """Return a value as an int or a float, a whole number as an int if the range has integers; raise as `check`."""
        value = to_integer(value) if self.is_integer else to_number(value)
        self.check(name, value)
        return value

    def check(self, name: str, value: Any) -> None:
        """Check a value.

        Raises:
            InvalidRequestError: it has another type or is outside the range; names `name`.
        """
        is_number = isinstance(value, int if self.is_integer else (int, float)) and not isinstance(value, bool)
        if is_number and self.low <= value and (self.high is None or value <= self.high):  # refuses NaN as well
            return
        raise InvalidRequestError(name, f"expected {self}, got {shorten(value)}")

    def __str__(self) -> str:
        kind, spec = ("an integer", "d") if self.is_integer else ("a number", "g")
        if self.high is None:
            return f"{kind} of at least {self.low:{spec}}"
        return f"{kind} in [{self.low:{spec}}, {self.high:{spec}}]"


RANGES: dict[str, Range] = {
    "n": Range(1, 128),
    "temperature": Range(0.0, 2.0e9),
    "top_p": Range(0.0, 1.0),
    "top_k": Range(-1, _INT32_MAX),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(1e-6, 1e6),
    "seed": Range(-SEED_MODULUS // 2, SEED_MODULUS - 1),
    "max_tokens": Range(0, _INT32_MAX),
    "min_tokens": Range(0, _INT32_MAX),
    "reasoning_max_tokens": Range(0, _INT32_MAX),
    "response_max_tokens": Range(1, _INT32_MAX),
    "truncate_prompt_tokens": Range(-1, _INT32_MAX),
    "logprobs": Range(-1, _INT32_MAX),
    "prompt_logprobs": Range(-1, _INT32_MAX),
}
"""Parameter -> its range; the HTTP API documents the same table."""

MAX_LOGPROBS = 20
"""Maximum number of alternatives per token, unless `max_logprobs` is set."""
MAX_LOGPROB_ENTRIES = 2**22
"""Maximum number of log-probabilities in one answer, unless `max_logprob_entries` is set."""
MAX_BAD_WORD_IDS = 16384
"""Maximum number of token ids in all bad words of a request, those of `bad_words` included."""
MAX_ITEMS: dict[str, int] = {
    "stop": 16,
    "bad_words": 4096,
    "bad_words_token_ids": MAX_BAD_WORD_IDS,
    "stop_token_ids": 4096,
    "allowed_token_ids": 1 << 18,
    "logprob_token_ids": 128,
}
"""Parameter -> the maximum length of its list."""
MAX_BAD_WORDS_LENGTH = 4 * MAX_BAD_WORD_IDS
"""Maximum length of all `bad_words` of a request in characters, each of which is tokenized twice."""
MAX_STOP_LENGTH = 1024
"""Maximum length of a stop string in characters, all of which a stream may have to hold back."""

OUTPUT_LENGTHS = Range(1, _INT32_MAX)
"""`max_tokens` of a request with output."""
TRUNCATION_SIDES = ("left", "right")

TOKEN_IDS = Range(0, _INT32_MAX)
PRIORITIES = Range(-(2**31), _INT32_MAX)
LOGIT_BIASES = Range(-100.0, 100.0)
NUM_SPECULATIVE_TOKENS = Range(0, 16)


MATCH = "match"  # method of requests that draft by matching only


@dataclass
class SpeculativeParams:
    """Speculation settings of one request.

    Attributes:
        method: "off" decodes this request without drafts, "match" drafts by matching only, without passes of a drafting
            model; None is the server's setting.
        num_speculative_tokens: maximum number of drafts per step, never above the server's; None is the server's.
    """

    method: str | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.method not in (None, "off", MATCH):
            message = f'expected "off", "{MATCH}" or nothing, got {shorten(self.method)}'
            raise InvalidRequestError("speculative.method", message)
        if self.num_speculative_tokens is not None:
            self.num_speculative_tokens = NUM_SPECULATIVE_TOKENS.read(
                "speculative.num_speculative_tokens", self.num_speculative_tokens
            )


_NO_BEAM_SEARCH = "beam search is not supported"
_OF_PROMPT_IDS = "use prompt_logprobs; -1 reports every token id at each position of the prompt (LLM(max_logprobs=-1))"
_FOREIGN: Absent = {
    "best_of": ("all choices are returned; use n", ()),
    "use_beam_search": (_NO_BEAM_SEARCH, (False,)),
    "length_penalty": (_NO_BEAM_SEARCH, (1.0,)),
    "early_stopping": (_NO_BEAM_SEARCH, (False,)),
    "thinking_token_budget": ("use reasoning_max_tokens", (-1,)),
    "logits_processors": ("use logit_bias, bad_words or allowed_token_ids", ([],)),
    "repetition_detection": ("use repetition_penalty or frequency_penalty", ()),
    "spaces_between_special_tokens": ("texts are decoded as the tokenizer writes them", (True,)),
    "flat_logprobs": ("leave it out; each position of the log-probabilities is a mapping by token id", (False,)),
    "prompt_logprob_token_ids": (_OF_PROMPT_IDS, ()),
    "prompt_logprob_start": (_OF_PROMPT_IDS, (0,)),
    "output_kind": ("use the argument `stream` of generate or chat", ()),
    "stream_interval": ("generate and chat with `stream` yield a result after each step", (1,)),
    "skip_reading_prefix_cache": ("use a `cache_salt` of its own in the prompt", (False,)),
    "skip_clone": ("parameters are never changed", (False, True)),
    "watermarking": ("texts have no watermark", (False,)),
    "routed_experts_prompt_start": ("the experts of a token are not reported", (0,)),
    "extra_args": ("there are no plug-ins that read it", ({},)),
}
"""Arguments of vLLM that do not exist here."""


@suggest_keywords(_FOREIGN)
@dataclass
class SamplingParams:
    """Sampling parameters of one request, under the names that vLLM and OpenAI use. `RANGES` holds the ranges.

    Attributes:
        n: number of choices.
        temperature: 0, or anything below 1e-5, is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this value; 0 keeps one token.
        top_k: number of largest logits to keep; 0 and -1 keep all.
        min_p: minimum probability relative to that of the most probable token.
        presence_penalty, frequency_penalty: penalties over the tokens of the output.
        repetition_penalty: penalty over the tokens of prompt and output.
        seed: seed of the random numbers, modulo 2**64; None draws one.
        max_tokens: maximum number of output tokens; None is limited by the context only. 0 computes the prompt and
            emits no token, which fills the prefix cache and gives `prompt_logprobs`; n is 1 then.
        min_tokens: minimum number of output tokens before an end token or a stop.
        stop: strings of at most `MAX_STOP_LENGTH` characters at which the text ends; they are left out unless
            include_stop_str_in_output.
        stop_token_ids: token ids that end the output, in addition to the model's end tokens.
        bad_words: strings that are never emitted, at most `MAX_BAD_WORDS_LENGTH` characters in all; the front end
            tokenizes them into bad_words_token_ids.
        bad_words_token_ids: token sequences that are never completed, at most `MAX_BAD_WORD_IDS` ids in all.
        allowed_token_ids: the only token ids that may be emitted, end tokens included; the end marker of reasoning is
            forced all the same when `reasoning_max_tokens` is reached. None allows all.
        ignore_eos: do not end at the model's end tokens.
        logit_bias: token id -> value added to its logit.
        logprobs: number of alternatives reported per output token; None reports nothing, -1 the whole vocabulary. The
            flags max_logprobs and max_logprob_entries limit both this and prompt_logprobs.
        prompt_logprobs: the same for the tokens of the prompt.
        logprob_token_ids: token ids that are reported per output token beside the alternatives; `logprobs` is 0 then if
            it is not given.
        detokenize: make the text of the output; False leaves it empty and allows no `stop` (offline only).
        skip_special_tokens: leave special tokens out of the text.
        visible_token_ids: special tokens that stay in the text all the same, such as the markers of tool calls.
        include_stop_str_in_output: keep the stop string in the text.
        truncate_prompt_tokens: keep only this many of the last prompt tokens; -1 keeps as many as fit the context.
        truncation_side: the side that truncate_prompt_tokens cuts off; `right` keeps the first tokens. None is `left`.
        reasoning_max_tokens: number of reasoning tokens after which the end marker is forced.
        response_max_tokens: maximum number of tokens after the end of the reasoning.
        structured_outputs: constraint on the output (after the reasoning).
        guided_decoding: an earlier name of `structured_outputs`; at most one of the two is set.
        speculative: speculation settings of this request.
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
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] = field(default_factory=list)
    detokenize: bool = True
    skip_special_tokens: bool = True
    visible_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    reasoning_max_tokens: int | None = None
    response_max_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: GuidedDecodingParams | None = None
    speculative: SpeculativeParams | None = None

    def __post_init__(self) -> None:
        """Convert shorthand values (a single stop string, None for a default) and check every range."""
        self._convert_shorthands()
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, allowed.read(name, value))
        if self.seed is not None:
            self.seed %= SEED_MODULUS
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens", "expected -1 or at least 1, got 0")
        self._check_truncation_side()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise InvalidRequestError("detokenize", "must be true with stop strings, which are found in the text")
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise InvalidRequestError("guided_decoding", "cannot be combined with structured_outputs; set one of them")
        if self.max_tokens == 0 and self.n != 1:
            raise InvalidRequestError("n", f"expected 1 with max_tokens 0, got {self.n}")
        if self.max_tokens == 0 and self.logprob_token_ids:
            raise InvalidRequestError("logprob_token_ids", "needs output tokens, but max_tokens is 0")
        self._check_lists()
        self._check_texts()

    def _convert_shorthands(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default() if callable(default) else default)
        self._convert_lists()
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = 0
        if isinstance(self.speculative, dict):
            self.speculative = SpeculativeParams(**self.speculative)
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams.from_fields("structured_outputs", self.structured_outputs)
        if isinstance(self.guided_decoding, dict):
            self.guided_decoding = GuidedDecodingParams(**self.guided_decoding)

    def _convert_lists(self) -> None:
        for name in (*MAX_ITEMS, "visible_token_ids"):
            value = getattr(self, name)
            if type(value) is not list and value is not None:
                expected = "expected a text or a list of texts" if name == "stop" else "expected a list"
                setattr(self, name, to_list(name, value, expected))
        if not isinstance(self.logit_bias, Mapping):
            expected = f"expected a mapping of token ids to numbers, got {shorten(self.logit_bias)}"
            raise InvalidRequestError("logit_bias", expected)

    def _check_truncation_side(self) -> None:
        if self.truncation_side is None:
            return
        if self.truncation_side not in TRUNCATION_SIDES:
            expected = " or ".join(TRUNCATION_SIDES)
            raise InvalidRequestError("truncation_side", f"expected {expected}, got {shorten(self.truncation_side)}")
        if self.truncate_prompt_tokens is None:
            raise InvalidRequestError("truncation_side", "needs truncate_prompt_tokens")

    def _check_lists(self) -> None:
        for name, maximum in MAX_ITEMS.items():
            items = getattr(self, name) or ()
            if len(items) > maximum:
                kind = "strings" if name == "stop" else "entries"
                raise InvalidRequestError(name, f"at most {maximum} {kind}, got {len(items)}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids", "expected at least one token id; leave it out to allow all")
        for name in ("stop_token_ids", "visible_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if getattr(self, name):
                setattr(self, name, to_integers(getattr(self, name)))
                _check_token_ids(name, getattr(self, name))
        self.bad_words_token_ids = [
            to_integers(to_list("bad_words_token_ids", sequence, "expected lists of token ids"))
            for sequence in self.bad_words_token_ids
        ]
        check_bad_word_ids("bad_words_token_ids", self.bad_words_token_ids)
        if any(len(sequence) == 0 for sequence in self.bad_words_token_ids):
            raise InvalidRequestError("bad_words_token_ids", "expected non-empty lists of token ids")
        for sequence in self.bad_words_token_ids:
            for token_id in sequence:
                TOKEN_IDS.check("bad_words_token_ids", token_id)
        self.logit_bias = {
            TOKEN_IDS.read("logit_bias", token_id): LOGIT_BIASES.read("logit_bias", bias)
            for token_id, bias in self.logit_bias.items()
        }

    def _check_texts(self) -> None:
        for name in ("stop", "bad_words"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name)):
                raise InvalidRequestError(name, "expected non-empty strings")
            for text in getattr(self, name):
                check_unicode(name, text)
        length = sum(map(len, self.bad_words))
        if length > MAX_BAD_WORDS_LENGTH:
            raise InvalidRequestError(
                "bad_words", f"at most {MAX_BAD_WORDS_LENGTH} characters in all strings, got {length}"
            )
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_LENGTH:
            raise InvalidRequestError("stop", f"expected strings of 1 to {MAX_STOP_LENGTH} characters, got {longest}")

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The constraint on the output, None if there is none."""
        return self.structured_outputs or self.guided_decoding

    def without_form(self) -> SamplingParams:
        """Return a copy that does not constrain the output."""
        return replace(self, structured_outputs=None, guided_decoding=None)

    @property
    def is_greedy(self) -> bool:
        """True if every token is the argmax of its processed logits."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def needs_history(self) -> bool:
        """True if a penalty depends on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_token_ids(name: str, token_ids: Collection[int]) -> None:
    if not token_ids or (set(map(type, token_ids)) == {int} and 0 <= min(token_ids) <= max(token_ids) <= _INT32_MAX):
        return  # one by one takes five times as long
    for token_id in token_ids:
        TOKEN_IDS.check(name, token_id)


def check_bad_word_ids(name: str, sequences: Collection[Sequence[int]]) -> None:
    """Check the number of ids in all bad words of a request.

    Raises:
        InvalidRequestError: there are more than MAX_BAD_WORD_IDS; names `name`.
    """
    num_ids = sum(map(len, sequences))
    if num_ids > MAX_BAD_WORD_IDS:
        raise InvalidRequestError(name, f"at most {MAX_BAD_WORD_IDS} token ids in all sequences, got {num_ids}")


_DEFAULTS = {
    spec.name: spec.default if spec.default is not MISSING else spec.default_factory
    for spec in fields(SamplingParams)
    if spec.default is not None
}
"""Parameter -> its default, or the function that makes it, where that is not None."""
