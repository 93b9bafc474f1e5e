# SPDX-License-Identifier: Apache-2.0
"""Describes an engine: the fingerprint of its numerics, its KV cache, its speculation."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdeploy.config.context_limit import ContextLength, ContextLimit
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.engine.memory_plan import MemoryPlan
from fastdeploy.engine.weight_memory import weight_bytes
from fastdeploy.models.weight_report import summarize, weight_fates
from fastdeploy.models.weight_source import digest_weight_files
from fastdeploy.ops.registry import is_exact, reference_names, selected_backend

_EIGHT_BITS = "wint8"  # the format of eight bits whose values are nearest to those of the weights


def make_fingerprint(config: EngineConfig, model_config: ModelConfig, key_balance: str, forms: str) -> dict[str, Any]:
    """Return everything that decides the bits of a logit: equal fingerprints give equal texts.

    Args:
        key_balance: of the model, which changes logits only if keys are cached in eight bits.
        forms: digest of those of its layers, which its weight formats do not tell if the checkpoint stores codes.
    """
    backend, references = selected_backend(), reference_names()
    return {
        "checkpoint": digest_checkpoint(model_config, config.load_choices),
        "dtype": model_config.dtype,
        "kv_cache_dtype": model_config.kv_cache_dtype,
        **({"balanced_keys": key_balance} if model_config.has_int8_cache else {}),
        "quantization": str(model_config.weight_formats(config.quantization)),
        **({"forms": forms} if model_config.own_codes else {}),
        "backend": backend.device,
        **backend.describe(),
        **({"reference_operators": references} if references else {}),
        "tensor_parallel_size": 1,
        "exact": is_exact() and not config.speculative.is_lossy,
    }


def describe_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    memory: MemoryPlan,
    fingerprint: dict[str, Any],
    context: ContextLimit,
) -> dict[str, Any]:
    """Return what `Engine.describe` says of the model, the memory and the speculation.

    Args:
        context: tokens of prompt and output together, if the KV cache holds them.
    """
    return {
        "model": config.model,
        "architecture": model_config.architecture,
        "max_model_len": min(context.num_tokens, memory.num_tokens),
        "model_context": model_config.max_context_len,
        "kv_cache": {
            "num_blocks": memory.num_blocks,
            "block_size": memory.block_size,
            "num_tokens": memory.num_tokens,
            "dtype": model_config.kv_cache_dtype,
            "bytes": memory.num_bytes,
            "bound": memory.bound,
        },
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "fingerprint": fingerprint,
        "weights_are_mapped": model_config.packed is not None and config.load_choices != "dummy",
        "speculation": _describe_speculation(config.speculative),
        "notes": [
            *selected_backend().notes(),
            *context_notes(config.max_model_len, context, model_config.max_context_len, memory.num_tokens),
            *weight_notes(config, model_config),
        ],
    }


def context_notes(
    requested: ContextLength, context: ContextLimit, model_context: int, num_cache_tokens: int
) -> list[str]:
    """Return what a start says of the context: what makes `auto` less than the model's, or that the cache holds less.

    Args:
        requested: value of `--max-model-len`.
        context: what follows from it, the model and the other flags.
        model_context: the model's own limit.
        num_cache_tokens: tokens that the KV cache holds.
    """
    is_short = num_cache_tokens < context.num_tokens
    if requested == "auto":
        context = ContextLimit(num_cache_tokens, "what the KV cache holds") if is_short else context
        is_less = context.num_tokens < model_context
        return [f"context {context.num_tokens} of the model's {model_context}: {context.reason}"] if is_less else []
    if not is_short:
        return []
    limit = f"requests are limited to {num_cache_tokens} tokens (--kv-cache-memory)"
    return [f"the KV cache is smaller than the context of {context.num_tokens} tokens: {limit}"]


def weight_notes(config: EngineConfig, model_config: ModelConfig) -> list[str]:
    """Return a line that says what became of weights that are stored as codes, and of a format that takes less."""
    if not model_config.has_codes or config.load_choices == "dummy":
        return []
    formats = model_config.weight_formats(config.quantization)
    note = f"weights of {Path(model_config.name).name}: {summarize(weight_fates(model_config, formats))}"
    if model_config.own_codes or not formats.is_none:
        return [note]
    less = sum(weight_bytes(model_config, QuantizationConfig.from_value(_EIGHT_BITS)).values())
    return [f"{note}; --quantization {_EIGHT_BITS} takes {less / 2**20:.1f} MiB in all"]


def digest_checkpoint(model_config: ModelConfig, load_choices: str) -> str:
    """Digest config.json and the weight files, or those that were packed; the digest does not depend on the folder."""
    config = repr(replace(model_config, path=""))
    if model_config.latent is not None:
        config += repr(model_config.latent)
    packed = model_config.packed
    files = digest_weight_files(Path(model_config.path)) if packed is None else packed.source
    return hashlib.blake2b(f"{load_choices}\0{config}\0{files}".encode(), digest_size=8).hexdigest()


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
