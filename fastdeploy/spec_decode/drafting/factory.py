# SPDX-License-Identifier: Apache-2.0
"""Builds the model that drafts, for the speculation methods that have one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastdeploy.config.drafting_checkpoint import infer_method_of
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig, resolve_model_path
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.detokenize.tokenizer_files import has_tokenizer
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import MTPLayer, load_mtp_layers, num_mtp_layers
from fastdeploy.models.registry import find_architecture
from fastdeploy.ops.attention import KVCache, allocate_kv_cache
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.drafting.draft_model_runner import DraftModelRunner
from fastdeploy.spec_decode.drafting.mtp_runner import MTPRunner
from fastdeploy.worker.model_runner import RunnerConfig

SECTION = "speculative_config"
_OWN_FIELDS = ("model", "revision", "quantization")
DRAFT_HEAD = "w4a8"

DraftingModel = CausalLM | list[MTPLayer]


@dataclass(frozen=True)
class Drafting:
    """The model that drafts, found and checked but not loaded.

    Attributes:
        config: of a draft model; of the target for a layer beside it.
        path: its folder; None where the layer lies in the target's files.
        num_layers: that have a cache.
        state_bytes: kept per token beside the caches.
    """

    method: str
    config: ModelConfig
    path: str | None
    num_layers: int
    state_bytes: int
    block_size: int

    @property
    def cache_bytes(self) -> int:
        """Bytes of one block in all its caches."""
        config = self.config
        layer_bytes = selected_backend().kv_bytes_per_token(config.num_kv_heads, config.head_dim, config.kv_cache_dtype)
        return self.num_layers * layer_bytes * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, the kept states among them."""
        return self.cache_bytes + self.state_bytes * self.block_size


def find_drafting(
    config: EngineConfig, target: ModelConfig, tokenizer: Tokenizer | None, vocab_limit: int, max_model_len: int
) -> Drafting | None:
    """Find the model that `config.speculative` names and check that it can draft for `target`.

    Returns:
        None for methods without a model.

    Raises:
        ConfigError: naming the key at fault.
    """
    wanted = config.speculative
    if wanted.method not in ("mtp", "draft_model"):
        return None
    with _naming_the_key():
        path = None if wanted.model is None else resolve_model_path(wanted.model, wanted.revision)
        if wanted.method == "mtp" or path is None:
            num_layers = _num_layers_used(config, path or target.path)
            return Drafting("mtp", target, path, num_layers, target.state_bytes, config.cache.block_size)
        method = infer_method_of(Path(path))
        if method != "draft_model":
            raise ConfigError("model", f"{wanted.model} is no draft model but one for method {method!r}")
        draft = ModelConfig.from_pretrained(
            path, dtype=config.dtype, generation_config="none", kv_cache_dtype=config.cache.dtype
        )
        find_architecture(draft)
        _check_context(draft, max_model_len)
        _check_vocabulary(draft, target, tokenizer, vocab_limit)
    return Drafting("draft_model", draft, path, draft.num_layers, 0, config.cache.block_size)


def load_drafting_model(drafting: Drafting, config: EngineConfig, target: CausalLM) -> DraftingModel:
    """Load the model that drafts.

    Raises:
        ConfigError: naming the key at fault.
    """
    quantization = _quantization_of(drafting, config)
    if drafting.method == "mtp":
        return load_mtp_layers(target, drafting.path, config.load_choices, quantization, drafting.num_layers)
    with _naming_the_key():
        return load_model(
            drafting.config,
            max_rows=target.max_rows,
            max_model_len=target.max_model_len,
            load_choices=config.load_choices,
            quantization=quantization,
        )


def make_draft_runner(
    drafting: Drafting,
    model: DraftingModel,
    target: CausalLM,
    config: EngineConfig,
    num_blocks: int,
    runner_config: RunnerConfig,
) -> MTPRunner | DraftModelRunner:
    """Give the model caches of the target's blocks and one scratch block per sequence."""
    draft = drafting.config
    caches = _allocate(drafting, num_blocks + config.scheduler.max_num_seqs)
    if isinstance(model, list):
        return MTPRunner(model, target, caches, num_blocks, runner_config)
    sizes = replace(runner_config, hidden_size=draft.hidden_size, vocab_size=draft.vocab_size, dtype=draft.dtype)
    return DraftModelRunner(model, caches, num_blocks, sizes)


def _quantization_of(drafting: Drafting, config: EngineConfig) -> QuantizationConfig:
    """Return the formats of the drafting model: those asked for, else the target's.

    Layers for multi-token prediction guess with a head of four bits unless they are told otherwise: on a large
    vocabulary the head is most of what a draft costs, and drafts are verified anyway.
    """
    wanted = config.speculative.quantization
    if wanted is not None:
        return QuantizationConfig.from_value(wanted)
    if drafting.method == "mtp" and drafting.config.dtype == "bfloat16":
        return replace(config.quantization, head=DRAFT_HEAD)
    return config.quantization


def describe_draft_model(
    drafting: Drafting | None, runner: MTPRunner | DraftModelRunner | None, config: EngineConfig, num_blocks: int
) -> dict[str, Any]:
    """Return what drafts and what memory it takes, as `draft_model` or `mtp`; nothing where there is no such model."""
    if drafting is None:
        return {}
    cache_bytes = drafting.cache_bytes * (num_blocks + config.scheduler.max_num_seqs)
    if isinstance(runner, DraftModelRunner):
        return {
            "draft_model": {
                "model": config.speculative.model,
                "architecture": drafting.config.architecture,
                "dtype": drafting.config.dtype,
                "weights_bytes": runner.model.num_weight_bytes,
                "kv_cache_bytes": cache_bytes,
            }
        }
    assert isinstance(runner, MTPRunner)
    return {"mtp": {**runner.describe(), "kv_cache_bytes": cache_bytes}}


def _num_layers_used(config: EngineConfig, folder: str) -> int:
    """Return how many layers for multi-token prediction draft: one per draft, as far as a call has room for them."""
    found = 1 if config.load_choices == "dummy" else num_mtp_layers(folder)
    room = config.scheduler.max_num_batched_tokens // config.scheduler.max_num_seqs
    return max(1, min(found, config.speculative.num_model_steps, room))


@contextmanager
def _naming_the_key() -> Iterator[None]:
    """Lay errors about the drafting model's checkpoint at the door of the key that names it."""
    try:
        yield
    except ConfigError as error:
        is_own = error.field in _OWN_FIELDS
        field = f"{SECTION}.{error.field if is_own else 'model'}"
        raise ConfigError(field, error.message if is_own else str(error)) from None


def _check_context(draft: ModelConfig, max_model_len: int) -> None:
    if draft.max_context_len < max_model_len:
        raise ConfigError(
            "model",
            f"{draft.path} holds {draft.max_context_len} tokens, less than --max-model-len {max_model_len}; lower that",
        )
    draft.check_max_model_len(max_model_len)


def _check_vocabulary(draft: ModelConfig, target: ModelConfig, tokenizer: Tokenizer | None, vocab_limit: int) -> None:
    """Refuse a draft model to which token ids mean something else; rows that stand for no token may differ."""
    if tokenizer is not None and has_tokenizer(Path(draft.path)):
        mine, other = tokenizer.vocabulary(), Tokenizer.from_pretrained(draft.path).vocabulary()
        differing = mine.items() ^ other.items()
        if differing:
            token = min(token for token, _ in differing)
            raise ConfigError(
                "model",
                f"{draft.path} has another vocabulary: {token!r} is {_shown(mine.get(token))} in the target's "
                f"tokenizer, {_shown(other.get(token))} in its own",
            )
    elif draft.vocab_size != target.vocab_size:
        raise ConfigError(
            "model", f"{draft.path} has a vocabulary of {draft.vocab_size} tokens, the target {target.vocab_size}"
        )
    if draft.vocab_size < vocab_limit:
        raise ConfigError("model", f"{draft.path} has {draft.vocab_size} embeddings, expected at least {vocab_limit}")


def _shown(token_id: int | None) -> str:
    return "missing" if token_id is None else str(token_id)


def _allocate(drafting: Drafting, num_blocks: int) -> list[KVCache]:
    config = drafting.config
    shape = (num_blocks, drafting.block_size, config.num_kv_heads, config.head_dim)
    return [allocate_kv_cache(*shape, config.kv_cache_dtype) for _ in range(drafting.num_layers)]
