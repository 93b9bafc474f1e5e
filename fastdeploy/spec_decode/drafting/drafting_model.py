# SPDX-License-Identifier: Apache-2.0
"""Finds, checks and loads the drafting model: a draft model, layers for multi-token prediction (MTP), or a head."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastdeploy.config.context_limit import ContextLimit
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.head_config import HEAD_METHODS, HeadConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.config.row_head_config import ROW_HEAD_METHODS, RowHeadSizes
from fastdeploy.config.speculation_by_files import complete_by_files
from fastdeploy.config.speculative_config import AnyOtherModel, ModelBasedConfig, MTPConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.detokenize.tokenizer_files import has_tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.heads.load_eagle import find_head, load_eagle_head
from fastdeploy.models.heads.load_row_head import find_row_head, load_row_head
from fastdeploy.models.loader import check_tensors, load_model
from fastdeploy.models.mtp import check_mtp_layers, load_mtp_layers
from fastdeploy.models.registry import check_device, find_architecture
from fastdeploy.ops.caches import LayerCache, allocate_cache
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.drafting.base import Drafter
from fastdeploy.spec_decode.drafting.loaded_models import (
    DraftingModel,
    LoadedDraftModel,
    LoadedEagleHead,
    LoadedMTPLayers,
    LoadedRowHead,
)
from fastdeploy.worker.model_runner import RunnerConfig

logger = logging.getLogger("fastdeploy.engine")

SECTION = "speculative_config"
KEYS_IN_SECTION = ("model", "revision", "gguf_file", "quantization")


@dataclass(frozen=True)
class DraftingModelConfig:
    """A drafting model that was found and checked, but not loaded.

    Attributes:
        method: the method of speculation that drafts with it.
        config: sizes of its decoder layers; for MTP layers, of the target.
        path: folder of the checkpoint; None if the MTP layers are in the target's checkpoint.
        num_layers: number of layers, each of which has a KV cache.
        state_bytes: bytes per token of the target's states that it reads.
        context: the longest context in which it drafts.
        head: what is known of a trained head; None for other drafting models.
    """

    method: str
    config: ModelConfig
    path: str | None
    num_layers: int
    state_bytes: int
    block_size: int
    context: ContextLimit
    head: HeadConfig | RowHeadSizes | None = None

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of one block over all layers."""
        layer_bytes = selected_backend().kv_bytes_per_token(self.config.cache_spec)
        return self.num_layers * layer_bytes * self.block_size

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block over all layers, with the states of its tokens."""
        return self.cache_bytes + self.state_bytes * self.block_size


def complete_speculation(config: EngineConfig) -> EngineConfig:
    """Return the configuration with what the files of a drafting model say of the method and the number of drafts.

    Raises:
        ConfigError: there is no such model, or its files are for another method than the one that was given.
    """
    speculative = config.speculative
    if not isinstance(speculative, AnyOtherModel):
        return config
    with _prefix_errors_with_key():
        path = find_checkpoint(speculative)
        assert path is not None, "the model is not a part of the target"
        completed = complete_by_files(speculative, Path(path))
    count, asked = completed.num_model_steps, speculative.num_model_steps
    if count < asked:
        logger.warning("speculative_config: %s makes at most %d drafts, %d were asked for", path, count, asked)
    elif count > asked:
        logger.info("speculative_config: %s makes %d drafts, as its files say", path, count)
    return replace(config, speculative=completed)


def find_drafting_model(
    config: EngineConfig, target: ModelConfig, tokenizer: Tokenizer | None, vocab_limit: int
) -> DraftingModelConfig | None:
    """Find the model that `config.speculative` names and check that it can draft for `target`.

    Returns:
        None for methods without a drafting model.

    Raises:
        ConfigError: the model does not exist or cannot draft for the target; names the key.
    """
    speculative, context, block_size = config.speculative, target.default_context, config.cache.block_size
    if not isinstance(speculative, ModelBasedConfig):
        return None
    with _prefix_errors_with_key():
        path = find_checkpoint(speculative)
        if isinstance(speculative, MTPConfig):
            num_layers = _num_layers_used(config, speculative, path, target)
            return DraftingModelConfig("mtp", target, path, num_layers, target.state_bytes, block_size, context)
        assert path is not None, "other drafting models have a checkpoint"
        if speculative.method in HEAD_METHODS:
            head = find_head(path, speculative.method, target)
            check_device(head.model)
            model = head.model
            return DraftingModelConfig(
                head.method, model, path, model.num_layers, model.state_bytes, block_size, context, head
            )
        if speculative.method in ROW_HEAD_METHODS:
            row_head = find_row_head(path, speculative.method, target)
            return DraftingModelConfig(row_head.method, target, path, 0, 0, block_size, context, row_head)
        draft = ModelConfig.from_pretrained(
            path, dtype=config.dtype, generation_config="none", kv_cache_dtype=config.cache.dtype
        )
        for note in draft.notes:
            logger.warning("%s", note)
        find_architecture(draft)
        check_device(draft)
        if config.max_model_len != "auto":
            _check_context(draft, config.max_model_len)
        _check_vocabulary(draft, target, tokenizer, vocab_limit)
        check_tensors(draft, config.load_choices)
    context = ContextLimit(draft.default_context.num_tokens, "the draft model")
    return DraftingModelConfig("draft_model", draft, path, draft.num_layers, 0, block_size, context)


def find_checkpoint(speculative: ModelBasedConfig) -> str | None:
    """Return the directory of the drafting model; None if it is a part of the target."""
    if speculative.model is None:
        return None
    return resolve_model_path(
        speculative.model, speculative.revision, gguf_file=speculative.gguf_file, takes_torch=True
    )


def load_drafting_model(drafting: DraftingModelConfig, config: EngineConfig, target: CausalLM) -> DraftingModel:
    """Load the drafting model.

    Raises:
        ConfigError: the checkpoint cannot be loaded; names the key.
    """
    with _prefix_errors_with_key():
        quantization = _quantization_of(drafting, config)
    if drafting.method == "mtp":
        assert isinstance(config.speculative, MTPConfig)
        state, num_layers = config.speculative.mtp_hidden_state, drafting.num_layers
        return LoadedMTPLayers(
            load_mtp_layers(target, drafting.path, config.load_choices, quantization, num_layers, state)
        )
    with _prefix_errors_with_key():
        if isinstance(drafting.head, RowHeadSizes):
            max_seqs = config.scheduler.max_num_seqs
            return LoadedRowHead(load_row_head(drafting.head, target, quantization, config.load_choices, max_seqs))
        if drafting.head is not None:
            return LoadedEagleHead(load_eagle_head(drafting.head, target, quantization, config.load_choices))
        model = load_model(
            drafting.config,
            max_rows=target.max_rows,
            max_model_len=target.max_model_len,
            load_choices=config.load_choices,
            quantization=quantization,
        )
    return LoadedDraftModel(model)


def make_drafter(
    drafting: DraftingModelConfig,
    model: DraftingModel,
    target: CausalLM,
    config: EngineConfig,
    num_blocks: int,
    runner_config: RunnerConfig,
) -> Drafter:
    """Allocate the model's KV caches, the target's blocks and one scratch block per sequence, and make its runner."""
    caches = _allocate(drafting, num_blocks + config.scheduler.max_num_seqs)
    return model.make_runner(target, caches, num_blocks, runner_config)


def _quantization_of(drafting: DraftingModelConfig, config: EngineConfig) -> QuantizationConfig:
    """Return the formats of the drafting model: those configured, else its own config.json's, else the target's."""
    assert isinstance(config.speculative, ModelBasedConfig)
    model, requested = drafting.config, config.speculative.quantization
    if requested is not None:
        formats = QuantizationConfig.from_value(requested)
        if drafting.path in (None, model.path):
            formats = model.checked_formats(formats)
        return formats.for_model(model.has_experts)
    if drafting.method == "mtp":
        return model.weight_formats(config.quantization).for_mtp_layers(model.dtype)
    if drafting.head is not None:
        return config.quantization.for_draft_model().for_mtp_layers(model.dtype)
    return UNQUANTIZED if model.quantization.is_given else config.quantization.for_draft_model()


def describe_drafting_model(
    drafting: DraftingModelConfig | None, runner: Drafter | None, config: EngineConfig, num_blocks: int
) -> dict[str, Any]:
    """Describe the drafting model and its memory under the key `draft_model`, `mtp` or `head`; {} if there is none."""
    if drafting is None or runner is None or not isinstance(config.speculative, ModelBasedConfig):
        return {}
    cache_bytes = drafting.cache_bytes * (num_blocks + config.scheduler.max_num_seqs)
    model = {} if drafting.method == "mtp" else {"model": config.speculative.model}
    name = "head" if drafting.head is not None else drafting.method
    return {name: {**model, **runner.describe(), "kv_cache_bytes": cache_bytes}}


def _num_layers_used(config: EngineConfig, speculative: MTPConfig, path: str | None, target: ModelConfig) -> int:
    """Return how many MTP layers draft: one per draft, as far as they exist and their rows fit a batch."""
    is_dummy, state = config.load_choices == "dummy", speculative.mtp_hidden_state
    found = 1 if is_dummy else check_mtp_layers(path, target, state)
    room = config.scheduler.max_num_batched_tokens // config.scheduler.max_num_seqs
    return max(1, min(found, speculative.num_model_steps, room))


@contextmanager
def _prefix_errors_with_key() -> Iterator[None]:
    """Make errors about the drafting model's checkpoint name the key of speculative_config that caused them."""
    try:
        yield
    except ConfigError as error:
        if error.field.startswith(f"{SECTION}."):
            raise
        is_key = error.field.split(".")[0] in KEYS_IN_SECTION
        field = f"{SECTION}.{error.field if is_key else 'model'}"
        raise ConfigError(field, error.message if is_key else str(error)) from None


def _check_context(draft: ModelConfig, max_model_len: int) -> None:
    if draft.max_context_len < max_model_len:
        raise ConfigError(
            "model",
            f"{draft.name} has a context of {draft.max_context_len} tokens; lower --max-model-len {max_model_len}",
        )
    draft.check_max_model_len(max_model_len)


def _check_vocabulary(draft: ModelConfig, target: ModelConfig, tokenizer: Tokenizer | None, vocab_limit: int) -> None:
    """Refuse a draft model whose token ids mean something else; ids without a token may differ in number."""
    if tokenizer is not None and has_tokenizer(Path(draft.path)):
        target_ids, draft_ids = tokenizer.vocabulary(), Tokenizer.from_pretrained(draft.path).vocabulary()
        differing = target_ids.items() ^ draft_ids.items()
        if differing:
            token = min(token for token, _ in differing)
            raise ConfigError(
                "model",
                f"{draft.name} has another vocabulary: {token!r} is {_token_id_text(target_ids.get(token))} in "
                f"the target's tokenizer, {_token_id_text(draft_ids.get(token))} in its own",
            )
    elif draft.vocab_size != target.vocab_size:
        raise ConfigError(
            "model", f"{draft.name} has a vocabulary of {draft.vocab_size} tokens, the target {target.vocab_size}"
        )
    if draft.vocab_size < vocab_limit:
        raise ConfigError("model", f"{draft.name} has {draft.vocab_size} embeddings, expected at least {vocab_limit}")


def _token_id_text(token_id: int | None) -> str:
    return "missing" if token_id is None else str(token_id)


def _allocate(drafting: DraftingModelConfig, num_blocks: int) -> list[LayerCache]:
    spec = drafting.config.cache_spec
    return [allocate_cache(num_blocks, drafting.block_size, spec) for _ in range(drafting.num_layers)]
