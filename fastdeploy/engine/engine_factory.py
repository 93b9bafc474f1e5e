# SPDX-License-Identifier: Apache-2.0
"""Builds an engine from its configuration: model, KV cache, runner, scheduler, proposer."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastdeploy.config.context_limit import ContextLimit
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.speculative_config import ModelBasedConfig, MTPConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.length_policy import LengthPolicy
from fastdeploy.core.reasoning import REASONING_FORMATS
from fastdeploy.core.request import Request
from fastdeploy.detokenize.stop_strings import StopStringScanner
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.detokenize.tokenizer_files import has_tokenizer
from fastdeploy.engine.admission import Admission
from fastdeploy.engine.batch_scheduler import MIN_PREFILL_ROWS, BatchScheduler
from fastdeploy.engine.cache_memory import CacheMemory, block_regions, make_cache_pages
from fastdeploy.engine.cluster_group import group_digest, group_parts, layout_digests
from fastdeploy.engine.description import describe_engine, make_fingerprint
from fastdeploy.engine.end_tokens import find_eos_token_ids
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.expert_counter import ExpertCounter
from fastdeploy.engine.kv_transfer import KVTransfer
from fastdeploy.engine.memory_plan import MemoryPlan, allocate_kv_caches, free_memory_bytes, plan_memory
from fastdeploy.engine.output_processor import OutputProcessor
from fastdeploy.engine.step_log import log_steps
from fastdeploy.engine.weight_memory import check_weights_fit
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.kv_cache.arena import Arena
from fastdeploy.kv_cache.manager import KVCacheManager
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import num_mtp_layers
from fastdeploy.models.registry import check_device
from fastdeploy.ops.backend import CachePages
from fastdeploy.ops.device_check.first_start import failing_operators
from fastdeploy.ops.registry import OperatorLibraryError, select_backend, selected_backend
from fastdeploy.spec_decode.adaptive.adaptive_length import AdaptiveLength
from fastdeploy.spec_decode.adaptive.step_times import DraftPasses
from fastdeploy.spec_decode.drafting.base import Drafter
from fastdeploy.spec_decode.drafting.drafting_model import (
    DraftingModelConfig,
    complete_speculation,
    describe_drafting_model,
    find_drafting_model,
    load_drafting_model,
    make_drafter,
)
from fastdeploy.spec_decode.drafting.loaded_models import key_balances
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.registry import make_proposer
from fastdeploy.structured_output.manager import StructuredOutputManager
from fastdeploy.worker.block_mover import BlockMover, CachePart
from fastdeploy.worker.full_step import num_blocks_of_full_step, run_full_step
from fastdeploy.worker.model_runner import ModelRunner, RunnerConfig
from fastdeploy.worker.step_timing import CONTEXT_TOKENS, LONG_CONTEXT_TOKENS, time_draft_passes, time_steps

Progress = Callable[[str, float], None]

MIN_ROWS_PER_EXPERT = 8  # on average of a prompt's chunk; with fewer, reading an expert takes longer than computing it

logger = logging.getLogger("fastdeploy.engine")


@dataclass(frozen=True)
class EngineSpec:
    """What is known of an engine before its weights are loaded.

    Attributes:
        config: the configuration, with the speculation method that is used.
        tokenizer: None if the model has none.
        context: tokens of prompt and output together, if the KV cache holds them.
        vocab_limit: number of ids that both the model and the tokenizer have.
        eos_token_ids: the end tokens of all files together.
    """

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    context: ContextLimit
    vocab_limit: int
    eos_token_ids: list[int]

    @property
    def max_model_len(self) -> int:
        """Return the tokens of the context."""
        return self.context.num_tokens


def make_engine(config: EngineConfig, on_progress: Progress | None = None, proposer: Proposer | None = None) -> Engine:
    """Load the model and build the engine around it.

    Args:
        on_progress: called with (name of the task, fraction done).
        proposer: used instead of the proposer that the configuration names (tests).

    Raises:
        ConfigError: names the flag or file at fault.
    """
    spec, drafting = _read_model_files(config)
    config, model_config = spec.config, spec.model_config
    structured_output = _make_structured_output(spec)  # reads the vocabulary while the weights are loaded
    model = load_model(
        model_config,
        max_rows=config.scheduler.max_num_batched_tokens,
        max_model_len=spec.max_model_len,
        load_choices=config.load_choices,
        on_progress=on_progress,
        quantization=config.quantization,
    )
    drafting_model = None if drafting is None else load_drafting_model(drafting, config, model)
    runner_config = _make_runner_config(spec)

    def make_runner(memory: MemoryPlan) -> tuple[ModelRunner, Drafter | None]:
        drafter = None
        if drafting is not None and drafting_model is not None:
            drafter = make_drafter(drafting, drafting_model, model, config, memory.num_blocks, runner_config)
        caches = allocate_kv_caches(model_config, memory)
        return ModelRunner(model, caches, runner_config, observer=drafter), drafter

    measure_step = partial(_measure_step, make_runner, runner_config)
    memory = plan_memory(config, model_config, spec.max_model_len, drafting, measure_step)
    _check_common_context(spec, memory)
    runner, drafter = make_runner(memory)
    pages = make_cache_pages(runner, drafter, config.cache, memory)
    proposer = proposer or make_proposer(config.speculative, drafter)
    length_policy = _make_length_policy(spec, runner, drafter, proposer, memory, pages)
    fingerprint = make_fingerprint(config, model_config, model.key_balance, model.forms)
    description = describe_engine(config, model_config, memory, fingerprint, spec.context)
    logger.info("context %d of the model's %d tokens", description["max_model_len"], description["model_context"])
    description["speculation"] |= describe_drafting_model(drafting, drafter, config, memory.num_blocks)
    description |= {"weights_bytes": model.num_weight_bytes, "streamed_weights_bytes": model.num_streamed_bytes}
    engine = Engine(
        _make_admission(spec, memory, structured_output),
        BatchScheduler(
            config.scheduler,
            _make_kv_cache_manager(spec, repr(fingerprint), drafting, memory, pages),
            length_policy,
            _min_prefill_rows(model_config),
        ),
        runner,
        proposer,
        OutputProcessor(spec.eos_token_ids, _make_scanner_factory(spec.tokenizer), time.monotonic),
        description=description,
        experts=_make_expert_counter(model, model_config),
    )
    if config.is_clustered or config.hands_over:
        description["cluster"] = _join_cluster(engine, spec, drafting, key_balances(model, drafting_model), memory)
    return log_steps(engine, logger)


def _make_kv_cache_manager(
    spec: EngineSpec,
    fingerprint: str,
    drafting: DraftingModelConfig | None,
    memory: MemoryPlan,
    pages: CachePages | None,
) -> KVCacheManager:
    """Return the manager of the blocks; they take the memory of `pages` when they are first used."""
    cache_memory = None
    if pages is not None:
        available_bytes = partial(free_memory_bytes, spec.config, spec.model_config, drafting)
        cache_memory = CacheMemory(pages, memory.num_blocks, memory.block_bytes, available_bytes)
    caches_prefixes = spec.config.cache.enable_prefix_caching
    return KVCacheManager(memory.num_blocks, memory.block_size, caches_prefixes, fingerprint, cache_memory)


def _make_expert_counter(model: CausalLM, config: ModelConfig) -> ExpertCounter | None:
    """Return what counts the load of the experts; None if all layers are dense."""
    load, experts = model.expert_load, config.experts
    if load is None or experts is None:
        return None
    layers = [index for index, is_sparse in enumerate(experts.sparse_layers) if is_sparse]
    return ExpertCounter(load.array, load.num_experts, load.num_chosen, layers)


def _measure_step(
    make_runner: Callable[[MemoryPlan], tuple[ModelRunner, Drafter | None]],
    config: RunnerConfig,
    one: MemoryPlan,
) -> int:
    """Return the bytes in use after a step of full size, its KV cache excepted; see `MeasureStep`."""
    memory, backend = replace(one, num_blocks=num_blocks_of_full_step(config)), selected_backend()
    runner, drafter = make_runner(memory)
    run_full_step(runner, None if drafter is None else drafter.draft)
    used_bytes = (backend.total_memory_bytes() or 0) - backend.free_memory_bytes() - memory.num_bytes
    del runner, drafter
    gc.collect()  # so that the memory of these buffers and graphs is there for the next ones
    return used_bytes


def _check_common_context(spec: EngineSpec, memory: MemoryPlan) -> None:
    """Refuse a context of a node among others that follows from its free memory or its draft model.

    Nodes continue each other's texts only if they accept the same ones, so that their contexts have to be equal.

    Raises:
        ConfigError: the context is not what the model, or `--max-model-len`, says; asks for the flag.
    """
    config, context = spec.config, spec.context
    if not (config.is_clustered or config.hands_over):
        return
    own = spec.model_config.default_context.num_tokens if config.max_model_len == "auto" else context.num_tokens
    depends_on_memory = config.max_model_len == "auto" or not config.cache.has_given_size
    if memory.num_tokens < context.num_tokens and depends_on_memory:
        context = ContextLimit(memory.num_tokens, "what the KV cache holds")
    if context.num_tokens < own:
        message = f"nodes of a cluster need a common context: set it to {context.num_tokens} or less on each of them"
        raise ConfigError("max_model_len", f"{message} ({context.reason}; without this limit it is {own})")


def _join_cluster(
    engine: Engine,
    spec: EngineSpec,
    drafting: DraftingModelConfig | None,
    balances: tuple[str, str],
    memory: MemoryPlan,
) -> dict[str, Any]:
    """Let the engine exchange blocks, if it is configured to; describe what other nodes need to know of it."""
    fingerprint = engine.describe()["fingerprint"]
    layouts = layout_digests(spec, fingerprint, drafting, balances) if spec.config.hands_over else {}
    if layouts:
        engine.transfer = make_kv_transfer(engine, memory.num_slots, layouts)
    parts = group_parts(spec, fingerprint, engine.max_model_len)
    return {
        "group": group_digest(parts),
        "parts": parts,
        "layouts": layouts,
        "num_slots": memory.num_slots,
        "slot_bytes": memory.slot_bytes,
        "bytes": memory.arena_bytes,
        "block_size": memory.block_size,
        "caches_prefixes": spec.config.cache.enable_prefix_caching,
    }


def _read_model_files(config: EngineConfig) -> tuple[EngineSpec, DraftingModelConfig | None]:
    """Select the backend, read config.json and the tokenizer, and check them against the configuration.

    The drafting model is found, too, and shortens a context that no flag gives.
    """
    try:
        backend = select_backend(config.device, config.gpu.captured_rows, failing_operators(config.device))
    except OperatorLibraryError as error:
        raise ConfigError("operator library", str(error).removeprefix("operator library: ")) from error
    if (num_seqs := config.scheduler.max_num_seqs) > backend.max_num_seqs:
        raise ConfigError("max_num_seqs", f"expected at most {backend.max_num_seqs} on this device, got {num_seqs}")
    path = config.model_folder or resolve_model_path(config.model, config.revision, gguf_file=config.gguf_file)
    model_config = config.read_model(path)
    for note in model_config.notes:
        logger.warning("%s", note)
    check_device(model_config)
    config = _fall_back_to_suffix(complete_speculation(config), path)
    context = config.choose_context(model_config)
    tokenizer = _load_tokenizer(config, path)
    vocab_limit = min(model_config.vocab_size, tokenizer.vocab_size) if tokenizer else model_config.vocab_size
    eos_token_ids = find_eos_token_ids(model_config, tokenizer, vocab_limit)
    check_weights_fit(model_config, config.quantization)
    drafting = find_drafting_model(config, model_config, tokenizer, vocab_limit)
    if drafting is not None and config.max_model_len == "auto":
        context = min(context, drafting.context)
    return EngineSpec(config, model_config, tokenizer, context, vocab_limit, eos_token_ids), drafting


def _fall_back_to_suffix(config: EngineConfig, path: str) -> EngineConfig:
    """Use suffix decoding alone, with a warning, if MTP was only implied and the checkpoint has no MTP layer."""
    speculative = config.speculative
    if not isinstance(speculative, MTPConfig) or speculative.needs_layer or speculative.extension is None:
        return config
    if speculative.model is not None or config.load_choices == "dummy" or num_mtp_layers(path):
        return config
    logger.warning(
        "speculative_config: %s has no layer for multi-token prediction; suffix decoding is used alone", path
    )
    return replace(config, speculative=speculative.extension)


def _load_tokenizer(config: EngineConfig, model_path: str) -> Tokenizer | None:
    """Return the configured tokenizer, else that of the model; None if there is none, and only ids can be served."""
    if config.tokenizer:
        return Tokenizer.from_pretrained(resolve_model_path(config.tokenizer, field="tokenizer"))
    return Tokenizer.from_pretrained(model_path) if has_tokenizer(Path(model_path)) else None


def _make_structured_output(spec: EngineSpec) -> StructuredOutputManager:
    reasoning_format = REASONING_FORMATS.get(spec.config.reasoning_parser)
    backend = spec.config.guided_decoding_backend
    return StructuredOutputManager(spec.tokenizer, spec.vocab_limit, spec.eos_token_ids, reasoning_format, backend)


def _make_admission(spec: EngineSpec, memory: MemoryPlan, structured_output: StructuredOutputManager) -> Admission:
    return Admission(
        max_model_len=spec.max_model_len,
        num_cache_tokens=memory.num_tokens,
        vocab_size=spec.vocab_limit,
        eos_token_ids=spec.eos_token_ids,
        has_tokenizer=spec.tokenizer is not None,
        speculative=spec.config.speculative,
        server_seed=spec.config.seed,
        structured_output=structured_output,
    )


def _make_runner_config(spec: EngineSpec) -> RunnerConfig:
    config, model_config = spec.config, spec.model_config
    return RunnerConfig(
        max_rows=config.scheduler.max_num_batched_tokens,
        max_seqs=config.scheduler.max_num_seqs,
        max_model_len=spec.max_model_len,
        block_size=config.cache.block_size,
        max_drafts=config.speculative.num_speculative_tokens,
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        vocab_limit=spec.vocab_limit,
        eos_token_ids=tuple(spec.eos_token_ids),
        dtype=model_config.dtype,
        verify_strategy=config.speculative.verify_strategy,
        accept_policy=config.speculative.accept_policy,
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
    )


def _make_length_policy(
    spec: EngineSpec,
    runner: ModelRunner,
    drafter: Drafter | None,
    proposer: Proposer,
    memory: MemoryPlan,
    pages: CachePages | None,
) -> LengthPolicy:
    """Return the configured policy; the adaptive policy measures the times of steps first.

    Args:
        pages: of the blocks that have not taken their memory; measuring touches some, and gives them back.
    """
    speculative, scheduler = spec.config.speculative, spec.config.scheduler
    if not speculative.adaptive:
        return LengthPolicy()
    clock = selected_backend().clock
    num_drafts, num_tokens = speculative.num_speculative_tokens, min(memory.num_tokens, spec.max_model_len)
    max_rows = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * (1 + num_drafts))
    if pages is not None:
        num_blocks, of_long = (
            -(-(length + num_drafts) // memory.block_size) for length in (CONTEXT_TOKENS, LONG_CONTEXT_TOKENS)
        )
        num_timed = max(scheduler.max_num_seqs * num_blocks, of_long)
        pages.touch(0, min(num_timed, memory.num_blocks))  # page faults would count as time of the first steps
    times, passes = time_steps(runner, max_rows, num_drafts, num_tokens, clock), None
    if drafter is not None:
        max_passes = speculative.num_model_steps if isinstance(speculative, ModelBasedConfig) else num_drafts
        first, other = time_draft_passes(drafter.draft_timed, drafter.config, num_tokens, clock)
        passes = DraftPasses(proposer.name, max_passes, first, other)
    if pages is not None:
        pages.release()
    return AdaptiveLength(times, passes, drafter is None or speculative.extension is not None, clock)


def _min_prefill_rows(config: ModelConfig) -> int:
    """Return the prefill rows that a step may have beside decoding requests, however slow it is.

    A chunk of a prompt reads nearly all experts once it has about 3 E / k rows, and each of them for few rows.
    """
    if config.experts is None:
        return MIN_PREFILL_ROWS
    return max(MIN_PREFILL_ROWS, MIN_ROWS_PER_EXPERT * config.experts.num_experts // config.experts.rule.num_chosen)


def _make_scanner_factory(tokenizer: Tokenizer | None) -> Callable[[Request], StopStringScanner]:
    def make_scanner(request: Request) -> StopStringScanner:
        assert tokenizer is not None, "admission refuses stop strings without a tokenizer"
        return StopStringScanner(tokenizer, request.prompt_token_ids.tolist(), request.params)

    return make_scanner


def make_kv_transfer(engine: Engine, num_slots: int, digests: Mapping[str, str]) -> KVTransfer:
    """Return what moves blocks between an engine and an arena of `num_slots` slots.

    Args:
        digests: by part of a slot (`target`, `drafting`, `states`), of what its bytes depend on.
    """
    runner, backend = engine.runner, selected_backend()
    assert isinstance(runner, ModelRunner)
    drafter = runner.observer if isinstance(runner.observer, Drafter) else None
    regions = block_regions(runner, drafter)
    mover = BlockMover([CachePart(n, digests[n], backend.make_block_regions(part)) for n, part in regions.items()])
    arena = Arena.create(num_slots, mover.slot_parts)
    return KVTransfer(engine.scheduler.kv_cache_manager, mover, arena, drafter)
