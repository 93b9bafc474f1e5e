# SPDX-License-Identifier: Apache-2.0
"""Engines with a drafting model, and recorders of their drafts and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import Draft, DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams, SpeculativeParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ops.drafting import DraftLoop
from fastdeploy.spec_decode.drafting.base import Drafter
from fastdeploy.spec_decode.drafting.medusa_runner import MedusaRunner
from tests.exactness.requests import HEADS

Drafts = dict[tuple[tuple[int, ...], int], tuple[int, ...]]
NUM_DRAFTS = 3
SPECULATIVE: dict[str, dict[str, Any]] = {
    "naive": {"method": "naive"},
    "mtp": {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS},
    "draft_model": {"model": "demo/draft", "num_speculative_tokens": NUM_DRAFTS},
    "target": {"model": "demo", "num_speculative_tokens": NUM_DRAFTS},
}


def engine_with(
    method: str,
    chunk: int = 256,
    prefix_caching: bool = False,
    num_blocks: int | None = None,
    cache_memory: int | None = None,
    max_num_seqs: int = 8,
    load_choices: str = "default_v1",
) -> Engine:
    """Return an engine of the demonstration model with the configuration SPECULATIVE[method]."""
    return make_engine(
        EngineConfig(
            model="demo",
            max_model_len=512,
            seed=0,
            load_choices=load_choices,
            cache=CacheConfig(
                block_size=16,
                num_blocks=num_blocks,
                kv_cache_memory=cache_memory,
                enable_prefix_caching=prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=256, long_prefill_token_threshold=chunk
            ),
            speculative=parse_speculative_config({**SPECULATIVE[method], "adaptive": False}),
        )
    )


def eight_requests() -> list[GenerationRequest]:
    """Return greedy and sampled requests on real text."""
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    variants = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 7})
    return [
        GenerationRequest(f"r{i}{j}", tokenizer.encode(head), SamplingParams(max_tokens=96, ignore_eos=True, **variant))
        for i, head in enumerate(HEADS)
        for j, variant in enumerate(variants)
    ]


def record_drafts(engine: Engine) -> Drafts:
    """Return a dictionary that collects the drafts of a running engine by context and seed."""
    drafts: Drafts = {}
    propose = engine.proposer.propose

    def recorded(requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        proposed = propose(requests, quotas)
        for request, draft in zip(requests, proposed):
            seed = 0 if request.params.is_greedy else request.seed
            drafts[tuple(request.token_ids.tolist()), seed] = tuple(draft.token_ids)
        return proposed

    engine.proposer.propose = recorded  # type: ignore[method-assign]
    return drafts


def record_rows(engine: Engine) -> list[int]:
    """Return a list that collects the number of rows of each draft pass and fill call."""
    loop, rows = engine.runner.observer.loop, list[int]()  # type: ignore[attr-defined]
    fill_stage, draft = loop.fill_stage, loop.draft

    def packed(num_seqs: int) -> int:
        return int(loop.batch.buffers.num_scheduled.array[:num_seqs].sum())

    def recorded_stage(stage: int, num_seqs: int) -> None:
        rows.append(packed(num_seqs))
        fill_stage(stage, num_seqs)

    def recorded_draft(num_seqs: int) -> None:
        counts = loop.num_drafts.array[:num_seqs]
        rows.append(packed(num_seqs))
        rows.extend(int((counts > index).sum()) for index in range(1, counts.max()))
        draft(num_seqs)

    loop.fill_stage, loop.draft = recorded_stage, recorded_draft
    return rows


def last_logits(drafter: Drafter, count: int) -> NDArray[np.float32]:
    """Return the logits from which the last of `count` drafts of the first request was sampled."""
    if isinstance(drafter, MedusaRunner):
        index, row = drafter.vocab_index, count - 1 if drafter.num_matrices == 1 else 0
        logits = drafter.narrow_logits[index][row]
    else:
        loop: DraftLoop = drafter.loop  # type: ignore[attr-defined]
        logits = loop.narrow_logits[loop.vocab_index][0]
    values: NDArray[np.float32] = logits.numpy()
    return values


def greedy(prompt: list[int], max_tokens: int, speculative: SpeculativeParams | None = None) -> GenerationRequest:
    """Return a greedy request that does not end early."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculative=speculative)
    return GenerationRequest("a", prompt, params)


def check_equal(found: Drafts, expected: Drafts, min_common: int) -> None:
    """Assert that at least `min_common` contexts occur in both, with the same drafts.

    Not all do: if a chunk or a prefix hit leaves one token of the prompt, drafting starts before the first token.
    """
    common = found.keys() & expected.keys()
    assert len(common) >= min_common
    for context in common:
        shorter = min(len(found[context]), len(expected[context]))
        assert found[context][:shorter] == expected[context][:shorter]
