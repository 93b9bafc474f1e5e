# SPDX-License-Identifier: Apache-2.0
"""Builds an engine from its configuration: model, memory plan, runner, scheduler, proposer."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.speculative_config import MTPConfig, SpeculativeConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.length_policy import LengthPolicy
from fastdeploy.core.reasoning import REASONING_FORMATS
from fastdeploy.core.request import Request
from fastdeploy.detokenize.stop_strings import StopStringScanner
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.detokenize.tokenizer_files import has_tokenizer
from fastdeploy.engine.admission import Admission
from fastdeploy.engine.batch_scheduler import BatchScheduler
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.output_processor import OutputProcessor
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.kv_cache.manager import KVCacheManager
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import num_mtp_layers
from fastdeploy.ops.attention import allocate_kv_cache
from fastdeploy.ops.registry import OperatorLibraryError, is_exact, select_backend, selected_backend
from fastdeploy.spec_decode.adaptive.adaptive_length import AdaptiveLength
from fastdeploy.spec_decode.adaptive.step_times import DraftPasses
from fastdeploy.spec_decode.drafting.drafter import Drafter
from fastdeploy.spec_decode.drafting.drafting_model import (
    DraftingModelConfig,
    describe_drafting_model,
    find_drafting_model,
    load_drafting_model,
    make_drafter,
)
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.registry import make_proposer
from fastdeploy.structured_output.manager import StructuredOutputManager
from fastdeploy.worker.model_runner import ModelRunner, RunnerConfig
from fastdeploy.worker.step_timing import time_draft_passes, time_steps

Progress = Callable[[str, float], None]

logger = logging.getLogger("fastdeploy.engine")


@dataclass(frozen=True)
class MemoryPlan:
    """How many KV blocks there are and what they cost.

    Attributes:
        block_bytes: of one block over all layers, the drafting model's among them.
        extra_bytes: of the drafting model's scratch blocks.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    extra_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return self.num_blocks * self.block_bytes + self.extra_bytes


def make_engine(config: EngineConfig, on_progress: Progress | None = None, proposer: Proposer | None = None) -> Engine:
    """Load the model and build the engine around it.

    Args:
        on_progress: called with (what is being done, fraction done).
        proposer: replaces the one that the configuration names (tests).

    Raises:
        ConfigError: naming the flag or file at fault.
    """
    try:
        select_backend(config.device)
    except OperatorLibraryError as error:
        raise ConfigError("operator library", str(error).removeprefix("operator library: ")) from error
    path = resolve_model_path(config.model, config.revision)
    model_config = ModelConfig.from_pretrained(
        path,
        dtype=config.dtype,
        generation_config=config.generation_config,
        kv_cache_dtype=config.cache.dtype,
    )
    config = _with_what_drafts(config, path)
    max_model_len = min(config.max_model_len, model_config.max_context_len)
    model_config.check_max_model_len(max_model_len)
    tokenizer = _load_tokenizer(config, path)
    eos_token_ids = _eos_token_ids(model_config, tokenizer)
    vocab_limit = min(model_config.vocab_size, tokenizer.vocab_size) if tokenizer else model_config.vocab_size
    reasoning_format = REASONING_FORMATS.get(config.reasoning_parser)
    structured_output = StructuredOutputManager(
        tokenizer, vocab_limit, eos_token_ids, reasoning_format, config.guided_decoding_backend
    )
    drafting = find_drafting_model(config, model_config, tokenizer, vocab_limit, max_model_len)

    model = load_model(
        model_config,
        max_rows=config.scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        load_choices=config.load_choices,
        on_progress=on_progress,
        quantization=config.quantization,
    )
    drafting_model = None if drafting is None else load_drafting_model(drafting, config, model)
    plan = _plan_memory(config, model_config, max_model_len, drafting)
    fingerprint = _fingerprint(config, model_config)
    runner_config = _runner_config(config, model_config, max_model_len, vocab_limit, eos_token_ids)
    drafter = None
    if drafting is not None and drafting_model is not None:
        drafter = make_drafter(drafting, drafting_model, model, config, plan.num_blocks, runner_config)
    runner = ModelRunner(model, _allocate(model_config, plan), runner_config, observer=drafter)
    kv = KVCacheManager(plan.num_blocks, plan.block_size, config.cache.enable_prefix_caching, repr(fingerprint))
    admission = Admission(
        max_model_len=max_model_len,
        num_cache_tokens=plan.num_tokens,
        vocab_size=vocab_limit,
        eos_token_ids=eos_token_ids,
        has_tokenizer=tokenizer is not None,
        speculative=config.speculative,
        server_seed=config.seed,
        structured_output=structured_output,
    )
    proposer = proposer or make_proposer(config.speculative, drafter)
    return Engine(
        admission,
        BatchScheduler(
            config.scheduler, kv, _make_length_policy(config, runner, drafter, proposer, plan, max_model_len)
        ),
        runner,
        proposer,
        OutputProcessor(eos_token_ids, _scanner_factory(tokenizer), time.monotonic),
        description={
            **_describe(config, model_config, plan, fingerprint, max_model_len),
            "speculation": _describe_speculation(config.speculative)
            | describe_drafting_model(drafting, drafter, config, plan.num_blocks),
            "weights_bytes": model.num_weight_bytes,
            "streamed_weights_bytes": model.num_streamed_bytes,
        },
    )


def _make_length_policy(
    config: EngineConfig,
    runner: ModelRunner,
    drafter: Drafter | None,
    proposer: Proposer,
    plan: MemoryPlan,
    max_model_len: int,
) -> LengthPolicy:
    """Return the policy that the configuration asks for; the adaptive one measures step times first."""
    speculative, scheduler, clock = config.speculative, config.scheduler, selected_backend().clock
    if not speculative.adaptive:
        return LengthPolicy()
    num_drafts, num_tokens = speculative.num_speculative_tokens, min(plan.num_tokens, max_model_len)
    max_rows = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * (1 + num_drafts))
    times = time_steps(runner, max_rows, num_drafts, num_tokens, clock)
    if drafter is None:
        return AdaptiveLength(times, None, True, clock)
    max_passes = speculative.num_model_steps if isinstance(speculative, MTPConfig) else num_drafts
    pass_s, request_s = time_draft_passes(drafter.draft, drafter.config, num_tokens, clock)
    passes = DraftPasses(proposer.name, max_passes, pass_s, request_s)
    return AdaptiveLength(times, passes, speculative.extension is not None, clock)


def _with_what_drafts(config: EngineConfig, path: str) -> EngineConfig:
    """Let suffix decoding draft alone where the keys of mtp mean both and there is no layer; a line says so."""
    wanted = config.speculative
    if not isinstance(wanted, MTPConfig) or wanted.needs_layer or wanted.extension is None:
        return config
    if wanted.model is not None or config.load_choices == "dummy" or num_mtp_layers(path):
        return config
    logger.warning("speculative_config: %s holds no layer for multi-token prediction: suffix decoding alone", path)
    return replace(config, speculative=wanted.extension)


def _load_tokenizer(config: EngineConfig, model_path: str) -> Tokenizer | None:
    """Read the tokenizer; None where the model's folder has none and none was asked for (token ids only)."""
    if config.tokenizer:
        return Tokenizer.from_pretrained(resolve_model_path(config.tokenizer, field="tokenizer"))
    return Tokenizer.from_pretrained(model_path) if has_tokenizer(Path(model_path)) else None


def _eos_token_ids(model_config: ModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    if model_config.eos_token_ids:
        return list(model_config.eos_token_ids)
    return [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _plan_memory(
    config: EngineConfig, model_config: ModelConfig, max_model_len: int, drafting: DraftingModelConfig | None
) -> MemoryPlan:
    """Take the blocks asked for, else what all sequences' full contexts need, at most half of the free memory."""
    block_size = config.cache.block_size
    backend = selected_backend()
    layer_bytes = backend.kv_bytes_per_token(
        model_config.num_kv_heads, model_config.head_dim, model_config.kv_cache_dtype
    )
    block_bytes, extra_bytes = model_config.num_layers * layer_bytes * block_size, 0
    if drafting is not None:
        block_bytes += drafting.block_bytes
        extra_bytes = drafting.cache_bytes * config.scheduler.max_num_seqs
    blocks_per_seq = -(-max_model_len // block_size)
    if config.cache.num_blocks is not None:
        num_blocks = config.cache.num_blocks
    elif config.cache.kv_cache_memory is not None:
        num_blocks = (config.cache.kv_cache_memory - extra_bytes) // block_bytes
    else:
        num_blocks = min(
            config.scheduler.max_num_seqs * blocks_per_seq, backend.free_memory_bytes() // 2 // block_bytes
        )
    if num_blocks < 1:
        raise ConfigError("kv_cache_memory", f"too little for one block of {block_bytes} bytes")
    return MemoryPlan(num_blocks, block_size, block_bytes, extra_bytes)


def _allocate(model_config: ModelConfig, plan: MemoryPlan) -> list[Any]:
    shape = (plan.num_blocks, plan.block_size, model_config.num_kv_heads, model_config.head_dim)
    return [allocate_kv_cache(*shape, model_config.kv_cache_dtype) for _ in range(model_config.num_layers)]


def _runner_config(
    config: EngineConfig, model_config: ModelConfig, max_model_len: int, vocab_limit: int, eos_token_ids: list[int]
) -> RunnerConfig:
    return RunnerConfig(
        max_rows=config.scheduler.max_num_batched_tokens,
        max_seqs=config.scheduler.max_num_seqs,
        max_blocks_per_seq=-(-max_model_len // config.cache.block_size),
        block_size=config.cache.block_size,
        max_drafts=config.speculative.num_speculative_tokens,
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        vocab_limit=vocab_limit,
        eos_token_ids=tuple(eos_token_ids),
        dtype=model_config.dtype,
        verify_strategy=config.speculative.verify_strategy,
        accept_policy=config.speculative.accept_policy,
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
    )


def _scanner_factory(tokenizer: Tokenizer | None) -> Callable[[Request], StopStringScanner]:
    def make_scanner(request: Request) -> StopStringScanner:
        assert tokenizer is not None, "admission refuses stop strings without a tokenizer"
        return StopStringScanner(tokenizer, request.token_ids.tolist(), request.params)

    return make_scanner


def _fingerprint(config: EngineConfig, model_config: ModelConfig) -> dict[str, Any]:
    """Everything that decides the bits of a logit: equal fingerprints give equal texts."""
    return {
        "checkpoint": _checkpoint_digest(model_config, config.load_choices),
        "dtype": model_config.dtype,
        "kv_cache_dtype": model_config.kv_cache_dtype,
        "quantization": str(config.quantization),
        "backend": config.device,
        **selected_backend().describe(),
        "tensor_parallel_size": 1,
        "exact": is_exact() and not config.speculative.is_lossy,
    }


def _checkpoint_digest(model_config: ModelConfig, load_choices: str) -> str:
    """Digest config.json and the size and head of every weight file: cheap, and different for any other checkpoint."""
    digest = hashlib.blake2b(f"{load_choices}\0{model_config!r}".encode(), digest_size=8)
    for file in sorted(Path(model_config.path).glob("*.safetensors")):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 16))
            stream.seek(-min(1 << 16, file.stat().st_size), 2)
            digest.update(stream.read(1 << 16))
    return digest.hexdigest()


def _describe(
    config: EngineConfig, model_config: ModelConfig, plan: MemoryPlan, fingerprint: dict[str, Any], max_model_len: int
) -> dict[str, Any]:
    return {
        "model": config.model,
        "architecture": model_config.architecture,
        "max_model_len": max_model_len,
        "kv_cache": {
            "num_blocks": plan.num_blocks,
            "block_size": plan.block_size,
            "num_tokens": plan.num_tokens,
            "dtype": model_config.kv_cache_dtype,
            "bytes": plan.num_bytes,
        },
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "fingerprint": fingerprint,
    }


def _describe_speculation(speculative: SpeculativeConfig) -> dict[str, Any]:
    return {
        "method": speculative.method,
        "extension": speculative.extension and speculative.extension.method,
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "num_model_steps": getattr(speculative, "num_model_steps", 1),
        "verify_strategy": speculative.verify_strategy,
        "accept_policy": speculative.accept_policy,
        "adaptive": speculative.adaptive,
        "lossy": speculative.is_lossy,
    }
