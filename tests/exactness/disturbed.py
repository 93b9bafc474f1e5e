# SPDX-License-Identifier: Apache-2.0
"""Batches in which some requests are refused, fail, are aborted or run out of time, and what the others emit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from fastdeploy.core.errors import RequestFailedError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import INTERNAL_ERROR, Engine
from fastdeploy.hub.model_path import resolve_model_path
from tests.doubles import ManualClock
from tests.exactness.dead_ends import make_dead_ends
from tests.exactness.engines import METHODS, Texts, build, config, configured, proposer_of, use_adaptive_length
from tests.exactness.requests import HEADS, Text, join, make_requests, run_alone

WAYS = {method: (7, 2048, 16)[i % 3] for i, method in enumerate(("naive", *METHODS))}  # the size of prefill chunks
GRAMMARS = {"words": r"[a-z ]{6,30}\.", "numbers": r"[0-9]{2,12}(, [0-9]+){3}"}
ADAPTIVE = ("suffix", "with_suffix")
REFUSED = Text((), "error", None, None, None, INTERNAL_ERROR)


@cache
def pool() -> tuple[list[GenerationRequest], Texts]:
    """Return requests with every parameter, grammars among them, and their plain decoding, one at a time."""
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    further = [
        GenerationRequest(
            name,
            tokenizer.encode(HEADS[-1]),
            SamplingParams(max_tokens=30, seed=i, logprobs=i, guided_decoding=GuidedDecodingParams(regex=regex)),
        )
        for i, (name, regex) in enumerate(GRAMMARS.items())
    ]
    shared = SamplingParams(max_tokens=12, seed=5, n=3, prompt_logprobs=1, logprobs=1)
    further.append(GenerationRequest("shared", tokenizer.encode(HEADS[1]), shared))
    requests = [*make_requests(tokenizer, build(config())), *make_dead_ends(tokenizer), *further]
    return requests, run_alone(build(config()), requests)


def engine_of(method: str) -> tuple[Engine, ManualClock]:
    """Return the engine of a method and its clock; it serves all tests, one after the other, until one fails."""
    if _build(method)[0].has_unfinished():
        _build.cache_clear()
    return _build(method)


@cache
def _build(method: str) -> tuple[Engine, ManualClock]:
    num_drafts = {"naive": 0, "mtp": 3}.get(method, 5)
    cfg = config(configured(method), num_drafts, WAYS[method], prefix_caching=method != "oracle")
    built, clock = build(cfg, proposer_of(method, pool()[1], num_drafts)), ManualClock()
    engine = Engine(built.admission, built.scheduler, built.runner, built.proposer, built.outputs, clock)
    if method in ADAPTIVE:
        use_adaptive_length(engine, method, slope=0.05)
    return engine, clock


def run_disturbed(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    before_step: Callable[[int], Sequence[TokenDelta]] = lambda step: (),
) -> Texts:
    """Run the requests together and check the engine's integrity after every step; return the output of each choice.

    Args:
        before_step: called with the number of the step; returns what it made the engine emit.
    """
    texts, deltas, step = Texts(), dict[tuple[str, int], list[TokenDelta]](), 0
    for request in requests:
        try:
            engine.prepare(request)
            engine.add_request(request)
        except RequestFailedError:
            texts |= {(request.request_id, index): REFUSED for index in range(request.params.n)}
    engine.check_integrity()
    while engine.has_unfinished():
        for delta in (*before_step(step), *engine.step()):
            deltas.setdefault((delta.request_id, delta.index), []).append(delta)
        engine.check_integrity()
        step += 1
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return texts | {key: join(parts) for key, parts in deltas.items()}


def is_beginning(text: Text, plain: Text) -> bool:
    """Return whether the tokens and log-probabilities of a text are the first ones of its plain decoding."""
    count = len(text.token_ids)
    return (
        text.token_ids == plain.token_ids[:count]
        and (text.logprobs or ()) == (plain.logprobs or ())[:count]
        and text.prompt_logprobs in (None, plain.prompt_logprobs)
    )
