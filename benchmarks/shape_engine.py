# SPDX-License-Identifier: Apache-2.0
"""An engine of a model's shape with random weights, brought to any step that a benchmark wants to time.

The shape is a folder with a config.json. Work is counted from it: the bytes that a step must read and the operations
that it must do.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from benchmarks.roofline import Reading, integer_products
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import FORMATS, QuantizationConfig
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.request import Draft, DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.engine.engine import Engine, Runner
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.proposers.naive import NaiveProposer

SHAPE = "benchmarks/shapes/qwen3-0.6b"
TOKEN = 7  # any token will do
_ids = count()


@dataclass(frozen=True)
class StepShape:
    """A step of `num_requests` requests with `rows_each` rows, the last of them at position `context`."""

    num_requests: int
    rows_each: int
    context: int

    @property
    def rows(self) -> int:
        """Rows of the whole step."""
        return self.num_requests * self.rows_each


@dataclass(frozen=True)
class Work:
    """What the steps of one model in one format need at least."""

    config: ModelConfig
    quantization: str
    weights_bytes: int  # of the embedding and all packed weights, as the engine reports
    streamed_bytes: int  # of those that every step reads

    @property
    def layer_parameters(self) -> int:
        """Weights of the linear layers without the head."""
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)

    def num_bytes(self, step: StepShape) -> int:
        """Return the bytes of weights, keys and values that a step reads."""
        c = self.config
        token_bytes = selected_backend().kv_bytes_per_token(c.num_kv_heads, c.head_dim, c.kv_cache_dtype)
        return self.streamed_bytes + c.num_layers * token_bytes * step.num_requests * step.context

    def model_operations(self, step: StepShape, logits_rows: int) -> tuple[float, float]:
        """Return what a step computes: operations of attention, and of linear layers, two per weight and row."""
        c = self.config
        seen = step.rows * (step.context - (step.rows_each - 1) / 2)
        attention = 4.0 * c.num_layers * c.num_heads * c.head_dim * seen
        weights = 2.0 * (step.rows * self.layer_parameters + logits_rows * c.vocab_size * c.hidden_size)
        return attention, weights

    def operations(self, step: StepShape, logits_rows: int) -> tuple[float, float]:
        """Return the operations of a step at the bf16 peak, and those at the int8 peak."""
        attention, weights = self.model_operations(step, logits_rows)
        products = integer_products(self.quantization)
        return (attention, products * weights) if products else (attention + weights, 0.0)

    def floor_s(self, step: StepShape, reading: Reading) -> float:
        """Return the least time of a step all of whose rows have logits."""
        return reading.floor_s(self.num_bytes(step), *self.operations(step, step.rows))


class FixedDraft(NaiveProposer):
    """Proposes `length` tokens at every step."""

    name = "fixed"
    length = 0

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Return the same token `length` times, as far as a request has room."""
        return [Draft([TOKEN] * min(self.length, quota.max_drafts), self.name) for quota in quotas]


class PromptSkipper:
    """A runner that takes a prompt's keys and values as computed, whatever its blocks hold.

    Their values change no step's time, and thirty thousand tokens of prompts would take longer than the measurement.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, plan: StepPlan) -> Sequence[RequestResult]:
        """Compute the step unless it reads a prompt, which is followed by a fixed token."""
        if not _reads_prompt(plan):
            return self._runner.run(plan)
        return [RequestResult([TOKEN] if rows else []) for rows in plan.num_verify_rows]


def _reads_prompt(plan: StepPlan) -> bool:
    return any(done < r.num_prompt_tokens for done, r in zip(plan.num_computed, plan.requests))


@dataclass
class ShapeEngine:
    """The engine, its proposer, and what its steps need."""

    engine: Engine
    proposer: FixedDraft
    work: Work

    @classmethod
    def load(
        cls,
        shape: str,
        quantization: str,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_drafts: int = 0,
        kv_cache_dtype: str = "auto",
    ) -> ShapeEngine:
        """Build an engine of `shape` that rejects all drafts, so that a step always advances a request by one."""
        gc.collect()  # an engine that is gone gives its memory back before the next takes its own
        speculation = {"method": "ngram", "num_speculative_tokens": max_drafts, "accept_policy": "reject_all"}
        config = EngineConfig(
            model=shape,
            load_choices="dummy",
            quantization=QuantizationConfig.from_value(quantization),
            max_model_len=max_model_len,
            cache=CacheConfig(dtype=kv_cache_dtype, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max(2048, max_num_seqs)),
            speculative=SpeculativeConfig.from_mapping(speculation if max_drafts else {"method": "naive"}),
        )
        proposer = FixedDraft()
        engine = make_engine(config, proposer=proposer)
        model = ModelConfig.from_pretrained(shape, kv_cache_dtype=kv_cache_dtype)
        sizes = engine.describe()
        work = Work(model, quantization, int(sizes["weights_bytes"]), int(sizes["streamed_weights_bytes"]))
        return cls(engine, proposer, work)

    def __post_init__(self) -> None:
        self._runner, self._limits = self.engine.runner, self.engine.scheduler.config

    def skip_prompts(self) -> None:
        """From now on compute decoding steps only; prompts of any length take one step, together."""
        self.engine.runner = PromptSkipper(self._runner)
        self.engine.scheduler.config = replace(self._limits, max_num_batched_tokens=1 << 30)

    def read_prompts(self) -> None:
        """From now on compute prompts too, as at first."""
        self.engine.runner, self.engine.scheduler.config = self._runner, self._limits

    def start(self, step: StepShape, num_steps: int) -> list[str]:
        """Bring requests to where the next `num_steps` steps have this shape; return their ids. Skips prompts."""
        self.proposer.length = step.rows_each - 1
        most = num_steps + step.rows_each + 1
        ids = [self.add([TOKEN] * (step.context - step.rows_each), most) for _ in range(step.num_requests)]
        emitted = {delta.request_id for delta in self.engine.step()}
        assert emitted == set(ids), "one step takes all prompts"
        return ids

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Add a greedy request that takes all its tokens; return its id."""
        request_id = f"bench-{next(_ids)}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(GenerationRequest(request_id, prompt, params))
        return request_id

    def stop(self, ids: list[str]) -> None:
        """End requests."""
        for request_id in ids:
            self.engine.abort(request_id)
        self.engine.check_integrity()


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose shape and formats."""
    parser.add_argument("--shape", default=SHAPE, help=f"folder with a config.json (default: {SHAPE})")
    parser.add_argument("--quantization", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats to measure")
