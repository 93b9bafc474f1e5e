# SPDX-License-Identifier: Apache-2.0
"""A text that is cut anywhere and resumed by another engine continues bit for bit as if it had not been cut."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.hub.model_path import resolve_model_path
from tests.exactness.engines import METHODS, NUM_DRAFTS, Texts, build, config, configured, exists, proposer_of
from tests.exactness.requests import Text, make_requests, run_all, run_alone
from tests.exactness.test_grammars import make_grammar_requests, thinking
from tests.pairwise import pairwise
from tests.thinking_model import save_thinking_model

Cut = tuple[GenerationRequest, Texts]  # a resumed request, and what each of its choices should emit
CASES = pairwise(METHODS, (7, 64, 2048), NUM_DRAFTS, (False, True), allowed=lambda *case: exists(*case[:3]))


def remaining(text: Text, cut: int) -> Text:
    """Return what follows the first `cut` tokens of a text."""
    logprobs = None if text.logprobs is None or cut == len(text.token_ids) else text.logprobs[cut:]
    return replace(text, token_ids=text.token_ids[cut:], logprobs=logprobs, prompt_logprobs=None)


def resume(request: GenerationRequest, texts: Texts, cuts: Sequence[int | None]) -> Cut:
    """Return the request with each choice cut after so many tokens; None: the choice has ended."""
    whole = {index: texts[request.request_id, index] for index in range(request.params.n)}
    resumed = [None if cut is None else list(whole[index].token_ids[:cut]) for index, cut in enumerate(cuts)]
    name = f"{request.request_id} at {cuts}"
    params = replace(request.params, prompt_logprobs=None)
    expected = {(name, i): remaining(whole[i], cut) for i, cut in enumerate(cuts) if cut is not None}
    return replace(request, request_id=name, params=params, resumed=resumed), expected


def all_cuts(requests: Iterable[GenerationRequest], texts: Texts) -> list[Cut]:
    """Return every request cut after every token; of two choices, one is cut elsewhere or has ended."""
    found = []
    for request in requests:
        lengths = [len(texts[request.request_id, index].token_ids) for index in range(request.params.n)]
        for cut in range(lengths[0] + 1):
            others = [None if cut % 3 == 0 else min(length, 7 * cut % 11) for length in lengths[1:]]
            found.append(resume(request, texts, [cut, *others]))
    return found


def check(engine: Engine, cuts: Sequence[Cut], run_together: bool = True) -> None:
    """Run the resumed requests and compare each choice with the rest of its text."""
    run = run_all if run_together else run_alone
    expected = {key: text for _, texts in cuts for key, text in texts.items()}
    assert run(engine, [request for request, _ in cuts]) == expected
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return make_requests(Tokenizer.from_pretrained(resolve_model_path("demo")), build(config()))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    return run_alone(build(config()), requests)


@pytest.fixture(scope="module")
def cuts(requests: list[GenerationRequest], plain: Texts) -> list[Cut]:
    return all_cuts(requests, plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_thinking_model(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def grammar_cuts(folder: Path) -> list[Cut]:
    requests = make_grammar_requests(Tokenizer.from_pretrained(folder))
    return all_cuts(requests, run_alone(build(thinking(folder)), requests))


def test_every_cut_of_every_text_continues_exactly(cuts: list[Cut]) -> None:
    check(build(config()), cuts)


def test_cuts_of_every_constrained_text_continue_exactly(folder: Path, grammar_cuts: list[Cut]) -> None:
    check(build(thinking(folder)), grammar_cuts[::4])


@pytest.mark.nightly
def test_every_cut_of_every_constrained_text_continues_exactly(folder: Path, grammar_cuts: list[Cut]) -> None:
    check(build(thinking(folder)), grammar_cuts)


@pytest.mark.parametrize(("method", "chunk", "num_drafts", "caches_prefixes"), CASES)
def test_speculation_continues_exactly(
    cuts: list[Cut], plain: Texts, method: str, chunk: int, num_drafts: int, caches_prefixes: bool
) -> None:
    some = random.Random(f"{method} {chunk} {num_drafts}").sample(cuts, 48)
    check(build_engine(plain, method, chunk, num_drafts, caches_prefixes), some)


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "chunk", "num_drafts", "caches_prefixes"), CASES)
def test_speculation_continues_exactly_at_every_cut(
    cuts: list[Cut], plain: Texts, method: str, chunk: int, num_drafts: int, caches_prefixes: bool
) -> None:
    check(build_engine(plain, method, chunk, num_drafts, caches_prefixes), cuts)
    check(build_engine(plain, method, chunk, num_drafts, caches_prefixes), cuts[::7], run_together=False)


def build_engine(plain: Texts, method: str, chunk: int, num_drafts: int, caches_prefixes: bool) -> Engine:
    cfg = config(configured(method), num_drafts, chunk, prefix_caching=caches_prefixes)
    return build(cfg, proposer_of(method, plain, num_drafts))


@pytest.mark.parametrize("method", ["ngram", "mtp", "with_suffix"])
def test_speculation_continues_constrained_texts_exactly(folder: Path, grammar_cuts: list[Cut], method: str) -> None:
    some = random.Random(method).sample(grammar_cuts, 48)
    check(build(thinking(folder, method, 3, prefix_caching=True)), some)


def test_preempted_requests_continue_exactly(cuts: list[Cut], plain: Texts) -> None:
    engine = build(config("ngram", 3, num_blocks=24, prefix_caching=True))
    check(engine, random.Random(0).sample(cuts, 100))
    assert engine.stats().num_preemptions > 0


def test_a_text_that_has_ended_ends_at_admission_with_its_reason(cuts: list[Cut]) -> None:
    engine, reasons = build(config()), set()
    for request, texts in cuts:
        ended = {key: text for key, text in texts.items() if not text.token_ids}
        deltas = engine.add_request(request)
        assert {(d.request_id, d.index): (d.finish_reason, d.stop_reason) for d in deltas} == {
            key: (text.finish_reason, text.stop_reason) for key, text in ended.items()
        }
        for delta in deltas:
            assert delta.token_ids == [] and delta.metrics is not None and delta.speculate_metrics is not None
            reasons.add((delta.finish_reason, type(delta.stop_reason)))
        engine.abort(request.request_id)
    engine.check_integrity()
    assert reasons == {("length", type(None)), ("stop", int), ("stop", str)}


def test_deltas_count_the_resumed_tokens_and_metrics_do_not() -> None:
    engine = build(config("ngram", 3))
    request = GenerationRequest("a", [5, 6, 7], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    tokens = run_all(engine, [request])["a", 0].token_ids
    engine.add_request(replace(request, resumed=[list(tokens[:8])]))
    indices, last = [], None
    while engine.has_unfinished():
        for last in engine.step():
            indices.append((last.first_index, len(last.token_ids)))
    assert indices[0][0] == 8
    assert [start + count for start, count in indices[:-1]] == [start for start, _ in indices[1:]]
    assert sum(indices[-1]) == 20
    assert last is not None and last.metrics is not None and last.speculate_metrics is not None
    metrics = last.speculate_metrics
    assert metrics.num_steps + metrics.accepted_tokens == 12 - indices[0][1]
    assert last.metrics.first_token_s is not None


INVALID = [
    ([], "expected 1 entries"),
    ([[1], [2]], "expected 1 entries"),
    ([None], "expected 1 entries, of which one or more are not None"),
    ([[5, -1]], r"expected token ids in \[0, "),
    ([[5, 1 << 20]], r"expected token ids in \[0, "),
    ([[5] * 11], "expected at most 10 tokens, got 11"),
    ([[5, 9, 5]], "expected at most 2 tokens for choice 0, which end it, got 3"),
]


@pytest.mark.parametrize(("resumed", "message"), INVALID)
def test_resumed_tokens_are_checked(resumed: list[list[int] | None], message: str) -> None:
    engine = build(config())
    params = SamplingParams(max_tokens=10, stop_token_ids=[9])
    with pytest.raises(InvalidRequestError, match=message) as caught:
        engine.add_request(GenerationRequest("a", [5, 6, 7], params, resumed=resumed))
    assert caught.value.field == "resumed"
    engine.check_integrity()
    assert not engine.has_unfinished()
