# SPDX-License-Identifier: Apache-2.0
"""The MTP layer's cache stays complete: what it drafts depends on the text alone, whatever became of the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from tests.exactness.requests import HEADS, Text, run_all, run_alone

Drafts = dict[tuple[tuple[int, ...], int], tuple[int, ...]]
STEPS = 3


def engine_with(
    chunk: int = 256,
    prefix_caching: bool = False,
    num_blocks: int | None = None,
    method: str = "mtp",
    cache_memory: int | None = None,
    max_num_seqs: int = 8,
) -> Engine:
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=STEPS, num_model_steps=STEPS)
    return make_engine(
        EngineConfig(
            model="demo",
            max_model_len=512,
            seed=0,
            cache=CacheConfig(
                block_size=16,
                num_blocks=num_blocks,
                kv_cache_memory=cache_memory,
                enable_prefix_caching=prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=256, long_prefill_token_threshold=chunk
            ),
            speculative=speculative if method != "naive" else SpeculativeConfig(),
        )
    )


def record_drafts(engine: Engine) -> Drafts:
    """Return a dictionary that fills, as the engine runs, with what was drafted after which tokens with which seed."""
    drafts: Drafts = {}
    propose = engine.proposer.propose

    def recorded(requests: Sequence[Request], caps: Sequence[int]) -> list[Draft]:
        proposed = propose(requests, caps)
        for request, draft in zip(requests, proposed):
            seed = 0 if request.params.is_greedy else request.seed
            drafts[tuple(request.token_ids.tolist()), seed] = tuple(draft.token_ids.tolist())
        return proposed

    engine.proposer.propose = recorded  # type: ignore[method-assign]
    return drafts


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    variants = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 7})
    return [
        GenerationRequest(f"r{i}{j}", tokenizer.encode(head), SamplingParams(max_tokens=96, ignore_eos=True, **variant))
        for i, head in enumerate(HEADS)
        for j, variant in enumerate(variants)
    ]


@pytest.fixture(scope="module")
def alone(requests: list[GenerationRequest]) -> tuple[dict[tuple[str, int], Text], Drafts]:
    """Return texts and drafts of each request alone, whole prompts, no prefix cache."""
    engine = engine_with()
    drafts = record_drafts(engine)
    texts = run_alone(engine, requests)
    return texts, drafts


def check_equal(found: Drafts, expected: Drafts, least: int) -> None:
    """Assert that at least `least` contexts occur in both and that the same was drafted after each of them.

    Not all do: a chunk or a prefix hit that leaves one token of the prompt lets the draft begin before the first token.
    """
    common = found.keys() & expected.keys()
    assert len(common) >= least
    for context in common:
        shorter = min(len(found[context]), len(expected[context]))
        assert found[context][:shorter] == expected[context][:shorter]


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 256])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_chunks_and_prefix_hits_draft_the_same(
    requests: list[GenerationRequest],
    alone: tuple[dict[tuple[str, int], Text], Drafts],
    chunk: int,
    prefix_caching: bool,
) -> None:
    engine = engine_with(chunk, prefix_caching)
    drafts = record_drafts(engine)
    for _ in range(2):
        assert run_all(engine, requests) == alone[0]
        check_equal(drafts, alone[1], least=len(alone[1]) * 9 // 10)
        drafts.clear()
    assert (engine.stats().num_prefix_hit_tokens > 0) == prefix_caching


def test_a_turn_that_goes_on_behind_emitted_blocks_drafts_the_same(requests: list[GenerationRequest]) -> None:
    found: list[Drafts] = []
    for prefix_caching in (True, False):
        engine = engine_with(7, prefix_caching)
        texts = run_all(engine, requests)
        turns = [
            replace(r, request_id=f"again {r.request_id}", prompt_token_ids=[*r.prompt_token_ids, *emitted[:90]])
            for r in requests
            for emitted in [texts[r.request_id, 0].token_ids]
        ]
        hits, drafts = engine.stats().num_prefix_hit_tokens, record_drafts(engine)
        run_all(engine, turns)
        assert prefix_caching == (engine.stats().num_prefix_hit_tokens - hits > 80 * len(turns))
        found.append(drafts)
    assert found[0] == found[1]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preemption_and_aborts_leave_no_hole(
    requests: list[GenerationRequest],
    alone: tuple[dict[tuple[str, int], Text], Drafts],
    prefix_caching: bool,
) -> None:
    random = np.random.default_rng(11)
    engine = engine_with(13, prefix_caching, num_blocks=30)
    drafts = record_drafts(engine)
    for round_ in range(3):
        for request in requests:
            engine.add_request(replace(request, request_id=f"{round_} {request.request_id}"))
        doomed = [f"{round_} {requests[i].request_id}" for i in random.permutation(len(requests))[:3]]
        while engine.has_unfinished():
            engine.step()
            if doomed and random.random() < 0.1:
                engine.abort(doomed.pop())
            engine.check_integrity()
    assert engine.stats().num_preemptions > 0
    check_equal(drafts, alone[1], least=len(alone[1]) // 2)
    drafts.clear()
    assert run_alone(engine, requests) == alone[0]
    check_equal(drafts, alone[1], least=len(alone[1]) * 9 // 10)


def shift_noise(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    rules = engine.runner.observer._rules  # type: ignore[attr-defined]
    write = rules.write_draft
    monkeypatch.setattr(rules, "write_draft", lambda request, row, drafted: write(request, row, drafted + 100_000))


def test_sampled_requests_agree_more_often_with_the_noise_of_their_position(
    requests: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = [replace(r, params=replace(r.params, temperature=1.0, seed=5)) for r in requests]
    accepted = []
    for coupled in (True, False):
        engine = engine_with()
        if not coupled:
            shift_noise(monkeypatch, engine)
        run_all(engine, warm)
        stats = engine.stats()
        accepted.append(stats.accepted_per_position[0] / stats.num_draft_tokens)
    assert accepted[0] > 1.3 * accepted[1]


def test_acceptance_does_not_decay_over_a_long_text(requests: list[GenerationRequest]) -> None:
    engine = engine_with(max_num_seqs=4)
    long = [replace(r, params=replace(r.params, max_tokens=400)) for r in requests if r.params.is_greedy]
    drafts = record_drafts(engine)
    texts = run_all(engine, long)
    shares = []
    for low, high in ((100, 250), (250, 400)):
        right = total = 0
        for request in long:
            whole = (*request.prompt_token_ids, *texts[request.request_id, 0].token_ids)
            for (context, _), draft in drafts.items():
                if context == whole[: len(context)] and low <= len(context) < high and draft:
                    total += 1
                    right += draft[0] == whole[len(context)]
        shares.append(right / total)
    assert min(shares) > 0.85


def test_the_memory_plan_counts_the_layer_and_the_fingerprint_does_not() -> None:
    plain, drafting = (engine_with(method=method, cache_memory=1 << 22).describe() for method in ("naive", "mtp"))
    assert plain["fingerprint"] == drafting["fingerprint"]
    layer_block = 2 * 2 * 64 * 2 * 16
    assert plain["kv_cache"]["num_blocks"] == (1 << 22) // (14 * layer_block)
    assert drafting["kv_cache"]["num_blocks"] == ((1 << 22) - 8 * layer_block) // (15 * layer_block + 256 * 2)
    assert drafting["kv_cache"]["bytes"] <= 1 << 22


def test_a_checkpoint_without_the_layer_is_refused() -> None:
    config = engine_config_of("tests/golden/ernie4_5")
    with pytest.raises(ConfigError, match="holds no layer for multi-token prediction"):
        make_engine(config)


def engine_config_of(model: str) -> EngineConfig:
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    return EngineConfig(model=model, max_model_len=32, speculative=speculative)


def test_keys_of_suffix_decoding_draft_alone_where_there_is_no_layer(caplog: pytest.LogCaptureFixture) -> None:
    given = {"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64}
    config = EngineConfig(
        model="tests/golden/ernie4_5", max_model_len=32, speculative=SpeculativeConfig.from_mapping(given)
    )
    with caplog.at_level("WARNING"):
        assert make_engine(config).describe()["speculation"]["method"] == "suffix"
    assert "holds no layer for multi-token prediction: suffix decoding alone" in caplog.text
