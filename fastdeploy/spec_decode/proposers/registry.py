# SPDX-License-Identifier: Apache-2.0
"""Creates the proposer of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastdeploy.config.speculative_config import (
    ModelBasedConfig,
    NaiveConfig,
    NgramConfig,
    SpeculativeConfig,
    SuffixDecodingConfig,
)
from fastdeploy.spec_decode.proposers.base import DraftRunner, Proposer

if TYPE_CHECKING:
    from fastdeploy.spec_decode.proposers.ngram import NgramProposer
    from fastdeploy.spec_decode.proposers.suffix import SuffixProposer


def _naive(config: NaiveConfig, runner: DraftRunner | None) -> Proposer:
    from fastdeploy.spec_decode.proposers.naive import NaiveProposer

    return NaiveProposer()


def _ngram(config: NgramConfig, runner: DraftRunner | None) -> NgramProposer:
    from fastdeploy.spec_decode.proposers.ngram import NgramProposer

    return NgramProposer(config.max_ngram_size, config.min_ngram_size)


def _suffix(config: SuffixDecodingConfig, runner: DraftRunner | None) -> SuffixProposer:
    from fastdeploy.ops.suffix_cache import SuffixConfig
    from fastdeploy.spec_decode.proposers.suffix import SuffixProposer

    return SuffixProposer(
        SuffixConfig(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_drafts=config.num_speculative_tokens,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_cache_bytes=config.suffix_decoding_max_cache_bytes,
        )
    )


def _model(config: ModelBasedConfig, runner: DraftRunner | None) -> Proposer:
    from fastdeploy.spec_decode.proposers.model_proposer import ModelProposer

    model = ModelProposer(config.method, _required(runner, config), config.num_model_steps)
    if config.extension is None:
        return model
    from fastdeploy.spec_decode.proposers.hybrid import HybridProposer

    extension = config.extension
    matcher = _ngram(extension, None) if isinstance(extension, NgramConfig) else _suffix(extension, None)
    return HybridProposer(model, matcher)


def _required(runner: DraftRunner | None, config: SpeculativeConfig) -> DraftRunner:
    if runner is None:
        raise ValueError(f"method {config.method} requires a runner for its drafting model")
    return runner


ProposerFactory = Callable[[Any, DraftRunner | None], Proposer]  # the configuration of its method
PROPOSERS: dict[str, ProposerFactory] = {
    "naive": _naive,
    "ngram": _ngram,
    "suffix": _suffix,
    **dict.fromkeys(("mtp", "draft_model", "eagle", "eagle3", "mlp_speculator", "medusa"), _model),
}


def make_proposer(config: SpeculativeConfig, runner: DraftRunner | None = None) -> Proposer:
    """Return a new proposer of the method `config.method`.

    Args:
        config: the method and its keys.
        runner: runs the drafting model; only for methods that have one.

    Raises:
        ValueError: the method has a drafting model, but there is no runner.
    """
    return PROPOSERS[config.method](config, runner)
