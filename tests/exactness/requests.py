# SPDX-License-Identifier: Apache-2.0
"""Sixteen requests that together use every sampling parameter and every way to finish, on real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from fastdeploy.core.outputs import ErrorInfo, TokenDelta, TokenLogprobs
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine

HEADS = (
    "def mean(data):\n    total = 0\n    for value in data:\n        total += value\n    return total\n\n\ndef ",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def ",
    "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv:\n        ",
    "x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\ny = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\nz = [1, 2, 3, 4, ",
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "seed": 12, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.2, "seed": 13, "min_p": 0.05, "logprobs": 25, "logprob_token_ids": [5, 300, 4000]},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "seed": 14, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0.0, "min_tokens": 13, "wanted_stop": "return"},
    {"temperature": 0.0, "stop_string_at": 9},
    {"temperature": 0.9, "seed": 15, "stop_string_at": 14, "include_stop_str_in_output": True},
    {"temperature": 0.0, "bad_pair_at": 9},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 16, "n": 2, "top_p": 0.95, "not_allowed_at": 5},
    {"temperature": 0.0, "logit_bias_of": "data"},
    {"temperature": 1.0, "seed": 17, "repetition_penalty": 1.1, "top_k": 5, "frequency_penalty": -0.3},
    {"temperature": 1.0, "seed": 18, "stop_token_at": 11},
    {"temperature": 0.0, "max_tokens": 3},
)
PREFILL_ONLY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 0, "prompt_logprobs": 2}
"""A variant without output."""


@dataclass(frozen=True)
class Text:
    """The output of one choice: everything that must not depend on how it was computed."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[tuple[Any, ...], ...] | None
    prompt_logprobs: tuple[Any, ...] | None
    error: ErrorInfo | None = None


def make_requests(
    tokenizer: Tokenizer,
    plain_engine: Engine,
    max_tokens: int = 40,
    prompts: Sequence[list[int]] = (),
    variants: Sequence[dict[str, Any]] = VARIANTS,
) -> list[GenerationRequest]:
    """Return the requests r0 .. r15; their stops and bad words are tokens that the model emits without them.

    Args:
        prompts: used in turn; those of HEADS if there are none.
    """
    prompts = prompts or [tokenizer.encode(head) for head in HEADS]
    requests = []
    for i, variant in enumerate(variants):
        params = {"max_tokens": max_tokens, "ignore_eos": True, **variant}
        derived = {name: params.pop(name) for name in DERIVED if name in params}
        request = GenerationRequest(f"r{i}", list(prompts[i % len(prompts)]), SamplingParams(**params))
        if derived:
            tokens = run_all(plain_engine, [request])[f"r{i}", 0].token_ids
            values = {key: value for name, at in derived.items() for key, value in DERIVED[name](tokenizer, tokens, at)}
            request = replace(request, params=replace(request.params, **values))
        requests.append(request)
    return requests


def prompts_of_lengths(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    """Return prompts of exactly so many tokens, each of which begins with another of HEADS."""
    prompts = []
    for i, length in enumerate(lengths):
        first = i % len(HEADS)
        text = "\n".join((*HEADS[first:], *HEADS[:first])) + "\n"
        prompts.append(tokenizer.encode(text * (1 + 4 * length // len(text)))[:length])
    return prompts


def _first_token(tokenizer: Tokenizer, text: str) -> int:
    return tokenizer.encode(text, add_special_tokens=False)[0]


def _across_tokens(tokenizer: Tokenizer, tokens: Sequence[int], at: int) -> str:
    """Return the last character before token `at` and its first one: a string that spans two tokens."""
    before, after = tokenizer.decode(tokens[:at]), tokenizer.decode(tokens[: at + 1])
    return before[-1] + after[len(before)]


# A derived parameter, from the tokens emitted without it and its value in VARIANTS.
DERIVED: dict[str, Callable[[Tokenizer, Sequence[int], Any], list[tuple[str, Any]]]] = {
    "stop_string_at": lambda tokenizer, tokens, at: [("stop", [_across_tokens(tokenizer, tokens, at)])],
    "stop_token_at": lambda _, tokens, at: [("stop_token_ids", [tokens[at]])],
    "not_allowed_at": lambda tokenizer, tokens, at: [
        ("allowed_token_ids", [token_id for token_id in range(tokenizer.vocab_size) if token_id != tokens[at]])
    ],
    "bad_pair_at": lambda _, tokens, at: [("bad_words_token_ids", [list(tokens[at : at + 2])])],
    "logit_bias_of": lambda tokenizer, _, text: [("logit_bias", {_first_token(tokenizer, text): 5.0})],
    # a stop token that is sampled at every position: the text must end exactly where min_tokens allows it
    "wanted_stop": lambda tokenizer, _, text: [
        ("stop_token_ids", [_first_token(tokenizer, text)]),
        ("logit_bias", {_first_token(tokenizer, text): 100.0}),
    ],
}


def run_all(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[tuple[str, int], Text]:
    """Run the requests together; return the output of each choice."""
    deltas: dict[tuple[str, int], list[TokenDelta]] = {}
    for delta in chain(_add(engine, requests), _step(engine)):
        deltas.setdefault((delta.request_id, delta.index), []).append(delta)
    engine.check_integrity()
    return {key: join(parts) for key, parts in deltas.items()}


def _add(engine: Engine, requests: Sequence[GenerationRequest]) -> Iterator[TokenDelta]:
    for request in requests:
        yield from engine.add_request(request)


def _step(engine: Engine) -> Iterator[TokenDelta]:
    while engine.has_unfinished():
        yield from engine.step()


def run_alone(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[tuple[str, int], Text]:
    """Run the requests one after the other."""
    texts: dict[tuple[str, int], Text] = {}
    for request in requests:
        texts.update(run_all(engine, [request]))
    return texts


def join(deltas: Sequence[TokenDelta]) -> Text:
    """Return the output of a choice from its deltas."""
    last = deltas[-1]
    logprobs = [_flat(entry) for delta in deltas for entry in delta.logprobs or ()]
    prompts = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert len(prompts) <= 1
    return Text(
        tuple(token for delta in deltas for token in delta.token_ids),
        last.finish_reason,
        last.stop_reason,
        None if deltas[0].logprobs is None else tuple(logprobs),
        tuple(_flat(entry) for entry in prompts[0][1:] if entry) if prompts else None,
        last.error,
    )


def _flat(entry: TokenLogprobs) -> tuple[Any, ...]:
    return entry.token_id, entry.logprob, entry.rank, tuple(entry.top), tuple(entry.requested)
