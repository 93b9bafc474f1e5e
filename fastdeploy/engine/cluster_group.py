# SPDX-License-Identifier: Apache-2.0
"""Which engines may continue each other's texts (one group), and which blocks they may exchange (equal layouts)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastdeploy.engine.description import digest_checkpoint
from fastdeploy.ops.golden import golden_digest
from fastdeploy.ops.registry import selected_backend

if TYPE_CHECKING:
    from fastdeploy.engine.engine_factory import EngineSpec
    from fastdeploy.spec_decode.drafting.drafting_model import DraftingModelConfig

Fingerprint = Mapping[str, Any]


MAX_SHOWN = 60  # characters of a value; a longer one is shown as its digest


def group_parts(spec: EngineSpec, fingerprint: Fingerprint, max_model_len: int) -> dict[str, str]:
    """Return all that decides the bits of a text, and whether a request is accepted, in words by name.

    Methods of speculation may differ. So may the degree of tensor parallelism, which does not change the bits.

    Args:
        max_model_len: tokens of prompt and output together that the engine accepts.
    """
    config, speculative = spec.config, spec.config.speculative
    contract = {
        "tokenizer": spec.tokenizer and spec.tokenizer.digest(),
        "vocab_limit": spec.vocab_limit,
        "eos_token_ids": spec.eos_token_ids,
        "max_model_len": max_model_len,
        "guided_decoding_backend": config.guided_decoding_backend,
        "libraries": [version(name) for name in ("llguidance", "tokenizers")],
        "samples_greedily": speculative.verify_strategy == "greedy",
        "lossy": repr(speculative) if speculative.is_lossy else "",
        "logprobs_mode": config.logprobs_mode,
        "reasoning_parser": config.reasoning_parser,
        "hands_over": config.hands_over,  # nodes with one queue would leave tickets for prefill standing
    }
    parts = dict(_numerics(fingerprint)) | {"results of operators": golden_digest()} | contract
    return {name: _show(value) for name, value in parts.items()}


def group_digest(parts: Mapping[str, str]) -> str:
    """Return the group of a node with these parts."""
    return _digest(sorted(parts.items()))


def layout_digests(
    spec: EngineSpec, fingerprint: Fingerprint, drafting: DraftingModelConfig | None, key_balances: tuple[str, str]
) -> dict[str, str]:
    """Return, by part of a slot (`target`, `drafting`, `states`), a digest of what its bytes depend on.

    Args:
        key_balances: of the target and of the drafting model.
    """
    balance, drafting_balance = key_balances
    target = _numerics(fingerprint), selected_backend().kv_layout, spec.config.cache.block_size
    digests = {"target": _digest("target", target, spec.model_config.cache_spec, balance)}
    if drafting is not None and drafting.num_layers:
        speculative = spec.config.speculative
        quantization = getattr(speculative, "quantization", None)
        hidden_state = getattr(speculative, "mtp_hidden_state", None)
        checkpoint = drafting.path and digest_checkpoint(
            replace(drafting.config, path=drafting.path), spec.config.load_choices
        )
        head = None if drafting.head is None else (drafting.head.identity, checkpoint, quantization)
        model = (
            drafting.method,
            drafting.config.dtype,
            checkpoint,
            drafting.num_layers,
            quantization,
            hidden_state,
            head,
        )
        digests["drafting"] = _digest("drafting", target, drafting.config.cache_spec, model, drafting_balance)
        if drafting.state_bytes:
            digests["states"] = _digest("states", target, drafting.method, hidden_state, head)
    return digests


def _numerics(fingerprint: Fingerprint) -> list[tuple[str, Any]]:
    return sorted((name, value) for name, value in fingerprint.items() if name != "tensor_parallel_size")


def _show(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else _digest(value)


def _digest(*values: Any) -> str:
    return blake2b(repr(values).encode(), digest_size=8).hexdigest()
