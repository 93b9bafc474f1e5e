# SPDX-License-Identifier: Apache-2.0
"""Two engines in one process: one computes prompts or begins texts, the other continues them, and nothing changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.hub.model_path import resolve_model_path
from tests.engine.hand_over import Pair, make_pair, run_moving
from tests.exactness.engines import METHODS, Texts, build, config, exists
from tests.exactness.requests import PREFILL_ONLY, VARIANTS, make_requests, prompts_of_lengths, run_alone
from tests.pairwise import pairwise

Change = Callable[[EngineConfig], EngineConfig]


class Case(NamedTuple):
    """Methods of both engines and how they run; `first_length` as in `texts_of_lengths`."""

    prefill: str
    decode: str
    chunk: int
    num_drafts: int
    caches_prefixes: bool
    block_size: int
    numerics: str
    first_length: int


def can_run(prefill: str, decode: str, chunk: int, num_drafts: int, *_: object) -> bool:
    return all(method == "naive" or exists(method, chunk, num_drafts) for method in (prefill, decode))


LENGTHS = (3, 64, 65, 700)  # of prompts: at the borders of blocks, and several steps long
VARIANTS_OF_FOUR = [{**variant, "n": 4} if "n" in variant else variant for variant in VARIANTS]
NUMERICS: dict[str, Change] = {
    "bfloat16": lambda cfg: cfg,
    "float32": lambda cfg: replace(cfg, dtype="float32"),
    "int8": lambda cfg: replace(cfg, cache=replace(cfg.cache, dtype="int8")),
}
ALL_METHODS = (*METHODS, "naive")
FACTORS = (ALL_METHODS, ALL_METHODS, (7, 2048), (1, 3), (False, True), (16, 64), tuple(NUMERICS))
CASES = [Case(*case, first_length=i % 4) for i, case in enumerate(pairwise(*FACTORS, allowed=can_run))]
ALL_CASES = [Case(*case) for case in product(*FACTORS, range(8)) if can_run(*case)]


def name_of(case: Case) -> str:
    return "-".join(map(str, case))


def of_lengths(numerics: str, block_size: int = 16) -> Change:
    """Return how the configuration changes for prompts of LENGTHS."""

    def change(cfg: EngineConfig) -> EngineConfig:
        cache = replace(cfg.cache, block_size=block_size, num_blocks=5120 // block_size)
        return NUMERICS[numerics](replace(cfg, max_model_len=768, cache=cache))

    return change


@cache
def texts_of_lengths(numerics: str, first_length: int) -> tuple[list[GenerationRequest], Texts]:
    """Return requests of every second variant with prompts of LENGTHS, and their plain decoding, one at a time.

    Args:
        first_length: 0 to 7; decides which variants, and which lengths for them.
    """
    tokenizer, engine = Tokenizer.from_pretrained(resolve_model_path("demo")), build(of_lengths(numerics)(config()))
    variants = VARIANTS_OF_FOUR[(first_length + first_length // 4) % 2 :: 2]
    prompts = prompts_of_lengths(tokenizer, [LENGTHS[(first_length + i + i // 4) % 4] for i in range(len(variants))])
    requests = make_requests(tokenizer, engine, 24, prompts, variants)
    return requests, run_alone(engine, requests)


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    return make_requests(tokenizer, make_engine(config()))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    return run_alone(make_engine(config()), requests)


def check_prompts_computed_elsewhere(case: Case) -> None:
    """Let one engine compute the prompts and the other one decode; compare all texts."""
    requests, plain = texts_of_lengths(case.numerics, case.first_length)
    pair = make_pair(
        plain,
        case.prefill,
        case.decode,
        case.chunk,
        case.num_drafts,
        case.caches_prefixes,
        of_lengths(case.numerics, case.block_size),
    )
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    assert len(pair.handovers) == len(requests)
    assert pair.importing.num_imported_blocks > 0
    assert pair.importing.num_failed_blocks.keys() <= {"drafting_layout"}  # an MTP layer and a draft model


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_prompt_computed_elsewhere_gives_the_same_text(case: Case) -> None:
    check_prompts_computed_elsewhere(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", random.Random(0).sample(ALL_CASES, 400), ids=name_of)
def test_prompts_computed_elsewhere_give_the_same_texts(case: Case) -> None:
    check_prompts_computed_elsewhere(case)


@pytest.mark.parametrize("seed", range(6))
def test_a_text_is_handed_over_at_any_step(requests: list[GenerationRequest], plain: Texts, seed: int) -> None:
    prefill, decode = random.Random(seed).choices(["naive", "ngram", "suffix", "mtp", "draft_model"], k=2)
    pair = make_pair(plain, prefill, decode, chunk=64, caches_prefixes=seed % 2 == 0)
    assert run_moving(pair, requests, random.Random(seed)) == plain
    assert pair.importing.num_imported_blocks > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6, 106))
def test_texts_are_handed_over_at_any_step(requests: list[GenerationRequest], plain: Texts, seed: int) -> None:
    test_a_text_is_handed_over_at_any_step(requests, plain, seed)


def test_with_too_few_slots_only_the_first_blocks_are_handed_over(
    requests: list[GenerationRequest], plain: Texts
) -> None:
    pair = make_pair(plain, "ngram", "ngram", caches_prefixes=False)
    del pair.free_slots[1:]
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    sizes = [len(handover.image.slots) for handover in pair.handovers if handover.image]
    assert sum(sizes) == pair.importing.num_imported_blocks == 1


def test_a_text_that_ends_with_its_first_token_is_not_handed_over(requests: list[GenerationRequest]) -> None:
    pair = Pair(build(config()), build(config()))
    request = replace(requests[0], params=replace(requests[0].params, max_tokens=1))
    pair.add(request)
    [text] = pair.texts().values()
    assert (len(text.token_ids), text.finish_reason, pair.handovers) == (1, "length", [])


@pytest.mark.parametrize("hands_over", [True, False])
def test_a_request_without_output_ends_with_its_prompt_wherever_that_is_computed(
    requests: list[GenerationRequest], hands_over: bool
) -> None:
    request = replace(requests[0], params=replace(requests[0].params, **PREFILL_ONLY))
    [expected] = run_alone(build(config()), [request]).values()
    pair = Pair(build(config(chunk=7)), build(config(chunk=7)))
    pair.add(request, hands_over)
    pair.step()
    if not hands_over:
        assert pair.first.hand_over("r0")
    [text] = pair.texts().values()
    assert text == expected
    assert (text.token_ids, text.finish_reason) == ((), "length")
    assert text.prompt_logprobs is not None and len(text.prompt_logprobs) == len(request.prompt_token_ids) - 1
    assert len(pair.handovers) == (not hands_over)


def test_an_abort_frees_blocks_that_are_exported_or_imported(requests: list[GenerationRequest]) -> None:
    pair = Pair(build(config(chunk=7)), build(config()))
    for request in requests:
        pair.add(request)
    for _ in range(8):
        pair.step()
    for request in requests:
        pair.collect(pair.first.abort(request.request_id))
        pair.collect(pair.second.abort(request.request_id))
    image = pair.handovers[0].image
    assert image is not None
    unwanted = replace(requests[0], request_id="unwanted", image=replace(image, arena="first"))
    assert pair.second.prepare(unwanted) is not None
    pair.second.cancel("unwanted")
    pair.texts()
    pair.first.check_integrity()
    pair.second.check_integrity()


def test_waiting_requests_with_imported_blocks_do_not_stop_the_others(
    requests: list[GenerationRequest], plain: Texts
) -> None:
    few = config("naive", num_blocks=20)
    pair = Pair(build(config()), build(replace(few, scheduler=replace(few.scheduler, max_num_seqs=2))))
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
