# SPDX-License-Identifier: Apache-2.0
"""How does a benchmark time a step of a given shape? With an engine of random weights that can run any step.

The shape is a folder with a config.json.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import FORMATS, QuantizationConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import Draft, DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.engine.engine import Engine, Runner
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.spec_decode.proposers.naive import NaiveProposer

SHAPE = "benchmarks/shapes/qwen3-0.6b"
NUM_TOKENS = 4000  # different ones; every shape has a larger vocabulary
_ids = count()


def tokens(num: int, first: int = 0) -> list[int]:
    """Return tokens of which neighbours differ, as in text: rows with equal tokens would choose the same experts."""
    return [7 + 1013 * (first + i) % NUM_TOKENS for i in range(num)]


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
class LoadedModel:
    """The model of an engine, its format, and the bytes of its weights as the engine reports them."""

    config: ModelConfig
    quantization: str
    weights_bytes: int


class FixedDraft(NaiveProposer):
    """Proposes `length` tokens per request and step."""

    name = "fixed"
    length = 0

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Return drafts of `length` tokens, or as many as a request has room for."""
        return [Draft(tokens(min(self.length, quota.max_drafts), i), self.name) for i, quota in enumerate(quotas)]


class PrefillSkipper:
    """A runner that treats a prompt's keys and values as computed, whatever its blocks contain.

    Their values do not change the time of a step, and prefill of long contexts would take longer than the measurement.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, plan: StepPlan) -> Sequence[RequestResult]:
        """Compute the step unless it prefills, in which case each request emits a fixed token."""
        if not _prefills(plan):
            return self._runner.run(plan)
        emitted = zip(plan.requests, tokens(len(plan.requests), first=17), strict=True)
        return [RequestResult([token] if scheduled.num_verify_rows else []) for scheduled, token in emitted]


def _prefills(plan: StepPlan) -> bool:
    return any(s.num_computed_tokens < s.request.num_prompt_tokens for s in plan.requests)


@dataclass
class ShapeEngine:
    """The engine, its proposer and its model."""

    engine: Engine
    proposer: FixedDraft
    model: LoadedModel

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
        layers: int | None = None,
    ) -> ShapeEngine:
        """Build an engine of `shape` that rejects all drafts, so that a step always emits one token per request.

        `layers` replaces the shape's number of layers.
        """
        gc.collect()  # free the memory of the engine before
        speculation = {"method": "ngram", "num_speculative_tokens": max_drafts, "accept_policy": "reject_all"}
        proposer = FixedDraft()
        with shape_of_layers(shape, layers) as folder:
            config = EngineConfig(
                model=folder,
                load_choices="dummy",
                quantization=QuantizationConfig.from_value(quantization),
                max_model_len=max_model_len,
                cache=CacheConfig(dtype=kv_cache_dtype, enable_prefix_caching=False),
                scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max(2048, max_num_seqs)),
                speculative=parse_speculative_config(speculation if max_drafts else {"method": "naive"}),
            )
            engine = make_engine(config, proposer=proposer)
            model = ModelConfig.from_pretrained(folder, kv_cache_dtype=kv_cache_dtype)
        return cls(engine, proposer, LoadedModel(model, quantization, int(engine.describe()["weights_bytes"])))

    def skip_prefill(self) -> None:
        """Compute only decoding steps from now on; one step skips the prompts of all requests, of any length."""
        self.engine.runner = PrefillSkipper(self.engine.runner)
        self.engine.scheduler.config = replace(self.engine.scheduler.config, max_num_batched_tokens=1 << 20)

    def start(self, step: StepShape, num_steps: int) -> list[str]:
        """Add requests so that the next `num_steps` steps have this shape; return their ids. Skips the prefill."""
        self.proposer.length = step.rows_each - 1
        max_tokens = num_steps + step.rows_each + 1
        ids = [self.add(tokens(step.context - step.rows_each), max_tokens) for _ in range(step.num_requests)]
        emitted = {delta.request_id for delta in self.engine.step()}
        assert emitted == set(ids), "expected one step to skip all prompts"
        return ids

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Add a greedy request that ignores the end token; return its id."""
        request_id = f"bench-{next(_ids)}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(GenerationRequest(request_id, prompt, params))
        return request_id

    def stop(self, ids: list[str]) -> None:
        """Abort requests and check that nothing of them is left."""
        for request_id in ids:
            self.engine.abort(request_id)
        self.engine.check_integrity()


@contextmanager
def shape_of_layers(shape: str, num_layers: int | None) -> Iterator[str]:
    """Yield a folder with the same shape, but for its number of layers if that is given.

    Large models are measured with as many layers as memory holds.
    """
    if num_layers is None:
        yield shape
        return
    config = json.loads(Path(shape, "config.json").read_text())
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
        yield folder


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for shape and formats."""
    parser.add_argument("--shape", default=SHAPE, help=f"folder with a config.json (default: {SHAPE})")
    parser.add_argument("--layers", type=int, help="number of layers, if it is not that of --shape")
    parser.add_argument("--quantization", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats to measure")
